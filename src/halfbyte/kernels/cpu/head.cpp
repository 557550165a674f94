// Final norm and output layer, for the rows asked for only. Where only the best token is wanted no logit leaves the item that
// made it. The best is the lowest id among the highest; a row with NaN in it has none (-1), so that its request ends.
#include <cmath>
#include <cstring>
#include <limits>

#include "step.h"

namespace halfbyte {
namespace {

const Best NONE{-std::numeric_limits<float>::infinity(), std::numeric_limits<int32_t>::max()};

// The same whoever of two saw which tokens.
Best better(const Best& a, const Best& b) {
    if (a.id < 0 || b.id < 0) return {std::numeric_limits<float>::quiet_NaN(), -1};
    if (a.value != b.value) return a.value > b.value ? a : b;
    return a.id < b.id ? a : b;
}

Best best_of(const float* x, int64_t count, int64_t first) {
    float top = x[0];
    bool nan = false;
    for (int64_t i = 0; i < count; ++i) {
        nan |= x[i] != x[i];
        top = x[i] > top ? x[i] : top;
    }
    if (nan) return {std::numeric_limits<float>::quiet_NaN(), -1};
    int64_t at = 0;
    while (x[at] != top) ++at;
    return {top, static_cast<int32_t>(first + at)};
}

// Logits [l, l + count), whose rows are h's first ones.
void run_rows(Instance& in, const hb_step& step, int64_t l, int64_t count) {
    const Matrix& head = in.head.matrix;
    const int64_t vocab = in.model.vocab, threads = in.pool->threads();
    if (step.best)
        for (int64_t t = 0; t < threads; ++t)
            for (int64_t r = 0; r < count; ++r) in.workspaces[t].best[r] = NONE;
    const int64_t tiles = cut(in, head, head.tiles(), 1, 1, BLOCK_COLUMNS / TILE_ROWS).tiles;
    in.pool->run(parts_of(head.tiles(), tiles), [&](int64_t item, int thread) {
        const int64_t first = item * tiles, last = first + tiles < head.tiles() ? first + tiles : head.tiles();
        const int64_t stride = (last - first) * TILE_ROWS, column = first * TILE_ROWS;
        const int64_t columns = vocab - column < stride ? vocab - column : stride;
        Workspace& w = in.workspaces[thread];
        for (int64_t begin = 0; begin < count; begin += ROW_BLOCK) {
            const int64_t rows = count - begin < ROW_BLOCK ? count - begin : ROW_BLOCK;
            product(head, first, last, in.h.from(begin, in.head.coded), nullptr, rows, w.product, stride);
            for (int64_t r = 0; r < rows; ++r) {
                const float* logits = w.product + r * stride;
                if (step.logits)
                    std::memcpy(step.logits + (l + begin + r) * vocab + column, logits, static_cast<size_t>(columns) * 4);
                if (step.best) w.best[begin + r] = better(w.best[begin + r], best_of(logits, columns, column));
            }
        }
    });
    if (!step.best) return;
    for (int64_t r = 0; r < count; ++r) {
        Best best = NONE;
        for (int64_t t = 0; t < threads; ++t) best = better(best, in.workspaces[t].best[r]);
        step.best[l + r] = best.id;
        if (step.best_logit) step.best_logit[l + r] = best.value;
    }
}

}  // namespace

void run_head(Instance& in, const hb_step& step, int64_t begin, int64_t rows) {
    if (!step.logits && !step.best) return;
    const auto here = [&](int64_t l) { return step.logit_rows[l] >= begin && step.logit_rows[l] < begin + rows; };
    for (int64_t l = 0; l < step.logit_count;) {
        if (!here(l)) {
            ++l;
            continue;
        }
        int64_t count = 1;
        while (l + count < step.logit_count && count < in.chunk && here(l + count)) ++count;
        const int64_t first = l;
        for_rows(in, count, in.model.hidden * 4, [&](int64_t r) {
            normalise(in, in.x + (step.logit_rows[first + r] - begin) * in.model.hidden, in.model.final_norm, in.head, r);
        });
        run_rows(in, step, l, count);
        l += count;
    }
}

}  // namespace halfbyte
