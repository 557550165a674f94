// Operations one at a time, for an engine that runs the rest of a step itself. They go through the step's own parts, so a
// row's bits are those of a whole step.
#pragma once
#include "instance.h"

namespace halfbyte {

// Null and a sentence, or memory for experts of this shape; the matrices of `hb_experts` may be missing.
Instance* make_expert_scratch(const hb_experts&, Pool*, int32_t most_rows, char* error, int64_t error_size);
// True, or false and a sentence.
bool check_experts(const Instance&, const hb_experts&, int32_t rows, const int32_t* ids, char* error, int64_t error_size);
bool check_product(const hb_matrix&, int32_t rows, char* error, int64_t error_size);

void run_experts_alone(Instance&, const hb_experts&, int32_t rows, const float* h, const int32_t* ids, const float* shares,
                       float* out);
void run_product_alone(Pool&, const hb_matrix&, const float* bias, bool int8_activations, int32_t rows, const float* x,
                       float* out);

}  // namespace halfbyte
