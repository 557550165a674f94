// Products for batches of 2 to 128 rows: shapes, arguments and shared memory of product.cu, and the instructions that only
// the batch kernels use. See product.cu for the whole picture.
#pragma once
#include "device/feeding.cuh"
#include "device/widen.cuh"

#ifdef HB_EMULATE
HB_DEV int shared_count(int* p) { emu::moved(); return (*p)++; }
HB_DEV u32 lds8(u32 p) { return *shared_at(p); }
HB_DEV u32x4 load128(const void* p) { u32x4 v; memcpy(&v, p, 16); return v; }
HB_DEV u32 load32(const void* p) { u32 v; memcpy(&v, p, 4); return v; }
HB_DEV u32 load_acquire(const u32* p) { return *p; }
HB_DEV void add_release(u32* p, u32 n) { dawdle(); emu::moved(); *p += n; }
HB_DEV void store128(void* p, u32 a, u32 b, u32 c, u32 d) { const u32 v[4] = {a, b, c, d}; memcpy(p, v, 16); }
HB_DEV void store64(void* p, u32 a, u32 b) { const u32 v[2] = {a, b}; memcpy(p, v, 8); }
HB_DEV void store32(void* p, u32 v) { memcpy(p, &v, 4); }
HB_DEV void mma_first(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  for (float& v : c) v = 0.f;
  mma(c, a0, a1, a2, a3, b0, b1);
}
#else
HB_DEV int shared_count(int* p) { return atomicAdd(p, 1); }
HB_DEV u32 lds8(u32 p) { u32 v; asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(p)); return v; }
// Past L1: what is read was written by the kernel before, which may still run when this one starts.
HB_DEV u32x4 load128(const void* p) {
  u32x4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
HB_DEV u32 load32(const void* p) { u32 v; asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
HB_DEV u32 load_acquire(const u32* p) { u32 v; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
HB_DEV void add_release(u32* p, u32 n) { dawdle(); asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(n) : "memory"); }
HB_DEV void store128(void* p, u32 a, u32 b, u32 c, u32 d) { asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory"); }
HB_DEV void store64(void* p, u32 a, u32 b) { asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(a), "r"(b) : "memory"); }
HB_DEV void store32(void* p, u32 v) { asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
HB_DEV void mma_first(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {  // c is not read: no zeros to make
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));
}
#endif

// A value of a vector that is bf16 or float, as the checkpoint has it.
HB_DEV float number(const void* p, int is_float, size_t i) {
  return is_float ? ((const float*)p)[i] : as_float((u32)((const u16*)p)[i] << 16);
}

// Four neighbours: floats that a kernel before this one wrote; or of a vector as the checkpoint has it, from a multiple of four on.
struct Four { float v[4]; };
HB_DEV Four four(const float* p) {
  const u32x4 w = load128(p);
  return {as_float(w.x), as_float(w.y), as_float(w.z), as_float(w.w)};
}
template <bool MAY_BE_NULL = false> HB_DEV Four four_at(const void* p, int is_float, size_t i) {  // null: zeros
  Four f = {};
  if (MAY_BE_NULL && !p) return f;
  if (is_float) {
    const u32x4 w = ldg128((const float*)p + i);
    f.v[0] = as_float(w.x); f.v[1] = as_float(w.y); f.v[2] = as_float(w.z); f.v[3] = as_float(w.w);
  } else {
    const u64 w = *(const u64*)((const u16*)p + i);
    f.v[0] = bf16_low((u32)w); f.v[1] = bf16_high((u32)w); f.v[2] = bf16_low((u32)(w >> 32)); f.v[3] = bf16_high((u32)(w >> 32));
  }
  return f;
}

// ---- one product (HB_K given) -------------------------------------------------------------------------------------------
#ifdef HB_K
constexpr int FORMAT = HB_FORMAT, K = HB_K;
constexpr int ROUTER = HB_ROUTER;                        // experts of the router that multiplies the result; 0: none
constexpr bool IDS = HB_IDS, SWIGLU = HB_SWIGLU;          // IDS: columns choose among a stack of matrices
constexpr bool BOTH = HB_STAGES == 2;                     // gate_up with swiglu, then down, in one launch
constexpr int CHUNK = CHUNK_BYTES[FORMAT];               // 16 rows x 64 k, scales included: "tile16"
constexpr int COLUMNS = 8;                                // of a group: those of mma.m16n8k16
constexpr int CHUNKS = K / 64, TILE_BYTES = CHUNKS * CHUNK;
// Warps that multiply: few for experts, because every warp of a tile costs 50 instructions, more for a product of few tiles, which
// waits for its first. A scheduler has every fourth warp, and the busiest one sets the pace: at 2880, eight with six chunks of
// a tile each (or twelve with four), the last three with one less, and those three stand where the summing warps do.
constexpr int MOST = CHUNKS > 48 ? 16 : IDS ? 8 : 12, WORKERS = CHUNKS < MOST ? CHUNKS : MOST;
constexpr int EACH = (CHUNKS + WORKERS - 1) / WORKERS, SHORT = WORKERS * EACH - CHUNKS;  // the last SHORT have one less
HB_CONST_FN int first_chunk(int worker) { return worker * EACH - (worker > WORKERS - SHORT ? worker - (WORKERS - SHORT) : 0); }
constexpr bool PAIRED = IDS && FORMAT == MXFP4;           // groups of up to four columns: two groups of 32 k side by side
#ifndef HB_SUMMERS
#define HB_SUMMERS 3
#endif
constexpr int SUMMERS = HB_SUMMERS;                       // warps that sum and store; with one that feeds, 20 at most
constexpr int THREADS = (WORKERS + 1 + SUMMERS) * 32;
constexpr int PARTS = (WORKERS + 4) / 5, TEAM = (WORKERS + PARTS - 1) / PARTS;  // slots of a tile, warps that share one
constexpr int SLOT_BYTES = TEAM * EACH * CHUNK;
HB_CONST_FN int first_of(int part) { return first_chunk(part * TEAM < WORKERS ? part * TEAM : WORKERS); }
HB_CONST_FN int part_bytes(int part) { return (first_of(part + 1) - first_of(part)) * CHUNK; }
#ifndef HB_RING
#define HB_RING 190000
#endif
// A whole number of tiles, so that a slot always serves the same warps, and none can be a round ahead of the ring.
constexpr int SLOTS = HB_RING / SLOT_BYTES / PARTS * PARTS;
constexpr int QUEUE = 4, COLUMNS_MAX = 512, EXPERTS_MAX = 512, PIECE = 4;
constexpr int REGISTERS = MOST == 8 ? 144 : FORMAT != MXFP4 || ROUTER || IDS ? 96 : 88;
static_assert(K % 64 == 0 && WORKERS <= 16 && SLOTS >= PARTS && SLOT_BYTES % 16 == 0, "shape");

struct Stage {
  const u8* weights;        // tile16, [experts][tiles]
  const void* bias;         // [experts][16 tiles], float or bf16; null: none
  const u16* x;             // bf16 [columns / share][K]
  void* out;                // float [columns][16 tiles]; with swiglu: bf16 [columns][8 tiles]
  int tiles, share, bias_float, unused;
};
constexpr bool RELEASES = BOTH || !SWIGLU;  // down by itself reads what the kernel before gate_up wrote, so gate_up waits first
HB_CONST_FN bool has_swiglu(int stage) { return SWIGLU && stage == 0; }

struct Product {            // mirrored in products.py
  Stage stage[2];           // the second only if BOTH: its x is what the first has stored
  const float* residual;    // float [columns][16 tiles], may be out; null: none
  const int* ids;           // the expert of each column; IDS only
  u32* tickets;             // one for each stage, zero before every launch; null: no piece is left to whoever comes first
  u32* done;                // [groups] tiles of the first stage that are stored, zero before every launch; BOTH only
  const u16* router;        // ROUTER only: bf16, as a warp reads it (see `tile_router` in products.py)
  const void* norm;         // the weight of the norm in front of it, float or bf16
  float* logits;            // [tiles][columns][ROUTER]: its products with norm weight times out, a part for each tile
  u64* trace;               // [grid][4] nanoseconds: start, x wanted, last tile asked for, end; null: none
  u32* failure;             // host memory: where a wait was given up, and by whom; BOTH only
  int columns, experts;
  int early;                // ids were written before the kernel in front of this one
  int norm_float;
  float limit, alpha;
};

HB_MIRRORED(Stage, weights, bias, x, out, tiles, share, bias_float, unused)
HB_MIRRORED(Product, stage, residual, ids, tickets, done, router, norm, logits, trace, failure, columns, experts, early, norm_float, limit, alpha)

struct Item { int group, tile, count, stage; };  // some tiles of one group; count 0: the end

struct Shared {
  u8 ring[SLOTS][SLOT_BYTES];
  float red[SUMMERS][WORKERS][COLUMNS * 16];  // sums of the warps, see red_at
  u64 full[SLOTS], empty[SLOTS];
  u64 red_full[SUMMERS], red_empty[SUMMERS];
  u64 item_full[QUEUE], item_empty[QUEUE];
  Item item[QUEUE];
  int groups;
  int count[EXPERTS_MAX], start[EXPERTS_MAX];
  u32 group[COLUMNS_MAX];   // expert << 16 | first of its columns in `list` << 4 | how many
  u16 list[COLUMNS_MAX];    // columns, by expert
  u16 id[COLUMNS_MAX];      // experts, by column
  u32 crowded;              // bit i: of the experts that lane i counts, one has more columns than a group
};
#define HB_AT(member) ((u32)(size_t)&((Shared*)0)->member)  // NVRTC has no offsetof; shared memory begins with it

// Where a warp keeps its sum of (row, column): [column'][row], quads of rows permuted, so that neither writing (lane (g, t)
// has rows g and g + 8 of columns 2 t and 2 t + 1) nor reading four rows of a column meets a bank twice.
HB_CONST_FN int column_of(int place) { return (place & 3) * 2 + (place >> 2); }
HB_CONST_FN int red_at(int place, int row) { return place * 16 + ((row >> 2) ^ (place & 2)) * 4 + (row & 3); }
#endif
