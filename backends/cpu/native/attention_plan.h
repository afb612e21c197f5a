// How one step's attention is divided among threads: computed once a step, used by every layer of the same shape.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"

namespace ew {

// The query rows [row0, row0 + rows) of one sequence and one kv head.
struct AttentionItem {
    int sequence, kv_head;
    int row0, rows;
    int first_span, spans;
    int64_t states; // where its spans' states begin, in floats
};
// One span of an item.
struct AttentionUnit {
    int item, span;
};

struct AttentionPlan {
    // What the layers it serves have in common.
    int group, kv_heads, q_heads, value_dim, window;

    std::vector<AttentionItem> items;
    bool whole = false; // one item a sequence and kv head
    bool by_spans = false;
    std::vector<AttentionUnit> units; // by_spans only
    std::vector<int> starts;          // thread t takes items (or units) [starts[t], starts[t + 1])
    int64_t state_floats = 0;         // of all units together

    // positions[row] of the step's rows; sequence s holds rows [seq_starts[s], seq_starts[s + 1]).
    void make(int threads, int sequences, const int32_t *seq_starts, const int32_t *positions);
};

} // namespace ew
