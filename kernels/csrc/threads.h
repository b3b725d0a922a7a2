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

// `num_threads` threads, the caller being one. A phase ends when its units are done, not when every thread has come: one
// that waits for its core holds up nobody, unless it lost the core amid a unit. Helpers linger briefly after a step, then
// sleep. So an idle replica costs nothing, and two replicas on the same cores do not hold them against each other.
class Team {
public:
    explicit Team(int num_threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return static_cast<int>(helpers_.size()) + 1; }
    // A number that differs once a unit more has begun; any thread may ask.
    uint64_t progress() const { return turn_.load(std::memory_order_relaxed); }

    // One thread's way through a step.
    class Member {
    public:
        // Calls work(i) for i in [0, count), each in whichever thread comes first; returns when all are done. Who
        // computes what never changes a result. Every member must make the same sequence of calls.
        template <class Work>
        void parallel_for(int count, const Work& work) {
            if (team_.helpers_.empty()) {
                for (int i = 0; i < count; ++i) {
                    team_.turn_.store(team_.progress() + 1, std::memory_order_relaxed);
                    work(i);
                }
                return;
            }
            if (count == 0) return;
            const uint32_t phase = phase_++;
            for (int i; (i = team_.claim(phase, count)) >= 0; team_.finish(phase, count)) work(i);
            team_.await_end(phase);
        }

    private:
        friend class Team;
        Member(Team& team, uint32_t phase) : team_(team), phase_(phase) {}
        Team& team_;
        uint32_t phase_;
    };

    // Runs body(member) in this thread and in the helpers that come in time; returns when all have left it.
    void run(const std::function<void(Member&)>& body);

private:
    int claim(uint32_t phase, int count);   // a unit, or -1 when none is left or the phase is over
    void finish(uint32_t phase, int count);
    void await_end(uint32_t phase);
    uint32_t current_phase() const { return static_cast<uint32_t>(turn_.load(std::memory_order_acquire) >> 32); }
    void help();

    std::vector<std::thread> helpers_;
    // Each on its own cache line: threads write one while others spin on another.
    alignas(64) std::atomic<uint64_t> turn_{0};  // the phase, and its next unit in the lower half
    alignas(64) std::atomic<int> done_{0};       // units of the phase
    alignas(64) std::atomic<unsigned> step_{0};
    alignas(64) std::atomic<unsigned> open_{0};  // the step that helpers may still enter; 0 for none
    alignas(64) std::atomic<int> inside_{0};     // helpers in body_, or about to see that it is closed
    std::atomic<bool> stopping_{false};
    const std::function<void(Member&)>* body_ = nullptr;
    uint32_t first_phase_ = 0;  // of the open step
    int sleepers_ = 0;          // under mutex_
    std::mutex mutex_;
    std::condition_variable wake_;
};

}  // namespace shoal
