#include "holder_table.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace shoal {
namespace {

constexpr int64_t FIRST_WORDS = 1;  // of each set of holders, at first
constexpr int64_t AHEAD = 8;        // digests whose ways are prefetched while one is looked up

template <typename Call>
void for_each_slot(const uint64_t* bits, int64_t num_words, Call call) {
    for (int64_t word = 0; word < num_words; ++word)
        for (uint64_t rest = bits[word]; rest; rest &= rest - 1) call(64 * word + __builtin_ctzll(rest));
}

}  // namespace

void HolderTable::Free::operator()(void* memory) const { std::free(memory); }

// The system provides zeroed pages on the first write, so an empty table takes no memory.
template <typename T>
HolderTable::Zeros<T> HolderTable::zeros() const {
    T* memory = static_cast<T*>(std::calloc(max_entries_, sizeof(T)));
    if (!memory) throw std::bad_alloc();
    return Zeros<T>(memory);
}

HolderTable::HolderTable(int64_t max_entries, int64_t digest_bytes)
    : max_entries_(max_entries),
      digest_bytes_(digest_bytes),
      set_mask_(max_entries / NUM_WAYS - 1),
      num_held_(64 * FIRST_WORDS),
      keys_(zeros<uint64_t>()),
      used_(zeros<uint64_t>()),
      holders_(zeros<uint32_t>()),
      sets_(FIRST_WORDS) {}

int64_t HolderTable::num_bytes() const {
    return max_entries_ * (sizeof(keys_[0]) + sizeof(used_[0]) + sizeof(holders_[0])) + sets_.num_bytes();
}

void HolderTable::add_slots() {
    sets_.add_words();
    num_held_.resize(2 * num_held_.size());
}

// Keys are odd: 0 marks a free way.
uint64_t HolderTable::key(const char* digests, int64_t number) const {
    uint64_t key;
    std::memcpy(&key, digests + number * digest_bytes_, sizeof(key));
    return key | 1;
}

int64_t HolderTable::find(uint64_t key) const {
    const int64_t first = first_way(key);
    const uint64_t* ways = keys_.get() + first;
    for (int64_t way = 0; way < NUM_WAYS; ++way)
        if (ways[way] == key) return first + way;
    return -1;
}

void HolderTable::prefetch(const char* digests, int64_t number, int64_t count) const {
    if (number >= count) return;
    const int64_t first = first_way(key(digests, number));
    for (int64_t way = 0; way < NUM_WAYS; way += 8) __builtin_prefetch(keys_.get() + first + way);
    for (int64_t way = 0; way < NUM_WAYS; way += 16) __builtin_prefetch(holders_.get() + first + way);
}

// First the known ones, then the new ones; of those with the same key only the first counts.
void HolderTable::hold(int64_t slot, const char* digests, int64_t count) {
    const uint64_t before = tick_;
    tick_ += count;
    std::vector<int64_t> unknown;
    for (int64_t i = 0; i < count; ++i) {
        prefetch(digests, i + AHEAD, count);
        const int64_t entry = find(key(digests, i));
        if (entry < 0) {
            unknown.push_back(i);
        } else if (used_[entry] <= before) {
            const uint32_t changed = sets_.change(holders_[entry], slot, true);
            num_held_[slot] += changed != holders_[entry];
            holders_[entry] = changed;
            used_[entry] = tick_ - i;
        }
    }
    for (const int64_t i : unknown)
        if (find(key(digests, i)) < 0) insert(key(digests, i), tick_ - i, slot);
}

void HolderTable::insert(uint64_t key, uint64_t tick, int64_t slot) {
    const int64_t first = first_way(key);
    const uint64_t* ways = keys_.get() + first;
    int64_t entry = first + (std::find(ways, ways + NUM_WAYS, 0) - ways);
    if (entry == first + NUM_WAYS) {
        const uint64_t* used = used_.get() + first;
        entry = first + (std::min_element(used, used + NUM_WAYS) - used);
        evict(entry);
    }
    keys_[entry] = key;
    used_[entry] = tick;
    holders_[entry] = sets_.change(0, slot, true);
    ++num_held_[slot];
    ++counts_.num_entries;
}

void HolderTable::evict(int64_t entry) {
    for_each_slot(sets_.bits(holders_[entry]), sets_.num_words(), [this](int64_t slot) { --num_held_[slot]; });
    sets_.drop(holders_[entry]);
    --counts_.num_entries;
    ++counts_.num_evicted;
}

void HolderTable::let_go(int64_t entry, int64_t slot) {
    const uint32_t changed = sets_.change(holders_[entry], slot, false);
    num_held_[slot] -= changed != holders_[entry];
    holders_[entry] = changed;
    if (changed) return;
    keys_[entry] = used_[entry] = 0;
    --counts_.num_entries;
}

void HolderTable::release(int64_t slot, const char* digests, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        prefetch(digests, i + AHEAD, count);
        const int64_t entry = find(key(digests, i));
        if (entry >= 0) let_go(entry, slot);
    }
}

void HolderTable::release_all(int64_t slot) {
    for (int64_t entry = 0; entry < max_entries_ && num_held_[slot]; ++entry)
        if (holders_[entry]) let_go(entry, slot);
}

// The first one becomes the most recently used.
void HolderTable::use(const char* digests, int64_t count) {
    for (int64_t i = count - 1; i >= 0; --i) {
        const int64_t entry = find(key(digests, i));
        if (entry >= 0) used_[entry] = tick_ + count - i;
    }
    tick_ += count;
}

void HolderTable::lengths(const char* digests, int64_t count, const uint64_t* also, int64_t* counts) const {
    const int64_t num_words = sets_.num_words();
    std::vector<uint64_t> alive(num_words, ~uint64_t{0});  // slots that hold all digests so far
    std::fill_n(counts, num_slots(), 0);
    uint32_t before = 0;
    for (int64_t i = 0; i < count; ++i) {
        prefetch(digests, i + AHEAD, count);
        const int64_t entry = find(key(digests, i));
        const uint32_t number = entry < 0 ? 0 : holders_[entry];
        if (!also && i && number == before) continue;
        before = number;
        uint64_t some = 0;
        for (int64_t word = 0; word < num_words; ++word) {
            const uint64_t held = sets_.bits(number)[word] | (also ? also[i * num_words + word] : 0);
            const uint64_t gone = alive[word] & ~held;
            if (i) for_each_slot(&gone, 1, [&](int64_t slot) { counts[64 * word + slot] = i; });
            some |= alive[word] &= held;
        }
        if (!some) return;
    }
    if (count) for_each_slot(alive.data(), num_words, [&](int64_t slot) { counts[slot] = count; });
}

const char* HolderTable::fault() const {
    std::vector<uint32_t> uses(sets_.num_numbers());
    std::vector<int64_t> num_held(num_held_.size());
    int64_t num_entries = 0;
    for (int64_t entry = 0; entry < max_entries_; ++entry) {
        const bool is_taken = keys_[entry];
        if (is_taken != (used_[entry] != 0) || is_taken != (holders_[entry] != 0)) return "an entry is half there";
        if (!is_taken) continue;
        if (find(keys_[entry]) != entry) return "an entry is not in its set, or is there twice";
        if (used_[entry] > tick_) return "a use is still to come";
        if (holders_[entry] >= uses.size()) return "holders are unknown";
        ++uses[holders_[entry]];
        ++num_entries;
        for_each_slot(sets_.bits(holders_[entry]), sets_.num_words(), [&](int64_t slot) { ++num_held[slot]; });
    }
    if (num_entries != counts_.num_entries) return "entries are miscounted";
    if (num_held != num_held_) return "what a slot holds is miscounted";
    return sets_.is_true(uses) ? nullptr : "sets of holders are miscounted";
}

}  // namespace shoal
