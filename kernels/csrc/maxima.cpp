// The largest logit of each row that samples, found by the threads that have just computed the logits.
#include <algorithm>

#include "decoder.h"

namespace shoal {

void Decoder::find_maxima(Team::Member& member, const ShoalStep& step) {
    // In each row, a thread looks at the columns that multiply() has given it: they are in its own cache.
    const int threads = team_.size();
    const auto begins = [&](int part) { return std::min<int64_t>(shape_.vocab_size, part_begin(part) * kBlockColumns); };
    member.parallel_for(step.num_samples * threads, [&](int i) {
        const int64_t begin = begins(i % threads), size = begins(i % threads + 1) - begin;
        Maximum& found = maxima_[static_cast<size_t>(i)];
        found = {kMinusInfinity, 0};
        if (size == 0) return;
        found = kernels_.row_maximum(step.logits + i / threads * int64_t{shape_.vocab_size} + begin, size);
        found.place += begin;
    });
}

void Decoder::take_maxima(const ShoalStep& step, float* values, int64_t* places) const {
    if (!has_maxima(step)) return;
    const auto is_nan = [](const Maximum& m) { return m.value != m.value; };
    const int threads = team_.size();
    for (int row = 0; row < step.num_samples; ++row) {
        const Maximum* const parts = maxima_.data() + row * threads;
        // Of equal values the first is taken: parts are in the order of their columns.
        const Maximum* best = std::find_if(parts, parts + threads, is_nan);
        if (best == parts + threads)
            best = std::max_element(parts, parts + threads,
                                    [](const Maximum& a, const Maximum& b) { return a.value < b.value; });
        values[row] = best->value;
        places[row] = best->place;
    }
}

}  // namespace shoal
