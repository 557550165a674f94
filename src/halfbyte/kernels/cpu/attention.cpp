// Attention as ops/attention.py means it, computed block by block with a running maximum.
//
// Keys are visited in blocks of 64 absolute positions. A segment of four blocks has a maximum, a sum and a mix of values of
// its own, which are combined segment after segment, whether one item goes through all of them or every segment is an
// item: a query's bits depend neither on the chunk it is in, nor on the threads, nor on how long the cache has grown.
// A block's keys are turned once (a lane is a key), for all queries of the tile and all heads of the group.
#include "attention.h"

#include <cmath>
#include <limits>

#include "cache.h"
#include "exponential.h"
#include "lanes.h"
#include "vector.h"

namespace halfbyte {
namespace {

static_assert(KEY_BLOCK == 64, "a block of keys is four vectors");
constexpr float NOTHING = -std::numeric_limits<float>::infinity();
// Sums that fit the registers: query heads at once, and vectors of 16 keys or dimensions for each.
#if defined(__AVX512F__)
constexpr int HEADS = 4, VECTORS = 4;
#elif defined(__AVX__) || defined(__aarch64__)
constexpr int HEADS = 2, VECTORS = 2;
#else
constexpr int HEADS = 2, VECTORS = 1;
#endif

// Where the keys and values of a tile are.
struct Cache {
    const uint8_t* base;      // the pool, at this layer and kv head
    const int32_t* table;
    int64_t page_size, page_bytes, row_bytes, side_bytes;
    // Of `count` keys from `position` on.
    void keys(int64_t position, int64_t count, const uint8_t** rows) const {
        const int32_t* page = table + position / page_size;
        int64_t slot = position % page_size;
        for (int64_t k = 0; k < count; ++k) {
            rows[k] = base + *page * page_bytes + slot * row_bytes;
            if (++slot == page_size) slot = 0, ++page;
        }
    }
};

// Keys [first, last) of the block at `start`, one lane a key, and their values. Other lanes repeat a key that is there:
// nothing that was never written is looked at.
template <class Cell>
void load_block(const Cache& cache, int64_t start, int64_t first, int64_t last, int64_t dim, int64_t padded, float* keys,
                float* values) {
    using native::LANES, native::Vector;
    const uint8_t* rows[KEY_BLOCK];
    cache.keys(start + first, last - first, rows + first);
    const int64_t begin = first / LANES * LANES, end = up(last, LANES);
    for (int64_t k = begin; k < first; ++k) rows[k] = rows[first];
    for (int64_t k = last; k < end; ++k) rows[k] = rows[last - 1];
    for (int64_t lane = begin; lane < end; lane += LANES) {
        constexpr int64_t in_word = 4 / Cell::bytes;  // words are turned, then taken apart
        int64_t d = 0;
        for (; d + LANES * in_word <= dim; d += LANES * in_word) {
            Vector words[LANES];
            unroll<LANES>([&](auto j) HB_LAMBDA { words[j] = native::load<Vector>(rows[lane + j] + d * Cell::bytes); });
            native::transpose(words);
            unroll<LANES>([&](auto j) HB_LAMBDA {
                unroll<in_word>([&](auto i) HB_LAMBDA {
                    native::store(keys + (d + j * in_word + i) * KEY_BLOCK + lane,
                                  Cell::part(reinterpret_cast<native::Bits>(words[j]), i));
                });
            });
        }
        for (; d < dim; ++d)
            for (int j = 0; j < LANES; ++j) keys[d * KEY_BLOCK + lane + j] = Cell::one(rows[lane + j] + d * Cell::bytes);
    }
    for (int64_t k = first; k < last; ++k) {
        const uint8_t* row = rows[k] + cache.side_bytes;
        float* to = values + k * padded;
        int64_t d = 0;
        for (; d + 16 <= dim; d += 16) Cell::sixteen(row + d * Cell::bytes, to + d);
        for (; d < dim; ++d) to[d] = Cell::one(row + d * Cell::bytes);
    }
}

// Scores of R query heads against the vectors of 16 keys that hold [first, last). Each lane adds its products in rising
// order of the dimension, whatever R is.
template <int R, int N>
void score_vectors(const float* q, int64_t dim, const float* keys, float scale, float* scores) {
    Floats sum[R][N];
    unroll<R>([&](auto r) HB_LAMBDA { unroll<N>([&](auto v) HB_LAMBDA { sum[r][v] = splat(0.0f); }); });
    for (int64_t d = 0; d < dim; ++d) {
        Floats key[N];
        unroll<N>([&](auto v) HB_LAMBDA { key[v] = load_floats(keys + d * KEY_BLOCK + v * 16); });
        unroll<R>([&](auto r) HB_LAMBDA {
            const Floats one = splat(q[r * dim + d]);
            unroll<N>([&](auto v) HB_LAMBDA { sum[r][v] = fma(one, key[v], sum[r][v]); });
        });
    }
    unroll<R>([&](auto r) HB_LAMBDA {
        unroll<N>([&](auto v) HB_LAMBDA {
            const Floats s = mul(sum[r][v], splat(scale));
            store(scores + r * KEY_BLOCK + v * 16, fma(s, splat(0.0f), s));  // an infinite score is none: NaN
        });
    });
}

template <int R>
void score(const float* q, int64_t dim, const float* keys, int64_t first, int64_t last, float scale, float* scores) {
    int64_t at = first / 16 * 16;
    for (; at + VECTORS * 16 <= up(last, 16); at += VECTORS * 16)
        score_vectors<R, VECTORS>(q, dim, keys + at, scale, scores + at);
    for (; at < last; at += 16) score_vectors<R, 1>(q, dim, keys + at, scale, scores + at);
}

// N vectors of R rows of values [first, last), weighted; joined to the mix so far, which shrinks by `keep`.
template <int R, int N>
void mix_columns(const float* weights, const float* values, int64_t first, int64_t last, int64_t padded,
                 const float* keep, float* out) {
    Floats sum[R][N];
    unroll<R>([&](auto r) HB_LAMBDA { unroll<N>([&](auto v) HB_LAMBDA { sum[r][v] = splat(0.0f); }); });
    for (int64_t k = first; k < last; ++k) {
        Floats value[N];
        unroll<N>([&](auto v) HB_LAMBDA { value[v] = load_floats(values + k * padded + v * 16); });
        unroll<R>([&](auto r) HB_LAMBDA {
            const Floats weight = splat(weights[r * KEY_BLOCK + k]);
            unroll<N>([&](auto v) HB_LAMBDA { sum[r][v] = fma(weight, value[v], sum[r][v]); });
        });
    }
    unroll<R>([&](auto r) HB_LAMBDA {
        unroll<N>([&](auto v) HB_LAMBDA {
            float* to = out + r * padded + v * 16;
            store(to, fma(load_floats(to), splat(keep[r]), sum[r][v]));
        });
    });
}

template <int R>
void mix(const float* weights, const float* values, int64_t first, int64_t last, int64_t padded, const float* keep,
         float* out) {
    int64_t at = 0;
    for (; at + VECTORS * 16 <= padded; at += VECTORS * 16)
        mix_columns<R, VECTORS>(weights, values + at, first, last, padded, keep, out + at);
    for (; at < padded; at += 16) mix_columns<R, 1>(weights, values + at, first, last, padded, keep, out + at);
}

// A block's keys [first, last) for R heads of one token; `top`, `total` and `out` are their running state.
template <int R>
void attend(const float* q, int64_t dim, int64_t padded, const float* keys, const float* values, int64_t first,
            int64_t last, float scale, float* scores, float* top, float* total, float* out) {
    score<R>(q, dim, keys, first, last, scale, scores);
    // Vectors of keys that nobody sees are nothing, too, so that there are always four and all rows go in step.
    alignas(64) float shrink[16] = {};
    float now[R];
    unroll<R>([&](auto r) HB_LAMBDA {
        float* row = scores + r * KEY_BLOCK;
        for (int64_t i = 0; i < first; ++i) row[i] = NOTHING;
        for (int64_t i = last; i < KEY_BLOCK; ++i) row[i] = NOTHING;
        const float here = native::highest(row, KEY_BLOCK);
        now[r] = here > top[r] ? here : top[r];
        shrink[r] = top[r] - now[r];
        top[r] = now[r];
    });
    store(shrink, soft_exponential(load_floats(shrink)));
    unroll<R>([&](auto r) HB_LAMBDA {
        float* row = scores + r * KEY_BLOCK;
        Floats weight[4];
        unroll<4>([&](auto v) HB_LAMBDA { weight[v] = soft_exponential(sub(load_floats(row + v * 16), splat(now[r]))); });
        unroll<4>([&](auto v) HB_LAMBDA { store(row + v * 16, weight[v]); });
        total[r] = total[r] * shrink[r] + sum(add(add(weight[0], weight[1]), add(weight[2], weight[3])));
    });
    mix<R>(scores, values, first, last, padded, shrink, out);
}

struct State { float *top, *sum, *mix; };

void clear(const State& s, int64_t rows, int64_t padded) {
    for (int64_t r = 0; r < rows; ++r) s.top[r] = NOTHING, s.sum[r] = 0;
    std::memset(s.mix, 0, static_cast<size_t>(rows * padded) * 4);
}

// Joins the state of the next segment. A row that has seen nothing in one of them is what it was in the other, so that
// a tile's other queries do not change its bits.
void join(const State& s, const State& next, int64_t rows, int64_t padded) {
    for (int64_t r = 0; r < rows; ++r) {
        if (next.top[r] == NOTHING && next.sum[r] == 0) continue;
        if (s.top[r] == NOTHING && s.sum[r] == 0) {
            s.top[r] = next.top[r], s.sum[r] = next.sum[r];
            std::memcpy(s.mix + r * padded, next.mix + r * padded, static_cast<size_t>(padded) * 4);
            continue;
        }
        float both[2] = {s.top[r], next.top[r]};
        const float now = both[1] > both[0] ? both[1] : both[0];
        exp_row(both, 2, now);
        s.sum[r] = s.sum[r] * both[0] + next.sum[r] * both[1];
        s.top[r] = now;
        float *a = s.mix + r * padded, *b = next.mix + r * padded;
        for (int64_t d = 0; d < padded; ++d) a[d] = a[d] * both[0] + b[d] * both[1];
    }
}

struct Query {
    const Instance& instance;
    const Tile& tile;
    const int32_t* positions;  // of the tile's rows
    int64_t window;            // 0: none
    int64_t head;              // kv head
    Cache cache;
    float scale;
};

// One segment for all queries of a tile; `state` is cleared first.
template <class Cell>
void segment(const Query& query, int64_t number, Workspace& w, const State& state) {
    const Instance& in = query.instance;
    const int64_t group = in.group, dim = in.model.head_dim, padded = in.padded_dim;
    clear(state, query.tile.count * group, padded);
    const int64_t begin = number * SEGMENT_BLOCKS * KEY_BLOCK;
    for (int64_t start = begin; start < begin + SEGMENT_BLOCKS * KEY_BLOCK; start += KEY_BLOCK) {
        if (start >= query.tile.last) break;
        if (start + KEY_BLOCK <= query.tile.first) continue;
        const int64_t low = query.tile.first > start ? query.tile.first - start : 0;
        const int64_t high = query.tile.last - start < KEY_BLOCK ? query.tile.last - start : KEY_BLOCK;
        load_block<Cell>(query.cache, start, low, high, dim, padded, w.keys, w.values);
        for (int64_t t = 0; t < query.tile.count; ++t) {
            const int64_t position = query.positions[t];
            const int64_t oldest = query.window && position >= query.window ? position - query.window + 1 : 0;
            const int64_t first = oldest > start ? oldest - start : 0;
            const int64_t last = position + 1 - start < KEY_BLOCK ? position + 1 - start : KEY_BLOCK;
            if (first >= last) continue;
            const float* q = in.q + ((query.tile.row + t) * in.model.kv_heads + query.head) * group * dim;
            const auto heads = [&](int64_t h, auto count) {
                const int64_t row = t * group + h;
                attend<decltype(count)::value>(q + h * dim, dim, padded, w.keys, w.values, first, last, query.scale,
                                               w.scores, state.top + row, state.sum + row, state.mix + row * padded);
            };
            int64_t h = 0;
            for (; h + HEADS <= group; h += HEADS) heads(h, std::integral_constant<int, HEADS>{});
            if (HEADS > 2 && h + 2 <= group) heads(h, std::integral_constant<int, 2>{}), h += 2;
            if (h < group) heads(h, std::integral_constant<int, 1>{});
        }
    }
}

// The sink joins, the mix is divided by the sum, and what o reads is made of it.
void finish(Instance& in, const Query& query, const Layer& layer, const State& s) {
    const int64_t group = in.group, dim = in.model.head_dim;
    for (int64_t t = 0; t < query.tile.count; ++t) {
        const int64_t row = query.tile.row + t;
        float* out = in.attention.values + row * in.attention.stride + query.head * group * dim;
        for (int64_t h = 0; h < group; ++h) {
            const int64_t r = t * group + h;
            float both[2] = {s.top[r], NOTHING};
            float denominator = s.sum[r], keep = 1;
            if (layer.weights->sinks) {
                both[1] = layer.weights->sinks[query.head * group + h];
                exp_row(both, 2, both[1] > both[0] ? both[1] : both[0]);
                keep = both[0];
                denominator = denominator * keep + both[1];
            }
            const float* mixed = s.mix + r * in.padded_dim;
            for (int64_t d = 0; d < dim; ++d) out[h * dim + d] = mixed[d] * keep / denominator;
        }
        if (layer.o.coded && in.attention_quantizes)
            in.attention.quantize(row, query.head * group * dim, group * dim, layer.o.matrix.format);
    }
}

template <class Cell>
void run(Instance& in, const hb_step& step, const int32_t* positions, const Layer& layer) {
    const bool sliding = layer.weights->sliding != 0;
    AttentionPlan& plan = in.plans[sliding];
    const int64_t kv_heads = in.model.kv_heads, padded = in.padded_dim;
    for (int64_t t = 0; t < plan.tile_count; ++t)
        if (plan.tiles[t].segments)
            for (int64_t head = 0; head < kv_heads; ++head)
                in.left[t * kv_heads + head].store(plan.tiles[t].segments, std::memory_order_relaxed);
    const int32_t* tables = sliding ? step.sliding_table : step.full_table;
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(in.model.head_dim)));
    in.pool->run(plan.work_count * kv_heads, [&](int64_t item, int thread) {
        const Work work = plan.work[item / kv_heads];
        const Tile& tile = plan.tiles[work.tile];
        const int64_t head = item % kv_heads, rows = tile.count * in.group;
        Workspace& w = in.workspaces[thread];
        const uint8_t* base = static_cast<const uint8_t*>(step.kv_pool) +
                              layer.weights->kind_index * in.kv_layer_bytes + head * in.kv_head_bytes;
        const Query query{in, tile, positions + tile.row, sliding ? in.model.window : 0, head,
                          {base, tables + tile.sequence * step.table_stride, in.model.page_size, in.kv_page_bytes,
                           in.model.head_dim * in.kv_cell, in.kv_side_bytes}, scale};
        const int64_t span = SEGMENT_BLOCKS * KEY_BLOCK, begin = tile.first / span, end = parts_of(tile.last, span);
        if (!tile.segments) {
            const State whole{w.top, w.sum, w.mix}, part{w.part_top, w.part_sum, w.part_mix};
            segment<Cell>(query, begin, w, whole);
            for (int64_t s = begin + 1; s < end; ++s) {
                segment<Cell>(query, s, w, part);
                join(whole, part, rows, padded);
            }
            finish(in, query, layer, whole);
            return;
        }
        const auto partial = [&](int64_t s) {
            const int64_t at = tile.partial + (head * tile.segments + s) * rows;
            return State{in.partial_top + at, in.partial_sum + at, in.partial_mix + at * padded};
        };
        segment<Cell>(query, begin + work.segment, w, partial(work.segment));
        if (in.left[work.tile * kv_heads + head].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        for (int64_t s = 1; s < tile.segments; ++s) join(partial(0), partial(s), rows, padded);  // last of all: combines
        finish(in, query, layer, partial(0));
    });
}

}  // namespace

void plan_attention(Instance& in, const hb_step& step, int64_t begin, int64_t rows, bool sliding) {
    AttentionPlan& plan = in.plans[sliding];
    const int64_t most = in.group < TILE_QUERIES ? TILE_QUERIES / in.group : 1, span = SEGMENT_BLOCKS * KEY_BLOCK;
    plan.tile_count = plan.work_count = 0;
    for (int64_t row = begin; row < begin + rows;) {
        const int32_t sequence = step.row_sequence[row];
        int64_t end = step.query_start[sequence + 1];
        if (end > begin + rows) end = begin + rows;
        const int64_t count = end - row < most ? end - row : most;
        const int32_t oldest = step.positions[row], newest = step.positions[row + count - 1];
        const int32_t first = sliding && oldest >= in.model.window ? oldest - in.model.window + 1 : 0;
        plan.tiles[plan.tile_count++] = {sequence, static_cast<int32_t>(row - begin), static_cast<int32_t>(count), first,
                                         newest + 1, 0, 0};
        row += count;
    }
    // Segments become items of their own where there would be too few items for the threads. The results are the same.
    const bool few = plan.tile_count * in.model.kv_heads < 4 * int64_t{in.pool->threads()};
    int64_t partials = 0;
    for (int64_t t = 0; t < plan.tile_count; ++t) {
        Tile& tile = plan.tiles[t];
        const int64_t segments = parts_of(tile.last, span) - tile.first / span;
        const int64_t states = segments * tile.count * in.group * in.model.kv_heads;
        if (few && in.pool->threads() > 1 && segments > 1 && partials + states <= MOST_PARTIALS) {
            tile.segments = static_cast<int32_t>(segments);
            tile.partial = static_cast<int32_t>(partials);
            partials += states;
        }
        for (int64_t s = 0; s < (tile.segments ? tile.segments : 1); ++s)
            plan.work[plan.work_count++] = {static_cast<int32_t>(t), static_cast<int32_t>(s)};
    }
}

void run_attention(Instance& in, const hb_step& step, int64_t begin, const Layer& layer) {
    const int32_t* positions = step.positions + begin;
    if (in.model.kv_format == 0) run<CellF32>(in, step, positions, layer);
    else if (in.model.kv_format == 2) run<CellBf16>(in, step, positions, layer);
    else run<CellE4m3>(in, step, positions, layer);
}

}  // namespace halfbyte
