#include "operations.h"

#include <cstring>
#include <memory>
#include <vector>

#include "step.h"

namespace halfbyte {
namespace {

bool check_stack(const hb_matrix& m, const char* name, int64_t rows, int64_t cols, char* error, int64_t size) {
    if (m.format < 0 || m.format > 4) return say(error, size, "%s has the unknown format %d.", name, m.format);
    if (m.rows != rows || m.cols != cols)
        return say(error, size, "%s is %lld x %lld, but the experts need %lld x %lld.", name, static_cast<long long>(m.rows),
                   static_cast<long long>(m.cols), static_cast<long long>(rows), static_cast<long long>(cols));
    if (!m.data || reinterpret_cast<uintptr_t>(m.data) % 64)
        return say(error, size, "%s must lie at a multiple of 64 bytes.", name);
    return true;
}

}  // namespace

Instance* make_expert_scratch(const hb_experts& e, Pool* pool, int32_t most_rows, char* error, int64_t size) {
    for (int32_t n : {e.hidden, e.intermediate, e.experts, e.top_k})
        if (n < 1) {
            say(error, size, "a size of the experts is %d; all are at least 1.", n);
            return nullptr;
        }
    if (e.top_k > e.experts) {
        say(error, size, "top %d of %d experts cannot be had.", e.top_k, e.experts);
        return nullptr;
    }
    hb_model m{};  // as small as can be where experts do not look
    m.hidden = e.hidden, m.intermediate = e.intermediate, m.experts = e.experts, m.top_k = e.top_k;
    m.swiglu_limit = e.swiglu_limit, m.swiglu_alpha = e.swiglu_alpha;
    m.heads = m.kv_heads = m.vocab = m.page_size = m.layers_per_page = 1;
    m.head_dim = TILE_ROWS;
    return make_scratch(m, pool, most_rows, error, size);
}

bool check_experts(const Instance& in, const hb_experts& e, int32_t rows, const int32_t* ids, char* error, int64_t size) {
    const hb_model& m = in.model;
    if (e.hidden != m.hidden || e.intermediate != m.intermediate || e.experts != m.experts || e.top_k != m.top_k)
        return say(error, size, "the experts have another shape than the scratch memory was made for.");
    if (rows < 0) return say(error, size, "there are %d rows.", rows);
    if (!e.gate_up_bias || !e.down_bias) return say(error, size, "a bias of the experts is missing.");
    for (int64_t i = 0; i < int64_t{rows} * m.top_k; ++i)
        if (ids[i] < 0 || ids[i] >= m.experts)
            return say(error, size, "row %lld asks for expert %d of %d.", static_cast<long long>(i / m.top_k), ids[i],
                       m.experts);
    return check_stack(e.gate_up, "gate_up", 2 * int64_t{m.intermediate}, m.hidden, error, size) &&
           check_stack(e.down, "down", m.hidden, m.intermediate, error, size);
}

bool check_product(const hb_matrix& m, int32_t rows, char* error, int64_t size) {
    if (rows < 0) return say(error, size, "there are %d rows.", rows);
    if (m.rows < 1 || m.cols < 1) return say(error, size, "a matrix has at least one row and one column.");
    return check_stack(m, "the matrix", m.rows, m.cols, error, size);
}

void run_experts_alone(Instance& in, const hb_experts& e, int32_t rows, const float* h, const int32_t* ids,
                       const float* shares, float* out) {
    hb_layer weights{};
    weights.gate_up_bias = e.gate_up_bias;
    weights.down_bias = e.down_bias;
    Layer layer{};
    layer.weights = &weights;
    layer.gate_up = stack_of(e.gate_up, e.int8_activations != 0);
    layer.down = stack_of(e.down, e.int8_activations != 0);
    const int64_t hidden = e.hidden, top_k = e.top_k;
    for (int64_t begin = 0; begin < rows; begin += in.chunk) {
        const int64_t count = rows - begin < in.chunk ? rows - begin : in.chunk;
        std::memcpy(in.chosen, ids + begin * top_k, static_cast<size_t>(count * top_k) * 4);
        std::memcpy(in.shares, shares + begin * top_k, static_cast<size_t>(count * top_k) * 4);
        for_rows(in, count, hidden * 4, [&](int64_t r) {
            std::memcpy(in.h.values + r * in.h.stride, h + (begin + r) * hidden, static_cast<size_t>(hidden) * 4);
            if (layer.gate_up.coded) in.h.quantize(r, 0, hidden, layer.gate_up.matrix.format);
            std::memset(in.x + r * hidden, 0, static_cast<size_t>(hidden) * 4);
        });
        run_chosen_experts(in, layer, count);
        std::memcpy(out + begin * hidden, in.x, static_cast<size_t>(count * hidden) * 4);
    }
}

void run_product_alone(Pool& pool, const hb_matrix& matrix, const float* bias, bool int8_activations, int32_t rows,
                       const float* x, float* out) {
    if (rows == 0) return;
    const Stack stack = stack_of(matrix, int8_activations);
    const Matrix& m = stack.matrix;
    const int64_t groups = m.groups(), padded = groups * GROUP, n = m.rows, chunk = rows < ROW_BLOCK ? rows : ROW_BLOCK;
    std::vector<float> values(static_cast<size_t>(chunk * padded));  // zero past the last column
    std::vector<CodedGroup> coded(static_cast<size_t>(stack.coded ? chunk * groups : 0));
    const std::unique_ptr<float[]> room(new float[static_cast<size_t>(pool.threads() * chunk * BLOCK_COLUMNS)]);
    Activations a{m.cols, groups, padded, values.data(), coded.data()};
    // As many items as give every thread several, whole blocks of tiles.
    int64_t tiles = m.tiles() / (4 * int64_t{pool.threads()}) / PRODUCT_TILES * PRODUCT_TILES;
    if (tiles < PRODUCT_TILES) tiles = PRODUCT_TILES;
    if (tiles > BLOCK_COLUMNS / TILE_ROWS) tiles = BLOCK_COLUMNS / TILE_ROWS;
    for (int64_t begin = 0; begin < rows; begin += chunk) {
        const int64_t count = rows - begin < chunk ? rows - begin : chunk;
        pool.run(parts_of(count, 8), [&](int64_t item, int) {
            for (int64_t r = item * 8; r < count && r < (item + 1) * 8; ++r) {
                std::memcpy(a.values + r * padded, x + (begin + r) * m.cols, static_cast<size_t>(m.cols) * 4);
                if (stack.coded) a.quantize(r, 0, m.cols, m.format);
            }
        });
        pool.run(parts_of(m.tiles(), tiles), [&](int64_t item, int thread) {
            const int64_t first = item * tiles, last = first + tiles < m.tiles() ? first + tiles : m.tiles();
            const int64_t stride = (last - first) * TILE_ROWS, column = first * TILE_ROWS;
            const int64_t columns = n - column < stride ? n - column : stride;
            float* y = room.get() + thread * chunk * BLOCK_COLUMNS;
            product(m, first, last, a.from(0, stack.coded), nullptr, count, y, stride);
            for (int64_t r = 0; r < count; ++r) {
                float* to = out + (begin + r) * n + column;
                const float* from = y + r * stride;
                if (bias)
                    for (int64_t c = 0; c < columns; ++c) to[c] = from[c] + bias[column + c];
                else
                    std::memcpy(to, from, static_cast<size_t>(columns) * 4);
            }
        });
    }
}

}  // namespace halfbyte
