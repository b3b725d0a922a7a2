#include <algorithm>
#include <cstring>

#include "decoder.h"

namespace shoal {

Pool::Pool(int64_t layers, int64_t blocks, int64_t block_words)
    : layers_(layers),
      blocks_(blocks),
      block_words_(block_words),
      pages_(static_cast<size_t>(layers * blocks * block_words) * sizeof(Word)),
      prefault_(static_cast<char*>(pages_.data()), layers, blocks * block_words * static_cast<int64_t>(sizeof(Word))) {}

void Pool::copy(const int64_t* pairs, int count) {
    const size_t bytes = static_cast<size_t>(block_words_) * sizeof(Word);
    std::vector<Word> sources(static_cast<size_t>(block_words_ * count));
    for (int l = 0; l < layers_; ++l) {
        Word* base = layer(l);
        for (int i = 0; i < count; ++i)
            std::memcpy(&sources[i * block_words_], base + pairs[2 * i] * block_words_, bytes);
        for (int i = 0; i < count; ++i)
            std::memcpy(base + pairs[2 * i + 1] * block_words_, &sources[i * block_words_], bytes);
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
