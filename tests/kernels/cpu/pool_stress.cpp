// Stress of the thread pool, for plain builds and under ThreadSanitizer: phases of random sizes, items that take their time,
// more threads than cores, a busy loop beside them, two callers in turn. Every item must run exactly once, in its own
// phase. Counts decide, never time. Arguments: threads, phases, seed.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

#include "pool.h"

namespace {

void busy_for(int microseconds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
    while (std::chrono::steady_clock::now() < end) {}
}

// Items write plain memory: what one phase leaves must be there in the next, which ThreadSanitizer checks as well.
bool phases(halfbyte::Pool& pool, int count, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<uint64_t> left, now;
    for (int phase = 0; phase < count; ++phase) {
        const int kind = static_cast<int>(random() % 8);
        const int64_t items = kind == 0 ? random() % 3 : kind < 6 ? 1 + random() % 40 : 1 + random() % 2000;
        const unsigned slow = random();
        const bool delays = random() % 16 == 0;
        left.assign(static_cast<size_t>(items), 0);
        now.assign(static_cast<size_t>(items), 0);
        std::vector<int> thread_of(static_cast<size_t>(items), -1);
        pool.run(items, [&](int64_t item, int thread) {
            if (delays && (static_cast<unsigned>(item) * 2654435761u ^ slow) % 64 == 0) {
                if (slow & 1) std::this_thread::sleep_for(std::chrono::microseconds(200));
                else busy_for(50);
            }
            left[static_cast<size_t>(item)] += static_cast<uint64_t>(item) + static_cast<uint64_t>(phase);
            thread_of[static_cast<size_t>(item)] = thread;
        });
        pool.run(items, [&](int64_t item, int) {  // reads what others have written
            const int64_t other = items - 1 - item;
            now[static_cast<size_t>(item)] += left[static_cast<size_t>(other)];
        });
        for (int64_t i = 0; i < items; ++i) {
            const uint64_t want = static_cast<uint64_t>(items - 1 - i) + static_cast<uint64_t>(phase);
            const int thread = thread_of[static_cast<size_t>(i)];
            if (now[static_cast<size_t>(i)] != want || thread < 0 || thread >= pool.threads()) {
                std::printf("phase %d of seed %u: item %lld of %lld was run by %d and left %llu, not %llu\n", phase, seed,
                            static_cast<long long>(i), static_cast<long long>(items), thread,
                            static_cast<unsigned long long>(now[static_cast<size_t>(i)]),
                            static_cast<unsigned long long>(want));
                return false;
            }
        }
        if (random() % 200 == 0) std::this_thread::sleep_for(std::chrono::microseconds(500));  // all workers fall asleep
    }
    return true;
}

// A caller that wanders: after make_room no worker is on its core, and the pool still runs every item.
bool wandering(int count, unsigned seed) {
#if defined(__linux__)
    cpu_set_t all;
    if (sched_getaffinity(0, sizeof all, &all) != 0) return true;
    std::vector<int32_t> cores;
    for (int c = 0; c < CPU_SETSIZE && cores.size() < 4; ++c)
        if (CPU_ISSET(c, &all)) cores.push_back(c);
    halfbyte::Pool pool(static_cast<int>(cores.size()), cores.data());
    std::mt19937 random(seed);
    bool good = true;
    for (int i = 0; i < 20 && good; ++i) {
        cpu_set_t one;
        CPU_ZERO(&one);
        const int here = cores[random() % cores.size()];
        CPU_SET(here, &one);
        sched_setaffinity(0, sizeof one, &one);
        pool.make_room();
        std::vector<int> sorted = pool.cores();
        std::sort(sorted.begin(), sorted.end());
        if (pool.cores()[0] != here || !std::equal(sorted.begin(), sorted.end(), cores.begin())) {
            std::printf("the caller is on core %d, and the pool thinks on %d\n", here, pool.cores()[0]);
            good = false;
        }
        good = good && phases(pool, count / 100 + 1, seed + static_cast<unsigned>(i));
    }
    sched_setaffinity(0, sizeof all, &all);
    return good;
#else
    return count >= 0 || seed > 0;
#endif
}

}  // namespace

int main(int argc, char** argv) {
    const int threads = argc > 1 ? std::atoi(argv[1]) : 4, count = argc > 2 ? std::atoi(argv[2]) : 2000;
    const unsigned seed = argc > 3 ? static_cast<unsigned>(std::atoi(argv[3])) : 1;
    std::atomic<bool> stop{false};
    std::thread busy([&] { while (!stop.load(std::memory_order_relaxed)) {} });
    bool good = true;
    {
        halfbyte::Pool pool(threads, nullptr);
        good = phases(pool, count, seed) && wandering(count, seed);
        bool others[2] = {true, true};
        std::thread callers[2];
        for (int c = 0; c < 2; ++c)
            callers[c] = std::thread([&, c] {
                for (int i = 0; i < 20; ++i) {
                    std::lock_guard<std::mutex> hold(pool.lock);
                    others[c] = others[c] && phases(pool, count / 100 + 1, seed + 100u * static_cast<unsigned>(c + 1) + static_cast<unsigned>(i));
                }
            });
        for (auto& c : callers) c.join();
        good = good && others[0] && others[1];
    }
    const int32_t cores[] = {0, 0, -1, 100000};  // pinned to one core, not pinned, a core that is not there
    for (int i = 0; i < 50; ++i) {               // made and ended, with and without work
        halfbyte::Pool pool(1 + i % 4, i % 2 ? cores : nullptr);
        good = good && phases(pool, i % 3, seed + static_cast<unsigned>(i));
    }
    stop = true;
    busy.join();
    std::printf("%d threads, %d phases, seed %u: %s\n", threads, count, seed, good ? "every item ran once" : "WRONG");
    return good ? 0 : 1;
}
