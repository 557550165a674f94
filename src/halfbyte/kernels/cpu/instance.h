// A model bound to its threads and scratch memory: what every part of a step reads. Nothing here computes.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "halfbyte_cpu.h"
#include "pool.h"
#include "products.h"

namespace halfbyte {

constexpr int64_t KEY_BLOCK = 64;          // absolute positions whose keys are visited together, as ops/attention.py does
constexpr int64_t SEGMENT_BLOCKS = 4;      // key blocks with a maximum and a sum of their own, combined in order
constexpr int64_t CHUNK_ROWS = 512;        // most rows of a step that go through the layers together
constexpr int64_t ROW_BLOCK = 256;         // most rows of one call of `product`
constexpr int64_t BLOCK_COLUMNS = 256;     // most columns of one
constexpr int64_t TILE_QUERIES = 64;       // most query rows (tokens times heads of a group) that share a block of keys
constexpr int64_t MOST_PARTIALS = 16384;   // query rows of segments that are computed apart
constexpr int64_t ALONE_BYTES = 16 << 10;  // what the caller does faster than it hands it out
constexpr int64_t PRODUCT_TILES = 4;    // that a product takes best together
constexpr int64_t PRODUCT_ROWS = 32;     // so few that unpacking the weights is felt
constexpr int64_t ITEM_BYTES = 64 << 10;   // of weights, for one item at decode: a few microseconds

constexpr int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
constexpr int64_t parts_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Rows of activations in front of a matrix: as numbers and, where the matrix wants it, as int8 codes. Rows are padded to
// whole groups; the padding is zero and stays so.
struct Activations {
    int64_t k, groups, stride;
    float* values;
    CodedGroup* coded;
    Rows from(int64_t row, bool as_codes) const {
        return {as_codes ? coded + row * groups : nullptr, values + row * stride, groups, stride};
    }
    // From values [row][begin, begin + count), where begin is the start of a group; `weights` is the reader's format.
    void quantize(int64_t row, int64_t begin, int64_t count, Format weights) {
        quantize_row(values + row * stride + begin, count, weights, coded + row * groups + begin / GROUP);
    }
};

// A stack of expert matrices, or one matrix.
struct Stack {
    Matrix matrix;
    bool coded;  // wants int8 codes
    Matrix of(int64_t index) const {
        Matrix m = matrix;
        m.data += index * m.tiles() * m.tile_bytes();
        return m;
    }
};

struct Layer {
    const hb_layer* weights;
    Stack qkv, o, gate_up, down;
};

// Queries that share their keys: consecutive tokens of one sequence.
struct Tile {
    int32_t sequence, row, count;   // row: in the chunk
    int32_t first, last;            // positions of keys that any of them sees: [first, last)
    int32_t segments;               // 0: one item goes through all of them
    int32_t partial;                // first of its query rows' states, where segments are apart
};
struct Work { int32_t tile, segment; };
// What a chunk's attention consists of in all layers of one kind.
struct AttentionPlan {
    Tile* tiles;
    Work* work;
    int64_t tile_count, work_count;
};

struct Best { float value; int32_t id; };  // id -1: a NaN was seen

// What one thread has for itself.
struct Workspace {
    float* product;     // ROW_BLOCK x BLOCK_COLUMNS, or all parts of a chunk in one tile
    float *keys, *values;             // a block: [head_dim][64] and [64][head_dim]
    float *top, *sum, *mix;           // of each query row: highest score, sum of weights, weighted values
    float *part_top, *part_sum, *part_mix;  // the same, of one segment
    float* scores;
    Best* best;
};

struct Instance {
    hb_model model;
    Pool* pool;
    std::vector<Layer> layers;
    Stack head;
    int64_t chunk;            // rows
    int64_t group;            // query heads of one kv head
    int64_t padded_dim;       // head_dim in whole vectors
    int64_t head_unit;        // heads that are whole tiles of the qkv matrix
    int64_t kv_cell;          // bytes of a number in the cache
    int64_t kv_head_bytes, kv_side_bytes, kv_layer_bytes, kv_page_bytes;  // strides in the pool
    bool attention_quantizes; // a kv head's queries are whole groups of o's input

    // Scratch, shared.
    float* x;                 // residual stream [chunk][hidden]
    float *cosines, *sines;   // [chunk][head_dim / 2]
    float* q;                 // [chunk][heads * head_dim]
    Activations h;            // normalised
    Activations attention;    // what o reads
    Activations hidden;       // what down reads, by entry: tokens grouped by expert
    float* router_logits;     // [chunk][experts]
    int32_t* chosen;          // [chunk][top_k]: experts
    float* shares;            // [chunk][top_k]
    int32_t* entry_of;        // [chunk][top_k]
    int32_t* entry_row;       // [chunk * top_k]
    int32_t* expert_start;    // [experts + 1]
    int32_t* active;          // experts that have an entry
    int32_t active_count;
    AttentionPlan plans[2];   // full, sliding
    std::atomic<int32_t>* left;  // segments not yet done, for each tile and kv head
    float *partial_top, *partial_sum, *partial_mix;
    Workspace* workspaces;

    void* memory;
    int64_t memory_bytes;
};

Stack stack_of(const hb_matrix&, bool int8_activations);
// Null and a sentence, or an instance.
Instance* make_instance(const hb_model&, Pool*, int32_t most_rows, char* error, int64_t error_size);
Instance* make_scratch(const hb_model&, Pool*, int32_t most_rows, char* error, int64_t error_size);  // no layers, no check
void destroy_instance(Instance*);
int64_t scratch_bytes(const hb_model&, int32_t threads, int32_t most_rows);
// True, or false and a sentence.
bool check_model(const hb_model&, char* error, int64_t error_size);
bool check_step(const Instance&, const hb_step&, char* error, int64_t error_size);
bool say(char* error, int64_t error_size, const char* format, ...) __attribute__((format(printf, 3, 4)));  // false

}  // namespace halfbyte
