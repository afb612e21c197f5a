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
    few,      // linear: prepare privately and compute output tiles
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
    bool barrier; // before it
};

struct ScheduleKey {
    std::array<RowMode, kRowKinds> mode;
    bool spans; // attention in two phases
    bool operator==(const ScheduleKey &other) const { return mode == other.mode && spans == other.spans; }
};

std::vector<Phase> make_schedule(const Program &program, const ScheduleKey &key);

} // namespace ew
