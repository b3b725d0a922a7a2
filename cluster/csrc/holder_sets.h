// Sets of slots, each stored once and shared by many entries of a table. See its twin, policies/holder_sets.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_set>
#include <vector>

namespace shoal {

// Number -> a set of slots as bits; 0 is the empty set. A set without entries is forgotten and its number used again.
class HolderSets {
  public:
    explicit HolderSets(int64_t num_words);
    HolderSets(const HolderSets&) = delete;
    HolderSets& operator=(const HolderSets&) = delete;

    int64_t num_words() const { return num_words_; }
    int64_t num_bytes() const;
    const uint64_t* bits(uint32_t number) const { return bits_.data() + static_cast<int64_t>(number) * num_words_; }
    bool has(uint32_t number, int64_t slot) const { return bits(number)[slot / 64] >> (slot % 64) & 1; }
    size_t num_numbers() const { return uses_.size(); }
    bool is_true(const std::vector<uint32_t>& uses) const;

    // Adds `slot` to the holders of an entry of set `number`, or removes it. Returns the entry's new number.
    uint32_t change(uint32_t number, int64_t slot, bool is_held);
    // An entry of set `number` is gone.
    void drop(uint32_t number);
    void add_words();

  private:
    static constexpr uint32_t PROBE = 1;  // the row in which a set is composed before it has a number

    struct Hash {
        const HolderSets* sets;
        size_t operator()(uint32_t number) const;
    };
    struct Equal {
        const HolderSets* sets;
        bool operator()(uint32_t a, uint32_t b) const;
    };
    using Numbers = std::unordered_set<uint32_t, Hash, Equal>;

    uint64_t* row(uint32_t number) { return bits_.data() + static_cast<int64_t>(number) * num_words_; }
    uint32_t number_of_probe();

    int64_t num_words_;
    std::vector<uint64_t> bits_;
    std::vector<uint32_t> uses_, free_;
    Numbers numbers_;
    // The last change, as a cache: blocks come in runs that had the same set and get the same new one.
    struct {
        uint32_t from, to;
        int64_t slot;
    } last_ = {0, 0, -1};
};

}  // namespace shoal
