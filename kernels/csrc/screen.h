// The largest logit of a row from half of the head's bytes: 8-bit weights say which columns can hold it.
#pragma once

#include <vector>

#include "kernels.h"

namespace shoal {

constexpr int kMostScreenedRows = 8;  // of any instruction set

// A bf16 head once more in 8 bits, and how far what it gives may be from what the head itself gives.
struct Screen {
    Linear head;               // no words: there is no screen
    std::vector<float> slack;  // of each column: the most that its two logits may differ by, for a row of length 1
};

// None for a head whose inputs are no whole groups, or that holds what is not finite or too large to be sure of.
Screen make_screen(Arena& arena, const void* weight, int outputs, int inputs);

}  // namespace shoal
