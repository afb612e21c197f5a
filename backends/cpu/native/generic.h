// Generic per-token ops: elementwise, copy, reduce, softmax, cumulate, topk, gather and scatter inside one row, in
// portable code, so that an unusual model needs no kernel of its own. instructions.md describes them.
#pragma once

#include <cstdint>

#include "program.h"

namespace ew {

// One operand of one row: numbers of either type.
union Pointer {
    void *any;
    float *f32;
    int32_t *i32;
};

// Merges dimensions that every operand walks as one, so that inner loops are long. Elementwise ops and copies only.
void simplify(Walk &walk, int operands);

// Bytes of scratch that run_generic needs for this instruction.
int64_t generic_scratch_bytes(const Instruction &code);

// Runs the op on one row. `operands`: inputs then outputs, null for an absent output. `scratch` is a thread's own.
// Returns false where an index lay outside its extent (that element is then left alone); never reads or writes
// outside the operands.
bool run_generic(const Instruction &code, const Pointer *operands, void *scratch);

} // namespace ew
