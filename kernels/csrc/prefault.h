// Memory that is real before it is first written.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace shoal {

// Several areas of one size, one after the other, each used from its beginning on: a thread has the system make pages of
// what comes next, once it has been used at all and while nobody uses it. A huge page takes 0.1 ms to clear, and under
// virtualisation, where the host has to find it first, up to 7: those who write it first would wait for that, in each layer
// of a step. Where the system cannot be asked (Linux before 5.14), pages are made by their first use as ever.
class Prefault {
public:
    // `data` is where a huge page begins.
    Prefault(char* data, int64_t areas, int64_t area_bytes);
    ~Prefault();
    Prefault(const Prefault&) = delete;
    Prefault& operator=(const Prefault&) = delete;

    // As long as it lives no page is begun; so many bytes of each area are in use from now on. One at a time.
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
    bool make_page() const;  // the next one; whether the system did
    bool is_done() const { return real_ >= wanted_ || has_failed_; }

    char* const data_;
    const int64_t areas_, area_bytes_;
    std::mutex mutex_;  // over all that follows
    std::condition_variable wake_;
    // Pages are made in rounds: in each, of every area the one with its byte real_; next_ is the area whose turn it is.
    int64_t wanted_ = 0, real_ = 0, next_ = 0;
    uint64_t uses_ = 0;  // begun and ended: odd within one
    bool sleeping_ = false, stopping_ = false, has_failed_ = false;
    std::thread thread_;  // the last: it uses the rest
};

}  // namespace shoal
