// A group of 32 values as two digits, eight lanes to a group, as the decode step makes them: what test_digits.py asks.
#include "device/digits.cuh"

struct Probe {
  const float* x;  // [4][32]
  u32* digits;     // [4][2][8]: words of high and of low digits
  float* scales;   // [4]
};

HB_DEV void probe(const Probe& p) {
  const int lane = hb_thread();
  float v[4];
  u32 largest = 0;
  for (int i = 0; i < 4; i++) {
    v[i] = p.x[lane * 4 + i];
    const u32 size = as_bits(v[i]) & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  for (int m = 1; m < 8; m *= 2) {
    const u32 other = shfl_xor(largest, m);
    largest = other > largest ? other : largest;
  }
  const Digits d = digits_of(v, largest >> 23);
  p.digits[lane / 8 * 16 + lane % 8] = d.high;
  p.digits[lane / 8 * 16 + 8 + lane % 8] = d.low;
  if (lane % 8 == 0) p.scales[lane / 8] = digit_scale(largest >> 23, 0);
}

extern "C" void hb_run(const char*, const Probe* p, int grid, u32 seed) {
  emu::run(grid, 32, 64, seed, [p] { probe(*p); });
}
