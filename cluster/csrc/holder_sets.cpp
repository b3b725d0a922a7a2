#include "holder_sets.h"

#include <algorithm>

namespace shoal {

HolderSets::HolderSets(int64_t num_words)
    : num_words_(num_words),
      bits_(2 * num_words),
      uses_(2),
      numbers_(8, Hash{this}, Equal{this}) {
    numbers_.insert(0);
}

size_t HolderSets::Hash::operator()(uint32_t number) const {
    uint64_t hash = 0;
    const uint64_t* words = sets->bits(number);
    for (int64_t i = 0; i < sets->num_words_; ++i) {
        hash = (hash ^ words[i]) * 0x9e3779b97f4a7c15;
        hash ^= hash >> 32;
    }
    return hash;
}

bool HolderSets::Equal::operator()(uint32_t a, uint32_t b) const {
    return std::equal(sets->bits(a), sets->bits(a) + sets->num_words_, sets->bits(b));
}

int64_t HolderSets::num_bytes() const {
    const size_t of_numbers = numbers_.bucket_count() * sizeof(void*) + numbers_.size() * 4 * sizeof(void*);
    return bits_.capacity() * sizeof(uint64_t) + (uses_.capacity() + free_.capacity()) * sizeof(uint32_t) + of_numbers;
}

uint32_t HolderSets::change(uint32_t number, int64_t slot, bool is_held) {
    if (has(number, slot) == is_held) return number;
    // No need to compare `is_held`: whether the slot is added or removed follows from the set itself.
    if (last_.slot != slot || last_.from != number) {
        std::copy_n(bits(number), num_words_, row(PROBE));
        row(PROBE)[slot / 64] ^= uint64_t{1} << (slot % 64);
        last_ = {number, number_of_probe(), slot};
    }
    const uint32_t changed = last_.to;
    ++uses_[changed];
    if (number) drop(number);
    return changed;
}

void HolderSets::drop(uint32_t number) {
    if (--uses_[number]) return;
    if (number == last_.from || number == last_.to) last_.slot = -1;  // an eviction may come between two changes
    free_.push_back(number);
    numbers_.erase(number);
    std::fill_n(row(number), num_words_, 0);
}

uint32_t HolderSets::number_of_probe() {
    const auto known = numbers_.find(PROBE);
    if (known != numbers_.end()) return *known;
    uint32_t number;
    if (free_.empty()) {
        number = uses_.size();
        uses_.push_back(0);
        bits_.resize(bits_.size() + num_words_);
    } else {
        number = free_.back();
        free_.pop_back();
    }
    std::copy_n(bits(PROBE), num_words_, row(number));
    numbers_.insert(number);
    return number;
}

void HolderSets::add_words() {
    const std::vector<uint32_t> numbers(numbers_.begin(), numbers_.end());
    numbers_.clear();
    std::vector<uint64_t> wider(2 * bits_.size());
    for (size_t number = 0; number < uses_.size(); ++number)
        std::copy_n(bits(number), num_words_, wider.data() + number * 2 * num_words_);
    bits_ = std::move(wider);
    num_words_ *= 2;
    numbers_.insert(numbers.begin(), numbers.end());
}

bool HolderSets::is_true(const std::vector<uint32_t>& uses) const {
    for (size_t number = PROBE + 1; number < uses_.size(); ++number) {
        if (uses_[number] != uses[number]) return false;
        const bool is_known = uses[number] && numbers_.count(number) && *numbers_.find(number) == number;
        const bool is_free = std::find(free_.begin(), free_.end(), number) != free_.end();
        const bool is_empty = std::all_of(bits(number), bits(number) + num_words_, [](uint64_t word) { return !word; });
        if (uses[number] ? !is_known || is_free || is_empty : !is_free || !is_empty) return false;
    }
    return numbers_.size() + free_.size() == uses_.size() - PROBE;
}

}  // namespace shoal
