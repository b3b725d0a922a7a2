// A team of threads that runs one step at a time: all threads go through the same phases and share their units.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace shoal {

// For a thread that waits for another one without giving up its core.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Memory that will be read soon.
struct Span {
    const char* data;
    int64_t bytes;
};

// `num_threads` threads, one of which is the caller. A phase ends when its units are done, not when every thread has
// arrived: a thread that waits for its core does not hold up the others, unless it lost the core in the middle of a
// unit. Helpers linger briefly after a step, then sleep, so that an idle replica costs nothing and two replicas on the
// same cores do not keep these from each other. A thread that waits reads ahead what it has been told it will need, so
// that memory stays busy.
class Team {
public:
    explicit Team(int num_threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return static_cast<int>(helpers_.size()) + 1; }
    // A number that changes whenever another unit has begun; any thread may call it.
    uint64_t progress() const;

    // One thread's participation in a step.
    class Member {
    public:
        int number() const { return number_; }
        // Calls work(i) for i in [0, count); returns when all are done. Unit i is meant for member i modulo their
        // number, but another member that has nothing left to do may take it; this must not change any result. Every
        // member must make the same sequence of calls.
        template <class Work>
        void parallel_for(int count, const Work& work) {
            if (team_.helpers_.empty()) {
                for (int i = 0; i < count; ++i) {
                    team_.shares_[0].taken.store(team_.progress() + 1, std::memory_order_relaxed);
                    work(i);
                }
                return;
            }
            if (count == 0) return;
            const uint64_t phase = phase_++;
            for (int i; (i = team_.claim(phase, count, number_)) >= 0; team_.finish(phase, count)) {
                if (team_.has_failed_.load(std::memory_order_relaxed)) continue;  // others wait for its end
                try {
                    work(i);
                } catch (...) {
                    team_.fail();
                }
            }
            team_.await_end(phase, ahead_);
        }
        // From now on, time spent waiting for other threads is used to read this.
        void read_ahead(const Span& span) { ahead_ = span; }

    private:
        friend class Team;
        Member(Team& team, uint64_t phase, int number) : team_(team), phase_(phase), number_(number) {}
        Team& team_;
        uint64_t phase_;
        const int number_;
        Span ahead_{nullptr, 0};
    };

    // Runs body(member) in this thread and in the helpers that arrive in time; returns when all have left it. While
    // helpers linger before the next step, they read `next`, in that order; it must stay valid until then. Null:
    // nothing.
    void run(const std::function<void(Member&)>& body, const std::vector<Span>* next);

private:
    // The units meant for one member that have been taken: the phase, and their number in the lowest kUnitBits bits.
    // Each is on its own cache line, so that a member that takes its own units does not disturb others.
    static constexpr int kUnitBits = 20;
    struct alignas(64) Share {
        std::atomic<uint64_t> taken{0};
    };

    void stop();
    void fail();  // keeps the present exception, for run() to throw
    int claim(uint64_t phase, int count, int member);  // a unit, or -1 when none is left or the phase is over
    void finish(uint64_t phase, int count);
    void await_end(uint64_t phase, Span& ahead);
    uint64_t current_phase() const { return phase_.load(std::memory_order_acquire); }
    void help(int number);
    void linger(unsigned seen, int number, const std::vector<Span>* next);

    std::vector<std::thread> helpers_;
    std::vector<Share> shares_;
    // Each on its own cache line: threads write one while others spin on another.
    alignas(64) std::atomic<uint64_t> phase_{1};
    alignas(64) std::atomic<int> done_{0};       // finished units of the phase
    alignas(64) std::atomic<unsigned> step_{0};
    alignas(64) std::atomic<unsigned> open_{0};  // the step that helpers may still enter; 0 for none
    alignas(64) std::atomic<int> inside_{0};     // helpers in body_, or about to see that it is closed
    std::atomic<bool> stopping_{false}, has_failed_{false};
    std::exception_ptr failure_;  // of the step, under mutex_
    const std::function<void(Member&)>* body_ = nullptr;
    const std::vector<Span>* next_ = nullptr;
    uint64_t first_phase_ = 0;  // of the open step
    int sleepers_ = 0;          // under mutex_
    std::mutex mutex_;
    std::condition_variable wake_;
};

}  // namespace shoal
