// Splits the attention of a step into tasks for the threads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "shoal_native.h"

namespace shoal {

// A task: units [first, first + count). If there are several, each has one query token, and their sequences share all
// pages up to key `shared_end`; a task with a single unit shares none.
struct AttentionTask {
    int first, count;
    int shared_end;  // a key
};

// The tasks in the order in which they are taken, and the partial results to merge after them. No result depends on the
// number of threads: how units are split and combined only affects how often a page is read.
class AttentionPlan {
public:
    // Queries see `window` tokens, themselves included, or if it is 0 all. Units have at most `most_rows` rows.
    void build(const ShoalShape& shape, const ShoalStep& step, int window, int most_rows);
    // Selects the tasks that contribute to sampled rows: the last layer needs no others.
    void choose_sampled(const ShoalStep& step);

    const std::vector<AttentionTask>& tasks() const { return tasks_; }
    const std::vector<AttentionTask>& sampled_tasks() const { return sampled_tasks_; }
    const AttentionUnit* units(const AttentionTask& task) const { return &units_[static_cast<size_t>(task.first)]; }
    // For each query and head whose keys were split: its first unit, and the number of its parts.
    const std::vector<AttentionUnit>& split() const { return split_; }
    const std::vector<int>& parts() const { return parts_; }
    int num_partials() const { return num_partials_; }

private:
    // Sequences with one query token each, and the number of leading blocks that all of them share.
    struct Sharers {
        std::vector<int> sequences;
        int64_t blocks;
    };
    int oldest_key(int position) const;  // that a position sees
    void add_prompt(const ShoalShape& shape, const ShoalStep& step, int sequence, int most_rows);
    void find_sharers(const ShoalShape& shape, const ShoalStep& step, int sequence);
    void add_sharers(const ShoalShape& shape, const ShoalStep& step, const Sharers& sharers);

    std::vector<AttentionUnit> units_, split_;
    std::vector<AttentionTask> tasks_, sampled_tasks_;
    std::vector<int> parts_;
    std::vector<Sharers> sharers_;
    std::vector<bool> is_sampled_;  // by row of the step
    int num_partials_ = 0;
    int window_ = 0;
};

}  // namespace shoal
