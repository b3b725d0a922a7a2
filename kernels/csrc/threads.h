// A team of threads that runs one step at a time: all threads walk through the same phases and share out their units.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace shoal {

// What a thread does that waits for another one without giving up its core.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Memory that is read soon.
struct Span {
    const char* data;
    int64_t bytes;
};

// `num_threads` threads, the caller being one. A phase ends when its units are done, not when every thread has come: one
// that waits for its core holds up nobody, unless it lost the core amid a unit. Helpers linger briefly after a step, then
// sleep. So an idle replica costs nothing, and two replicas on the same cores do not hold them against each other.
// A thread that waits reads ahead what it has been told it will need: memory is busy meanwhile.
class Team {
public:
    explicit Team(int num_threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return static_cast<int>(helpers_.size()) + 1; }
    // A number that differs once a unit more has begun; any thread may ask.
    uint64_t progress() const;

    // One thread's way through a step.
    class Member {
    public:
        int number() const { return number_; }
        // Calls work(i) for i in [0, count); returns when all are done. Unit i is meant for member i modulo their number,
        // and goes to another one that has nothing left to do. Who computes what never changes a result. Every member
        // must make the same sequence of calls.
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
            for (int i; (i = team_.claim(phase, count, number_)) >= 0; team_.finish(phase, count)) work(i);
            team_.await_end(phase, ahead_);
        }
        // From now on, waits for other threads go to reading this.
        void read_ahead(const Span& span) { ahead_ = span; }

    private:
        friend class Team;
        Member(Team& team, uint64_t phase, int number) : team_(team), phase_(phase), number_(number) {}
        Team& team_;
        uint64_t phase_;
        const int number_;
        Span ahead_{nullptr, 0};
    };

    // Runs body(member) in this thread and in the helpers that come in time; returns when all have left it. As long as
    // helpers linger, until the next step, they read `next`, in that order; it must outlive that. Null: nothing.
    void run(const std::function<void(Member&)>& body, const std::vector<Span>* next);

private:
    // Units meant for one member that have been taken: the phase, and how many of it in the lowest kUnitBits. Each on a
    // cache line of its own, so that taking one's own unit disturbs nobody.
    static constexpr int kUnitBits = 20;
    struct alignas(64) Share {
        std::atomic<uint64_t> taken{0};
    };

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
    alignas(64) std::atomic<int> done_{0};       // units of the phase
    alignas(64) std::atomic<unsigned> step_{0};
    alignas(64) std::atomic<unsigned> open_{0};  // the step that helpers may still enter; 0 for none
    alignas(64) std::atomic<int> inside_{0};     // helpers in body_, or about to see that it is closed
    std::atomic<bool> stopping_{false};
    const std::function<void(Member&)>* body_ = nullptr;
    const std::vector<Span>* next_ = nullptr;
    uint64_t first_phase_ = 0;  // of the open step
    int sleepers_ = 0;          // under mutex_
    std::mutex mutex_;
    std::condition_variable wake_;
};

}  // namespace shoal
