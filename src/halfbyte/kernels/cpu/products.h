// Products of activations with weight matrices: the interface between the arithmetic of one instruction set and the step
// that uses it. Every instruction set implements exactly this; nothing else knows how a weight's bytes are read.
//
// Weights lie in the layout `rows16` (halfbyte/formats/rows16.py packs it): rows in tiles of 16, a tile's rows
// interleaved so that one vector lane belongs to one row. A tile is its codes, then its scales, each padded to 64 bytes:
//
//   mxfp4  codes [groups][4][16 rows][4 bytes]: the four words of a row's 16 bytes as the checkpoint has them, so that a
//          word's low nibbles are k = 0, 2, 4, 6 and its high nibbles k = 1, 3, 5, 7 of its eight; scales [groups][16] E8M0
//   q8     codes [groups][8][16 rows][4 bytes], four consecutive k to a word; scales [groups][16] float16
//   bf16   codes [k][16 rows] bfloat16 (or float16, float32); no scales
//
// Rows past the matrix's last are zero bytes (scale byte 0 too); K is padded to whole groups of 32 with zeros.
//
// Arithmetic, the same for one row of activations as for hundreds, so that a result depends neither on the batch nor on
// who computed it:
//   int8 activations: per group of 32 the exact integer dot product d; then acc = acc + float(d) * (ws * as), groups in
//   ascending order, in float32, one accumulator a row (mxfp4: twice d with half of ws, which differs only where ws * as
//   is subnormal).
//   f32 activations (any format): per group of 32 k a partial sum in ascending k, then acc = acc + partial.
// NaN and infinity survive: an E8M0 scale of 255 is NaN; a group of activations that holds NaN or infinity has scale NaN.
#pragma once
#include <cstdint>

namespace halfbyte {

constexpr int TILE_ROWS = 16;
constexpr int GROUP = 32;

enum class Format : int32_t { f32 = 0, f16 = 1, bf16 = 2, q8 = 3, mxfp4 = 4 };

// One matrix in the layout rows16. An expert stack is `tiles` consecutive tiles a matrix.
struct Matrix {
    Format format;
    int64_t rows, cols;         // logical
    const uint8_t* data;        // 64-byte aligned
    int64_t tile_bytes() const;
    int64_t tiles() const { return (rows + TILE_ROWS - 1) / TILE_ROWS; }
    int64_t groups() const { return (cols + GROUP - 1) / GROUP; }
};

// A group of 32 activations as a product with int8 activations reads it. One record, because a product of many rows follows
// many rows at once and has registers for one pointer each. Codes stand in the order that meets the weights' words: for
// mxfp4, of every eight, k = 0 2 4 6 then 1 3 5 7; for q8 as they come. Codes past K are zero.
struct CodedGroup {
    int8_t codes[GROUP];
    float scale;
    int32_t start;  // what the integer sum starts from: it takes back what the instruction set adds to unsigned weights
};

// Rows of activations: coded, or float32 as they are (`coded` null). Strides are in elements.
struct Rows {
    const CodedGroup* coded;  // [rows][groups]
    const float* values;      // [rows][value_stride]
    int64_t groups, value_stride;
};

// codes = round to nearest even (x / s) with s = amax / 127 in float32, as ops.linear.round_activation("int8") does:
// the division is a division, a group of zeros has scale 0 and codes 0, NaN or infinity make the scale NaN.
// `weights` is the format of the matrix that will meet the row, q8 or mxfp4.
void quantize_row(const float* x, int64_t k, Format weights, CodedGroup* out);

// out[i * out_stride + r - 16 * tile_begin] = dot(row token_rows[i] of a, row r of m), for the matrix rows r of tiles
// [tile_begin, tile_end) and i in [0, count). token_rows null means 0, 1, 2 … Rows past the matrix's last are
// written as zeros, so `out` must have room for whole tiles.
void product(const Matrix& m, int64_t tile_begin, int64_t tile_end, const Rows& a, const int32_t* token_rows,
             int64_t count, float* out, int64_t out_stride);

// Vector helpers whose result does not depend on where a row starts; implemented beside the products.
float sum_of_squares(const float* x, int64_t n);        // fixed order: 64 partial sums, then a fixed tree
void scale_multiply(const float* x, float s, const float* w, int64_t n, float* out);  // out = (x * s) * w
void swiglu(const float* gate_up, int64_t pairs, float limit, float alpha, float* out);  // interleaved pairs
float dot(const float* a, const float* b, int64_t n);   // fixed order, for the router and for attention scores
void add_scaled(float* acc, float s, const float* x, int64_t n);  // acc += s * x
void exp_row(float* x, int64_t n, float maximum);       // x = exp(x - maximum), error under 2 ulp, NaN kept
const char* instruction_set();                          // avx512, avx512-amx, avx2, avx-vnni, neon, neon-i8mm, portable

}  // namespace halfbyte
