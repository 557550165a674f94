// Shapes, arguments and shared memory of the decode step. Every size is a compile-time constant given by the binding
// (step.py); what cannot be served is refused there, and asserted here.
#pragma once
#include "device/widen.cuh"

// ---- the model ---------------------------------------------------------------------------------------------------
constexpr int HIDDEN = HB_HIDDEN, INTER = HB_INTER, LAYERS = HB_LAYERS, EXPERTS = HB_EXPERTS, TOP_K = 4;
constexpr int HEADS = HB_HEADS, KV_HEADS = HB_KV_HEADS, HEAD_DIM = 64, GROUP = HEADS / KV_HEADS, VOCAB = HB_VOCAB;
constexpr int Q_DIM = HEADS * HEAD_DIM, KV_DIM = KV_HEADS * HEAD_DIM, QKV = Q_DIM + 2 * KV_DIM;
constexpr int WINDOW = HB_WINDOW, PAGE = 64;
constexpr bool KV_FP8 = HB_KV_FP8;  // the cache in E4M3 without scales, or in bf16
constexpr int KV_BYTES = KV_FP8 ? 1 : 2, PAGE_BYTES = PAGE * HEAD_DIM * KV_BYTES;  // of one head's keys or values
constexpr int ROWS = HB_ROWS;  // batch rows this kernel was built for: 1, 2, 4 or 8
static_assert(GROUP == 8 && HEADS % KV_HEADS == 0, "one mma column per query head of a group");
static_assert(HIDDEN % 64 == 0 && INTER % 64 == 0 && QKV % 16 == 0 && VOCAB % 16 == 0, "tiles are 16 rows by 64 k");
static_assert(EXPERTS % 32 == 0 && EXPERTS <= 256, "a warp holds all router logits");
static_assert(ROWS == 1 || ROWS == 2 || ROWS == 4 || ROWS == 8, "rows");

// ---- builds on trial (bench/experiments/one_stream.py), 0 or absent in every plan ------------------------------------
#ifndef HB_BY_PRODUCT  // register 2 of a word by a product instead of a shift: Chunk<MXFP4, true>
#define HB_BY_PRODUCT 0
#endif
#ifndef HB_O_CHAINS  // sums that the products of a piece of o take in turn
#define HB_O_CHAINS 1
#endif
#ifndef HB_PART_PAGES  // the fewest pages of a part, where a sequence has fewer than SPLITS of them
#define HB_PART_PAGES 2
#endif
#ifndef HB_ROUTER_JOINED  // a block adds its router sums up before it sends them, instead of one set of warps at a time
#define HB_ROUTER_JOINED 0
#endif
#ifndef HB_ONE_POLLER  // one warp looks at some words of a vector until they are there, the others wait at the block's barrier
#define HB_ONE_POLLER 0
#endif
#ifndef HB_TILE_BODY  // 1: experts by products of a warpgroup with x in two E4M3 digits (digits.cuh); weights in tile16_e5m2
#define HB_TILE_BODY 0
#endif

// ---- weight formats ----------------------------------------------------------------------------------------------
constexpr int SLOT_BYTES = HB_SLOT_BYTES;           // of the ring (step.py)

// ---- the block ---------------------------------------------------------------------------------------------------
constexpr int WORKERS = HB_WORKERS;  // warps that multiply; one more feeds them
constexpr int WORK_THREADS = WORKERS * 32, THREADS = WORK_THREADS + 32;
constexpr int ARRIVALS = 16;  // that free a slot: one of each warp that reads from it, the rest of the first one
constexpr int SLOTS = HB_SLOTS;
constexpr int AHEAD = HB_AHEAD, AHEAD_REST = HB_AHEAD_REST;  // slots that may be asked for and not yet used: experts, all else
static_assert(AHEAD >= 2 && AHEAD <= SLOTS && AHEAD_REST >= 2 && AHEAD_REST <= SLOTS, "windows of the ring");
constexpr bool PAGE_WHOLE = SLOT_BYTES >= 2 * PAGE_BYTES;  // keys and values of a page in one slot, or in two
constexpr int PAGE_SLOTS = PAGE_WHOLE ? 1 : 2;
constexpr int LANE_ROWS = ROWS < 4 ? ROWS : 4;  // batch rows in one set of 8 mma columns (a high and a low column each)
constexpr int SETS = ROWS / LANE_ROWS;
constexpr int GROUPS_AT_ONCE = 4 / LANE_ROWS;   // k groups that share one accumulator, in columns of their own
constexpr int SPLITS = HB_SPLITS;                // most parts a sequence's keys are cut into
constexpr int ROUTER_COPIES = 4;                // of the logit accumulators, against contention
constexpr bool ACQUIRE = HB_ACQUIRE;            // one thread of a block acquires in every phase: see mailbox.cuh
constexpr bool KEEP_SHARED = HB_KEEP_SHARED;    // what several blocks copy stays in L2: a window's pages, the router's columns
constexpr int ROUTER_SETS = 3, ROUTER_WARPS = WORKERS / ROUTER_SETS;  // of warps, that take the tiles in turn
constexpr int ROUTER_EACH = (EXPERTS / 16 + ROUTER_WARPS - 1) / ROUTER_WARPS;  // times 16 experts to a warp of a set
constexpr int ROUTER_BYTES = EXPERTS * 32, ROUTER_FIT = SLOT_BYTES / ROUTER_BYTES;  // of 16 columns; these in a slot
static_assert(ROUTER_WARPS >= 1 && ROUTER_FIT >= 1, "a slot for 16 columns of all experts");
// Sums of so many tiles (of one row) are kept before they are added up. Warps that meet less often drift apart, and hold slots
// that the copies then lack.
constexpr int RED_TILES = ROWS == 1 ? 3 : WORKERS < 8 ? 2 * WORKERS : 16;  // a thread of the working warps for each sum
HB_CONST_FN int larger(int a, int b) { return a > b ? a : b; }

// How the chunks of a tile (16 rows, all of K) are shared out to warps and slots. Quantised tiles: a warp takes EACH
// neighbouring chunks, all in one slot, and waits once. Dense ones are too large for that: pieces of up to 15 chunks,
// one chunk of each to a warp.
//
// A barrier's parity tells one round of the ring from the next, not from the one after. A warp that waits for every slot
// in turn, and without which no slot is free, can be neither a round ahead nor a round behind. One that knows its own
// slots only (OWN) could be ahead, so there the warps meet (FLUSH) before the ring has gone round.
template <int FORMAT, int K> struct Tile {
  static constexpr int CHUNKS = K / 64, CHUNK = CHUNK_BYTES[FORMAT], BYTES = CHUNKS * CHUNK;
  static constexpr int FIT = SLOT_BYTES / CHUNK;  // chunks in a slot
  static constexpr int SHARE = (CHUNKS + WORKERS - 1) / WORKERS, SHARES = (CHUNKS + SHARE - 1) / SHARE;  // and warps with one
  static constexpr int SLOTS_OWN = SHARE <= FIT ? (SHARES + larger(FIT / SHARE, 1) - 1) / larger(FIT / SHARE, 1) : SLOTS + 1;
  static constexpr bool OWN = FORMAT != BF16 && SLOTS_OWN <= SLOTS;
  static constexpr int EACH = OWN ? SHARE : 1, PIECES = OWN ? 1 : SHARE, MINE = PIECES * EACH;
  static constexpr int WIDTH = (CHUNKS + PIECES - 1) / PIECES, PER_SLOT = OWN ? (SHARES + SLOTS_OWN - 1) / SLOTS_OWN * SHARE : FIT;
  static HB_CONST_FN int chunks_in(int piece) { return piece < PIECES - 1 ? WIDTH : CHUNKS - WIDTH * (PIECES - 1); }
  static HB_CONST_FN int slots_in(int piece) { return (chunks_in(piece) + PER_SLOT - 1) / PER_SLOT; }
  static HB_CONST_FN int slots() {
    int n = 0;
    for (int i = 0; i < PIECES; i++) n += slots_in(i);
    return n;
  }
  static constexpr int MOST = RED_TILES / ROWS;
  static constexpr int FLUSH = OWN && slots() > 1 && SLOTS / slots() < MOST ? SLOTS / slots() : MOST;  // tiles
};

#if HB_TILE_BODY
// Four tiles of experts are multiplied together, by all warps. A product of a warpgroup has 64 rows: warp i of a third has tile i.
// Warpgroups share K, a third each: an atom is two chunks for each (in the last atom maybe one), and a slot holds an atom or several of all
// four tiles. So every warp reads from every slot, in turn, and frees it: see Tile. Memory has what a slot has, in the same order,
// so that a quad is one copy a slot: [quad of a matrix][atom][tile of the quad][chunk of the atom] (tile16_e5m2, formats/tile16.py).
constexpr int THIRDS = 3, QUAD = 4, DIGIT_COLUMNS = 8 * SETS;
static_assert(WORKERS == THIRDS * QUAD, "a warp for each of four tiles in three warpgroups");
template <int K> struct Quad {
  static constexpr int CHUNKS = K / 64, CHUNK = CHUNK_BYTES[MXFP4], BYTES = CHUNKS * CHUNK;  // of a tile
  static constexpr int WIDE = 2 * THIRDS, ATOMS = (CHUNKS + WIDE - 1) / WIDE;                 // chunks of a tile in an atom
  static constexpr int REST = CHUNKS - (ATOMS - 1) * WIDE, REST_EACH = (REST + THIRDS - 1) / THIRDS;  // in the last one; of a third
  static constexpr int IN_SLOT = SLOT_BYTES / (QUAD * WIDE * CHUNK), SLOTS_EACH = (ATOMS + IN_SLOT - 1) / IN_SLOT;
  static constexpr int ATOM_BYTES = QUAD * WIDE * CHUNK, SLOT_STEP = IN_SLOT * ATOM_BYTES;    // of a full atom, of a full slot
  static_assert(IN_SLOT >= 1, "a slot for an atom of four tiles");
  static HB_CONST_FN int each(int atom) { return atom < ATOMS - 1 ? 2 : REST_EACH; }        // chunks of a third
  static HB_CONST_FN int tile_bytes(int atom) { return (atom < ATOMS - 1 ? WIDE : REST) * CHUNK; }
  static HB_CONST_FN int bytes_in(int slot) { return (slot < SLOTS_EACH - 1 ? IN_SLOT * WIDE : CHUNKS - slot * IN_SLOT * WIDE) * CHUNK; }  // of a tile
};
constexpr int MOST_ATOMS = larger(Quad<HIDDEN>::ATOMS, Quad<INTER>::ATOMS);
constexpr int SUM_TILES = ROWS <= 2 ? 12 : 4;  // whose sums are kept before they are added up
struct DigitBuffers {  // 1024 bytes: eight columns of 128 k, permuted as the tensor core wants them
  alignas(1024) u8 digits[MOST_ATOMS][THIRDS][SETS][1024];
  float scales[MOST_ATOMS][THIRDS][4][ROWS];
  float sums[2][SUM_TILES][THIRDS][ROWS * 16];
};
#endif

// o is shared out by kv heads: a piece is what one tile has of a head's eight query heads, and one warp's alone. Warps know
// their own slots only, so they meet after MOST tiles.
template <int FORMAT> struct Piece {
  static constexpr int CHUNKS = GROUP * HEAD_DIM / 64, CHUNK = CHUNK_BYTES[FORMAT], BYTES = CHUNKS * CHUNK;
  static constexpr int FIT = SLOT_BYTES / BYTES;                     // pieces in a slot, or
  static constexpr int EACH = FIT ? CHUNKS : SLOT_BYTES / CHUNK >= 4 ? 4 : 2;  // chunks in one of
  static constexpr int SLOTS_EACH = CHUNKS / EACH;                   // several slots
  static constexpr int ROOM = FIT ? SLOTS * FIT : SLOTS / SLOTS_EACH, MOST = ROOM < WORKERS ? ROOM : WORKERS;
  static_assert(FIT <= ARRIVALS && CHUNKS == 8 && EACH * CHUNK <= SLOT_BYTES && MOST >= 1, "pieces");
  static HB_CONST_FN int slots(int pieces) { return FIT ? (pieces + (FIT ? FIT : 1) - 1) / (FIT ? FIT : 1) : pieces * SLOTS_EACH; }
};

// ---- arguments (mirrored in step.py, which a test compares) -----------------------------------------------------------------------------
struct Layer {
  const u8 *qkv, *o, *gate_up, *down;                     // tile16; experts as HB_TILE_BODY has them
  const u16 *qkv_bias, *o_bias, *gate_up_bias, *down_bias;  // bf16
  const u16 *attn_norm, *mlp_norm;                        // bf16
  const u16 *router;                                      // bf16 [HIDDEN / 16][EXPERTS][16]
  const u16 *router_bias, *sinks;                         // bf16
#ifdef HB_LENT
  u8* pages;  // [pages][2][KV_HEADS][PAGE][HEAD_DIM]: this layer's alone, as another engine holds them
#endif
};

struct Boxes {      // words that carry their own validity, see mailbox.cuh
  u64 *x;           // [2][ROWS][HIDDEN]             residual, summed in fixed point; layers take the halves in turn
  u64 *mid;         // [2][ROWS][HIDDEN]             the same before the experts
  u64 *logits;      // [2][ROWS][COPIES][EXPERTS]    router, summed in fixed point
  u64 *qkv;         // [ROWS][QKV]                   float + tag
  u64 *part;        // [ROWS][HEADS][SPLITS][34]     64 values paired; maximum and sum, float + tag
  u64 *h;           // [ROWS][TOP_K][INTER / 2]      paired
  u64 *best;        // [ROWS]                        argmax key
  u64 *broken;      // [ROWS]                        where a row first met a value that is no number, or 0
};

struct Step {
  const Layer* layers;
  const u16 *embed, *final_norm;
  const u8* head;
  int *tokens, *positions;             // [ROWS]
  const int *row_seq;                  // [ROWS]
  const int *sliding_table, *full_table;  // [seqs][max_blocks]
  u8* pool;                            // [pages][layers of a kind][2][KV_HEADS][PAGE][HEAD_DIM]
  const float* rope;                   // [positions][64]: 32 cosines, 32 sines
  float* logits_out;                   // [ROWS][VOCAB]; lent: the residual behind the last layer, [ROWS][HIDDEN]
  int* next_tokens;                    // [ROWS]
  Boxes box;
  u32* control;                        // epoch, arrivals
  u32* failure;                        // host memory: where a wait was given up, and by whom
  u64* trace;                          // [grid][LAYERS + 1][32] clocks, or null (HB_TRACE)
  float* taps;                         // [bits of tap_layers][rows][HIDDEN] (HB_TAPS)
  u64 tap_layers;                      // bit b: the residual that enters layer b; of LAYERS: that leaves the last one
  float norm_eps, swiglu_limit, swiglu_alpha;
  float unit, per_unit;                // of the residual: 1, or a larger power of two if embeddings are unusually large
  int rows;                            // rows in use, at most ROWS
  int max_blocks, page_layers;
  int advance;                         // 1: feed the argmax back and move one position on
};

#ifdef HB_LENT
HB_MIRRORED(Layer, qkv, o, gate_up, down, qkv_bias, o_bias, gate_up_bias, down_bias, attn_norm, mlp_norm, router, router_bias, sinks, pages)
#else
HB_MIRRORED(Layer, qkv, o, gate_up, down, qkv_bias, o_bias, gate_up_bias, down_bias, attn_norm, mlp_norm, router, router_bias, sinks)
#endif
HB_MIRRORED(Step, layers, embed, final_norm, head, tokens, positions, row_seq, sliding_table, full_table, pool, rope, logits_out,
            next_tokens, box.x, box.mid, box.logits, box.qkv, box.part, box.h, box.best, box.broken, control, failure, trace, taps, tap_layers, norm_eps,
            swiglu_limit, swiglu_alpha, unit, per_unit, rows, max_blocks, page_layers, advance)

struct Routing {
  int count;                  // distinct experts of all rows
  int list[ROWS * TOP_K];
  int expert[ROWS][TOP_K];
  float weight[ROWS][TOP_K];
  float scale[ROWS];          // 1 / rms of each row
};

struct Seat { int head, index, of; };  // a block among those of a kv head (of the first one where it has several)

struct Unit {  // of attention: one row, one part of its pages, for the seat's kv head
  int row, part, parts;
  int first, last;   // pages of this part
  int from, to;      // cached tokens the row sees: [from, to)
  int position;
  bool on;
  bool alone;        // every block of the head does it for itself, and no mailbox is needed
  bool owner;        // takes this step's own tokens
  bool writes;       // and writes the row's into the cache
};

constexpr int ATTN_HEAD = HEAD_DIM + 8, ATTN_PART = GROUP * ATTN_HEAD + 32;  // padded: lanes meet no bank twice
constexpr int MERGE_ROW = HEAD_DIM + 4;
constexpr int ATTENDING = WORKERS / 4 * 4;  // warps: four to a page
struct JoinedLogits { i64 sum[ROUTER_SETS - 1][HB_ROUTER_JOINED ? ROWS : 1][HB_ROUTER_JOINED ? EXPERTS : 1]; };
struct Merge { alignas(16) float o[ATTENDING][GROUP][MERGE_ROW]; float top[ATTENDING][GROUP]; float sum[ATTENDING][GROUP]; };

struct Shared {  // a constant address, so that every phase can be a function of its own with its own registers
  u8 ring[SLOTS][SLOT_BYTES];
  union {
    float red[2][RED_TILES * WORKERS * 16];  // sums of the warps: [tile][warp of the team][row][16]
    Merge merge;
    JoinedLogits joined;
#if HB_TILE_BODY
    DigitBuffers by_digits;
#endif
  };
  alignas(16) u16 q[2][GROUP][HEAD_DIM + 8];    // high and low halves; rows padded so that eight lanes meet no bank twice
  u16 fresh[2][16][HEAD_DIM];  // keys and values of this step's own tokens
  alignas(16) u16 attn[ROWS][2][ATTN_PART];     // high and low halves of the head's attention
  alignas(16) u16 xs[WORKERS][ROWS][2][16];     // what the head adds to tiles of the residual, times the norm's weight: high and low parts
  alignas(16) float ssq[ROWS][16];
  Routing routing[2];
  Step step;                   // copies: a pointer that is fetched from memory costs as much as what it points to
  Layer layers[LAYERS];
  u64 full[SLOTS], empty[SLOTS], routed, squared, attended;
  int token[ROWS], position[ROWS], seq[ROWS], base[ROWS];
  Unit unit[2];                // this block's first, on full and on sliding layers
  int units[2], parts[2][ROWS];  // how many it has; of the rows
  Seat seat;
  int turns;                   // kv heads of this block
  int qkv_tiles, o_first, o_last, head_tiles, up_tiles, down_first, down_last;  // this block's share, of experts while there are TOP_K
  int layer_of[WORKERS + 1];   // where each warp is, for break_row()
  u32 epoch, last;
};
