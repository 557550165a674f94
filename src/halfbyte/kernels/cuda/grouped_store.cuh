// What becomes of an item's sums: bias and swiglu into the packed input of the next product, or bias and residual into rows.
#pragma once
#include "grouped.cuh"

struct Consumer {
  const Product& p;
  Shared& sh;
  int group, warp, lane;  // warpgroup, warp in it, lane
  Place at;
  int turn;

  HB_DEV_MEMBER void release(int slot) const {  // to everyone who fills it
    if constexpr (PAIR == 1) { if (lane == 0) bar_arrive(&sh.empty[slot], 1); }
    else if (lane < PAIR) bar_arrive_in(lane, &sh.empty[slot]);
  }
};

// The biases a lane needs for MT tiles of 16 rows: of its rows g and g + 8; SWIGLU: of the gate and up rows around them.
template <int MT> struct Bias {
  float v[SWIGLU ? 4 * MT : 2 * MT];
  HB_DEV_MEMBER void load(const Product& p, const Item& it, int first, int lane);
};

HB_DEV float bias_at(const Product& p, size_t i) {
  if (p.bias_float) return ((const float*)p.bias)[i];
  return as_float((u32)((const u16*)p.bias)[i] << 16);
}

template <int MT> HB_DEV_MEMBER void Bias<MT>::load(const Product& p, const Item& it, int first, int lane) {
  const int g = lane >> 2;
  const size_t row = (size_t)it.expert * p.m_tiles * 64 + first * 16;
  HB_UNROLL
  for (int i = 0; i < (SWIGLU ? 4 * MT : 2 * MT); i++) {
    const int at = SWIGLU ? (i >> 1) * 8 + (g & ~1) + (i & 1) : i * 8 + g;
    v[i] = p.bias ? bias_at(p, row + at) : 0.f;
  }
}

// ---- what becomes of 64 rows x N columns in a warpgroup's registers -------------------------------------------------

HB_DEV float swiglu(const Product& p, float gate, float up) {
  gate = fminf(gate, p.limit);
  up = fminf(fmaxf(up, -p.limit), p.limit);
  return (up + 1.f) * gate * reciprocal(1.f + power_of_two(gate * (p.alpha * -1.4426950408889634f)));
}

// A warp has MT consecutive tiles of 16 rows, tile `first` and on. Rows alternate gate, up: partners are four lanes apart.
// Even lanes take the even column of a pair, odd lanes the odd one. Then four lanes hold the eight hidden values of a tile
// for four columns each; a transpose among them gives every lane the eight values of one column. They are words 4 t .. of
// a group of 32 values, and tile16 wants word (t, i) of a group at place (i, t): MT words to be stored side by side.
template <int N, int MT> HB_DEV void store_hidden(const Consumer& c, const Item& it, int first, const float (&acc)[MT][N / 2], const Bias<MT>& bias) {
  const Product& p = c.p;
  const int g = c.lane >> 2, t = c.lane & 3, odd = g & 1, q = g >> 1, high = q >> 1, low = q & 1;
  HB_UNROLL
  for (int four = 0; four < (N + 31) / 32; four++) {
    u32 words[4][MT];
    HB_UNROLL
    for (int mt = 0; mt < MT; mt++) {
      u32 v[4] = {0, 0, 0, 0};
      HB_UNROLL
      for (int k = 0; k < 4; k++) {
        const int j = four * 4 + k;
        if (j >= N / 8) continue;
        float y[2];
        HB_UNROLL
        for (int h = 0; h < 2; h++) {
          const float a = acc[mt][4 * j + 2 * h], b = acc[mt][4 * j + 2 * h + 1];
          const float own = odd ? b : a, got = shfl_xor(odd ? a : b, 4);
          y[h] = swiglu(p, (odd ? got : own) + bias.v[4 * mt + 2 * h], (odd ? own : got) + bias.v[4 * mt + 2 * h + 1]);
        }
        v[k] = bf16_pair(y[0], y[1]);
      }
      const u32 k0 = high ? v[2] : v[0], k1 = high ? v[3] : v[1];
      const u32 r0 = shfl_xor(high ? v[0] : v[2], 16), r1 = shfl_xor(high ? v[1] : v[3], 16);
      const u32 own = low ? k1 : k0, far = low ? r1 : r0;
      const u32 got = shfl_xor(low ? k0 : k1, 8), got_far = shfl_xor(low ? r0 : r1, 8);
      const u32 x0 = low ? got : own, x1 = low ? own : got, y0 = low ? got_far : far, y1 = low ? far : got_far;
      const u32 w0 = high ? y0 : x0, w1 = high ? y1 : x1, w2 = high ? x0 : y0, w3 = high ? x1 : y1;
      words[0][mt] = permute(w0, w1, 0x5410);
      words[1][mt] = permute(w2, w3, 0x5410);
      words[2][mt] = permute(w0, w1, 0x7632);
      words[3][mt] = permute(w2, w3, 0x7632);
    }
    const int column = (four * 4 + q) * 8 + 2 * t + odd;
    if (column < N && column < it.valid) {
      const int slot = it.slot + column;
      u16* row = p.packed + ((size_t)(first >> 3) * p.packed_slots + slot) * 64;
      HB_UNROLL
      for (int i = 0; i < 4; i++) store_words<MT>(row + ((((first & 4) + i) ^ (slot & 7)) * 8 + (first & 3) * 2), words[i]);
    }
  }
}

template <int N, int MT> HB_DEV void store_rows(const Consumer& c, const Item& it, int first, const float (&acc)[MT][N / 2], const Bias<MT>& bias) {
  const Product& p = c.p;
  const int g = c.lane >> 2, t = c.lane & 3, row = first * 16 + g;
  const size_t base = (size_t)(it.slot + 2 * t) * p.out_stride + row;
  float* out = p.out + base;
  const float* residual = p.residual ? p.residual + base : nullptr;
  HB_UNROLL
  for (int j = 0; j < N / 8; j++)
    HB_UNROLL
    for (int e = 0; e < 2; e++) {
      if (8 * j + 2 * t + e >= it.valid) continue;
      const size_t at = (size_t)(8 * j + e) * p.out_stride;
      HB_UNROLL
      for (int i = 0; i < 2 * MT; i++) {
        float v = acc[i / 2][4 * j + 2 * (i & 1) + e] + bias.v[i];
        if (residual) v += residual[at + 8 * i];
        out[at + 8 * i] = v;
      }
    }
}

template <int N, int MT> HB_DEV void store(const Consumer& c, const Item& it, int first, const float (&acc)[MT][N / 2], const Bias<MT>& bias) {
  if constexpr (SWIGLU) store_hidden<N, MT>(c, it, first, acc, bias);
  else store_rows<N, MT>(c, it, first, acc, bias);
}
