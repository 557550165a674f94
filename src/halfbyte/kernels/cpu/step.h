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
// The experts alone: h (with its codes), `chosen` and `shares` are there; adds to x.
void run_chosen_experts(Instance&, const Layer&, int64_t rows);

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

// How a product is cut into items: blocks of tiles (16 matrix rows each) and, where those are too few for the threads, of
// rows. Enough bytes to be worth taking, few enough that every thread has several; whole blocks of PRODUCT_TILES.
struct Cut {
    int64_t tiles, tile_blocks, rows, row_blocks;
    int64_t items() const { return tile_blocks * row_blocks; }
};
// `reads`: matrices that an item goes through; `most`: tiles that it has room for.
inline Cut cut(const Instance& in, const Matrix& m, int64_t tiles, int64_t rows, int64_t reads, int64_t most) {
    const int64_t wanted = 4 * int64_t{in.pool->threads()};
    int64_t n = ITEM_BYTES / (m.tile_bytes() * reads);
    if (n > tiles / wanted) n = tiles / wanted;
    if (n > most) n = most;
    if (n > PRODUCT_TILES) n = n / PRODUCT_TILES * PRODUCT_TILES;
    if (n < PRODUCT_TILES) n = tiles < PRODUCT_TILES * in.pool->threads() && rows < 2 * PRODUCT_ROWS ? 1 : PRODUCT_TILES;
    Cut c{n, parts_of(tiles, n), rows, 1};
    if (c.tile_blocks < wanted && rows >= 2 * PRODUCT_ROWS) {
        const int64_t blocks = parts_of(wanted, c.tile_blocks), room = rows / PRODUCT_ROWS;
        c.rows = parts_of(rows, blocks < room ? blocks : room);
        c.row_blocks = parts_of(rows, c.rows);
    }
    return c;
}

}  // namespace halfbyte
