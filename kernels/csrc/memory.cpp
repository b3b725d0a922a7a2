#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

namespace shoal {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kArenaChunk = size_t{64} << 20;
constexpr size_t kAlignment = 64;

}  // namespace

Pages::Pages(size_t bytes) : size_(bytes) {
    if (bytes == 0) return;
    // The system provides a huge page only if the mapping includes all of it.
    if (bytes >= kHugePage / 8) size_ = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    mapped_size_ = size_ + kHugePage;  // room to align the beginning to a huge page
    mapped_ = mmap(nullptr, mapped_size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    const auto address = reinterpret_cast<uintptr_t>(mapped_);
    data_ = reinterpret_cast<void*>((address + kHugePage - 1) / kHugePage * kHugePage);
#if defined(MADV_HUGEPAGE)
    madvise(data_, size_, MADV_HUGEPAGE);  // only a hint: everything works without it, but slower
#endif
}

Pages::~Pages() {
    if (mapped_ != nullptr) munmap(mapped_, mapped_size_);
}

Pages::Pages(Pages&& other) noexcept
    : mapped_(std::exchange(other.mapped_, nullptr)),
      mapped_size_(std::exchange(other.mapped_size_, 0)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

Pages& Pages::operator=(Pages&& other) noexcept {
    std::swap(mapped_, other.mapped_);
    std::swap(mapped_size_, other.mapped_size_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

uint32_t* Arena::words(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(uint32_t) + kAlignment - 1) / kAlignment * kAlignment;
    if (chunks_.empty() || used_ + bytes > chunks_.back().size()) {
        chunks_.emplace_back(std::max(bytes, kArenaChunk));
        used_ = 0;
    }
    auto* piece = static_cast<char*>(chunks_.back().data()) + used_;
    used_ += bytes;
    return reinterpret_cast<uint32_t*>(piece);
}

float* thread_scratch(int64_t count) {
    static thread_local Buffer<float> scratch;
    scratch.reserve(count);
    return scratch.data();
}

}  // namespace shoal
