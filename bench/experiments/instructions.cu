// HB_GROUPS times what HB_GROUP says, by every warp of a block, on registers alone: how long does it take? (bench/experiments/instructions.py)
typedef unsigned u32;
struct Arguments { u32* memory; long long* clocks; int times; };

// Asked for as they are, in this order, and each on registers of its own for as long as possible.
#define HMMA(c) asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
  : "+f"(sum[(c) % 4][0]), "+f"(sum[(c) % 4][1]), "+f"(sum[(c) % 4][2]), "+f"(sum[(c) % 4][3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
// weights of 16 x 32 (bytes), and of 16 x 32 out of 16 x 64 (two of every four, named by s)
#define IMMA(c) asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
  : "+r"(whole[(c) % 4][0]), "+r"(whole[(c) % 4][1]), "+r"(whole[(c) % 4][2]), "+r"(whole[(c) % 4][3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#define SPARSE_IMMA(c) asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0x0;" \
  : "+r"(whole[(c) % 4][0]), "+r"(whole[(c) % 4][1]), "+r"(whole[(c) % 4][2]), "+r"(whole[(c) % 4][3]) \
  : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a[0]), "r"(a[1]), "r"(s));
#define LOP3(i) asm volatile("lop3.b32 %0, %0, %1, %2, 0x6a;" : "+r"(r[(i) % 16]) : "r"(a[(i) % 4]), "r"(b[0]));
#define SHF(i) asm volatile("shf.r.wrap.b32 %0, %0, %0, 6;" : "+r"(r[(i) % 16]));
#define PRMT(i) asm volatile("prmt.b32 %0, %0, %1, 0x4321;" : "+r"(r[(i) % 16]) : "r"(b[0]));
#define IMAD(i) asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(r[(i) % 16]) : "r"(b[0]), "r"(b[1]));
#define FFMA(i) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(f[(i) % 16]) : "f"(f[16]), "f"(f[17]));

extern "C" __global__ void __launch_bounds__(512, 1) instructions(const __grid_constant__ Arguments p) {
  u32 a[4], b[2], r[16];
  int whole[4][4] = {};
  float f[18], sum[4][4] = {};
  for (int i = 0; i < 4; i++) a[i] = p.memory[i * 32 + threadIdx.x % 32];
  for (int i = 0; i < 16; i++) r[i] = p.memory[(i + 4) * 32 + threadIdx.x % 32];
  for (int i = 0; i < 18; i++) f[i] = __uint_as_float(p.memory[800 + i]);
  b[0] = p.memory[700];
  b[1] = p.memory[701];
  const u32 s = (p.memory[702] & 0x55555555u) | 0x88888888u;  // each pair: one of places 0 and 1, one of 2 and 3
  __syncthreads();
  const long long begin = clock64();
#pragma unroll 1
  for (int n = 0; n < p.times; n++) {
#pragma unroll
    for (int g = 0; g < HB_GROUPS; g++) { HB_GROUP }
  }
  const long long end = clock64();
  u32 all = 0;
  for (int i = 0; i < 16; i++) all ^= r[i] ^ __float_as_uint(f[i]) ^ __float_as_uint(sum[i / 4][i % 4]) ^ whole[i / 4][i % 4] ^ s;
  p.memory[1024 + blockIdx.x * blockDim.x + threadIdx.x] = all;
  if (threadIdx.x == 0) p.clocks[blockIdx.x] = end - begin;
}
