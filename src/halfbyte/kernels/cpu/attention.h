// Attention of a chunk's queries over the paged cache: sinks, window, grouped queries.
#pragma once
#include "instance.h"

namespace halfbyte {

// What the chunk's attention consists of, for layers of one kind: made once a step.
void plan_attention(Instance&, const hb_step&, int64_t begin, int64_t rows, bool sliding);
// The phase: reads `q` and the cache, writes `attention`.
void run_attention(Instance&, const hb_step&, int64_t begin, const Layer&);

}  // namespace halfbyte
