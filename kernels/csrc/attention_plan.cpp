#include "attention_plan.h"

#include <algorithm>
#include <tuple>

namespace shoal {

namespace {

constexpr int kSplitKeys = 512;   // keys of one part of a long decode; fixed, so that results do not depend on threads
constexpr int64_t kUnitsOfThread = 8;  // of long prompts, per thread, so that all threads finish at about the same time
constexpr int kLeastShared = 128;  // shared keys that are worth processing for several sequences together: one tile

// The largest number of pieces, of `tokens` tokens each, in a unit of a prompt. With more pieces per unit, keys are
// read less often, but each thread should get several units.
int64_t pieces_of_unit(const ShoalShape& shape, const ShoalStep& step, int tokens, int64_t most) {
    if (shape.num_threads == 1) return most;
    const int64_t pieces = int64_t{step.num_tokens} * shape.num_kv_heads / tokens;  // of all heads
    return std::clamp<int64_t>(pieces / (kUnitsOfThread * shape.num_threads), 1, most);
}

// The end of the part of a long decode that contains `key`.
int part_end(int key, int newest) { return std::min(newest, (key / kSplitKeys + 1) * kSplitKeys); }

// The number of leading blocks that two sequences share.
int64_t common_blocks(const ShoalStep& step, int block_size, int a, int b) {
    const int64_t most = std::min(step.seq_lens[a], step.seq_lens[b]) / block_size;
    const int32_t *first = step.block_tables + a * step.table_stride, *second = step.block_tables + b * step.table_stride;
    return std::mismatch(first, first + most, second).first - first;
}

}  // namespace

int AttentionPlan::oldest_key(int position) const { return window_ > 0 ? std::max(0, position - window_ + 1) : 0; }

void AttentionPlan::build(const ShoalShape& shape, const ShoalStep& step, int window, int most_rows) {
    window_ = window;
    units_.clear();
    split_.clear();
    parts_.clear();
    tasks_.clear();
    sharers_.clear();
    num_partials_ = 0;
    for (int s = 0; s < step.num_seqs; ++s) {
        const int tokens = step.query_start_loc[s + 1] - step.query_start_loc[s];
        if (tokens == 1)
            find_sharers(shape, step, s);
        else
            add_prompt(shape, step, s, most_rows);
    }
    for (const Sharers& sharers : sharers_) add_sharers(shape, step, sharers);
    // Prompts first, ordered by head, so that the head's keys and values stay in a near cache. Then decodes, the
    // longest first, so that no thread is still busy with one when the others are done.
    const auto place = [&](const AttentionTask& task) {
        int64_t pairs = 0;
        for (int i = task.first; i < task.first + task.count; ++i)
            pairs += int64_t{units_[i].tokens} * (units_[i].key_end - units_[i].key_begin);
        const AttentionUnit& unit = *units(task);
        const bool decodes = unit.tokens == 1;
        return std::make_tuple(decodes, decodes ? 0 : unit.sequence, decodes ? 0 : unit.kv_head, -pairs);
    };
    std::stable_sort(tasks_.begin(), tasks_.end(),
                     [&](const AttentionTask& a, const AttentionTask& b) { return place(a) < place(b); });
}

void AttentionPlan::choose_sampled(const ShoalStep& step) {
    is_sampled_.assign(static_cast<size_t>(step.num_tokens), false);
    for (int i = 0; i < step.num_samples; ++i) is_sampled_[static_cast<size_t>(step.sample_rows[i])] = true;
    sampled_tasks_.clear();
    for (const AttentionTask& task : tasks_) {
        const AttentionUnit* const first = units(task);
        const bool wanted = std::any_of(first, first + task.count, [&](const AttentionUnit& unit) {
            const auto row = is_sampled_.begin() + unit.first_row;
            return unit.partial >= 0 || std::find(row, row + unit.tokens, true) != row + unit.tokens;
        });
        if (wanted) sampled_tasks_.push_back(task);
    }
}

void AttentionPlan::add_prompt(const ShoalShape& shape, const ShoalStep& step, int sequence, int most_rows) {
    const int begin = step.query_start_loc[sequence], end = step.query_start_loc[sequence + 1];
    const int group = shape.num_heads / shape.num_kv_heads, piece = std::max(1, kAttentionRows / group);
    // If units may have several pieces, whose number depends on the threads, the remainder of a prompt never becomes a
    // unit of its own: a unit with few rows takes another code path and would give other bits. With a sliding window
    // units have one piece, because a unit's first token determines its first key.
    const int most = window_ > 0 || 2 * group > kAttentionRows ? 1 : most_rows / kAttentionRows - 1;
    const bool joins_rest = most > 1;
    const int pieces = std::max(1, joins_rest ? (end - begin) / piece : static_cast<int>(divide_up(end - begin, piece)));
    const int units = joins_rest ? static_cast<int>(divide_up(pieces, pieces_of_unit(shape, step, piece, most))) : pieces;
    for (int i = 0; i < units; ++i) {
        const auto row_of = [&](int64_t unit) { return begin + piece * static_cast<int>(pieces * unit / units); };
        const int row = row_of(i), after = row_of(i + 1);
        const int tokens = (i + 1 == units ? end : after) - row, position = step.seq_lens[sequence] - (end - row);
        for (int head = 0; head < shape.num_kv_heads; ++head) {
            tasks_.push_back({static_cast<int>(units_.size()), 1, 0});
            units_.push_back({sequence, head, row, tokens, position, oldest_key(position), position + tokens, -1});
        }
    }
}

void AttentionPlan::find_sharers(const ShoalShape& shape, const ShoalStep& step, int sequence) {
    const int oldest = oldest_key(step.seq_lens[sequence] - 1);
    Sharers* best = nullptr;
    int64_t best_blocks = 0;
    for (Sharers& sharers : sharers_) {
        const int leader = sharers.sequences.front();
        if (oldest_key(step.seq_lens[leader] - 1) != oldest) continue;
        const int64_t blocks = common_blocks(step, shape.block_size, leader, sequence);
        if (blocks * shape.block_size < oldest + kLeastShared || blocks <= best_blocks) continue;
        // Adding this sequence must not cost the others more than it gains.
        const auto count = static_cast<int64_t>(sharers.sequences.size());
        if (count > 1 && count * std::min(blocks, sharers.blocks) < (count - 1) * sharers.blocks) continue;
        best = &sharers;
        best_blocks = blocks;
    }
    if (best == nullptr) {
        sharers_.push_back({{sequence}, step.seq_lens[sequence] / shape.block_size});
        return;
    }
    best->sequences.push_back(sequence);
    best->blocks = std::min(best->blocks, best_blocks);
}

void AttentionPlan::add_sharers(const ShoalShape& shape, const ShoalStep& step, const Sharers& sharers) {
    const int most = std::max(1, kSharedRows / (shape.num_heads / shape.num_kv_heads));
    const int shared = static_cast<int>(sharers.blocks * shape.block_size);
    const auto& sequences = sharers.sequences;
    const int oldest = oldest_key(step.seq_lens[sequences.front()] - 1);  // the same for all of them
    int longest = 0;
    for (const int s : sequences) longest = std::max(longest, step.seq_lens[s]);
    std::vector<int> places(sequences.size());
    for (int head = 0; head < shape.num_kv_heads; ++head) {
        for (int key = oldest; key < longest; key = part_end(key, longest)) {
            int first = static_cast<int>(units_.size());
            for (size_t i = 0; i < sequences.size(); ++i) {
                const int s = sequences[i], newest = step.seq_lens[s];
                const bool split = newest - oldest > kSplitKeys;
                if (key >= newest || (key > oldest && !split)) continue;
                AttentionUnit unit{s, head, step.query_start_loc[s], 1, newest - 1, key, part_end(key, newest), -1};
                if (split) {
                    if (key == oldest) {
                        int parts = 0;
                        for (int k = oldest; k < newest; k = part_end(k, newest)) ++parts;
                        places[i] = num_partials_;
                        num_partials_ += parts;
                        parts_.push_back(parts);
                    }
                    unit.partial = places[i]++;
                    if (key == oldest) split_.push_back(unit);
                } else {
                    unit.key_end = newest;
                }
                units_.push_back(unit);
            }
            const int end = static_cast<int>(units_.size());
            int shared_end = shared;
            for (int i = first; i < end; ++i) shared_end = std::min(shared_end, units_[i].key_end);
            const int together = shared_end - key >= kLeastShared ? most : 1;
            for (; first < end; first += together) tasks_.push_back({first, std::min(together, end - first), shared_end});
        }
    }
}

}  // namespace shoal
