// Times the products of one instruction set beside what the machine allows: the read bandwidth and the rate of dot product
// instructions, both measured on the spot. Not part of the library:
//
//   g++ -std=c++17 -O3 -ffp-contract=off FLAGS -I../../src/halfbyte/kernels/cpu microbench.cpp
//       ../../src/halfbyte/kernels/cpu/{products,rows}.cpp -pthread -o microbench
//   ./microbench [threads] [seconds for each line] [int8, if lines with float32 activations are not wanted]
//
// Weights are larger than the caches together for few rows (they come from memory), one matrix of an expert for many.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "products.h"
#include "vector.h"

using namespace halfbyte;
using Clock = std::chrono::steady_clock;

static double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

// Runs f(thread, stop) on every thread; f returns the work it did before `stop`; the sum of work a second.
static double rate(int threads, double seconds, const std::function<double(int, const std::atomic<bool>&)>& f) {
    std::atomic<bool> stop{false};
    std::atomic<int> ready{0};
    std::vector<double> rates(static_cast<size_t>(threads));
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; t++)
        pool.emplace_back([&, t] {
            ready++;
            while (ready < threads) {}
            auto start = Clock::now();
            double work = f(t, stop);
            rates[static_cast<size_t>(t)] = work / seconds_since(start);
        });
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    stop = true;
    for (auto& thread : pool) thread.join();
    double total = 0;
    for (double r : rates) total += r;
    return total;
}

static uint8_t* aligned_bytes(size_t bytes) {
    auto* p = static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    if (!p) std::abort();
    return p;
}

static volatile float sink;

// Four streams a thread, as products read tiles: one stream is slower on some machines.
static double read_bandwidth(int threads, double seconds, const uint8_t* data, size_t bytes) {
    return rate(threads, seconds, [&](int t, const std::atomic<bool>& stop) {
        size_t part = bytes / static_cast<size_t>(threads) / 16384 * 4096;
        const uint8_t* p = data + static_cast<size_t>(t) * 4 * part;
        double work = 0;
        Floats acc[4] = {splat(0), splat(0), splat(0), splat(0)};
        while (!stop)
            for (size_t i = 0; i + 65536 <= part && !stop; i += 65536, work += 4 * 65536)
                for (size_t j = i; j < i + 65536; j += 64)
                    unroll<4>([&](auto k) HB_LAMBDA {
                        __builtin_prefetch(p + k * part + j + 2048);
                        acc[k] = add(acc[k], load_floats(reinterpret_cast<const float*>(p + k * part + j)));
                    });
        sink = sum(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
        return work;
    });
}

// The set's dot product instructions on registers alone, on all threads at once, because threads may share a core:
// multiply-adds a second. 0: the set has none.
static double dot_peak(int threads, double seconds) {
    return rate(threads, seconds, [&](int, const std::atomic<bool>& stop) {
        double work = 0;
#if defined(__AVX512VNNI__)
        __m512i t[12] = {}, w = _mm512_set1_epi32(std::rand()), a = _mm512_set1_epi32(std::rand());
        while (!stop) {
            for (int i = 0; i < 10000; i++)
                unroll<12>([&](auto j) HB_LAMBDA { asm volatile("vpdpbusd %2, %1, %0" : "+v"(t[j]) : "v"(w), "v"(a)); });
            work += 10000.0 * 12 * 64;
        }
#elif defined(__AVXVNNI__)
        __m256i t[12] = {}, w = _mm256_set1_epi32(std::rand()), a = _mm256_set1_epi32(std::rand());
        while (!stop) {
            for (int i = 0; i < 10000; i++)
                unroll<12>([&](auto j) HB_LAMBDA { asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(t[j]) : "x"(w), "x"(a)); });
            work += 10000.0 * 12 * 32;
        }
#elif defined(__AVX2__)  // a product of bytes, a sum of pairs, an addition
        __m256i t[6] = {}, w = _mm256_set1_epi32(std::rand()), a = _mm256_set1_epi32(std::rand());
        __m256i ones = _mm256_set1_epi16(1);
        while (!stop) {
            for (int i = 0; i < 10000; i++)
                unroll<6>([&](auto j) HB_LAMBDA {
                    __m256i p = _mm256_maddubs_epi16(w, a);
                    asm volatile("" : "+x"(p));
                    t[j] = _mm256_add_epi32(t[j], _mm256_madd_epi16(p, ones));
                    asm volatile("" : "+x"(t[j]));
                });
            work += 10000.0 * 6 * 32;
        }
#elif defined(__ARM_FEATURE_DOTPROD)
        int32x4_t t[12] = {};
        int8x16_t w = vdupq_n_s8(static_cast<int8_t>(std::rand())), a = w;
        while (!stop) {
            for (int i = 0; i < 10000; i++)
                unroll<12>([&](auto j) HB_LAMBDA { t[j] = vdotq_s32(t[j], w, a); asm volatile("" : "+w"(t[j])); });
            work += 10000.0 * 12 * 16;
        }
#else
        while (!stop) std::this_thread::yield();
#endif
        return work;
    });
}

int main(int argc, char** argv) {
    int threads = argc > 1 ? std::atoi(argv[1]) : static_cast<int>(std::thread::hardware_concurrency());
    double seconds = argc > 2 ? std::atof(argv[2]) : 0.3;
    const size_t pool_bytes = size_t{512} << 20;
    uint8_t* pool = aligned_bytes(pool_bytes + (1 << 16));
    std::mt19937 random(7);
    for (size_t i = 0; i < pool_bytes + (1 << 16); i += 4) {
        uint32_t v = (random() & 0x0f0f0f0fu) | 0x30303030u;  // as scales of any format these are ordinary numbers
        std::memcpy(pool + i, &v, 4);
    }
    double bandwidth = 0;
    for (int i = 0; i < 3; i++) bandwidth = std::max(bandwidth, read_bandwidth(threads, seconds, pool, pool_bytes));
    double peak = dot_peak(threads, seconds) / threads;
    std::printf("%s, %d threads: read bandwidth %.1f GB/s, dot products at most %.0f GMAC/s a thread\n", instruction_set(),
                threads, bandwidth / 1e9, peak / 1e9);

    const int64_t K = 2880;
    const int64_t groups = K / GROUP;
    const int64_t most = 512;
    std::vector<float> values(static_cast<size_t>(most * K));
    std::normal_distribution<float> normal;
    for (auto& v : values) v = normal(random);
    struct Case { const char* name; Format format; bool exact; };
    const Case cases[] = {{"mxfp4", Format::mxfp4, false}, {"q8", Format::q8, false},     {"bf16", Format::bf16, true},
                          {"mxfp4 f32", Format::mxfp4, true}, {"q8 f32", Format::q8, true}};
    for (const Case& c : cases) {
        if (c.exact && argc > 3) continue;
        std::vector<CodedGroup> coded(static_cast<size_t>(most * groups));
        if (!c.exact)
            for (int64_t i = 0; i < most; i++)
                quantize_row(&values[static_cast<size_t>(i * K)], K, c.format, &coded[static_cast<size_t>(i * groups)]);
        Rows rows{c.exact ? nullptr : coded.data(), values.data(), groups, K};
        for (int64_t count : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}) {
            Matrix m{c.format, 1 << 30, K, pool};
            int64_t all = static_cast<int64_t>(pool_bytes) / m.tile_bytes() / threads;
            if (count > 8) all = 2880 / 16;
            double macs = rate(threads, seconds, [&](int t, const std::atomic<bool>& stop) {
                std::vector<float> out(static_cast<size_t>(count * 64 + 64));
                double work = 0;
                while (!stop)
                    for (int64_t tile = 0; tile + 4 <= all && !stop; tile += 4, work += 64.0 * K * static_cast<double>(count))
                        product(m, t * all + tile, t * all + tile + 4, rows, nullptr, count, out.data(), 64);
                sink = out[0];
                return work;
            });
            double bytes = macs / static_cast<double>(count) / (16.0 * K) * static_cast<double>(m.tile_bytes());
            std::printf("%-10s %4d rows  %6.1f GB/s (%3.0f %% of read)  %7.1f GMAC/s a thread (%3.0f %% of dot products)\n",
                        c.name, static_cast<int>(count), bytes / 1e9, 100 * bytes / bandwidth, macs / threads / 1e9,
                        peak > 0 ? 100 * macs / threads / peak : 0.0);
            std::fflush(stdout);
        }
    }
    return 0;
}
