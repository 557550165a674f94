// What a model or a step must be, said in one sentence before anything is written. Costs a few comparisons a row and page.
#include <cstdarg>
#include <cstdio>

#include "instance.h"

namespace halfbyte {

bool say(char* error, int64_t error_size, const char* format, ...) {
    if (error && error_size > 0) {
        va_list values;
        va_start(values, format);
        std::vsnprintf(error, static_cast<size_t>(error_size), format, values);
        va_end(values);
    }
    return false;
}

namespace {

bool check_matrix(const hb_matrix& m, const char* name, int layer, int64_t rows, int64_t cols, char* error, int64_t size) {
    char where[32] = "";
    if (layer >= 0) std::snprintf(where, sizeof where, " of layer %d", layer);
    if (m.format < 0 || m.format > 4)
        return say(error, size, "%s%s has the unknown format %d.", name, where, m.format);
    if (m.rows != rows || m.cols != cols)
        return say(error, size, "%s%s is %lld x %lld, but the model needs %lld x %lld.", name, where,
                   static_cast<long long>(m.rows), static_cast<long long>(m.cols), static_cast<long long>(rows),
                   static_cast<long long>(cols));
    if (!m.data || reinterpret_cast<uintptr_t>(m.data) % 64)
        return say(error, size, "%s%s must lie at a multiple of 64 bytes.", name, where);
    return true;
}

}  // namespace

bool check_model(const hb_model& m, char* error, int64_t size) {
    if (m.abi != HALFBYTE_CPU_ABI)
        return say(error, size, "the library speaks ABI %d, the caller %d; build both from one source.",
                   HALFBYTE_CPU_ABI, m.abi);
    const int32_t counts[] = {m.layers, m.hidden, m.intermediate, m.experts, m.top_k, m.heads, m.kv_heads, m.head_dim,
                              m.vocab, m.page_size, m.layers_per_page};
    for (int32_t n : counts)
        if (n < 1) return say(error, size, "a size of the model is %d; all are at least 1.", n);
    if (m.head_dim % 2) return say(error, size, "head_dim is %d; rope needs an even number.", m.head_dim);
    if (m.heads % m.kv_heads) return say(error, size, "%d heads do not divide over %d kv heads.", m.heads, m.kv_heads);
    if (m.top_k > m.experts) return say(error, size, "top %d of %d experts cannot be had.", m.top_k, m.experts);
    if (m.kv_format != 0 && m.kv_format != 2 && m.kv_format != 5)
        return say(error, size, "the KV format %d is unknown; it is 0 (f32), 2 (bf16) or 5 (fp8).", m.kv_format);
    if (m.embed_format < 0 || m.embed_format > 2)
        return say(error, size, "the embedding's format %d is unknown; it is 0 (f32), 1 (f16) or 2 (bf16).",
                   m.embed_format);
    if (!m.rope_inverse || !m.embed || !m.layer || !m.final_norm)
        return say(error, size, "a pointer of the model is missing.");
    const int64_t q = int64_t{m.heads} * m.head_dim, kv = int64_t{m.kv_heads} * m.head_dim;
    for (int32_t n = 0; n < m.layers; ++n) {
        const hb_layer& l = m.layer[n];
        if (!l.attn_norm || !l.qkv_bias || !l.o_bias || !l.mlp_norm || !l.router || !l.router_bias ||
            !l.gate_up_bias || !l.down_bias)
            return say(error, size, "a pointer of layer %d is missing.", n);
        if (l.kind_index < 0 || l.kind_index >= m.layers_per_page)
            return say(error, size, "layer %d is number %d of its kind, but a page holds %d.", n, l.kind_index,
                       m.layers_per_page);
        if (l.sliding && m.window < 1) return say(error, size, "the window is %d; it is at least 1.", m.window);
        if (!check_matrix(l.qkv, "qkv", n, q + 2 * kv, m.hidden, error, size) ||
            !check_matrix(l.o, "o", n, m.hidden, q, error, size) ||
            !check_matrix(l.gate_up, "gate_up", n, 2 * int64_t{m.intermediate}, m.hidden, error, size) ||
            !check_matrix(l.down, "down", n, m.hidden, m.intermediate, error, size))
            return false;
    }
    return check_matrix(m.lm_head, "lm_head", -1, m.vocab, m.hidden, error, size);
}

namespace {

bool check_pages(const Instance& i, const hb_step& s, int32_t sequence, int32_t first_seen, int32_t last, bool sliding,
                 char* error, int64_t size) {
    const int32_t* table = (sliding ? s.sliding_table : s.full_table) + sequence * s.table_stride;
    for (int32_t block = first_seen / i.model.page_size; block <= last / i.model.page_size; ++block)
        if (table[block] < 0 || table[block] >= s.pages)
            return say(error, size, "block %d of sequence %d is page %d in the %s table, but the pool has %lld pages.", block,
                       sequence, table[block], sliding ? "sliding" : "full", static_cast<long long>(s.pages));
    return true;
}

}  // namespace

bool check_step(const Instance& i, const hb_step& s, char* error, int64_t size) {
    const hb_model& m = i.model;
    if (s.rows < 0 || s.sequences < 0 || s.logit_count < 0 || s.tap_count < 0 || s.table_stride < 0)
        return say(error, size, "a count of the step is negative.");
    if (s.rows > 0 && (!s.tokens || !s.positions || !s.query_start || !s.kv_lens || !s.row_sequence || !s.kv_pool))
        return say(error, size, "a pointer of the step is missing.");
    if (s.logit_count > 0 && !s.logit_rows) return say(error, size, "the rows whose logits are wanted are missing.");
    if (s.tap_count > 0 && (!s.tap_layers || !s.taps)) return say(error, size, "a pointer of the taps is missing.");
    bool any_full = false, any_sliding = false;
    for (const Layer& l : i.layers) (l.weights->sliding ? any_sliding : any_full) = true;
    if ((any_full && !s.full_table) || (any_sliding && !s.sliding_table))
        return say(error, size, "a block table of the step is missing.");
    for (int32_t r = 0; r < s.rows; ++r)
        if (s.tokens[r] < 0 || s.tokens[r] >= m.vocab)
            return say(error, size, "row %d has token %d, but the vocabulary has %d.", r, s.tokens[r], m.vocab);
    if (s.sequences > 0 && (s.query_start[0] != 0 || s.query_start[s.sequences] != s.rows))
        return say(error, size, "the sequences' rows do not cover the step's %d rows.", s.rows);
    if (s.sequences == 0 && s.rows > 0) return say(error, size, "%d rows belong to no sequence.", s.rows);
    for (int32_t n = 0; n < s.sequences; ++n) {
        const int32_t begin = s.query_start[n], end = s.query_start[n + 1];
        if (end < begin || end > s.rows) return say(error, size, "the rows of sequence %d are out of order.", n);
        if (begin == end) continue;
        const int32_t length = s.kv_lens[n], first = s.positions[begin], last = s.positions[end - 1];
        if (length < 1 || (length - int64_t{1}) / m.page_size >= s.table_stride)
            return say(error, size, "sequence %d has %d tokens, but its block table has room for %lld.", n, length,
                       static_cast<long long>(s.table_stride * m.page_size));
        for (int32_t r = begin; r < end; ++r) {
            if (s.row_sequence[r] != n)
                return say(error, size, "row %d says it belongs to sequence %d, but lies in %d.", r, s.row_sequence[r], n);
            if (s.positions[r] < 0 || s.positions[r] >= length)
                return say(error, size, "row %d is at position %d of a sequence of %d.", r, s.positions[r], length);
            if (r > begin && s.positions[r] <= s.positions[r - 1])
                return say(error, size, "row %d is at position %d, not behind the row before it.", r, s.positions[r]);
        }
        const int32_t seen = first >= m.window ? first - m.window + 1 : 0;
        if ((any_full && !check_pages(i, s, n, 0, last, false, error, size)) ||
            (any_sliding && !check_pages(i, s, n, seen, last, true, error, size)))
            return false;
    }
    for (int32_t l = 0; l < s.logit_count; ++l)
        if (s.logit_rows[l] < 0 || s.logit_rows[l] >= s.rows)
            return say(error, size, "logits are wanted of row %d, but the step has %d rows.", s.logit_rows[l], s.rows);
    for (int32_t t = 0; t < s.tap_count; ++t)
        if (s.tap_layers[t] < 0 || s.tap_layers[t] > m.layers)
            return say(error, size, "layer %d is to be tapped, but the model has %d.", s.tap_layers[t], m.layers);
    return true;
}

}  // namespace halfbyte
