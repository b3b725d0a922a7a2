#include "threads.h"

namespace shoal {

namespace {

constexpr int kSpins = 4000;  // tens of microseconds: longer than the gaps inside a step, shorter than a time slice

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Team::Team(int num_threads) {
    for (int i = 1; i < num_threads; ++i) helpers_.emplace_back([this] { help(); });
}

Team::~Team() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        step_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
}

void Team::run(const std::function<void()>& body) {
    if (helpers_.empty()) return body();
    bool asleep;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        body_ = &body;
        step_.fetch_add(1, std::memory_order_release);
        asleep = sleepers_ > 0;
    }
    if (asleep) wake_.notify_all();
    body();
    barrier();  // the helpers have left body
}

void Team::help() {
    for (unsigned seen = 0;;) {
        for (int spin = 0; spin < kSpins && step_.load(std::memory_order_acquire) == seen; ++spin) relax();
        if (step_.load(std::memory_order_acquire) == seen) {
            std::unique_lock<std::mutex> lock(mutex_);
            ++sleepers_;
            wake_.wait(lock, [&] { return step_.load(std::memory_order_relaxed) != seen; });
            --sleepers_;
        }
        ++seen;
        if (stopping_) return;
        (*body_)();
        barrier();
    }
}

void Team::barrier() {
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
        arrived_.store(0, std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int spin = 0; phase_.load(std::memory_order_acquire) == phase; ++spin) {
        // Past a short spin the missing thread is likely waiting for this core.
        spin < kSpins ? relax() : std::this_thread::yield();
    }
}

}  // namespace shoal
