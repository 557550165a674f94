// The expert MLP of a chunk: norm, router, tokens grouped by expert, gate_up with swiglu, down with the weighted sum.
//
// An item of gate_up is whole groups of 32 swiglu outputs, so it ends with what down reads. An item of down is a few columns
// for all experts, so it ends with the residual stream: parts are added in the router's order, as ops/moe.py does.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "step.h"

namespace halfbyte {
namespace {

// a comes before b: the higher logit, NaN before everything, equals by the lower expert, as a stable sort has it.
bool before(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// The experts of a row, with their shares: a softmax over the chosen.
void choose(const float* logits, int64_t experts, int64_t top_k, int32_t* chosen, float* shares) {
    int64_t count = 0;
    for (int32_t e = 0; e < experts; ++e) {
        if (count == top_k && !before(logits[e], logits[chosen[top_k - 1]])) continue;
        int64_t at = count < top_k ? count++ : top_k - 1;
        for (; at > 0 && before(logits[e], logits[chosen[at - 1]]); --at) chosen[at] = chosen[at - 1];
        chosen[at] = e;
    }
    float total = 0;
    for (int64_t k = 0; k < top_k; ++k) {
        shares[k] = static_cast<float>(std::exp(static_cast<double>(logits[chosen[k]] - logits[chosen[0]])));
        total += shares[k];
    }
    for (int64_t k = 0; k < top_k; ++k) shares[k] /= total;
}

void run_router(Instance& in, const Layer& layer, int64_t rows) {
    const hb_model& m = in.model;
    const int64_t hidden = m.hidden, experts = m.experts, bytes = experts * hidden * 4;
    const auto logit = [&](int64_t row, int64_t e) {
        in.router_logits[row * experts + e] =
            dot(in.h.values + row * in.h.stride, layer.weights->router + e * hidden, hidden) + layer.weights->router_bias[e];
    };
    const auto finish = [&](int64_t row) {
        choose(in.router_logits + row * experts, experts, m.top_k, in.chosen + row * m.top_k, in.shares + row * m.top_k);
    };
    const auto norm = [&](int64_t row) {
        normalise(in, in.x + row * hidden, layer.weights->mlp_norm, layer.gate_up, row);
    };
    if (rows * (bytes + hidden * 4) <= ALONE_BYTES || (rows >= 4 * in.pool->threads() && bytes <= 8 * ITEM_BYTES)) {
        for_rows(in, rows, bytes + hidden * 4, [&](int64_t row) {
            norm(row);
            for (int64_t e = 0; e < experts; ++e) logit(row, e);
            finish(row);
        });
        return;
    }
    // Few rows and many experts: the router's matrix is read once, by everybody.
    for_rows(in, rows, hidden * 4, norm);
    int64_t block = ITEM_BYTES / (hidden * 4);
    if (block < 1) block = 1;
    if (rows * bytes <= 4 * ALONE_BYTES) block = experts;
    in.pool->run(parts_of(experts, block), [&](int64_t item, int) {
        for (int64_t e = item * block; e < experts && e < (item + 1) * block; ++e)
            for (int64_t row = 0; row < rows; ++row) logit(row, e);
    });
    for (int64_t row = 0; row < rows; ++row) finish(row);
}

// Entries are pairs of a row and one of its experts, in order of experts, and of rows within one.
void group(Instance& in, int64_t rows) {
    const int64_t experts = in.model.experts, top_k = in.model.top_k;
    int32_t* start = in.expert_start;
    std::memset(start, 0, static_cast<size_t>(experts + 1) * 4);
    for (int64_t i = 0; i < rows * top_k; ++i) ++start[in.chosen[i] + 1];
    in.active_count = 0;
    for (int64_t e = 0; e < experts; ++e) {
        if (start[e + 1]) in.active[in.active_count++] = static_cast<int32_t>(e);
        start[e + 1] += start[e];
    }
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t k = 0; k < top_k; ++k) {
            const int32_t entry = start[in.chosen[row * top_k + k]]++;
            in.entry_of[row * top_k + k] = entry;
            in.entry_row[entry] = static_cast<int32_t>(row);
        }
    for (int64_t e = experts; e > 0; --e) start[e] = start[e - 1];  // each had moved to its end
    start[0] = 0;
}

void run_gate_up(Instance& in, const Layer& layer) {
    const hb_model& m = in.model;
    const Matrix& whole = layer.gate_up.matrix;
    constexpr int64_t unit = 2 * GROUP / TILE_ROWS;  // tiles of one group of outputs
    int64_t tiles = cut(in, whole, whole.tiles() * in.active_count, 1, 1, BLOCK_COLUMNS / TILE_ROWS).tiles;
    tiles = tiles < unit ? unit : tiles / unit * unit;
    const int64_t blocks = parts_of(whole.tiles(), tiles);
    in.pool->run(in.active_count * blocks, [&](int64_t item, int thread) {
        const int64_t expert = in.active[item / blocks], first = item % blocks * tiles;
        const int64_t last = first + tiles < whole.tiles() ? first + tiles : whole.tiles();
        const int64_t stride = (last - first) * TILE_ROWS, column = first * TILE_ROWS;
        const int64_t columns = whole.rows - column < stride ? whole.rows - column : stride;
        const float* bias = layer.weights->gate_up_bias + expert * whole.rows + column;
        const Matrix matrix = layer.gate_up.of(expert);
        float* out = in.workspaces[thread].product;
        for (int64_t e = in.expert_start[expert]; e < in.expert_start[expert + 1]; e += ROW_BLOCK) {
            const int64_t left = in.expert_start[expert + 1] - e, count = left < ROW_BLOCK ? left : ROW_BLOCK;
            product(matrix, first, last, in.h.from(0, layer.gate_up.coded), in.entry_row + e, count, out, stride);
            for (int64_t i = 0; i < count; ++i) {
                float* y = out + i * stride;
                for (int64_t c = 0; c < columns; ++c) y[c] += bias[c];
                float* to = in.hidden.values + (e + i) * in.hidden.stride + column / 2;
                swiglu(y, columns / 2, m.swiglu_limit, m.swiglu_alpha, to);
                if (layer.down.coded) in.hidden.quantize(e + i, column / 2, columns / 2, layer.down.matrix.format);
            }
        }
    });
}

void run_down(Instance& in, const Layer& layer, int64_t rows) {
    const hb_model& m = in.model;
    const Matrix& whole = layer.down.matrix;
    const int64_t hidden = m.hidden, top_k = m.top_k, entries = rows * top_k;
    // Parts of an item's entries lie in the thread's own memory until they are added.
    int64_t most = (in.chunk < ROW_BLOCK ? in.chunk : ROW_BLOCK) * BLOCK_COLUMNS / (entries * TILE_ROWS);
    if (most < PRODUCT_TILES) most = PRODUCT_TILES;
    if (most > BLOCK_COLUMNS / TILE_ROWS) most = BLOCK_COLUMNS / TILE_ROWS;
    const Cut c = cut(in, whole, whole.tiles(), rows, in.active_count, most);
    in.pool->run(c.items(), [&](int64_t item, int thread) {
        const int64_t first = item / c.row_blocks * c.tiles;
        const int64_t last = first + c.tiles < whole.tiles() ? first + c.tiles : whole.tiles();
        const int64_t stride = (last - first) * TILE_ROWS, column = first * TILE_ROWS;
        const int64_t columns = hidden - column < stride ? hidden - column : stride;
        const int32_t row_begin = static_cast<int32_t>(item % c.row_blocks * c.rows);
        const int32_t row_end = static_cast<int32_t>(row_begin + c.rows < rows ? row_begin + c.rows : rows);
        float* out = in.workspaces[thread].product;
        for (int64_t a = 0; a < in.active_count; ++a) {
            const int64_t expert = in.active[a];
            const int32_t *from = in.entry_row + in.expert_start[expert], *to = in.entry_row + in.expert_start[expert + 1];
            const int64_t begin = std::lower_bound(from, to, row_begin) - in.entry_row;
            const int64_t end = std::lower_bound(from, to, row_end) - in.entry_row;
            const Matrix matrix = layer.down.of(expert);
            for (int64_t e = begin; e < end; e += ROW_BLOCK) {
                const int64_t count = end - e < ROW_BLOCK ? end - e : ROW_BLOCK;
                product(matrix, first, last, in.hidden.from(e, layer.down.coded), nullptr, count, out + e * stride, stride);
            }
        }
        for (int64_t row = row_begin; row < row_end; ++row) {
            float total[BLOCK_COLUMNS];
            for (int64_t k = 0; k < top_k; ++k) {
                const float* y = out + in.entry_of[row * top_k + k] * stride;
                const float* bias = layer.weights->down_bias + in.chosen[row * top_k + k] * hidden + column;
                const float share = in.shares[row * top_k + k];
                if (k == 0)
                    for (int64_t c = 0; c < columns; ++c) total[c] = (y[c] + bias[c]) * share;
                else
                    for (int64_t c = 0; c < columns; ++c) total[c] += (y[c] + bias[c]) * share;
            }
            float* x = in.x + row * hidden + column;
            for (int64_t c = 0; c < columns; ++c) x[c] += total[c];
        }
    });
}

}  // namespace

void run_experts(Instance& in, const Layer& layer, int64_t rows) {
    run_router(in, layer, rows);
    run_chosen_experts(in, layer, rows);
}

void run_chosen_experts(Instance& in, const Layer& layer, int64_t rows) {
    group(in, rows);
    run_gate_up(in, layer);
    run_down(in, layer, rows);
}

}  // namespace halfbyte
