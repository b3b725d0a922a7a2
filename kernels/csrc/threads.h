// A team of threads that runs one step at a time, all of it in each thread, with barriers inside.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace shoal {

// `num_threads` threads, the caller being one. Helpers spin briefly after a step, then sleep: an idle replica costs
// nothing, and two replicas on the same cores do not hold them against each other.
class Team {
public:
    explicit Team(int num_threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return static_cast<int>(helpers_.size()) + 1; }

    // Runs body() in every thread; returns when all are done.
    void run(const std::function<void()>& body);

    // Inside run: calls work(i) for i in [0, count), each in whichever thread comes first, then waits for all threads.
    // Who computes what never changes a result. Every thread must make the same sequence of calls.
    template <class Work>
    void parallel_for(int count, const Work& work) {
        if (helpers_.empty()) {
            for (int i = 0; i < count; ++i) work(i);
            return;
        }
        for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
        barrier();
    }

private:
    void barrier();
    void help();

    std::vector<std::thread> helpers_;
    // Each on its own cache line: threads write one while others spin on another.
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> phase_{0};
    alignas(64) std::atomic<unsigned> step_{0};
    std::atomic<bool> stopping_{false};
    const std::function<void()>* body_ = nullptr;
    int sleepers_ = 0;  // under mutex_
    std::mutex mutex_;
    std::condition_variable wake_;
};

}  // namespace shoal
