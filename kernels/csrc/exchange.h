// How the ranks that share each layer exchange their parts of what they sum or concatenate.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "memory.h"
#include "shoal_native.h"

namespace shoal {

// Every rank makes the same calls: it writes its part of `count` floats to mine(), calls publish(count), and then reads
// the parts of all ranks, which are valid until its next publish(). A sum costs one wait, and each rank adds the parts
// in the same order, so that all have the same numbers, to the bit.
class Exchange {
public:
    virtual ~Exchange() = default;
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

    const int rank, size;
    const int64_t capacity;  // floats per part

    virtual float* mine() = 0;
    // Called by one thread. Once a rank has failed to come, this and all later calls return at once.
    virtual void publish(int64_t count) = 0;
    virtual const float* part(int rank) const = 0;
    bool has_failed() const { return failed_.load(std::memory_order_relaxed); }

protected:
    explicit Exchange(const ShoalExchange& e) : rank(e.rank), size(e.size), capacity(e.capacity) {}
    std::atomic<bool> failed_{false};
};

// Throws std::invalid_argument if `exchange` is invalid.
std::unique_ptr<Exchange> make_exchange(const ShoalExchange& exchange);

}  // namespace shoal
