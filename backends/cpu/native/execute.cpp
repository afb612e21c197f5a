// What each thread does in a step: walk the phases, run this thread's share of each.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>

#include "engine.h"

namespace ew {
void Engine::run_thread(int thread) {
    if (thread == 0 && !profile_.empty())
        return run_measured();
    for (const Phase &phase : *phases_) {
        if (phase.barrier)
            pool_->barrier();
        run_phase(phase, thread);
    }
}

// Thread 0's walk when times are wanted.
void Engine::run_measured() {
    using Clock = std::chrono::steady_clock;
    auto since = [](Clock::time_point start) {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
    };
    for (const Phase &phase : *phases_) {
        Profile &entry = profile_[size_t(phase.instruction)];
        auto start = Clock::now();
        if (phase.barrier)
            pool_->barrier();
        entry.waiting += since(start);
        start = Clock::now();
        run_phase(phase, 0);
        entry.work += since(start);
    }
}

void Engine::share(RowKind rows, int thread, int64_t &begin, int64_t &end) const {
    const int64_t count = rows_[size_t(rows)].count;
    // Blocks of 8 rows suit the kernels; with few rows an even share matters more.
    divide(count, pool_->threads(), thread, mode_[size_t(rows)] == RowMode::rows ? 8 : 1, begin, end);
}

// The first failure is told; its element keeps an arbitrary value and the step goes on to its barriers.
void Engine::report(const Instruction &code, const char *what) {
    int none = -1;
    if (failed_.compare_exchange_strong(none, int(&code - program_.instructions.data())))
        failure_ = what;
}

void Engine::run_phase(const Phase &phase, int thread) {
    const Instruction &code = program_.instructions[size_t(phase.instruction)];
    switch (code.op) {
    case Op::linear:
    case Op::linear_gated: return run_linear(code, phase, thread);
    case Op::rope_write: return run_rope_write(code, phase.part, thread);
    case Op::attention: return run_attention(code, phase.part, thread);
    case Op::moe: return run_moe(code, phase.part, thread);
    default: return run_rows(code, phase.part, thread);
    }
}

void Engine::run_rows(const Instruction &code, Part part, int thread) {
    const Scratch &scratch = scratch_[size_t(thread)];
    int64_t begin, end;
    if (part == Part::few)
        return run_norm(code, 0, rows_[size_t(code.rows)].count, &scratch);
    share(code.rows, thread, begin, end);
    if (part == Part::publish) {
        const int64_t width = code.out[1].width;
        for (int64_t r = begin; r < end; ++r)
            std::memcpy(row_f32(code.out[1], r), scratch.sum + r * width, size_t(width) * 4);
        return;
    }
    switch (code.op) {
    case Op::embedding: return run_embedding(code, begin, end);
    case Op::rms_norm:
    case Op::layer_norm: return run_norm(code, begin, end, nullptr);
    case Op::activation:
        for (int64_t r = begin; r < end; ++r)
            kernels_.activation(code.activation, row_f32(code.in[0], r), row_f32(code.out[0], r), code.in[0].width);
        return;
    case Op::gated_activation:
        for (int64_t r = begin; r < end; ++r)
            gated_row(code, row_f32(code.in[0], r), row_f32(code.in[1], r), row_f32(code.out[0], r), code.in[0].width);
        return;
    case Op::rope: {
        const float *cosines = vector_or_null(code.weights[0]), *sines = vector_or_null(code.weights[1]);
        const int64_t half = code.rotary_dim / 2;
        for (int64_t r = begin; r < end; ++r) {
            const int64_t at = input_.positions[r] * half;
            kernels_.attention.rope(row_f32(code.in[0], r), code.q_heads, code.key_dim, cosines + at, sines + at,
                                    code.rotary_dim, code.interleaved);
        }
        return;
    }
    case Op::select_rows:
        for (int64_t r = begin; r < end; ++r)
            std::memcpy(row_bytes(code.out[0], r), row_bytes(code.in[0], input_.logit_rows[r]),
                        size_t(code.in[0].width) * 4);
        return;
    default: return run_generic_rows(code, begin, end, scratch);
    }
}

void Engine::run_embedding(const Instruction &code, int64_t begin, int64_t end) {
    const Weight &table = program_.weights[size_t(code.weights[0])];
    const int64_t width = table.k, per_row = code.index == Operand::Source::value ? code.in[0].width : 1;
    const bool packed = table.kind == Weight::Kind::linear;
    const int32_t *inputs = code.index == Operand::Source::tokens ? input_.tokens : input_.positions;
    for (int64_t r = begin; r < end; ++r)
        for (int64_t j = 0; j < per_row; ++j) {
            int64_t index = code.index == Operand::Source::value ? row_i32(code.in[0], r)[j] : inputs[r];
            index += code.index_offset;
            if (index < 0 || index >= table.n) {
                report(code, "looks up a row that the table does not have");
                index = 0;
            }
            float *y = row_f32(code.out[0], r) + j * width;
            if (packed) {
                const auto id = int32_t(index);
                kernels_.embedding(table.linear, &id, 1, code.scale, y, width);
            } else {
                const float *x = vector_or_null(code.weights[0]) + index * width;
                for (int64_t c = 0; c < width; ++c)
                    y[c] = x[c] * code.scale;
            }
        }
}

// `own`: results go to this thread's scratch instead of the outputs.
void Engine::run_norm(const Instruction &code, int64_t begin, int64_t end, const Scratch *own) {
    const float *weight = vector_or_null(code.weights[0]);
    const float *bias = code.op == Op::layer_norm ? vector_or_null(code.weights[1]) : nullptr;
    const bool adds = code.in.size() == 2;
    for (int64_t r = begin; r < end; ++r) {
        const float *x = row_f32(code.in[0], r), *residual = adds ? row_f32(code.in[1], r) : nullptr;
        float *y = own ? own->normed + r * code.in[0].width : row_f32(code.out[0], r);
        float *sum = !adds ? nullptr : own ? own->sum + r * code.in[0].width : row_f32(code.out[1], r);
        for (int64_t c = 0; c < code.in[0].width; c += code.dim) {
            if (code.op == Op::rms_norm)
                kernels_.rms_norm(x + c, residual, sum, weight, code.weight_offset, code.eps, code.dim, y + c);
            else
                kernels_.layer_norm(x + c, residual, sum, weight, bias, code.eps, code.dim, y + c);
        }
    }
}

void Engine::run_generic_rows(const Instruction &code, int64_t begin, int64_t end, const Scratch &scratch) {
    Pointer operands[kMaxOperands];
    int64_t strides[kMaxOperands]; // bytes from row to row
    union {
        float f32;
        int32_t i32;
    } scalars[kMaxOperands];
    const size_t inputs = code.in.size(), count = inputs + code.out.size();
    for (size_t p = 0; p < count; ++p) {
        const Operand &operand = p < inputs ? code.in[p] : code.out[p - inputs];
        operands[p].any = nullptr;
        strides[p] = 0;
        switch (operand.source) {
        case Operand::Source::none: break;
        case Operand::Source::value:
            operands[p].any = row_bytes(operand, begin);
            strides[p] = row_stride(operand) * 4;
            break;
        case Operand::Source::weight:
            operands[p].any = const_cast<uint8_t *>(weight_data(operand.index)) + operand.column * 4; // only read
            break;
        case Operand::Source::scalar:
            if (operand.dtype == DType::f32)
                scalars[p].f32 = float(operand.scalar);
            else
                scalars[p].i32 = operand.scalar >= -2147483648.0 && operand.scalar <= 2147483647.0
                                     ? int32_t(operand.scalar)
                                     : INT32_MIN;
            operands[p].any = &scalars[p];
            break;
        case Operand::Source::tokens:
        case Operand::Source::positions:
            operands[p].any = const_cast<int32_t *>(
                (operand.source == Operand::Source::tokens ? input_.tokens : input_.positions) + begin);
            strides[p] = 4;
            break;
        }
    }
    for (int64_t r = begin; r < end; ++r) {
        if (!run_generic(code, operands, scratch.generic))
            report(code, "an index lies outside its extent");
        for (size_t p = 0; p < count; ++p)
            if (strides[p])
                operands[p].any = static_cast<uint8_t *>(operands[p].any) + strides[p];
    }
}

// ---- linears ------------------------------------------------------------------------------------------------------

void Engine::prepare_rows(const Instruction &code, const LinearWeight &weight, int64_t rows, const float *x,
                          int64_t stride, uint8_t *prepared) const {
    if (code.inner == 1)
        return kernels_.prepare(weight, x, stride, rows, prepared);
    const int64_t bytes = kernels_.prepared_row_bytes(weight) * code.inner;
    for (int64_t r = 0; r < rows; ++r)
        kernels_.prepare(weight, x + r * stride, weight.k, code.inner, prepared + r * bytes);
}

// Output tiles [t0, t1) of rows [begin, end), whose prepared form begins at `prepared`.
void Engine::linear_rows(const Instruction &code, int64_t begin, int64_t end, int64_t t0, int64_t t1,
                         const uint8_t *prepared) {
    const LinearWeight &weight = program_.weights[size_t(code.weights[0])].linear;
    const float *bias = vector_or_null(code.weights[1]);
    if (t0 >= t1 || begin >= end)
        return;
    if (code.inner == 1) {
        kernels_.linear(weight, prepared, end - begin, t0, t1, bias, row_f32(code.out[0], begin),
                        row_stride(code.out[0]));
        return;
    }
    const int64_t bytes = kernels_.prepared_row_bytes(weight) * code.inner;
    for (int64_t r = begin; r < end; ++r)
        kernels_.linear(weight, prepared + (r - begin) * bytes, code.inner, t0, t1, bias, row_f32(code.out[0], r),
                        weight.n);
}

void Engine::run_linear(const Instruction &code, const Phase &phase, int thread) {
    const LinearWeight &weight = program_.weights[size_t(code.weights[0])].linear;
    const Scratch &scratch = scratch_[size_t(thread)];
    const int64_t rows = rows_[size_t(code.rows)].count;
    const int64_t bytes = kernels_.prepared_row_bytes(weight) * code.inner;
    const bool gated = code.op == Op::linear_gated;
    const int64_t units = gated ? weight.tiles / 2 : weight.tiles; // what is divided: tiles, or pairs of them
    const int64_t columns = code.out[0].width;
    const float *bias = vector_or_null(code.weights[1]);
    auto multiply = [&](int64_t begin, int64_t end, int64_t u0, int64_t u1, const uint8_t *prepared) {
        if (gated)
            gated_tiles(weight, prepared, end - begin, u0, u1, columns, bias, code, row_f32(code.out[0], begin),
                        row_stride(code.out[0]), scratch);
        else
            linear_rows(code, begin, end, u0, u1, prepared);
    };
    const int64_t stride = row_stride(code.in[0]);
    int64_t begin, end;
    switch (phase.part) {
    case Part::prepare:
        share(code.rows, thread, begin, end);
        if (begin < end)
            prepare_rows(code, weight, end - begin, row_f32(code.in[0], begin), stride, prepared_ + begin * bytes);
        return;
    case Part::whole: // by rows
        share(code.rows, thread, begin, end);
        for (int64_t r = begin; r < end; r += std::max<int64_t>(kRowChunk / code.inner, 1)) {
            const int64_t last = std::min(r + std::max<int64_t>(kRowChunk / code.inner, 1), end);
            prepare_rows(code, weight, last - r, row_f32(code.in[0], r), stride, scratch.prepared);
            multiply(r, last, 0, units, scratch.prepared);
        }
        return;
    default: // by output tiles; pairs of tiles suit the kernels where there are many
        divide(units, pool_->threads(), thread, !gated && units >= 8 * pool_->threads() ? 2 : 1, begin, end);
        if (rows == 0 || begin >= end)
            return;
        if (phase.norm >= 0) {
            const Instruction &norm = program_.instructions[size_t(phase.norm)];
            prepare_rows(code, weight, rows, scratch.normed + code.in[0].column - norm.out[0].column,
                         norm.out[0].width, scratch.prepared);
        } else if (phase.part == Part::few) {
            prepare_rows(code, weight, rows, row_f32(code.in[0], 0), stride, scratch.prepared);
        }
        multiply(0, rows, begin, end, phase.part == Part::few ? scratch.prepared : prepared_);
    }
}

// Pairs [pair0, pair1) of gate and up tiles of `rows` prepared rows: y[r][16 * pair + i] = act(gate) * up.
void Engine::gated_tiles(const LinearWeight &weight, const uint8_t *prepared, int64_t rows, int64_t pair0,
                         int64_t pair1, int64_t columns, const float *bias, const Instruction &code, float *y,
                         int64_t ldy, const Scratch &scratch) const {
    const int64_t bytes = kernels_.prepared_row_bytes(weight);
    auto *both = reinterpret_cast<float *>(scratch.tiles), *gate = both + kTileFloats, *up = gate + kTileFloats / 2;
    for (int64_t chunk = std::min(rows, kRowChunk), pairs = std::max<int64_t>(kTileFloats / (32 * chunk), 1), p = pair0;
         p < pair1; p += pairs) {
        const int64_t count = std::min(pairs, pair1 - p), first = 16 * p, n = std::min(16 * count, columns - first);
        LinearWeight part = weight; // only these tiles, so that their outputs begin at column 0
        part.data += 2 * p * weight.tile_bytes;
        part.tiles = 2 * count;
        part.n = 32 * count;
        for (int64_t r = 0; r < rows; r += chunk) {
            const int64_t m = std::min(chunk, rows - r), ld = 32 * count;
            kernels_.linear(part, prepared + r * bytes, m, 0, part.tiles, bias ? bias + 32 * p : nullptr, both, ld);
            for (int64_t i = 0; i < m; ++i) {
                for (int64_t j = 0; j < count; ++j) {
                    std::memcpy(gate + 16 * j, both + i * ld + 32 * j, 64);
                    std::memcpy(up + 16 * j, both + i * ld + 32 * j + 16, 64);
                }
                gated_row(code, gate, up, y + (r + i) * ldy + first, n);
            }
        }
    }
}

void Engine::gated_row(const Instruction &code, const float *gate, const float *up, float *y, int64_t n) const {
    if (code.activation != kSwigluOai)
        return kernels_.gated(code.activation, gate, up, y, n);
    // Clamped and scaled by hand, the sigmoid by the kernel, a block at a time.
    constexpr int64_t kBlock = 256;
    alignas(64) float clamped[kBlock], gates[kBlock];
    const float limit = code.limit > 0 ? code.limit : std::numeric_limits<float>::infinity();
    for (int64_t start = 0; start < n; start += kBlock) {
        const int64_t m = std::min(kBlock, n - start);
        for (int64_t i = 0; i < m; ++i) {
            clamped[i] = gate[start + i] > limit ? limit : gate[start + i];
            gates[i] = code.alpha * clamped[i];
        }
        kernels_.activation(int(Activation::sigmoid), gates, gates, m);
        for (int64_t i = 0; i < m; ++i) {
            const float u = up[start + i];
            const float bounded = u > limit ? limit : u < -limit ? -limit : u;
            y[start + i] = (bounded + 1.0f) * (clamped[i] * gates[i]);
        }
    }
}

// ---- attention ----------------------------------------------------------------------------------------------------

// One token's kv heads [head0, head1) and their query heads: rotate, then write keys and values.
void Engine::rope_write(const Instruction &code, int64_t row, int64_t head0, int64_t head1) {
    const KvGroup &group = program_.groups[size_t(code.group)];
    const KvLayout &layout = group.layers[size_t(code.layer)].layout;
    const int32_t position = input_.positions[row];
    float *k = row_f32(code.in[1], row);
    if (code.weights[0] >= 0) {
        const int64_t at = position * int64_t(code.rotary_dim / 2), heads = code.q_heads / code.kv_heads;
        const float *cosines = vector_or_null(code.weights[0]) + at, *sines = vector_or_null(code.weights[1]) + at;
        if (code.in[0].present())
            kernels_.attention.rope(row_f32(code.in[0], row) + head0 * heads * code.key_dim, (head1 - head0) * heads,
                                    code.key_dim, cosines, sines, code.rotary_dim, code.interleaved);
        kernels_.attention.rope(k + head0 * code.key_dim, head1 - head0, code.key_dim, cosines, sines,
                                code.rotary_dim, code.interleaved);
    }
    const int32_t page = page_table(code.group, sequence_of_[size_t(row)])[position / group.page_size];
    auto *pool = const_cast<uint8_t *>(pool_layer(code.group, code.layer));
    kernels_.attention.kv_write(layout, pool + page * layout.page_bytes, position % group.page_size, k,
                                row_f32(code.in[2], row), int(head0), int(head1));
}

void Engine::run_rope_write(const Instruction &code, Part part, int thread) {
    if (part == Part::own) { // what this thread attends for next
        const AttentionPlan &plan = attention_[size_t(plan_of_[size_t(&code - program_.instructions.data())])];
        for (int i = plan.starts[size_t(thread)]; i < plan.starts[size_t(thread) + 1]; ++i) {
            const AttentionItem &item = plan.items[size_t(i)];
            for (int64_t row = item.row0; row < item.row0 + item.rows; ++row)
                rope_write(code, row, item.kv_head, item.kv_head + 1);
        }
        return;
    }
    // Items are (token, kv head with its query heads); in row mode a thread takes its own rows whole.
    const int64_t heads = code.kv_heads;
    int64_t begin, end;
    if (mode_[size_t(code.rows)] == RowMode::rows) {
        share(code.rows, thread, begin, end);
        begin *= heads;
        end *= heads;
    } else {
        divide(rows_[size_t(code.rows)].count * heads, pool_->threads(), thread, 1, begin, end);
    }
    while (begin < end) {
        const int64_t head0 = begin % heads, head1 = std::min(heads, head0 + end - begin);
        rope_write(code, begin / heads, head0, head1);
        begin += head1 - head0;
    }
}

void Engine::run_attention(const Instruction &code, Part part, int thread) {
    const AttentionPlan &plan = attention_[size_t(plan_of_[size_t(&code - program_.instructions.data())])];
    const KvLayout &layout = program_.groups[size_t(code.group)].layers[size_t(code.layer)].layout;
    const AttentionShape shape{code.q_heads,
                               code.scale,
                               code.softcap,
                               code.window,
                               vector_or_null(code.weights[0]),
                               vector_or_null(code.weights[1])};
    const uint8_t *pool = pool_layer(code.group, code.layer);
    const int64_t heads = code.q_heads / code.kv_heads, ldq = row_stride(code.in[0]), ldo = row_stride(code.out[0]);
    const int64_t state = attention_state_floats(layout) * heads;
    auto *states = reinterpret_cast<float *>(states_.data());
    void *scratch = scratch_[size_t(thread)].attention;
    auto query = [&](const AttentionItem &item) {
        return row_f32(code.in[0], item.row0) + item.kv_head * heads * code.key_dim;
    };
    auto result = [&](const AttentionItem &item) {
        return row_f32(code.out[0], item.row0) + item.kv_head * heads * code.value_dim;
    };
    if (part == Part::merge) {
        if (!plan.by_spans)
            return;
        int64_t begin, end;
        divide(int64_t(plan.items.size()), pool_->threads(), thread, 1, begin, end);
        for (int64_t i = begin; i < end; ++i) {
            const AttentionItem &item = plan.items[size_t(i)];
            kernels_.attention.attention_merge(shape, layout, item.kv_head, item.rows, states + item.states,
                                               state * item.rows, item.spans, result(item), ldo);
        }
        return;
    }
    for (int i = plan.starts[size_t(thread)]; i < plan.starts[size_t(thread) + 1]; ++i) {
        const AttentionItem &item = plan.items[size_t(plan.by_spans ? plan.units[size_t(i)].item : i)];
        const int32_t *table = page_table(code.group, item.sequence), *positions = input_.positions + item.row0;
        if (plan.by_spans) {
            const int span = plan.units[size_t(i)].span;
            kernels_.attention.attention_span(shape, layout, pool, table, item.kv_head, query(item), ldq, positions,
                                              item.rows, span,
                                              states + item.states + (span - item.first_span) * state * item.rows,
                                              scratch);
        } else {
            kernels_.attention.attention(shape, layout, pool, table, item.kv_head, query(item), ldq, positions,
                                         item.rows, result(item), ldo, scratch);
        }
    }
}

} // namespace ew
