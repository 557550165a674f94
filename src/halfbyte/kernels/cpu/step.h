// The parts of a step, in the order they run. A chunk is `rows` rows of the step from `begin` on.
#pragma once
#include "instance.h"

namespace halfbyte {

// All layers for all rows, and the logits that are asked for. The step was checked.
void run_step(Instance&, const hb_step&);

// h = rms_norm(x) for a row, and its codes where the matrix behind it wants them.
void normalise(Instance&, const float* x, const float* weight, const Stack& reader, int64_t row);

// mlp_norm, router and experts of a chunk: reads and writes x.
void run_experts(Instance&, const Layer&, int64_t rows);

// The logits of a chunk's rows, or the best of each.
void run_head(Instance&, const hb_step&, int64_t begin, int64_t rows);

// Items over rows: the caller alone where there is little to do.
template <class F>
void for_rows(Instance& in, int64_t rows, int64_t bytes_a_row, F&& f) {
    if (rows * bytes_a_row <= ALONE_BYTES) {
        for (int64_t r = 0; r < rows; ++r) f(r);
        return;
    }
    int64_t block = ALONE_BYTES / bytes_a_row;
    block = block < 1 ? 1 : block > 8 ? 8 : block;
    in.pool->run(parts_of(rows, block), [&](int64_t item, int) {
        for (int64_t r = item * block; r < rows && r < (item + 1) * block; ++r) f(r);
    });
}

// Tiles of 16 matrix rows that one item takes, of `tiles` in all: enough bytes to be worth taking, few enough that every
// thread has several. `reads` is how many matrices an item goes through.
inline int64_t tiles_an_item(const Instance& in, const Matrix& m, int64_t tiles, int64_t reads, int64_t most) {
    const int64_t fair = tiles / (4 * int64_t{in.pool->threads()});
    int64_t n = ITEM_BYTES / (m.tile_bytes() * reads);
    if (n > fair) n = fair;
    if (n > most) n = most;
    return n < 1 ? 1 : n;
}

}  // namespace halfbyte
