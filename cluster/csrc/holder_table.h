// Which slots hold which blocks, laid out like a processor's cache. See its twin, policies/holder_table.py.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "holder_sets.h"
#include "shoal_placement.h"

namespace shoal {

// A part of a key selects a set of ways; a new key replaces the least recently used entry of a full set.
class HolderTable {
  public:
    static constexpr int64_t NUM_WAYS = 32;

    HolderTable(int64_t max_entries, int64_t digest_bytes);

    const ShoalCounts& counts() const { return counts_; }
    int64_t num_bytes() const;
    int64_t num_slots() const { return num_held_.size(); }
    int64_t num_held(int64_t slot) const { return num_held_[slot]; }

    void add_slots();
    void hold(int64_t slot, const char* digests, int64_t count);
    void release(int64_t slot, const char* digests, int64_t count);
    void release_all(int64_t slot);
    void use(const char* digests, int64_t count);
    void lengths(const char* digests, int64_t count, const uint64_t* also, int64_t* counts) const;
    const char* fault() const;

  private:
    struct Free {
        void operator()(void* memory) const;
    };
    template <typename T>
    using Zeros = std::unique_ptr<T[], Free>;
    template <typename T>
    Zeros<T> zeros() const;

    uint64_t key(const char* digests, int64_t number) const;
    int64_t first_way(uint64_t key) const { return (key >> 1 & set_mask_) * NUM_WAYS; }
    // The entry of a key; -1 if it is not in the table.
    int64_t find(uint64_t key) const;
    void prefetch(const char* digests, int64_t number, int64_t count) const;
    void insert(uint64_t key, uint64_t tick, int64_t slot);
    void evict(int64_t entry);
    void let_go(int64_t entry, int64_t slot);

    int64_t max_entries_, digest_bytes_;
    uint64_t set_mask_, tick_ = 0;
    ShoalCounts counts_ = {0, 0};
    std::vector<int64_t> num_held_;
    Zeros<uint64_t> keys_;  // 0: the way is free
    Zeros<uint64_t> used_;  // tick of the last use
    Zeros<uint32_t> holders_;
    HolderSets sets_;
};

}  // namespace shoal
