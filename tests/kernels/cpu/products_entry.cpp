// C entries over products.h, for ctypes.
#include "products.h"

using namespace halfbyte;

extern "C" {

void entry_quantize(const float* x, int64_t k, int32_t weights, CodedGroup* out) {
    quantize_row(x, k, static_cast<Format>(weights), out);
}

int64_t entry_tile_bytes(int32_t format, int64_t rows, int64_t cols) {
    return Matrix{static_cast<Format>(format), rows, cols, nullptr}.tile_bytes();
}

void entry_product(int32_t format, int64_t rows, int64_t cols, const uint8_t* data, int64_t tile_begin, int64_t tile_end,
                   const CodedGroup* coded, const float* values, int64_t value_stride,
                   const int32_t* token_rows, int64_t count, float* out, int64_t out_stride) {
    Matrix m{static_cast<Format>(format), rows, cols, data};
    Rows a{coded, values, m.groups(), value_stride};
    product(m, tile_begin, tile_end, a, token_rows, count, out, out_stride);
}

float entry_sum_of_squares(const float* x, int64_t n) { return sum_of_squares(x, n); }
float entry_dot(const float* a, const float* b, int64_t n) { return dot(a, b, n); }
void entry_scale_multiply(const float* x, float s, const float* w, int64_t n, float* out) { scale_multiply(x, s, w, n, out); }
void entry_swiglu(const float* gate_up, int64_t pairs, float limit, float alpha, float* out) {
    swiglu(gate_up, pairs, limit, alpha, out);
}
void entry_add_scaled(float* acc, float s, const float* x, int64_t n) { add_scaled(acc, s, x, n); }
void entry_exp_row(float* x, int64_t n, float maximum) { exp_row(x, n, maximum); }
const char* entry_instruction_set() { return instruction_set(); }

}
