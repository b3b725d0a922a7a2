// Memory in huge pages where the system grants them: with 4 KiB pages under virtualisation, address translation halves
// the speed at which weights stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shoal {

// Zeroed pages directly from the system, which are backed by memory only when first touched.
class Pages {
public:
    explicit Pages(size_t bytes);
    ~Pages();
    Pages(Pages&& other) noexcept;
    Pages& operator=(Pages&& other) noexcept;

    void* data() const { return data_; }
    size_t size() const { return size_; }

private:
    void* mapped_ = nullptr;
    size_t mapped_size_ = 0;
    void* data_ = nullptr;
    size_t size_ = 0;
};

// Hands out zeroed, 64-byte-aligned pieces that are all freed together, so that small matrices share huge pages.
class Arena {
public:
    uint32_t* words(int64_t count);

private:
    std::vector<Pages> chunks_;
    size_t used_ = 0;  // bytes used in the last chunk
};

// Scratch memory of a step: grows to the largest size requested, without keeping its contents.
template <class T>
class Buffer {
public:
    void reserve(int64_t count) {
        const size_t bytes = static_cast<size_t>(count) * sizeof(T);
        if (bytes > pages_.size()) pages_ = Pages(bytes + bytes / 4);
    }
    T* data() const { return static_cast<T*>(pages_.data()); }

private:
    Pages pages_{0};
};

// At least `count` values for the calling thread alone, valid until its next call. Not inline: code that is compiled
// for one instruction set must not be used by the others.
float* thread_scratch(int64_t count);

}  // namespace shoal
