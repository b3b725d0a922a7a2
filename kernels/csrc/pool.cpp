#include <algorithm>
#include <cstring>

#include "decoder.h"

namespace shoal {

namespace {

// Of pairs (from, to): then copies may be made one after another.
bool none_both_read_and_written(const int64_t* pairs, int count) {
    std::vector<int64_t> written(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) written[static_cast<size_t>(i)] = pairs[2 * i + 1];
    std::sort(written.begin(), written.end());
    for (int i = 0; i < count; ++i)
        if (std::binary_search(written.begin(), written.end(), pairs[2 * i])) return false;
    return true;
}

}  // namespace

Pool::Pool(int64_t layers, int64_t blocks, int64_t block_words)
    : layers_(layers),
      blocks_(blocks),
      block_words_(block_words),
      pages_(static_cast<size_t>(layers * blocks * block_words) * sizeof(Word)),
      prefault_(static_cast<char*>(pages_.data()), layers, blocks * block_words * static_cast<int64_t>(sizeof(Word))) {}

void Pool::copy(const int64_t* pairs, int count) {
    const bool apart = none_both_read_and_written(pairs, count);
    std::vector<Word> kept(apart ? 0 : static_cast<size_t>(block_words_ * count));
    const auto copy_block = [&](Word* to, const Word* from) {
        std::memcpy(to, from, static_cast<size_t>(block_words_) * sizeof(Word));
    };
    for (int l = 0; l < layers_; ++l) {
        Word* base = layer(l);
        for (int i = 0; i < count && !apart; ++i)
            copy_block(&kept[i * block_words_], base + pairs[2 * i] * block_words_);
        for (int i = 0; i < count; ++i)
            copy_block(base + pairs[2 * i + 1] * block_words_,
                       apart ? base + pairs[2 * i] * block_words_ : &kept[i * block_words_]);
    }
}

void Pool::read(const int64_t* blocks, int count, Word* words) const {
    for (int l = 0; l < layers_; ++l)
        for (int i = 0; i < count; ++i, words += block_words_)
            std::memcpy(words, layer(l) + blocks[i] * block_words_, static_cast<size_t>(block_words_) * sizeof(Word));
}

void Pool::write(const int64_t* blocks, int count, const Word* words) {
    if (count == 0) return;
    const Prefault::Use in_use = use(*std::max_element(blocks, blocks + count));
    for (int l = 0; l < layers_; ++l)
        for (int i = 0; i < count; ++i, words += block_words_)
            std::memcpy(layer(l) + blocks[i] * block_words_, words, static_cast<size_t>(block_words_) * sizeof(Word));
}

}  // namespace shoal
