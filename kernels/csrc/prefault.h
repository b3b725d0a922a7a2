// Memory whose pages exist before they are first written.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace shoal {

// Several areas of the same size, one after the other, each used from its beginning on. A thread has the system make
// the pages that will be needed next, once the memory has been used at all, and only while it is not in use. A huge
// page takes 0.1 ms to clear, and under virtualisation, where the host has to find it first, up to 7 ms; the first
// write would wait for that, in each layer of a step. If the system does not support it (Linux before 5.14), pages are
// made on first use as usual.
class Prefault {
public:
    // `data` must be aligned to a huge page.
    Prefault(char* data, int64_t areas, int64_t area_bytes);
    ~Prefault();
    Prefault(const Prefault&) = delete;
    Prefault& operator=(const Prefault&) = delete;

    // While it lives, no page is begun. The first `bytes` of each area count as used from now on.
    class Use {
    public:
        Use(Prefault& memory, int64_t bytes) : memory_(memory) { memory_.begin_use(bytes); }
        ~Use() { memory_.end_use(); }
        Use(const Use&) = delete;
        Use& operator=(const Use&) = delete;

    private:
        Prefault& memory_;
    };

private:
    void begin_use(int64_t bytes);
    void end_use();
    void work();
    bool make_page() const;  // makes the next page; returns whether the system did
    bool is_done() const { return real_ >= wanted_ || has_failed_; }

    char* const data_;
    const int64_t areas_, area_bytes_;
    std::mutex mutex_;  // guards everything below
    std::condition_variable wake_;
    // Pages are made in rounds: each round makes, in every area, the page with byte real_; next_ is the next area.
    int64_t wanted_ = 0, real_ = 0, next_ = 0;
    uint64_t uses_ = 0;  // begun plus ended
    int users_ = 0;      // begun and not ended
    bool sleeping_ = false, stopping_ = false, has_failed_ = false;
    std::thread thread_;  // last, because it uses the other members
};

}  // namespace shoal
