// The C interface of the table. No exception crosses it.
#include <new>

#include "holder_table.h"
#include "shoal_placement.h"

struct ShoalTable : shoal::HolderTable {
    using HolderTable::HolderTable;
};

namespace {

template <typename Call>
int done(Call call) {
    try {
        call();
        return 0;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

}  // namespace

ShoalTable* shoal_table_create(int64_t max_entries, int64_t digest_bytes) {
    try {
        return new ShoalTable(max_entries, digest_bytes);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void shoal_table_destroy(ShoalTable* table) { delete table; }

const ShoalCounts* shoal_table_counts(const ShoalTable* table) { return &table->counts(); }
int64_t shoal_table_num_bytes(const ShoalTable* table) { return table->num_bytes(); }
int64_t shoal_table_num_slots(const ShoalTable* table) { return table->num_slots(); }
int64_t shoal_table_num_held(const ShoalTable* table, int64_t slot) { return table->num_held(slot); }

int shoal_table_add_slots(ShoalTable* table) {
    return done([&] { table->add_slots(); });
}

int shoal_table_hold(ShoalTable* table, int64_t slot, const char* digests, int64_t count) {
    return done([&] { table->hold(slot, digests, count); });
}

int shoal_table_release(ShoalTable* table, int64_t slot, const char* digests, int64_t count) {
    return done([&] { table->release(slot, digests, count); });
}

int shoal_table_release_all(ShoalTable* table, int64_t slot) {
    return done([&] { table->release_all(slot); });
}

void shoal_table_use(ShoalTable* table, const char* digests, int64_t count) { table->use(digests, count); }

int shoal_table_lengths(const ShoalTable* table, const char* digests, int64_t count, const uint64_t* also,
                        int64_t* counts) {
    return done([&] { table->lengths(digests, count, also, counts); });
}

const char* shoal_table_fault(const ShoalTable* table) {
    try {
        return table->fault();
    } catch (const std::bad_alloc&) {
        return "no memory to look for faults";
    }
}

const int64_t* shoal_struct_bytes(void) {
    static const int64_t bytes[] = {sizeof(ShoalTold), sizeof(ShoalCluster), sizeof(ShoalOutlook), sizeof(ShoalWish),
                                    sizeof(ShoalHeld)};
    return bytes;
}
