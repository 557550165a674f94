// AMX's tile instructions written out in C++, for a CPU that has AVX-512 but no tiles: included in front of a source file
// (-include), it makes the code for AMX compile and run, sanitizers and all. It emulates what amx.h uses and no more; a tile
// that was not configured stops the program.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __AMX_INT8__ 1
#define HALFBYTE_EMULATED_AMX 1
#define HALFBYTE_AMX_ROWS 2  // so that few rows go that way, too

namespace emulated_amx {

struct Tile {
    int rows = 0, bytes = 0;
    uint8_t data[16][64];
};
inline thread_local Tile tiles[8];

inline Tile& tile(int which) {
    if (which < 0 || which >= 8 || !tiles[which].rows) std::abort();
    return tiles[which];
}
inline void configure(const void* config) {
    const auto* bytes = static_cast<const uint8_t*>(config);
    if (bytes[0] != 1) std::abort();
    for (int i = 0; i < 8; i++) {
        uint16_t width;
        std::memcpy(&width, bytes + 16 + 2 * i, 2);
        tiles[i].rows = bytes[48 + i];
        tiles[i].bytes = width;
        if (tiles[i].rows > 16 || width > 64) std::abort();
    }
}
inline void release() {
    for (Tile& t : tiles) t.rows = 0;
}
inline void zero(int which) { std::memset(tile(which).data, 0, sizeof(Tile::data)); }
inline void load(int which, const void* from, int64_t stride) {
    Tile& t = tile(which);
    for (int r = 0; r < t.rows; r++)
        std::memcpy(t.data[r], static_cast<const uint8_t*>(from) + r * stride, static_cast<size_t>(t.bytes));
}
inline void store(int which, void* to, int64_t stride) {
    const Tile& t = tile(which);
    for (int r = 0; r < t.rows; r++)
        std::memcpy(static_cast<uint8_t*>(to) + r * stride, t.data[r], static_cast<size_t>(t.bytes));
}
inline void multiply(int sums, int left, int right) {
    Tile &c = tile(sums), &a = tile(left), &b = tile(right);
    if (a.rows != c.rows || b.bytes != c.bytes || a.bytes != 4 * b.rows) std::abort();
    for (int m = 0; m < c.rows; m++)
        for (int k = 0; k < a.bytes / 4; k++)
            for (int n = 0; n < c.bytes / 4; n++) {
                int32_t sum;
                std::memcpy(&sum, c.data[m] + 4 * n, 4);
                for (int i = 0; i < 4; i++)
                    sum += static_cast<int8_t>(a.data[m][4 * k + i]) * static_cast<int8_t>(b.data[k][4 * n + i]);
                std::memcpy(c.data[m] + 4 * n, &sum, 4);
            }
}

}  // namespace emulated_amx

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#define _tile_loadconfig emulated_amx::configure
#define _tile_release emulated_amx::release
#define _tile_zero emulated_amx::zero
#define _tile_loadd emulated_amx::load
#define _tile_stored emulated_amx::store
#define _tile_dpbssd emulated_amx::multiply
