#include "threads.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "thread_name.h"

namespace shoal {

namespace {

constexpr int kSpins = 4000;  // tens of microseconds: longer than the gaps inside a step, shorter than a time slice

// The gap between two steps of one sequence. Waking a thread takes a tenth of that, and the step would wait for it.
constexpr std::chrono::microseconds kLinger{1000};

// Bytes read ahead between two checks of what is awaited, and between two offers of the core to other threads.
constexpr int64_t kPiece = 1 << 10;
constexpr int64_t kYieldPiece = 64 << 10;

// Reads from each cache line. Not by prefetches, which some processors drop while many are in flight.
template <class Condition>
void read_while(Span& span, const Condition& condition) {
    for (; span.bytes > 0 && condition(); span.data += kPiece, span.bytes -= kPiece)
        for (int64_t i = 0; i < std::min(kPiece, span.bytes); i += 64)
            asm volatile("" ::"r"(*reinterpret_cast<const volatile char*>(span.data + i)));
}

// After a short spin, the awaited thread is probably waiting for this core.
template <class Condition>
void await(const Condition& condition) {
    for (int spin = 0; !condition(); ++spin) spin < kSpins ? relax() : std::this_thread::yield();
}

}  // namespace

Team::Team(int num_threads) : shares_(static_cast<size_t>(num_threads)) {
    try {
        for (int i = 1; i < num_threads; ++i) {
            helpers_.emplace_back([this, i] { help(i); });
            name_thread(helpers_.back(), "shoal-helper");
        }
    } catch (...) {  // no more threads are to be had
        stop();
        throw;
    }
}

void Team::stop() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        step_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
}

Team::~Team() { stop(); }

uint64_t Team::progress() const {
    uint64_t taken = 0;
    for (const Share& share : shares_) taken += share.taken.load(std::memory_order_relaxed);
    return taken;
}

void Team::run(const std::function<void(Member&)>& body, const std::vector<Span>* next_read) {
    Member caller(*this, current_phase(), 0);
    if (helpers_.empty()) return body(caller);
    bool asleep;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        body_ = &body;
        next_ = next_read;
        first_phase_ = caller.phase_;
        unsigned next = step_.load(std::memory_order_relaxed) + 1;
        if (next == 0) next = 1;
        open_.store(next);
        step_.store(next, std::memory_order_release);
        asleep = sleepers_ > 0;
    }
    if (asleep) wake_.notify_all();
    body(caller);
    // Sequentially consistent, as in help(): either a helper sees that the step is closed, or it is seen inside.
    open_.store(0);
    await([&] { return inside_.load() == 0; });
    if (!has_failed_.exchange(false)) return;
    std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Team::linger(unsigned seen, int number, const std::vector<Span>* next) {
    const auto waits = [&] { return step_.load(std::memory_order_acquire) == seen; };
    const auto end = std::chrono::steady_clock::now() + kLinger;
    if (next != nullptr) {
        int64_t piece = 0;  // helpers take pieces in turn
        for (const Span& span : *next)
            for (int64_t begin = 0; begin < span.bytes; begin += kYieldPiece) {
                if (piece++ % static_cast<int64_t>(helpers_.size()) != number - 1) continue;
                Span part{span.data + begin, std::min(kYieldPiece, span.bytes - begin)};
                read_while(part, waits);
                if (!waits() || std::chrono::steady_clock::now() >= end) return;
                std::this_thread::yield();
            }
    }
    for (int spin = 0; spin < kSpins && waits(); ++spin) relax();
    while (waits() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

void Team::help(int number) {
    const std::vector<Span>* next = nullptr;
    for (unsigned seen = 0;;) {
        linger(seen, number, next);
        next = nullptr;
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
            Member member(*this, first_phase_, number);
            (*body_)(member);
            next = next_;
        }
        inside_.fetch_sub(1);
    }
}

void Team::fail() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_ == nullptr) failure_ = std::current_exception();
    has_failed_ = true;
}

int Team::claim(uint64_t phase, int count, int member) {
    constexpr uint64_t units = (uint64_t{1} << kUnitBits) - 1;
    for (int i = 0; i < size(); ++i) {
        const int owner = (member + i) % size();
        std::atomic<uint64_t>& taken = shares_[static_cast<size_t>(owner)].taken;
        // A count of an earlier phase means that no unit of this one has been taken; a later one's, that this one is
        // over.
        for (uint64_t seen = taken.load(std::memory_order_acquire); seen >> kUnitBits <= phase;) {
            const uint64_t now = seen >> kUnitBits == phase ? seen : phase << kUnitBits;
            const int unit = owner + static_cast<int>(now & units) * size();
            if (unit >= count) break;
            if (taken.compare_exchange_weak(seen, now + 1, std::memory_order_acq_rel, std::memory_order_acquire)) return unit;
        }
    }
    return -1;
}

void Team::finish(uint64_t phase, int count) {
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
    done_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
}

void Team::await_end(uint64_t phase, Span& ahead) {
    read_while(ahead, [&] { return current_phase() == phase; });
    await([&] { return current_phase() != phase; });
}

}  // namespace shoal
