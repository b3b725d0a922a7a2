#include "prefault.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>

#include "thread_name.h"

#if defined(__linux__) && !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23  // the kernel may support it even if the C library does not define it
#endif

namespace shoal {

namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
// How far ahead of the used memory pages are made: in all areas together, and the least in each one, give or take a
// page per area. More than a burst of prompts writes, but little compared to the weights.
constexpr int64_t kAhead = int64_t{128} << 20, kLeastAhead = 2 * kHugePage;
// The gap between consecutive steps is shorter than this.
constexpr std::chrono::milliseconds kPatience{20};

}  // namespace

Prefault::Prefault(char* data, int64_t areas, int64_t area_bytes)
    : data_(data), areas_(areas), area_bytes_(area_bytes), thread_([this] { work(); }) {
    name_thread(thread_, "shoal-pages");
}

Prefault::~Prefault() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_one();
    thread_.join();
}

void Prefault::begin_use(int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++uses_, ++users_;
    wanted_ = std::max(wanted_, std::min(area_bytes_, bytes + std::max(kLeastAhead, kAhead / areas_)));
}

void Prefault::end_use() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++uses_, --users_;
    if (sleeping_ && !is_done()) wake_.notify_one();
}

bool Prefault::make_page() const {
#if defined(MADV_POPULATE_WRITE)
    const int64_t begin = (next_ * area_bytes_ + real_) / kHugePage * kHugePage;
    const int64_t bytes = std::min(kHugePage, areas_ * area_bytes_ - begin);
    return madvise(data_ + begin, static_cast<size_t>(bytes), MADV_POPULATE_WRITE) == 0;
#else
    return false;
#endif
}

// Runs at normal priority: if this thread were preempted in the middle of a page, it would keep other threads from
// changing the process's memory map.
void Prefault::work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_) {
        sleeping_ = is_done();
        if (sleeping_) {
            wake_.wait(lock);
            continue;
        }
        const uint64_t seen = uses_;
        wake_.wait_for(lock, kPatience, [&] { return stopping_; });
        while (!stopping_ && uses_ == seen && users_ == 0 && !is_done()) {
            lock.unlock();
            const bool made = make_page();  // only this thread changes real_ and next_
            lock.lock();
            has_failed_ = !made;
            next_ = (next_ + 1) % areas_;
            if (next_ == 0) real_ += kHugePage;
        }
    }
}

}  // namespace shoal
