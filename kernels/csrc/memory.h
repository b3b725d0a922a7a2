// Memory in huge pages where the system grants them: with 4 KiB pages under virtualisation, address translation halves
// the speed at which weights stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shoal {

// Zeroed pages straight from the system, which become real memory only when first touched.
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

// Hands out 64-byte-aligned zeroed pieces, freed all together: small matrices share huge pages.
class Arena {
public:
    uint32_t* words(int64_t count);

private:
    std::vector<Pages> chunks_;
    size_t used_ = 0;  // bytes of the last chunk
};

// A step's scratch: grows to the largest size asked, keeping nothing.
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

// At least `count` values of the calling thread's own, until it asks again. Not inline: what is compiled for one instruction
// set alone must not serve the others.
float* thread_scratch(int64_t count);

}  // namespace shoal
