// Mixture of experts: tokens are sorted by expert, each expert multiplies its own rows, and every token adds its
// contributions in the order of its top-k list.
//
//   route     rows = (token, choice) pairs sorted by expert, in token order within one      one thread
//   prepare   the rows' inputs, quantised                                                   by rows
//   expand    hidden = act(gate) * up                                                       by (expert, pair of tiles)
//   squeeze   hidden rows, quantised                                                        by rows
//   contract  out = down . hidden                                                           by (expert, tile)
//   combine   y[token] = sum over j of weight[token][j] * out[row of (token, j)]            by rows, or by columns
#include <algorithm>

#include "engine.h"

namespace ew {
namespace {

// Fewer rows than this cost as much: the expert's weights are read all the same.
constexpr int64_t kMinCost = 8;

// Units [begin, end) of expert `e`, of `units` each, that lie in thread `thread`'s equal share of all costs.
void expert_share(const std::vector<int64_t> &cost, size_t e, int64_t units, int threads, int thread, int64_t &begin,
                  int64_t &end) {
    const int64_t each = cost[e + 1] - cost[e], start = cost[e] * units, total = cost.back() * units;
    auto first_at = [&](int64_t bound) {
        return std::clamp<int64_t>((bound - start + each - 1) / each, 0, bound <= start ? 0 : units);
    };
    begin = first_at(total / threads * thread + total % threads * thread / threads);
    end = thread + 1 == threads ? units
                                : first_at(total / threads * (thread + 1) + total % threads * (thread + 1) / threads);
}

} // namespace

// Buffers for the largest step: rows are (token, choice) pairs.
void Engine::plan_experts() {
    int64_t prepared = 0, squeezed = 0, hidden = 0, out = 0;
    size_t experts = 0, choices = 0;
    for (const Instruction &code : program_.instructions) {
        if (code.op != Op::moe)
            continue;
        const Weight &up = program_.weights[size_t(code.weights[0])], &down = program_.weights[size_t(code.weights[2])];
        const int64_t rows = (code.rows == RowKind::tokens ? options_.max_tokens : options_.max_rows) * code.top_k;
        prepared = std::max(prepared, rows * kernels_.prepared_row_bytes(up.linear));
        squeezed = std::max(squeezed, rows * kernels_.prepared_row_bytes(down.linear));
        hidden = std::max(hidden, rows * down.k * 4);
        out = std::max(out, rows * down.n * 4);
        experts = std::max(experts, size_t(code.experts));
        choices = std::max(choices, size_t(rows));
    }
    if (choices == 0)
        return;
    auto aligned = [](int64_t bytes) { return (bytes + 4095) / 4096 * 4096; };
    experts_.memory = Mapping::anonymous(
        size_t(aligned(prepared) + aligned(squeezed) + aligned(hidden) + aligned(out)), true);
    experts_.prepared = experts_.memory.data();
    experts_.squeezed = experts_.prepared + aligned(prepared);
    experts_.hidden = reinterpret_cast<float *>(experts_.squeezed + aligned(squeezed));
    experts_.out = experts_.hidden + aligned(hidden) / 4;
    experts_.first.reserve(experts + 1);
    experts_.cost.reserve(experts + 1);
    experts_.token.resize(choices);
    experts_.row.resize(choices);
}

void Engine::route(const Instruction &code) {
    const int64_t tokens = rows_[size_t(code.rows)].count, top_k = code.top_k;
    const auto count = size_t(code.experts);
    auto &first = experts_.first;
    first.assign(count + 1, 0); // within the reserved capacity
    bool good = true;
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t j = 0; j < top_k; ++j) {
            const int32_t expert = row_i32(code.in[1], t)[j];
            if (expert < 0 || expert >= code.experts)
                good = false;
            else
                ++first[size_t(expert) + 1];
        }
    if (!good)
        report(code, "a token chooses an expert that does not exist");
    experts_.cost.assign(count + 1, 0);
    for (size_t e = 0; e < count; ++e) {
        const int64_t rows = first[e + 1];
        experts_.cost[e + 1] = experts_.cost[e] + (rows > 0 ? std::max(rows, kMinCost) : 0);
        first[e + 1] += first[e];
    }
    // Placing the choices moves each expert's beginning to its end; moved back below.
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t j = 0; j < top_k; ++j) {
            const int32_t expert = row_i32(code.in[1], t)[j];
            const bool exists = expert >= 0 && expert < code.experts;
            const int32_t row = exists ? first[size_t(expert)]++ : -1;
            experts_.row[size_t(t * top_k + j)] = row;
            if (exists)
                experts_.token[size_t(row)] = int32_t(t);
        }
    for (size_t e = count; e > 0; --e)
        first[e] = first[e - 1];
    first[0] = 0;
}

void Engine::run_moe(const Instruction &code, Part part, int thread) {
    const Weight &up = program_.weights[size_t(code.weights[0])], &down = program_.weights[size_t(code.weights[2])];
    const int64_t wide = down.k, narrow = down.n; // features between the two matrices, and after them
    const int64_t up_bytes = kernels_.prepared_row_bytes(up.linear);
    const int64_t down_bytes = kernels_.prepared_row_bytes(down.linear);
    const int threads = pool_->threads();
    const int64_t rows = part == Part::route ? 0 : experts_.first.back();
    int64_t begin, end;
    switch (part) {
    case Part::route:
        if (thread == 0)
            route(code);
        return;
    case Part::prepare:
        divide(rows, threads, thread, 1, begin, end);
        for (int64_t r = begin; r < end; ++r)
            kernels_.prepare(up.linear, row_f32(code.in[0], experts_.token[size_t(r)]), up.k, 1,
                             experts_.prepared + r * up_bytes);
        return;
    case Part::squeeze:
        divide(rows, threads, thread, 1, begin, end);
        if (begin < end)
            kernels_.prepare(down.linear, experts_.hidden + begin * wide, wide, end - begin,
                             experts_.squeezed + begin * down_bytes);
        return;
    case Part::expand:
    case Part::contract: {
        const bool expands = part == Part::expand;
        const Weight &stack = expands ? up : down;
        const int64_t units = expands ? stack.linear.tiles / 2 : stack.linear.tiles;
        const float *bias = vector_or_null(code.weights[expands ? 1 : 3]);
        for (size_t e = 0; e < size_t(code.experts); ++e) {
            const int64_t first = experts_.first[e], count = experts_.first[e + 1] - first;
            if (count == 0)
                continue;
            expert_share(experts_.cost, e, units, threads, thread, begin, end);
            if (begin >= end)
                continue;
            LinearWeight weight = stack.linear;
            weight.data += int64_t(e) * stack.expert_bytes();
            const float *own_bias = bias ? bias + int64_t(e) * (expands ? stack.linear.n : stack.n) : nullptr;
            if (expands)
                gated_tiles(weight, experts_.prepared + first * up_bytes, count, begin, end, wide, own_bias, code,
                            experts_.hidden + first * wide, wide, scratch_[size_t(thread)]);
            else
                kernels_.linear(weight, experts_.squeezed + first * down_bytes, count, begin, end, own_bias,
                                experts_.out + first * narrow, narrow);
        }
        return;
    }
    default: {
        const bool by_rows = mode_[size_t(code.rows)] == RowMode::rows;
        int64_t column0 = 0, column1 = narrow;
        begin = 0;
        end = rows_[size_t(code.rows)].count;
        if (by_rows)
            share(code.rows, thread, begin, end);
        else
            divide(narrow, threads, thread, 16, column0, column1);
        for (int64_t t = begin; t < end; ++t) {
            float *y = row_f32(code.out[0], t);
            const float *weights = row_f32(code.in[2], t);
            std::fill(y + column0, y + column1, 0.0f);
            for (int64_t j = 0; j < code.top_k; ++j) {
                const int32_t row = experts_.row[size_t(t * code.top_k + j)];
                if (row < 0)
                    continue;
                const float weight = weights[j], *x = experts_.out + row * narrow;
                for (int64_t c = column0; c < column1; ++c)
                    y[c] += weight * x[c];
            }
        }
    }
    }
}

} // namespace ew
