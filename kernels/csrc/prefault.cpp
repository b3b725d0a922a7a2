#include "prefault.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace shoal {

namespace {

constexpr int64_t kPiece = int64_t{2} << 20;  // a huge page
// Ahead of what is used, in all areas together: more than a burst of prompts writes, little beside weights.
constexpr int64_t kAhead = int64_t{128} << 20;
// Steps that follow one another leave less than this between them.
constexpr std::chrono::milliseconds kPatience{20};

}  // namespace

Prefault::Prefault(char* data, int64_t areas, int64_t area_bytes)
    : data_(data),
      areas_(areas),
      area_bytes_(area_bytes),
      ahead_(std::max(kPiece, kAhead / std::max<int64_t>(areas, 1))),
      thread_([this] { work(); }) {}

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
    ++uses_;
    used_ = std::max(used_, bytes);
}

void Prefault::end_use() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++uses_;
    if (sleeping_ && !is_done()) wake_.notify_one();
}

bool Prefault::is_done() const { return real_ >= std::min(area_bytes_, used_ + ahead_); }

bool Prefault::make_piece() const {
#if defined(MADV_POPULATE_WRITE)
    const int64_t area = next_ * area_bytes_, page = sysconf(_SC_PAGESIZE);
    const int64_t begin = (area + real_) / page * page, end = area + std::min(real_ + kPiece, area_bytes_);
    return madvise(data_ + begin, static_cast<size_t>(end - begin), MADV_POPULATE_WRITE) == 0;
#else
    return false;
#endif
}

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
        while (!stopping_ && uses_ == seen && seen % 2 == 0 && !is_done()) {
            lock.unlock();
            const bool made = make_piece();  // of what this thread alone changes
            lock.lock();
            if (!made) return;
            next_ = (next_ + 1) % areas_;
            if (next_ == 0) real_ = std::min(real_ + kPiece, area_bytes_);
        }
    }
}

}  // namespace shoal
