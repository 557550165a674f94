// Weights from files into the layout rows16: rows are read where a GGUF file or a safetensors folder has them, some tiles at
// a time, turned in memory that stays in a cache, and written once to where they stay. Nothing else of a file is ever
// in this process's memory, and a scale or a number that is not finite, or a part of zeros, is noticed on the way. Knows no
// headers: offsets come checked. A file that ends early or cannot be read is said, never mapped: it cannot stop the process.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "cache.h"
#include "halfbyte_cpu.h"
#include "products.h"

namespace halfbyte {
namespace {

constexpr int64_t ITEM_BYTES = 512 << 10;  // of a file, read at a time by one thread
constexpr int64_t AHEAD = 2;               // items, times threads, that the system is told of before they are read

typedef uint8_t Sixteen __attribute__((vector_size(16)));
typedef uint32_t Quad __attribute__((vector_size(16)));

constexpr int64_t round64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// How one row of a part lies in its file, and what it becomes.
struct Shape {
    Format format;
    bool gguf, blocks;
    int64_t groups, row_bytes, scale_row_bytes, tile_bytes, code_bytes;

    explicit Shape(const hb_packing& p) : format(static_cast<Format>(p.format)), gguf(p.gguf) {
        blocks = format == Format::mxfp4 || format == Format::q8;
        groups = (p.cols + GROUP - 1) / GROUP;
        const int64_t group_bytes = format == Format::mxfp4 ? 16 : 32, scale_bytes = format == Format::mxfp4 ? 1 : 2;
        tile_bytes = Matrix{format, p.rows, p.cols, nullptr}.tile_bytes();
        code_bytes = round64(groups * group_bytes * TILE_ROWS);
        row_bytes = blocks ? groups * (group_bytes + (gguf ? scale_bytes : 0)) : p.cols * (format == Format::f32 ? 4 : 2);
        scale_row_bytes = blocks && !gguf ? groups * scale_bytes : 0;
    }
};

struct Row {
    const uint8_t *data, *scales;  // scales null in GGUF's blocks
};

// Sixteen words of four rows, turned, to places 64 bytes apart.
inline void turn(Quad a, Quad b, Quad c, Quad d, uint8_t* to) {
    const Quad ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    const Quad AB = __builtin_shufflevector(a, b, 2, 6, 3, 7), CD = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    const Quad columns[4] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                             __builtin_shufflevector(AB, CD, 0, 1, 4, 5), __builtin_shufflevector(AB, CD, 2, 3, 6, 7)};
    for (int i = 0; i < 4; i++) std::memcpy(to + 64 * i, &columns[i], 16);
}

inline Quad load(const uint8_t* from) {
    Quad v;
    std::memcpy(&v, from, 16);
    return v;
}

// GGUF's byte j holds elements j and j + 16; here byte j holds 2 j and 2 j + 1.
inline Quad in_order(Quad words) {
    const Sixteen v = reinterpret_cast<Sixteen>(words);
    const Sixteen even = __builtin_shufflevector(v, v, 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
    const Sixteen odd = __builtin_shufflevector(v, v, 1, 3, 5, 7, 9, 11, 13, 15, 1, 3, 5, 7, 9, 11, 13, 15);
    const Quad e = reinterpret_cast<Quad>(even), o = reinterpret_cast<Quad>(odd);
    const Quad low = (e & 0x0f0f0f0fu) | (o << 4 & 0xf0f0f0f0u), high = (e >> 4 & 0x0f0f0f0fu) | (o & 0xf0f0f0f0u);
    return __builtin_shufflevector(low, high, 0, 1, 6, 7);
}

template <bool GGUF>
bool pack_mxfp4(const Shape& s, const Row* rows, uint8_t* tile) {
    constexpr int64_t block = GGUF ? 17 : 16, skip = GGUF ? 1 : 0;
    uint8_t* scales = tile + s.code_bytes;
    unsigned worst = 0;
    for (int64_t g = 0; g < s.groups; g++, tile += 256, scales += TILE_ROWS)
        for (int r = 0; r < TILE_ROWS; r += 4) {
            Quad v[4];
            for (int i = 0; i < 4; i++) {
                const uint8_t* from = rows[r + i].data + g * block;
                v[i] = GGUF ? in_order(load(from + skip)) : load(from);
                const uint8_t scale = GGUF ? *from : rows[r + i].scales[g];
                const Quad elements = v[i] & 0x77777777u;
                const bool zeros = !(elements[0] | elements[1] | elements[2] | elements[3]);
                scales[r + i] = scale < 2 && zeros ? 127 : scale;  // of zeros any scale is right: see rows16.py
                worst = scale > worst ? scale : worst;
            }
            turn(v[0], v[1], v[2], v[3], tile + 4 * r);
        }
    return worst != 255;
}

inline bool finite_f16(uint16_t h) { return (h & 0x7c00) != 0x7c00; }

template <bool GGUF>
bool pack_q8(const Shape& s, const Row* rows, uint8_t* tile) {
    constexpr int64_t block = GGUF ? 34 : 32, skip = GGUF ? 2 : 0;
    uint8_t* scales = tile + s.code_bytes;
    bool finite = true;
    for (int64_t g = 0; g < s.groups; g++, tile += 512, scales += 2 * TILE_ROWS)
        for (int r = 0; r < TILE_ROWS; r += 4) {
            const uint8_t* from[4];
            for (int i = 0; i < 4; i++) {
                from[i] = rows[r + i].data + g * block;
                uint16_t scale;
                std::memcpy(&scale, GGUF ? from[i] : rows[r + i].scales + 2 * g, 2);
                std::memcpy(scales + 2 * (r + i), &scale, 2);
                finite &= finite_f16(scale);
                from[i] += skip;
            }
            turn(load(from[0]), load(from[1]), load(from[2]), load(from[3]), tile + 4 * r);
            turn(load(from[0] + 16), load(from[1] + 16), load(from[2] + 16), load(from[3] + 16), tile + 256 + 4 * r);
        }
    return finite;
}

template <class Element>
void pack_numbers(int64_t cols, const Row* rows, uint8_t* tile) {
    for (int64_t k = 0; k < cols; k++) {
        Element column[TILE_ROWS];
        for (int r = 0; r < TILE_ROWS; r++) std::memcpy(&column[r], rows[r].data + k * sizeof(Element), sizeof(Element));
        std::memcpy(tile + k * sizeof column, column, sizeof column);
    }
}

template <class Element>
bool all_finite(const uint8_t* from, int64_t count, Element exponent) {
    int bad = 0;
    for (int64_t i = 0; i < count; i++) {
        Element x;
        std::memcpy(&x, from + i * static_cast<int64_t>(sizeof x), sizeof x);
        bad |= (x & exponent) == exponent;
    }
    return !bad;
}

bool finite_numbers(Format format, const uint8_t* from, int64_t count) {
    if (format == Format::f32) return all_finite<uint32_t>(from, count, 0x7f800000u);
    return all_finite<uint16_t>(from, count, format == Format::bf16 ? 0x7f80 : 0x7c00);
}

// A tile of rows16; whether its scales are finite (numbers are looked at as they are read).
bool pack_tile(const Shape& s, const hb_packing& p, const Row* rows, uint8_t* tile) {
    if (!s.blocks) {
        const int64_t element = s.format == Format::f32 ? 4 : 2;
        if (element == 4) pack_numbers<uint32_t>(p.cols, rows, tile);
        else pack_numbers<uint16_t>(p.cols, rows, tile);
        std::memset(tile + p.cols * TILE_ROWS * element, 0, static_cast<size_t>(s.tile_bytes - p.cols * TILE_ROWS * element));
        return true;
    }
    const int64_t used = s.code_bytes + s.groups * TILE_ROWS * (s.format == Format::mxfp4 ? 1 : 2);
    std::memset(tile + used, 0, static_cast<size_t>(s.tile_bytes - used));
    if (s.format == Format::mxfp4) return s.gguf ? pack_mxfp4<true>(s, rows, tile) : pack_mxfp4<false>(s, rows, tile);
    return s.gguf ? pack_q8<true>(s, rows, tile) : pack_q8<false>(s, rows, tile);
}

// The numbers of one row of GGUF's blocks.
bool widen_row(const Shape& s, const uint8_t* from, float* to) {
    static const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    bool finite = true;
    for (int64_t g = 0; g < s.groups; g++, to += GROUP) {
        if (s.format == Format::q8) {
            uint16_t half;
            std::memcpy(&half, from, 2);
            const float scale = from_f16(half);
            finite &= finite_f16(half);
            for (int i = 0; i < GROUP; i++) to[i] = scale * static_cast<float>(static_cast<int8_t>(from[2 + i]));
            from += 34;
            continue;
        }
        const uint32_t e = *from;
        uint32_t bits = e == 255 ? 0x7fc00000u : e ? e << 23 : 0x00400000u;
        float scale;
        std::memcpy(&scale, &bits, 4);
        finite &= e != 255;
        for (int i = 0; i < GROUP; i++) {
            const int code = i < 16 ? from[1 + i] & 15 : from[1 + i - 16] >> 4;
            const float element = static_cast<float>(doubled[code]) * 0.5f;
            to[i] = (code == 8 ? -0.0f : element) * scale;
        }
        from += 17;
    }
    return finite;
}

class Packing {
   public:
    explicit Packing(const hb_packing& job)
        : p(job), s(job), has_data(static_cast<size_t>(job.part_count)), has_scales(static_cast<size_t>(job.part_count)) {
        const int64_t tiles = (p.rows + TILE_ROWS - 1) / TILE_ROWS, row = s.row_bytes + s.scale_row_bytes;
        item_tiles = ITEM_BYTES / (row * TILE_ROWS);
        if (item_tiles < 1) item_tiles = 1;
        if (item_tiles > tiles) item_tiles = tiles;
        items_each = (tiles + item_tiles - 1) / item_tiles;
        items = items_each * p.stack;
        for (int32_t i = 0; i < p.part_count; i++) has_scales[static_cast<size_t>(i)] = !s.scale_row_bytes;
    }

    int32_t run() {
        std::vector<std::thread> threads;
        const int64_t wanted = p.threads < items ? p.threads : items;
        try {
            for (int64_t t = 1; t < wanted; t++) threads.emplace_back([this] { work(); });
        } catch (const std::system_error&) {
        }  // with fewer threads, then
        work();
        for (std::thread& thread : threads) thread.join();
        return failure;
    }

    bool sound() const {
        bool filled = true;
        for (int32_t i = 0; i < p.part_count; i++) filled &= has_data[static_cast<size_t>(i)] && has_scales[static_cast<size_t>(i)];
        return !bad && filled;
    }

   private:
    void work() {
        try {
            const int64_t rows = item_tiles * TILE_ROWS;
            std::vector<uint8_t> data(static_cast<size_t>(rows * s.row_bytes)), scales(static_cast<size_t>(rows * s.scale_row_bytes));
            const std::vector<uint8_t> nothing(static_cast<size_t>(s.row_bytes + s.scale_row_bytes), 0);
            std::vector<Row> row(static_cast<size_t>(rows));
            for (int64_t item; !failure && (item = next++) < items;) {
                announce(item + AHEAD * p.threads);
                for (Row& r : row) r = {nothing.data(), nothing.data()};
                uint8_t *to = data.data(), *scales_to = scales.data();
                each_part(item, [&](const hb_stored_rows& part, int64_t from, int64_t count, int64_t first) {
                    fill(part.file, part.offset + from * s.row_bytes, to, count * s.row_bytes);
                    fill(part.scale_file, part.scale_offset + from * s.scale_row_bytes, scales_to, count * s.scale_row_bytes);
                    const size_t index = static_cast<size_t>(&part - p.parts);
                    note_bytes(has_data[index], to, count * s.row_bytes);
                    note_bytes(has_scales[index], scales_to, count * s.scale_row_bytes);
                    if (!s.blocks && !finite_numbers(s.format, to, count * p.cols)) bad = true;
                    for (int64_t i = 0; i < count; i++, to += s.row_bytes, scales_to += s.scale_row_bytes)
                        row[static_cast<size_t>(first + i * part.step)] = {to, scales_to};
                });
                if (!failure && p.out) write(item, row.data());
            }
        } catch (const std::bad_alloc&) {
            failure = ENOMEM;
        }
    }

    // Looks no further than the first byte that is not zero, and not at all once a part has one.
    static void note_bytes(std::atomic<bool>& filled, const uint8_t* from, int64_t bytes) {
        if (filled.load(std::memory_order_relaxed)) return;
        int64_t i = 0;
        while (i < bytes && !from[i]) i++;
        if (i < bytes) filled.store(true, std::memory_order_relaxed);
    }

    // f(part, its first row, how many rows, place of the first in the item) for what an item needs.
    template <class F>
    void each_part(int64_t item, F&& f) const {
        const int64_t matrix = item / items_each, begin = item % items_each * item_tiles * TILE_ROWS;
        const int64_t end = begin + item_tiles * TILE_ROWS;
        for (int32_t i = 0; i < p.part_count; i++) {
            const hb_stored_rows& part = p.parts[i];
            const auto upto = [&](int64_t row) {
                const int64_t n = row <= part.first ? 0 : (row - part.first + part.step - 1) / part.step;
                return n < part.rows ? n : part.rows;
            };
            const int64_t from = upto(begin), count = upto(end) - from;
            if (count > 0) f(part, matrix * part.rows + from, count, part.first + from * part.step - begin);
        }
    }

    // So that a disk has something to do while rows are turned.
    void announce(int64_t item) const {
#ifdef POSIX_FADV_WILLNEED
        if (item >= items) return;
        each_part(item, [&](const hb_stored_rows& part, int64_t from, int64_t count, int64_t) {
            posix_fadvise(part.file, part.offset + from * s.row_bytes, count * s.row_bytes, POSIX_FADV_WILLNEED);
        });
#endif
    }

    void fill(int32_t file, int64_t offset, uint8_t* to, int64_t bytes) {
        while (bytes > 0 && !failure) {
            const ssize_t got = pread(file, to, static_cast<size_t>(bytes), offset);
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) failure = got ? errno : -1;
            else to += got, offset += got, bytes -= got;
        }
    }

    void write(int64_t item, const Row* row) {
        const int64_t matrix = item / items_each, first = item % items_each * item_tiles;
        bool good = true;
        if (p.widen) {
            for (int64_t r = first * TILE_ROWS, i = 0; r < p.rows && i < item_tiles * TILE_ROWS; r++, i++)
                good &= widen_row(s, row[i].data, static_cast<float*>(p.out) + (matrix * p.rows + r) * s.groups * GROUP);
        } else {
            const int64_t tiles = (p.rows + TILE_ROWS - 1) / TILE_ROWS;
            for (int64_t t = 0; t < item_tiles && first + t < tiles; t++)
                good &= pack_tile(s, p, row + t * TILE_ROWS,
                                  static_cast<uint8_t*>(p.out) + (matrix * tiles + first + t) * s.tile_bytes);
        }
        if (!good) bad = true;
    }

    const hb_packing& p;
    const Shape s;
    int64_t item_tiles, items_each, items;
    std::atomic<int64_t> next{0};
    std::atomic<int32_t> failure{0};
    std::atomic<bool> bad{false};
    std::vector<std::atomic<bool>> has_data, has_scales;  // of each part: whether a byte is not zero
};

}  // namespace
}  // namespace halfbyte

extern "C" int32_t hb_pack(const hb_packing* packing, int32_t* sound) {
    halfbyte::Packing work(*packing);
    const int32_t failure = work.run();
    *sound = work.sound();
    return failure;
}
