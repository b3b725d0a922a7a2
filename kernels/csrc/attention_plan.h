// What the attention of a step consists of: tasks that the threads share out.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "shoal_native.h"

namespace shoal {

// One task: units [first, first + count). Several are one query token each, of sequences whose pages are the same up to
// `shared_end`; a task of one unit has no such pages.
struct AttentionTask {
    int first, count;
    int shared_end;  // a key
};

// Tasks, the longest first, and what is to be merged after them. No result depends on the number of threads: how units are cut
// and put together changes none, only how often a page is read.
class AttentionPlan {
public:
    // With units of at most `most_rows`.
    void build(const ShoalShape& shape, const ShoalStep& step, int most_rows);
    // The tasks without which the sampled rows would lack something: all that the last layer needs.
    void choose_sampled(const ShoalStep& step);

    const std::vector<AttentionTask>& tasks() const { return tasks_; }
    const std::vector<AttentionTask>& sampled_tasks() const { return sampled_tasks_; }
    const AttentionUnit* units(const AttentionTask& task) const { return &units_[static_cast<size_t>(task.first)]; }
    // The first unit of each query and head whose keys were split, and how many parts it has.
    const std::vector<AttentionUnit>& split() const { return split_; }
    const std::vector<int>& parts() const { return parts_; }
    int num_partials() const { return num_partials_; }

private:
    // Sequences of one query token, and the blocks that all of them begin with.
    struct Sharers {
        std::vector<int> sequences;
        int64_t blocks;
    };
    void add_prompt(const ShoalShape& shape, const ShoalStep& step, int sequence, int most_rows);
    void find_sharers(const ShoalShape& shape, const ShoalStep& step, int sequence);
    void add_sharers(const ShoalShape& shape, const ShoalStep& step, const Sharers& sharers);

    std::vector<AttentionUnit> units_, split_;
    std::vector<AttentionTask> tasks_, sampled_tasks_;
    std::vector<int> parts_;
    std::vector<Sharers> sharers_;
    std::vector<bool> is_sampled_;  // of each row
    int num_partials_ = 0;
};

}  // namespace shoal
