// Binds a model: derived numbers and one block of scratch memory, laid out once. A step allocates nothing.
#include "instance.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace halfbyte {
namespace {

// Hands out parts of one block of memory; without a block it only counts.
class Layout {
public:
    explicit Layout(uint8_t* base) : base_(base) {}
    template <class T>
    void take(T*& pointer, int64_t count) {
        pointer = base_ ? reinterpret_cast<T*>(base_ + size_) : nullptr;
        size_ += up(count * static_cast<int64_t>(sizeof(T)), 64) + 64;  // no two parts on one cache line pair
    }
    int64_t size() const { return size_; }

private:
    uint8_t* base_;
    int64_t size_ = 0;
};

void take_activations(Layout& layout, Activations& a, int64_t rows, int64_t k) {
    a.k = k;
    a.groups = parts_of(k, GROUP);
    a.stride = a.groups * GROUP;
    layout.take(a.values, rows * a.stride);
    layout.take(a.coded, rows * a.groups);
}

int64_t lay_out(Instance& i, int threads, uint8_t* base) {
    const hb_model& m = i.model;
    const int64_t rows = i.chunk, entries = rows * m.top_k, queries = m.heads * int64_t{m.head_dim};
    Layout l(base);
    l.take(i.x, rows * m.hidden);
    l.take(i.cosines, rows * m.head_dim / 2);
    l.take(i.sines, rows * m.head_dim / 2);
    l.take(i.q, rows * queries);
    take_activations(l, i.h, rows, m.hidden);
    take_activations(l, i.attention, rows, queries);
    take_activations(l, i.hidden, entries, m.intermediate);
    l.take(i.router_logits, rows * m.experts);
    l.take(i.chosen, entries);
    l.take(i.shares, entries);
    l.take(i.entry_of, entries);
    l.take(i.entry_row, entries);
    l.take(i.expert_start, m.experts + int64_t{1});
    l.take(i.active, m.experts);
    for (AttentionPlan& p : i.plans) {
        l.take(p.tiles, rows);
        l.take(p.work, rows + MOST_PARTIALS);
    }
    l.take(i.left, rows * m.kv_heads);
    l.take(i.partial_top, MOST_PARTIALS);
    l.take(i.partial_sum, MOST_PARTIALS);
    l.take(i.partial_mix, MOST_PARTIALS * i.padded_dim);
    l.take(i.workspaces, threads);
    const int64_t tile_queries = TILE_QUERIES > i.group ? TILE_QUERIES : i.group;
    const int64_t block_rows = rows < ROW_BLOCK ? rows : ROW_BLOCK;
    const int64_t unit = i.head_unit * m.head_dim;
    const int64_t columns = unit > BLOCK_COLUMNS ? up(unit, TILE_ROWS) : BLOCK_COLUMNS;
    const int64_t parts = entries * PRODUCT_TILES * TILE_ROWS;
    const int64_t product = block_rows * columns > parts ? block_rows * columns : parts;
    for (int t = 0; t < threads; ++t) {
        Workspace unused, &w = base ? i.workspaces[t] : unused;
        l.take(w.product, product);
        l.take(w.keys, i.padded_dim * KEY_BLOCK);
        l.take(w.values, i.padded_dim * KEY_BLOCK);
        l.take(w.top, tile_queries);
        l.take(w.sum, tile_queries);
        l.take(w.mix, tile_queries * i.padded_dim);
        l.take(w.part_top, tile_queries);
        l.take(w.part_sum, tile_queries);
        l.take(w.part_mix, tile_queries * i.padded_dim);
        l.take(w.scores, 4 * KEY_BLOCK);  // of as many heads as are computed at once
        l.take(w.best, rows);
    }
    return l.size();
}

void derive(Instance& i, const hb_model& m, int32_t most_rows) {
    i.model = m;
    i.chunk = most_rows < CHUNK_ROWS ? most_rows : CHUNK_ROWS;
    i.group = m.heads / m.kv_heads;
    i.padded_dim = up(m.head_dim, TILE_ROWS);
    i.head_unit = 1;
    while (i.head_unit * m.head_dim % TILE_ROWS) i.head_unit *= 2;  // ends: head_dim is even
    i.kv_cell = m.kv_format == 0 ? 4 : m.kv_format == 2 ? 2 : 1;
    i.kv_head_bytes = int64_t{m.page_size} * m.head_dim * i.kv_cell;
    i.kv_side_bytes = i.kv_head_bytes * m.kv_heads;
    i.kv_layer_bytes = 2 * i.kv_side_bytes;
    i.kv_page_bytes = i.kv_layer_bytes * m.layers_per_page;
    i.attention_quantizes = i.group * m.head_dim % GROUP == 0;
}

}  // namespace

Stack stack_of(const hb_matrix& m, bool int8_activations) {
    const Format format = static_cast<Format>(m.format);
    const bool coded = int8_activations && (format == Format::q8 || format == Format::mxfp4);
    return {{format, m.rows, m.cols, static_cast<const uint8_t*>(m.data)}, coded};
}

int64_t scratch_bytes(const hb_model& model, int32_t threads, int32_t most_rows) {
    Instance i{};
    derive(i, model, most_rows);
    return lay_out(i, threads, nullptr);
}

Instance* make_instance(const hb_model& model, Pool* pool, int32_t most_rows, char* error, int64_t error_size) {
    if (!check_model(model, error, error_size)) return nullptr;
    Instance* i = make_scratch(model, pool, most_rows, error, error_size);
    if (!i) return nullptr;
    const bool int8 = model.int8_activations != 0;
    for (int32_t n = 0; n < model.layers; ++n) {
        const hb_layer& w = model.layer[n];
        i->layers.push_back({&w, stack_of(w.qkv, int8), stack_of(w.o, int8), stack_of(w.gate_up, int8),
                             stack_of(w.down, int8)});
    }
    i->head = stack_of(model.lm_head, int8);
    return i;
}

Instance* make_scratch(const hb_model& model, Pool* pool, int32_t most_rows, char* error, int64_t error_size) {
    if (most_rows < 1) {
        say(error, error_size, "most_rows is %d; a step has at least one row.", most_rows);
        return nullptr;
    }
    Instance* i = new (std::nothrow) Instance{};
    if (!i) {
        say(error, error_size, "there is no memory for another model.");
        return nullptr;
    }
    derive(*i, model, most_rows);
    i->pool = pool;
    i->memory_bytes = up(lay_out(*i, pool->threads(), nullptr), 4096);
    i->memory = std::aligned_alloc(4096, static_cast<size_t>(i->memory_bytes));
    if (!i->memory) {
        say(error, error_size, "%lld bytes of scratch memory for %d rows cannot be had; ask for fewer rows.",
            static_cast<long long>(i->memory_bytes), most_rows);
        delete i;
        return nullptr;
    }
    std::memset(i->memory, 0, static_cast<size_t>(i->memory_bytes));
    lay_out(*i, pool->threads(), static_cast<uint8_t*>(i->memory));
    return i;
}

void destroy_instance(Instance* i) {
    if (!i) return;
    std::free(i->memory);
    delete i;
}

}  // namespace halfbyte
