// Products against plain loops in double, without Python: for other machines, emulators and sanitizers. Prints the
// instruction set and "ok", or what was wrong, and returns 1.
//
// Weights and activations are random bytes. A product is compared within a bound on its roundings; with scales of 1 and
// one group, bit for bit; and a row's bits among many rows with its bits alone.
#include "products.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

using namespace halfbyte;

static std::mt19937 generator(11);
static int random_int(int low, int high) { return low + static_cast<int>(generator() % static_cast<unsigned>(high - low + 1)); }
static int failures = 0;
static void fail(const char* what, int format, long rows, long cols, long count) {
    std::printf("wrong: %s, format %d, %ld rows, %ld columns, %ld activations\n", what, format, rows, cols, count);
    failures++;
}

static const double E2M1[16] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6};

// A random matrix, in bytes and in numbers.
struct Weights {
    Matrix m;
    std::vector<uint8_t> room;
    std::vector<double> values;  // [rows][groups * 32]
    int64_t stride;

    Weights(Format format, int64_t rows, int64_t cols, bool ones) : m{format, rows, cols, nullptr} {
        stride = m.groups() * GROUP;
        room.assign(static_cast<size_t>(m.tiles() * m.tile_bytes() + 64), 0);
        uint8_t* data = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) % 64;
        m.data = data;
        values.assign(static_cast<size_t>(rows * stride), 0.0);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < cols; k++) put(data + r / 16 * m.tile_bytes(), r, k, ones);
    }

    void put(uint8_t* tile, int64_t r, int64_t k, bool ones) {
        const int64_t lane = r % 16, g = k / 32, i = k % 32, groups = m.groups();
        double& value = values[static_cast<size_t>(r * stride + k)];
        if (m.format == Format::mxfp4) {
            uint8_t* scale = tile + groups * 256 + g * 16 + lane;
            if (i == 0) *scale = static_cast<uint8_t>(ones ? 127 : random_int(0, 40) ? random_int(110, 130) : random_int(0, 3));
            const int code = random_int(0, 15);
            uint8_t& byte = tile[g * 256 + i / 8 * 64 + lane * 4 + i % 8 / 2];
            byte = static_cast<uint8_t>(byte | (i % 2 ? code << 4 : code));
            value = std::ldexp(E2M1[code], *scale - 127);
        } else if (m.format == Format::q8) {
            uint8_t* at = tile + groups * 512 + (g * 16 + lane) * 2;
            static const uint16_t scales[] = {0x3c00, 0x2e66, 0x0001, 0x1234, 0x03ff};  // 1, 0.1, subnormal, small, subnormal
            if (i == 0) std::memcpy(at, &scales[ones ? 0 : random_int(0, 4)], 2);
            uint16_t half;
            std::memcpy(&half, at, 2);
            const int exponent = half >> 10 & 31, mantissa = half & 1023;
            const double scale = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
            const int code = random_int(-128, 127);
            tile[g * 512 + i / 4 * 64 + lane * 4 + i % 4] = static_cast<uint8_t>(code);
            value = code * scale;
        } else {
            float x = static_cast<float>(random_int(-4000, 4000)) / 1024.0f;
            uint32_t bits;
            std::memcpy(&bits, &x, 4);
            if (m.format == Format::f32) {
                std::memcpy(tile + (k * 16 + lane) * 4, &bits, 4);
            } else if (m.format == Format::bf16) {
                bits &= 0xffff0000u;
                const uint16_t top = static_cast<uint16_t>(bits >> 16);
                std::memcpy(tile + (k * 16 + lane) * 2, &top, 2);
                std::memcpy(&x, &bits, 4);
            } else {  // f16: a whole number of 1024ths below 2 has 11 bits
                x = static_cast<float>(random_int(-1023, 1023)) / 1024.0f;
                int exponent;
                const double f = std::frexp(std::fabs(x), &exponent);
                uint16_t half = x == 0 ? 0 : static_cast<uint16_t>((exponent + 14) << 10 | (static_cast<int>(f * 2048) & 1023));
                if (x < 0) half |= 0x8000;
                std::memcpy(tile + (k * 16 + lane) * 2, &half, 2);
            }
            value = x;
        }
    }
};

static void check(Format format, int64_t rows, int64_t cols, int64_t count, bool coded, bool ones) {
    const Weights w(format, rows, cols, ones);
    const int64_t groups = w.m.groups(), width = w.m.tiles() * 16, stride = width + 3;
    std::vector<float> x(static_cast<size_t>(count * cols));
    for (auto& v : x) v = static_cast<float>(random_int(-127, 127)) * (ones ? 1.0f : 0.37f);
    if (ones)
        for (int64_t i = 0; i < count; i++) x[static_cast<size_t>(i * cols)] = 127.0f;  // so that the scale is 1
    std::vector<CodedGroup> records(static_cast<size_t>(count * groups));
    std::vector<double> exact(static_cast<size_t>(count * groups * 32), 0.0);
    for (int64_t i = 0; i < count; i++) {
        if (coded) quantize_row(&x[static_cast<size_t>(i * cols)], cols, format, &records[static_cast<size_t>(i * groups)]);
        for (int64_t k = 0; k < cols; k++) {
            const CodedGroup& g = records[static_cast<size_t>(i * groups + k / 32)];
            int64_t place = k % 32;
            if (format == Format::mxfp4) place = place / 8 * 8 + place % 2 * 4 + place % 8 / 2;
            exact[static_cast<size_t>(i * groups * 32 + k)] =
                coded ? static_cast<double>(g.codes[place]) * static_cast<double>(g.scale) : x[static_cast<size_t>(i * cols + k)];
        }
    }
    const Rows a{coded ? records.data() : nullptr, x.data(), groups, cols};
    std::vector<float> out(static_cast<size_t>(count * stride), 77.0f);
    product(w.m, 0, w.m.tiles(), a, nullptr, count, out.data(), stride);
    for (int64_t i = 0; i < count; i++)
        for (int64_t r = 0; r < stride; r++) {
            const double got = out[static_cast<size_t>(i * stride + r)];
            if (r >= width ? got != 77.0 : r >= rows && got != 0.0) return fail("padding", int(format), rows, cols, count);
            if (r >= rows) continue;
            double want = 0, size = 0;
            for (int64_t k = 0; k < cols; k++) {
                const double term = exact[static_cast<size_t>(i * groups * 32 + k)] * w.values[static_cast<size_t>(r * w.stride + k)];
                want += term;
                size += std::fabs(term);
            }
            double bound = 0.0;
            if (!ones || !coded || groups != 1)  // the second part: a product of scales that is subnormal
                bound = std::ldexp(size, -24) * static_cast<double>(groups + 35) + std::ldexp(static_cast<double>(groups * 32 * 24 * 127), -150);
            if (!(std::fabs(got - want) <= bound)) return fail("a product", int(format), rows, cols, count);
        }
    std::vector<float> alone(static_cast<size_t>(width));
    for (int64_t i = 0; i < count; i++) {
        const int32_t row = static_cast<int32_t>(i);
        product(w.m, 0, w.m.tiles(), a, &row, 1, alone.data(), width);
        if (std::memcmp(alone.data(), &out[static_cast<size_t>(i * stride)], static_cast<size_t>(width) * 4))
            return fail("a row alone", int(format), rows, cols, count);
    }
    if (coded) {  // NaN in a row makes that row NaN
        records[static_cast<size_t>((count - 1) * groups)].scale = std::nanf("");
        product(w.m, 0, w.m.tiles(), a, nullptr, count, out.data(), stride);
        for (int64_t r = 0; r < rows; r++)
            if (!std::isnan(out[static_cast<size_t>((count - 1) * stride + r)])) return fail("NaN", int(format), rows, cols, count);
    }
}

static void check_rows() {
    std::vector<float> x;
    for (int i = 0; i < 5000; i++) x.push_back(static_cast<float>(i - 4200) / 47.0f);
    x.push_back(std::nanf(""));
    std::vector<float> y = x;
    exp_row(y.data(), static_cast<int64_t>(y.size()), 0.0f);
    for (size_t i = 0; i < x.size(); i++) {
        const double want = std::exp(static_cast<double>(x[i]));
        const float near = static_cast<float>(want);
        const bool good = std::isnan(want) ? std::isnan(y[i])
                                           : std::fabs(y[i] - want) <= 2 * (std::nextafter(near, INFINITY) - near);
        if (!good) return fail("exp", 0, static_cast<long>(i), 0, 0);
    }
    double squares = 0;
    for (int i = 0; i < 777; i++) squares += static_cast<double>(x[static_cast<size_t>(i)]) * x[static_cast<size_t>(i)];
    if (std::fabs(sum_of_squares(x.data(), 777) - squares) > squares * 1e-6) fail("sum of squares", 0, 0, 0, 0);
    std::vector<float> out(33);
    swiglu(x.data() + 4100, 33, 7.0f, 1.702f, out.data());
    for (int i = 0; i < 33; i++) {
        const double gate = std::fmin(x[static_cast<size_t>(4100 + 2 * i)], 7.0);
        const double up = std::fmax(std::fmin(x[static_cast<size_t>(4101 + 2 * i)], 7.0), -7.0);
        const double want = (up + 1) * gate / (1 + std::exp(-1.702 * gate));
        if (std::fabs(out[static_cast<size_t>(i)] - want) > 2e-6 * std::fabs(want) + 1e-30) return fail("swiglu", 0, i, 0, 0);
    }
}

int main() {
    for (int f = 0; f < 5; f++)
        for (bool coded : {false, true}) {
            const Format format = static_cast<Format>(f);
            if (coded && format != Format::q8 && format != Format::mxfp4) continue;
            for (int64_t rows : {1, 16, 40, 80, 100})
                for (int64_t cols : {1, 32, 45, 320, 1000})
                    for (int64_t count : {1, 2, 3, 5, 9, 13}) check(format, rows, cols, count, coded, false);
            for (int64_t count : {1, 2, 7}) check(format, 64, 32, count, coded, true);
        }
    check_rows();
    std::printf("%s: %s\n", instruction_set(), failures ? "wrong" : "ok");
    return failures != 0;
}
