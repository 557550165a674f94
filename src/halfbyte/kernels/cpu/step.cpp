// One step: embedding, layers, head, for any number of rows. Rows go through the layers in chunks, so that scratch memory is
// bounded; a row's bits do not depend on its chunk.
//
// A layer at decode is five phases: qkv with rope and cache write, attention, o, gate_up with swiglu, down. What lies
// between them is so small that the caller does it alone.
#include "step.h"

#include <cmath>
#include <cstring>

#include "attention.h"
#include "cache.h"

namespace halfbyte {
namespace {

void embed(const hb_model& m, int32_t token, float* x) {
    const uint8_t* table = static_cast<const uint8_t*>(m.embed);
    const int64_t at = int64_t{token} * m.hidden;
    if (m.embed_format == 0) {
        std::memcpy(x, table + 4 * at, static_cast<size_t>(m.hidden) * 4);
        return;
    }
    const uint16_t* row = reinterpret_cast<const uint16_t*>(table) + at;
    if (m.embed_format == 1)
        for (int32_t i = 0; i < m.hidden; ++i) x[i] = from_f16(row[i]);
    else
        for (int32_t i = 0; i < m.hidden; ++i) x[i] = CellBf16::one(reinterpret_cast<const uint8_t*>(row + i));
}

// The angle is a float32 product as everywhere; the functions are not sensitive to how they are computed.
void turn(const hb_model& m, int32_t position, float* cosines, float* sines) {
    for (int32_t i = 0; i < m.head_dim / 2; ++i) {
        const double angle = static_cast<float>(position) * m.rope_inverse[i];
        cosines[i] = static_cast<float>(std::cos(angle) * static_cast<double>(m.rope_temperature));
        sines[i] = static_cast<float>(std::sin(angle) * static_cast<double>(m.rope_temperature));
    }
}

// Pairs (i, i + half).
void rotate(float* x, const float* cosines, const float* sines, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i] + a * sines[i];
    }
}

void add(float* x, const float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] += y[i];
}

// h -> q in scratch memory, k and v in the cache.
void run_qkv(Instance& in, const hb_step& step, const Layer& layer, int64_t begin, int64_t rows) {
    const hb_model& m = in.model;
    const int64_t heads = m.heads + 2 * int64_t{m.kv_heads}, dim = m.head_dim, half = dim / 2;
    const int64_t units = parts_of(heads, in.head_unit), columns = in.head_unit * dim, tiles = columns / TILE_ROWS;
    const Matrix& qkv = layer.qkv.matrix;
    const int32_t* tables = layer.weights->sliding ? step.sliding_table : step.full_table;
    const int64_t wanted = parts_of(4 * int64_t{in.pool->threads()}, units), fair = parts_of(rows, wanted);
    const int64_t block = fair < PRODUCT_ROWS ? PRODUCT_ROWS : fair < ROW_BLOCK ? fair : ROW_BLOCK;
    const int64_t blocks = parts_of(rows, block);
    in.pool->run(units * blocks, [&](int64_t item, int thread) {
        const int64_t unit = item / blocks, first = item % blocks * block;
        const int64_t count = rows - first < block ? rows - first : block;
        const int64_t last_tile = (unit + 1) * tiles < qkv.tiles() ? (unit + 1) * tiles : qkv.tiles();
        float* out = in.workspaces[thread].product;
        product(qkv, unit * tiles, last_tile, in.h.from(first, layer.qkv.coded), nullptr, count, out, columns);
        for (int64_t r = 0; r < count; ++r) {
            const int64_t row = first + r;
            const int32_t position = step.positions[begin + row];
            const int64_t page = tables[step.row_sequence[begin + row] * step.table_stride + position / m.page_size];
            for (int64_t h = 0; h < in.head_unit && unit * in.head_unit + h < heads; ++h) {
                const int64_t head = unit * in.head_unit + h;
                float* x = out + r * columns + h * dim;
                add(x, layer.weights->qkv_bias + head * dim, dim);
                if (head < m.heads + m.kv_heads) rotate(x, in.cosines + row * half, in.sines + row * half, half);
                if (head < m.heads) {
                    std::memcpy(in.q + (row * m.heads + head) * dim, x, static_cast<size_t>(dim) * 4);
                    continue;
                }
                const int64_t side = head >= m.heads + m.kv_heads, kv_head = head - m.heads - side * m.kv_heads;
                write_cells(x, dim, m.kv_format,
                            static_cast<uint8_t*>(step.kv_pool) + page * in.kv_page_bytes +
                                layer.weights->kind_index * in.kv_layer_bytes + side * in.kv_side_bytes +
                                kv_head * in.kv_head_bytes + position % m.page_size * dim * in.kv_cell);
            }
        }
    });
}

void run_o(Instance& in, const Layer& layer, int64_t rows) {
    const Matrix& o = layer.o.matrix;
    const int64_t hidden = in.model.hidden;
    if (layer.o.coded && !in.attention_quantizes)
        for_rows(in, rows, in.attention.k * 4, [&](int64_t r) {
            in.attention.quantize(r, 0, in.attention.k, layer.o.matrix.format);
        });
    const Cut c = cut(in, o, o.tiles(), rows, 1, BLOCK_COLUMNS / TILE_ROWS);
    in.pool->run(c.items(), [&](int64_t item, int thread) {
        const int64_t first = item / c.row_blocks * c.tiles, last = first + c.tiles < o.tiles() ? first + c.tiles : o.tiles();
        const int64_t column = first * TILE_ROWS, stride = (last - first) * TILE_ROWS;
        const int64_t columns = hidden - column < stride ? hidden - column : stride;
        const int64_t row = item % c.row_blocks * c.rows, end = row + c.rows < rows ? row + c.rows : rows;
        float* out = in.workspaces[thread].product;
        for (int64_t r = row; r < end; r += ROW_BLOCK) {
            const int64_t count = end - r < ROW_BLOCK ? end - r : ROW_BLOCK;
            product(o, first, last, in.attention.from(r, layer.o.coded), nullptr, count, out, stride);
            for (int64_t i = 0; i < count; ++i) {
                add(out + i * stride, layer.weights->o_bias + column, columns);
                add(in.x + (r + i) * hidden + column, out + i * stride, columns);
            }
        }
    });
}

void tap(Instance& in, const hb_step& step, int32_t layer, int64_t begin, int64_t rows) {
    const int64_t hidden = in.model.hidden;
    for (int32_t t = 0; t < step.tap_count; ++t)
        if (step.tap_layers[t] == layer)
            std::memcpy(step.taps + (int64_t{t} * step.rows + begin) * hidden, in.x, static_cast<size_t>(rows * hidden) * 4);
}

}  // namespace

void normalise(Instance& in, const float* x, const float* weight, const Stack& reader, int64_t row) {
    const int64_t n = in.model.hidden;
    const double mean = static_cast<double>(sum_of_squares(x, n)) / static_cast<double>(n);
    const float scale = static_cast<float>(1.0 / std::sqrt(mean + static_cast<double>(in.model.norm_eps)));
    scale_multiply(x, scale, weight, n, in.h.values + row * in.h.stride);
    if (reader.coded) in.h.quantize(row, 0, n, reader.matrix.format);
}

void run_step(Instance& in, const hb_step& step) {
    const hb_model& m = in.model;
    for (int64_t begin = 0; begin < step.rows; begin += in.chunk) {
        const int64_t rows = step.rows - begin < in.chunk ? step.rows - begin : in.chunk;
        for_rows(in, rows, m.hidden * 4, [&](int64_t r) {
            embed(m, step.tokens[begin + r], in.x + r * m.hidden);
            turn(m, step.positions[begin + r], in.cosines + r * m.head_dim / 2, in.sines + r * m.head_dim / 2);
        });
        plan_attention(in, step, begin, rows, false);
        plan_attention(in, step, begin, rows, true);
        for (int32_t n = 0; n < m.layers; ++n) {
            const Layer& layer = in.layers[static_cast<size_t>(n)];
            tap(in, step, n, begin, rows);
            for_rows(in, rows, m.hidden * 4, [&](int64_t r) {
                normalise(in, in.x + r * m.hidden, layer.weights->attn_norm, layer.qkv, r);
            });
            run_qkv(in, step, layer, begin, rows);
            run_attention(in, step, begin, layer);
            run_o(in, layer, rows);
            run_experts(in, layer, rows);
            if (step.chosen)
                std::memcpy(step.chosen + (int64_t{n} * step.rows + begin) * m.top_k, in.chosen,
                            static_cast<size_t>(rows * m.top_k) * 4);
        }
        tap(in, step, m.layers, begin, rows);
        run_head(in, step, begin, rows);
    }
}

}  // namespace halfbyte
