// Finds the largest logit of a row from half of the head's bytes: 8-bit weights tell which columns can have it.
#pragma once

#include <vector>

#include "kernels.h"

namespace shoal {

constexpr int kMostScreenedRows = 8;  // with any instruction set

// A second copy of a bf16 head in 8 bits, and bounds on how far its logits may be from those of the head itself.
struct Screen {
    Linear head;               // without words: there is no screen
    std::vector<float> slack;  // per column: the most by which the two logits may differ, for a row of length 1
};

// Gives no screen if the head's inputs are not whole groups, or if it has values that are not finite or too large for a
// bound.
Screen make_screen(Arena& arena, const void* weight, int outputs, int inputs);

}  // namespace shoal
