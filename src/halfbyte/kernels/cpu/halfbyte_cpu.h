// The C interface of the CPU kernels: a model made of pointers, and one call a step. No torch, no Python; Python reaches it
// through ctypes (library.py mirrors these structs; the sizes are checked when the library is loaded), the replay program
// through a linker. Pointers stay the caller's; the library copies nothing but keeps the structs.
#pragma once
#include <cstdint>

extern "C" {

#define HALFBYTE_CPU_ABI 1

struct hb_matrix { int32_t format; int32_t reserved; int64_t rows, cols; const void* data; };  // layout rows16

struct hb_layer {
    const float* attn_norm;       // [hidden]
    hb_matrix qkv; const float* qkv_bias;
    const float* sinks;           // [heads], null when the gates switch them off
    hb_matrix o; const float* o_bias;
    const float* mlp_norm;
    const float* router; const float* router_bias;  // float32 [experts, hidden], [experts]
    hb_matrix gate_up; const float* gate_up_bias;   // stack: rows = 2 * intermediate of one expert; [experts, rows]
    hb_matrix down; const float* down_bias;
    int32_t sliding;              // 1: window, block table `sliding`
    int32_t kind_index;           // place of this layer inside a KV page
};

struct hb_model {
    int32_t abi, layers, hidden, intermediate, experts, top_k, heads, kv_heads, head_dim, vocab, window, page_size;
    int32_t layers_per_page, kv_format;             // Format: f32, bf16, or 5 = fp8 (E4M3, saturating)
    int32_t embed_format;                           // f32, f16 or bf16, plain [vocab, hidden]
    int32_t int8_activations;                       // 1: groups of 32 in front of q8 and mxfp4; 0: float32 (exact form)
    float norm_eps, swiglu_limit, swiglu_alpha;
    const float* rope_inverse; float rope_temperature;  // [head_dim / 2]; cos and sin are multiplied by it
    const void* embed;
    const hb_layer* layer;
    const float* final_norm;
    hb_matrix lm_head;
};

struct hb_step {
    int32_t rows, sequences, logit_count, max_kv_len;
    const int32_t *tokens, *positions, *query_start, *kv_lens, *row_sequence;
    const int32_t *sliding_table, *full_table;      // [sequences, blocks]
    int64_t table_stride;
    const int32_t* logit_rows;
    void* kv_pool;                                  // [pages, layers_per_page, 2, kv_heads, page_size, head_dim]
    int64_t pages;                                  // page numbers past it are refused, not read
    float* logits;                                  // [logit_count, vocab], or null when only the best is wanted
    int32_t* best; float* best_logit;               // [logit_count] or null; the lowest id among equals; NaN anywhere: -1
    const int32_t* tap_layers; int32_t tap_count;   // residual stream as it enters these layers; `layers`: leaves the last
    float* taps;                                    // [tap_count, rows, hidden]
    int32_t* chosen;                                // [layers, rows, top_k], the router's experts, or null
};

// Experts alone, for an engine that runs the rest of a step itself.
struct hb_experts {
    int32_t hidden, intermediate, experts, top_k, int8_activations;
    float swiglu_limit, swiglu_alpha;
    hb_matrix gate_up; const float* gate_up_bias;   // as in hb_layer
    hb_matrix down; const float* down_bias;
};

// Rows of a matrix that lie one after the other in a file: row i of them is the matrix's row first + i * step. In a stack, those
// of the next matrix follow at once. Scales lie apart but in GGUF's blocks.
struct hb_stored_rows { int32_t file, scale_file; int64_t offset, scale_offset, rows, first, step; };

struct hb_packing {
    int32_t format, gguf;         // what the numbers are; 1: in GGUF's blocks of scale and codes
    int32_t widen;                // 1: not rows16, but rows of float32, from GGUF's blocks
    int32_t threads;
    int64_t stack, rows, cols;    // matrices, and the size of each
    int32_t part_count;
    const hb_stored_rows* parts;
    void* out;                    // null: only look whether the numbers are sound
};

struct hb_pool;       // worker threads
struct hb_instance;   // a model bound to a pool, with its scratch memory
struct hb_scratch;    // scratch memory of experts alone: of all layers of one shape

// The arguments of hb_run_experts in one record, for a caller that can pass only one address: a GPU's stream.
struct hb_expert_job {
    hb_scratch* scratch; const hb_experts* experts;
    const float* h; const int32_t* ids; const float* shares; float* out;
    int32_t rows, failures;       // failures counts jobs that were refused; their rows are NaN
};

hb_pool* hb_pool_create(int32_t threads, const int32_t* cores /* or null: not pinned */);
void hb_pool_destroy(hb_pool*);
hb_instance* hb_create(const hb_model*, hb_pool*, int32_t most_rows, char* error, int64_t error_size);
void hb_destroy(hb_instance*);
int64_t hb_scratch_bytes(const hb_model*, int32_t threads, int32_t most_rows);
// 0, or a code whose sentence is in error: a token, position or page out of range ends the step before anything is written.
int32_t hb_run(hb_instance*, const hb_step*, char* error, int64_t error_size);

// Single operations. Bits are those of the same operation in hb_run.
// The shape of `experts` counts, not its matrices.
hb_scratch* hb_scratch_create(const hb_experts* experts, hb_pool*, int32_t most_rows, char* error, int64_t error_size);
void hb_scratch_destroy(hb_scratch*);
// out[r] = sum over k of shares[r][k] * expert ids[r][k] of h[r]; float32 rows, one behind the other. 0, or a code.
int32_t hb_run_experts(hb_scratch*, const hb_experts*, int32_t rows, const float* h, const int32_t* ids, const float* shares,
                       float* out, char* error, int64_t error_size);
// hb_run_experts for an hb_expert_job. Has the signature of CUDA's host functions, calls no CUDA and reports no error: rows of a
// job that is refused are NaN.
void hb_run_expert_job(void* job);
// out[r] = m x[r] + bias; bias may be null.
int32_t hb_run_product(hb_pool*, const hb_matrix* m, const float* bias, int32_t int8_activations, int32_t rows,
                       const float* x, float* out, char* error, int64_t error_size);

// 0, or what is wrong with reading: errno, or -1 where a file ends early. `sound`: 0 where a number or a scale
// is not finite, or where all numbers or all scales of a part are zero.
int32_t hb_pack(const hb_packing*, int32_t* sound);
// The sum of all 64-bit words of a memory: what this machine's roof is measured with, so it does nothing but read.
uint64_t hb_read(hb_pool*, const uint64_t* words, int64_t count);
const char* hb_instruction_set(void);
int64_t hb_struct_size(int32_t which);  // in the order of their declarations, hb_matrix first: checked against ctypes

}
