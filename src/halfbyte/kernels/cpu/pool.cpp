// The thread pool: see pool.h. Waiting spins for a bounded while, then sleeps, so that a second process on the machine gets
// its turn and an idle server costs nothing.
#include "pool.h"

#include <chrono>
#include <utility>

#if defined(__linux__)
#include <climits>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#endif

namespace halfbyte {
namespace {

// A worker bridges the caller's work between two phases and a short pause between two steps; the caller waits for items
// that are some tens of microseconds long. Past that somebody was put aside, and a free core helps most.
constexpr std::chrono::microseconds WORKER_SPIN{60}, CALLER_SPIN{40};
constexpr uint64_t ONE_PHASE = uint64_t{1} << 32, ITEMS_LEFT = ONE_PHASE - 1;
constexpr int64_t MOST_ITEMS = int64_t{1} << 30;  // that would be a mistake of the caller's; it pays for it alone

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// True as soon as `ready` is; false when the time is up.
template <class Ready>
bool spin(std::chrono::microseconds limit, Ready ready) {
    const auto end = std::chrono::steady_clock::now() + limit;
    do {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

#if defined(__linux__)
// Sleeps unless `word` has changed from `seen`; may return for no reason.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
void wake(std::atomic<uint32_t>& word, int count) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}
#else
std::mutex sleep_mutex;
std::condition_variable sleep_condition;
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
    std::unique_lock<std::mutex> hold(sleep_mutex);
    if (word.load() == seen) sleep_condition.wait(hold);
}
void wake(std::atomic<uint32_t>&, int) {
    { std::lock_guard<std::mutex> hold(sleep_mutex); }
    sleep_condition.notify_all();
}
#endif

void pin(std::thread& thread, int core) {
#if defined(__linux__)
    cpu_set_t* set = CPU_ALLOC(core + 1);
    if (!set) return;
    const size_t size = CPU_ALLOC_SIZE(core + 1);
    CPU_ZERO_S(size, set);
    CPU_SET_S(core, size, set);
    pthread_setaffinity_np(thread.native_handle(), size, set);  // a core that is not ours: the thread stays where it is
    CPU_FREE(set);
#else
    (void)thread, (void)core;
#endif
}

}  // namespace

Pool::Pool(int threads, const int32_t* cores) : threads_(threads < 1 ? 1 : threads) {
    if (cores) cores_.assign(cores, cores + threads_);
    workers_.reserve(static_cast<size_t>(threads_ - 1));
    try {
        for (int i = 1; i < threads_; ++i) {
            workers_.emplace_back([this, i] { work(i); });
            if (cores && cores[i] >= 0) pin(workers_.back(), cores[i]);
        }
    } catch (...) {  // the system gives no more threads: those that run are ended first
        end();
        throw;
    }
}

Pool::~Pool() { end(); }

// Beside a busy neighbour the system moves the caller away from it, onto a core that may be a worker's: two threads of a
// step would share one core while the neighbour's other half stays empty.
void Pool::make_room() {
#if defined(__linux__)
    if (cores_.empty()) return;
    const int here = sched_getcpu();
    if (here < 0 || here == cores_[0]) return;
    for (int i = 1; i < threads_; ++i)
        if (cores_[static_cast<size_t>(i)] == here) {
            std::swap(cores_[0], cores_[static_cast<size_t>(i)]);
            pin(workers_[static_cast<size_t>(i - 1)], cores_[static_cast<size_t>(i)]);
            return;
        }
#endif
}

void Pool::end() {
    ending_.store(true);
    bell_.fetch_add(1);
    wake(bell_, INT32_MAX);
    for (auto& w : workers_) w.join();
}

// One item, if there is one.
bool Pool::take(int thread) {
    uint64_t place = place_.load(std::memory_order_acquire);
    for (;;) {
        const uint32_t left = static_cast<uint32_t>(place & ITEMS_LEFT);
        if (left == 0) return false;
        // These may belong to the next phase already; then the exchange fails and they are forgotten.
        const Function function = function_.load(std::memory_order_relaxed);
        void* const context = context_.load(std::memory_order_relaxed);
        const uint32_t items = items_.load(std::memory_order_relaxed);
        if (place_.compare_exchange_weak(place, place - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
            function(context, static_cast<int64_t>(items - left), thread);
            // Once the last item is counted the phase may end and this thread must not touch it again.
            if (done_.fetch_add(1, std::memory_order_seq_cst) + 1 == items &&
                caller_sleeps_.load(std::memory_order_seq_cst))
                wake(done_, 1);
            return true;
        }
    }
}

void Pool::run_items(int64_t items, Function function, void* context) {
    if (threads_ == 1 || items <= 1 || items > MOST_ITEMS) {
        for (int64_t i = 0; i < items; ++i) function(context, i, 0);
        return;
    }
    run_phase(static_cast<uint32_t>(items), function, context);
}

void Pool::run_phase(uint32_t items, Function function, void* context) {
    function_.store(function, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    items_.store(items, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t before = place_.load(std::memory_order_relaxed);
    place_.store((before & ~ITEMS_LEFT) + ONE_PHASE + items, std::memory_order_seq_cst);
    const uint32_t sleepers = sleepers_.load(std::memory_order_seq_cst);
    if (sleepers > 0) {
        bell_.fetch_add(1, std::memory_order_seq_cst);
        wake(bell_, static_cast<int>(sleepers < items - 1 ? sleepers : items - 1));
    }
    while (take(0)) {}
    const auto over = [&] { return done_.load(std::memory_order_acquire) == items; };
    if (over() || spin(CALLER_SPIN, over)) return;
    caller_sleeps_.store(1, std::memory_order_seq_cst);
    for (uint32_t seen; (seen = done_.load(std::memory_order_seq_cst)) != items;) sleep_on(done_, seen);
    caller_sleeps_.store(0, std::memory_order_relaxed);
}

void Pool::work(int thread) {
    const auto something = [&] {
        return (place_.load(std::memory_order_acquire) & ITEMS_LEFT) != 0 || ending_.load(std::memory_order_relaxed);
    };
    for (;;) {
        while (take(thread)) {}
        if (ending_.load()) return;
        if (spin(WORKER_SPIN, something)) continue;
        const uint32_t seen = bell_.load(std::memory_order_seq_cst);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        // Whoever begins a phase after this line rings; whoever began one before it is seen here.
        if ((place_.load(std::memory_order_seq_cst) & ITEMS_LEFT) == 0 && !ending_.load()) sleep_on(bell_, seen);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
}

}  // namespace halfbyte
