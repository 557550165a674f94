// What happens to rows of activations between products: quantisation, sums, swiglu, exponentials. Every sum has partial
// sums of its own and a fixed tree, so that a result depends on the row alone.
#include "products.h"

#include "exponential.h"
#include "vector.h"

namespace halfbyte {

namespace {

constexpr float NOT_A_NUMBER = __builtin_nanf("");

// The first n of 16 floats, zeros behind them.
HB_INLINE Floats load_some(const float* p, int64_t n) {
    if (n >= 16) return load_floats(p);
    alignas(64) float buffer[16] = {};
    std::memcpy(buffer, p, static_cast<size_t>(n) * 4);
    return load_floats(buffer);
}
HB_INLINE void store_some(float* p, Floats a, int64_t n) {
    if (n >= 16) return store(p, a);
    alignas(64) float buffer[16];
    store(buffer, a);
    std::memcpy(p, buffer, static_cast<size_t>(n) * 4);
}

// Bytes 0 1 2 3 4 5 6 7 become 0 2 4 6 1 3 5 7.
HB_INLINE uint64_t evens_odds(uint64_t w) {
    uint64_t middle = ((w >> 8) ^ (w >> 16)) & 0x000000ff000000ffull;  // bytes 1, 2 and 5, 6 change places
    w ^= (middle << 8) ^ (middle << 16);
    uint64_t outer = ((w >> 16) ^ (w >> 32)) & 0x000000000000ffffull;       // then the pairs 1 and 2
    return w ^ (outer << 16) ^ (outer << 32);
}

// The lanes of 64 partial sums: (a0 + a1) + (a2 + a3), then the tree of 16.
HB_INLINE float total(const Floats* a) { return sum(add(add(a[0], a[1]), add(a[2], a[3]))); }

}  // namespace

void quantize_row(const float* x, int64_t k, Format weights, CodedGroup* out) {
    const int offset = weights == Format::mxfp4 ? MXFP4_OFFSET : Q8_OFFSET;
    int64_t groups = (k + GROUP - 1) / GROUP;
    for (int64_t g = 0; g < groups; g++, out++) {
        const float* p = x + g * GROUP;
        int64_t rest = k - g * GROUP;
        Floats a = load_some(p, rest), b = rest > 16 ? load_some(p + 16, rest - 16) : splat(0.0f);
        float amax = largest(larger_magnitude(absolute(a), absolute(b)));
        float s = amax / 127.0f;
        bool finite = amax <= 3.40282347e38f;
        if (!(s > 0.0f) || !finite) {
            std::memset(out, 0, sizeof(*out));
            if (!finite) out->scale = NOT_A_NUMBER;
            continue;
        }
        Floats scale = splat(s), most = splat(127.0f), least = splat(-127.0f);
        // A subnormal scale is short of bits, so that quotients may lie past 127.
        Ints ca = to_ints(nearest(at_least(at_most(div(a, scale), most), least)));
        Ints cb = to_ints(nearest(at_least(at_most(div(b, scale), most), least)));
        out->scale = s;
        out->start = offset ? -offset * (sum(ca) + sum(cb)) : 0;
        store_bytes(out->codes, ca);
        store_bytes(out->codes + 16, cb);
        if (weights == Format::mxfp4)
            for (int e = 0; e < GROUP; e += 8) {
                uint64_t w;  // as eight bytes, the least first
                std::memcpy(&w, out->codes + e, 8);
                w = evens_odds(w);
                std::memcpy(out->codes + e, &w, 8);
            }
    }
}

float sum_of_squares(const float* x, int64_t n) { return dot(x, x, n); }

float dot(const float* a, const float* b, int64_t n) {
    Floats acc[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    int64_t i = 0;
    for (; i + 64 <= n; i += 64)
        unroll<4>([&](auto j) HB_LAMBDA { acc[j] = fma(load_floats(a + i + 16 * j), load_floats(b + i + 16 * j), acc[j]); });
    unroll<4>([&](auto j) HB_LAMBDA {
        if (i < n) acc[j] = fma(load_some(a + i, n - i), load_some(b + i, n - i), acc[j]);
        i += 16;
    });
    return total(acc);
}

void scale_multiply(const float* x, float s, const float* w, int64_t n, float* out) {
    Floats scale = splat(s);
    for (int64_t i = 0; i < n; i += 16)
        store_some(out + i, mul(mul(load_some(x + i, n - i), scale), load_some(w + i, n - i)), n - i);
}

void swiglu(const float* gate_up, int64_t pairs, float limit, float alpha, float* out) {
    Floats most = splat(limit), least = splat(-limit), one = splat(1.0f), minus_alpha = splat(-alpha);
    for (int64_t i = 0; i < pairs; i += 16) {
        Floats gate, up;
        if (pairs - i >= 16) {
            load_pairs(gate_up + 2 * i, gate, up);
        } else {
            alignas(64) float buffer[32] = {};
            std::memcpy(buffer, gate_up + 2 * i, static_cast<size_t>(pairs - i) * 8);
            load_pairs(buffer, gate, up);
        }
        gate = at_most(gate, most);
        up = at_least(at_most(up, most), least);
        Floats sigmoid = div(one, add(one, exponential(mul(minus_alpha, gate))));
        store_some(out + i, mul(mul(add(up, one), gate), sigmoid), pairs - i);
    }
}

void add_scaled(float* acc, float s, const float* x, int64_t n) {
    Floats scale = splat(s);
    for (int64_t i = 0; i < n; i += 16)
        store_some(acc + i, fma(scale, load_some(x + i, n - i), load_some(acc + i, n - i)), n - i);
}

void exp_row(float* x, int64_t n, float maximum) {
    Floats m = splat(maximum);
    for (int64_t i = 0; i < n; i += 16) store_some(x + i, exponential(sub(load_some(x + i, n - i), m)), n - i);
}

}  // namespace halfbyte
