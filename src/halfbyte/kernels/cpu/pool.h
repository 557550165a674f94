// Worker threads for phases of a step. A phase is a number of items; whoever has time takes the next one, the calling
// thread included. A phase is over when all its items are done, not when all threads have arrived, so a worker that the
// system has put aside while it holds nothing delays nobody.
//
// The pool knows no order of items and promises none: what an item computes must not depend on who computes it or when.
// One phase at a time; a caller that shares a pool with others holds `lock` for as long as its phases last.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace halfbyte {

class Pool {
public:
    using Function = void (*)(void* context, int64_t item, int thread);

    // `cores`, where given, names the processor of each thread. The first is the caller's, which is not pinned: it goes
    // where the system puts it, and `make_room` has the worker of that core trade places with it.
    Pool(int threads, const int32_t* cores);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }  // the calling one included
    std::mutex lock;
    void make_room();  // before a step, by its caller
    const std::vector<int>& cores() const { return cores_; }  // of each thread; empty where nobody is pinned

    // All items of a phase, the calling thread as number 0. `f` is called as f(item, thread).
    template <class F>
    void run(int64_t items, F&& f) {
        using Body = std::remove_reference_t<F>;
        run_items(items, [](void* body, int64_t item, int thread) { (*static_cast<Body*>(body))(item, thread); },
                  const_cast<void*>(static_cast<const void*>(&f)));
    }

private:
    void run_items(int64_t items, Function, void* context);
    void run_phase(uint32_t items, Function, void* context);
    bool take(int thread);
    void work(int thread);
    void end();

    // Where the phase is: its number in the upper half, the items nobody has taken yet in the lower. One word, so that a
    // worker who arrives late cannot take anything of a phase that is over: nothing is left of it, and the exchange
    // fails as soon as the next one has begun.
    alignas(64) std::atomic<uint64_t> place_{0};
    alignas(64) std::atomic<uint32_t> done_{0};      // items of this phase
    std::atomic<uint32_t> caller_sleeps_{0};
    // The phase's own data; written while no item is to be had, believed once an item was taken.
    alignas(64) std::atomic<Function> function_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<uint32_t> items_{0};
    alignas(64) std::atomic<uint32_t> bell_{0};      // what sleeping workers watch
    std::atomic<uint32_t> sleepers_{0};
    std::atomic<bool> ending_{false};

    int threads_;
    std::vector<int> cores_;  // the caller's as it was last seen
    std::vector<std::thread> workers_;
};

}  // namespace halfbyte
