// Packing from a file against plain loops, without Python: for other machines, emulators and sanitizers. Prints "ok", or what
// was wrong, and returns 1. Every byte of a tile is compared; what lies in front of and behind it must stay as it was.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "halfbyte_cpu.h"
#include "products.h"

using namespace halfbyte;
using Raw = std::vector<uint8_t>;

static std::mt19937 generator(5);
static int failures = 0;

static const int64_t GUARD = 64;

struct Case {
    Format format;
    bool gguf, interleaved;
    int64_t stack, rows, cols;
};

// The bytes of one group or of one number, wherever the file has them.
struct Written {
    int64_t groups, code_bytes, scale_bytes;
    explicit Written(const Case& c) : groups((c.cols + 31) / 32) {
        const bool blocks = c.format == Format::mxfp4 || c.format == Format::q8;
        code_bytes = blocks ? (c.format == Format::mxfp4 ? 16 : 32) : (c.format == Format::f32 ? 4 : 2);
        scale_bytes = blocks ? (c.format == Format::mxfp4 ? 1 : 2) : 0;
        if (!blocks) groups = c.cols;
    }
};

static void check(const Case& c, int threads) {
    const Written w(c);
    const int64_t rows = c.stack * c.rows;
    Raw codes(static_cast<size_t>(rows * w.groups * w.code_bytes)), scales(static_cast<size_t>(rows * w.groups * w.scale_bytes));
    for (auto& b : codes) b = static_cast<uint8_t>(generator() & 0x3f);  // finite, as any number
    for (auto& b : scales) b = static_cast<uint8_t>(generator() & 0x3f);
    // The file: rows of each part in turn, of all matrices; gate and up apart where they are interleaved.
    const int64_t parts = c.interleaved ? 2 : 1, part_rows = c.rows / parts;
    Raw file(3, 9), apart;
    std::vector<hb_stored_rows> stored;
    const auto row_of = [&](int64_t matrix, int64_t part, int64_t i) { return matrix * c.rows + (c.interleaved ? 2 * i + part : i); };
    for (int64_t part = 0; part < parts; part++) {
        stored.push_back({0, 0, static_cast<int64_t>(file.size()), static_cast<int64_t>(apart.size()), part_rows, part, parts});
        for (int64_t matrix = 0; matrix < c.stack; matrix++)
            for (int64_t i = 0; i < part_rows; i++)
                for (int64_t g = 0; g < w.groups; g++) {
                    const int64_t at = row_of(matrix, part, i) * w.groups + g;
                    const uint8_t *code = &codes[static_cast<size_t>(at * w.code_bytes)], *scale = scales.data() + at * w.scale_bytes;
                    (c.gguf ? file : apart).insert((c.gguf ? file : apart).end(), scale, scale + w.scale_bytes);
                    if (!c.gguf || c.format == Format::q8) {
                        file.insert(file.end(), code, code + w.code_bytes);
                    } else {
                        const auto element = [&](int e) { return code[e / 2] >> (e % 2 * 4) & 15; };
                        for (int j = 0; j < 16; j++) file.push_back(static_cast<uint8_t>(element(j) | element(j + 16) << 4));
                    }
                }
    }
    const int64_t gap = static_cast<int64_t>(file.size());
    file.insert(file.end(), apart.begin(), apart.end());
    for (auto& part : stored) part.scale_offset += gap;
    std::FILE* f = std::tmpfile();
    if (!f || std::fwrite(file.data(), 1, file.size(), f) != file.size() || std::fflush(f)) std::abort();
    for (auto& part : stored) part.file = part.scale_file = fileno(f);

    const Matrix m{c.format, c.rows, c.cols, nullptr};
    const int64_t size = c.stack * m.tiles() * m.tile_bytes();
    Raw want(static_cast<size_t>(size), 0), got(static_cast<size_t>(size + 2 * GUARD), 0xee);
    const bool blocks = w.scale_bytes > 0;
    const int64_t scales_at = blocks ? (m.groups() * w.code_bytes * 16 + 63) / 64 * 64 : 0;
    for (int64_t matrix = 0; matrix < c.stack; matrix++)
        for (int64_t r = 0; r < c.rows; r++)
            for (int64_t g = 0; g < w.groups; g++) {
                uint8_t* tile = want.data() + (matrix * m.tiles() + r / 16) * m.tile_bytes();
                const int64_t at = (matrix * c.rows + r) * w.groups + g, lane = r % 16;
                for (int64_t b = 0; b < w.code_bytes; b++) {
                    const int64_t place = blocks ? g * w.code_bytes * 16 + b / 4 * 64 + lane * 4 + b % 4 : (g * 16 + lane) * w.code_bytes + b;
                    tile[place] = codes[static_cast<size_t>(at * w.code_bytes + b)];
                }
                for (int64_t b = 0; b < w.scale_bytes; b++)
                    tile[scales_at + (g * 16 + lane) * w.scale_bytes + b] = scales[static_cast<size_t>(at * w.scale_bytes + b)];
            }
    hb_packing packing{static_cast<int32_t>(c.format), c.gguf, 0, threads, c.stack, c.rows, c.cols,
                       static_cast<int32_t>(stored.size()), stored.data(), got.data() + GUARD};
    int32_t finite = 0;
    const int32_t failure = hb_pack(&packing, &finite);
    bool good = !failure && finite && !std::memcmp(want.data(), got.data() + GUARD, want.size());
    for (int64_t i = 0; i < GUARD; i++) good = good && got[static_cast<size_t>(i)] == 0xee && got[static_cast<size_t>(size + GUARD + i)] == 0xee;
    if (c.gguf) {  // as rows of bfloat16: that they are written where they belong; their bits are compared from Python
        std::vector<uint16_t> wide(static_cast<size_t>(rows * c.cols));
        packing.widen = 1;
        packing.out = wide.data();
        good = good && !hb_pack(&packing, &finite) && finite;
    }
    packing.out = nullptr;
    good = good && !hb_pack(&packing, &finite);
    for (auto& part : stored) part.offset += static_cast<int64_t>(file.size());
    good = good && hb_pack(&packing, &finite) == -1;
    std::fclose(f);
    if (!good) {
        std::printf("wrong: format %d, gguf %d, %ld of %ld x %ld\n", static_cast<int>(c.format), c.gguf, static_cast<long>(c.stack),
                    static_cast<long>(c.rows), static_cast<long>(c.cols));
        failures++;
    }
}

int main() {
    for (int threads : {1, 3})
        for (Format format : {Format::mxfp4, Format::q8, Format::bf16, Format::f16, Format::f32}) {
            const bool blocks = format == Format::mxfp4 || format == Format::q8;
            for (int gguf = 0; gguf <= (blocks ? 1 : 0); gguf++) {
                check({format, gguf != 0, false, 1, 1, 32}, threads);
                check({format, gguf != 0, false, 2, 33, blocks ? 96 : 77}, threads);
                check({format, gguf != 0, true, 3, 46, 64}, threads);
                check({format, gguf != 0, false, 1, 700, 2880}, threads);
            }
        }
    if (!failures) std::printf("packing: ok\n");
    return failures ? 1 : 0;
}
