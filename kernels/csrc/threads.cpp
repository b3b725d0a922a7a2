#include "threads.h"

#include <chrono>

namespace shoal {

namespace {

constexpr int kSpins = 4000;  // tens of microseconds: longer than the gaps inside a step, shorter than a time slice

// What lies between two steps of one sequence; to be woken takes a tenth of that, and the step waits.
constexpr std::chrono::microseconds kLinger{600};

// Past a short spin the awaited thread is likely waiting for this core.
template <class Condition>
void await(const Condition& condition) {
    for (int spin = 0; !condition(); ++spin) spin < kSpins ? relax() : std::this_thread::yield();
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

void Team::run(const std::function<void(Member&)>& body) {
    Member caller(*this, current_phase());
    if (helpers_.empty()) return body(caller);
    bool asleep;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        body_ = &body;
        first_phase_ = caller.phase_;
        unsigned next = step_.load(std::memory_order_relaxed) + 1;
        if (next == 0) next = 1;
        open_.store(next);
        step_.store(next, std::memory_order_release);
        asleep = sleepers_ > 0;
    }
    if (asleep) wake_.notify_all();
    body(caller);
    // Sequentially consistent, as in help(): either a helper sees the door closed, or it is seen inside.
    open_.store(0);
    await([&] { return inside_.load() == 0; });
}

void Team::help() {
    for (unsigned seen = 0;;) {
        const auto waits = [&] { return step_.load(std::memory_order_acquire) == seen; };
        for (int spin = 0; spin < kSpins && waits(); ++spin) relax();
        for (const auto end = std::chrono::steady_clock::now() + kLinger; waits() && std::chrono::steady_clock::now() < end;)
            std::this_thread::yield();
        if (step_.load(std::memory_order_acquire) == seen) {
            std::unique_lock<std::mutex> lock(mutex_);
            ++sleepers_;
            wake_.wait(lock, [&] { return step_.load(std::memory_order_relaxed) != seen; });
            --sleepers_;
        }
        seen = step_.load(std::memory_order_acquire);
        if (stopping_) return;
        inside_.fetch_add(1);
        if (open_.load() == seen) {
            Member member(*this, first_phase_);
            (*body_)(member);
        }
        inside_.fetch_sub(1);
    }
}

int Team::claim(uint32_t phase, int count) {
    uint64_t turn = turn_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(turn >> 32) == phase && static_cast<int>(turn & 0xffffffffu) < count)
        if (turn_.compare_exchange_weak(turn, turn + 1, std::memory_order_acq_rel, std::memory_order_acquire))
            return static_cast<int>(turn & 0xffffffffu);
    return -1;
}

void Team::finish(uint32_t phase, int count) {
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
    done_.store(0, std::memory_order_relaxed);
    turn_.store(static_cast<uint64_t>(phase + 1) << 32, std::memory_order_release);
}

void Team::await_end(uint32_t phase) {
    await([&] { return current_phase() != phase; });
}

}  // namespace shoal
