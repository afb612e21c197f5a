// The order of work inside a step: each instruction becomes one or more phases, and a barrier stands before a phase only
// where another thread may still use what it touches.
#pragma once

#include <array>
#include <vector>

#include "program.h"

namespace ew {

// How a step of some number of rows is divided among threads. The results are the same in all three.
enum class RowMode {
    few,   // linears by output tiles; every thread prepares all rows for itself, which is cheaper than a barrier
    tiles, // linears by output tiles; rows are prepared together, each once
    rows,  // everything by rows: a thread takes its rows through all instructions up to the next attention
};

enum class Part {
    whole,    // the instruction in one phase, split by rows (or as its op says)
    prepare,  // linear, moe: quantise the inputs, split by rows
    tiles,    // linear: output tiles
    few,      // linear: prepare privately and compute output tiles; norm: every thread all rows, for itself
    publish,  // norm: the sum, which every thread has, goes where later instructions find it; split by rows
    own,      // rope_write: the rows and heads that the same thread then attends for
    spans,    // attention: the states of spans of keys
    merge,    // attention: merge them
    route,    // moe: sort tokens by expert (one thread)
    expand,   // moe: gate and up, by (expert, tile)
    squeeze,  // moe: prepare the hidden rows
    contract, // moe: down, by (expert, tile)
    combine,  // moe: add a token's contributions, split by rows
};

struct Phase {
    int instruction;
    Part part;
    bool barrier;       // before it
    int norm; // linear: the norm whose result every thread has for itself and which is the input; else -1
};

// How attention is divided in a step.
enum class AttentionMode {
    apart, // by items; a sequence may have several, so keys and values are written before a barrier
    own,   // by items, one a sequence and kv head: the thread that writes the new keys is the one that needs them
    spans, // by spans of keys, merged after a barrier
};

struct ScheduleKey {
    std::array<RowMode, kRowKinds> mode;
    AttentionMode attention;
    bool operator==(const ScheduleKey &other) const { return mode == other.mode && attention == other.attention; }
};

// plan_of: an attention's or rope_write's way to be divided into items (a number; -1 for all other instructions).
std::vector<Phase> make_schedule(const Program &program, const std::vector<int> &plan_of, const ScheduleKey &key);

} // namespace ew
