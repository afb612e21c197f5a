#include "schedule.h"

namespace ew {
namespace {

constexpr int kNotByRows = -1;
constexpr int kByItems = kRowKinds; // plus the number of the attention plan

// One region of memory that a phase reads or writes. `split` says how it is divided when every thread touches only its
// own part: by a kind of rows, or by the items of an attention plan. Two regions that are divided alike are disjoint between
// threads if they lie at the same place with the same row size.
struct Access {
    int space;
    int64_t low, high;
    int64_t row_bytes;
    bool write;
    int split;
};

enum Space : int { kArena = 0, kPrepared = kRowKinds, kExperts, kStates, kCache };

bool conflict(const Access &a, const Access &b) {
    if (a.space != b.space || (!a.write && !b.write) || a.low >= b.high || b.low >= a.high)
        return false;
    return !(a.split != kNotByRows && a.split == b.split && a.low == b.low && a.row_bytes == b.row_bytes);
}

class Scheduler {
  public:
    Scheduler(const Program &program, const std::vector<int> &plan_of, const ScheduleKey &key)
        : program_(program), plan_of_(plan_of), key_(key), mentions_(program.values.size()) {
        for (const Instruction &code : program.instructions)
            for (const auto *list : {&code.in, &code.out})
                for (const Operand &operand : *list)
                    if (operand.source == Operand::Source::value)
                        ++mentions_[size_t(operand.index)];
        ++mentions_[size_t(program.output.index)];
    }

    std::vector<Phase> run() {
        const int count = int(program_.instructions.size());
        for (int i = 0; i < count; ++i) {
            const int linears = private_norm(i);
            if (linears == 0) {
                add_instruction(i);
            } else {
                add_private_norm(i, linears);
                i += linears;
            }
        }
        return std::move(phases_);
    }

  private:
    const Program &program_;
    const std::vector<int> &plan_of_;
    const ScheduleKey &key_;
    std::vector<int> mentions_; // of each value, anywhere
    std::vector<Phase> phases_;
    std::vector<Access> open_; // since the last barrier
    std::vector<Access> now_;  // of the phase being made

    void touch(const Operand &operand, bool write, int split) {
        if (operand.source != Operand::Source::value)
            return;
        const Value &value = program_.values[size_t(operand.index)];
        now_.push_back({kArena + int(value.rows), value.offset, value.offset + value.row_bytes, value.row_bytes, write,
                        split});
    }
    void inputs(const Instruction &code, int split) {
        for (const Operand &operand : code.in)
            touch(operand, false, split);
    }
    void outputs(const Instruction &code, int split) {
        for (const Operand &operand : code.out)
            touch(operand, true, split);
    }
    void scratch(Space space, bool write, int split = kNotByRows) { now_.push_back({space, 0, 1, 0, write, split}); }
    void cache(const Instruction &code, bool write, int split) {
        const int64_t layer = int64_t(code.group) << 32 | code.layer;
        now_.push_back({kCache, layer, layer + 1, 0, write, split});
    }

    // With few rows a norm costs less than a barrier: where only the linears right after it read its result, every thread
    // computes it for itself. Returns how many linears follow; 0 where the norm is better divided.
    int private_norm(int index) const {
        const Instruction &norm = program_.instructions[size_t(index)];
        if ((norm.op != Op::rms_norm && norm.op != Op::layer_norm) || key_.mode[size_t(norm.rows)] != RowMode::few)
            return 0;
        int linears = 0;
        for (size_t i = size_t(index) + 1; i < program_.instructions.size(); ++i, ++linears) {
            const Instruction &code = program_.instructions[i];
            if ((code.op != Op::linear && code.op != Op::linear_gated) || code.in[0].index != norm.out[0].index)
                break;
            if (norm.out.size() == 2 && share_memory(code.out[0], norm.out[1]))
                return 0; // the sum is published after the linears: it must not take their place
        }
        return mentions_[size_t(norm.out[0].index)] == linears + 1 ? linears : 0;
    }
    bool share_memory(const Operand &a, const Operand &b) const {
        const Value &x = program_.values[size_t(a.index)], &y = program_.values[size_t(b.index)];
        return x.rows == y.rows && x.offset < y.offset + y.row_bytes && y.offset < x.offset + x.row_bytes;
    }
    void add_private_norm(int index, int linears) {
        const Instruction &norm = program_.instructions[size_t(index)];
        inputs(norm, kNotByRows);
        phase(index, Part::few);
        for (int i = index + 1; i <= index + linears; ++i) {
            outputs(program_.instructions[size_t(i)], kNotByRows);
            phase(i, Part::few, index);
        }
        if (norm.out.size() == 2) {
            touch(norm.out[1], true, int(norm.rows));
            phase(index, Part::publish);
        }
    }

    void phase(int instruction, Part part, int norm = -1) {
        bool barrier = false;
        for (const Access &a : now_)
            for (const Access &b : open_)
                barrier |= conflict(a, b);
        if (barrier)
            open_.clear();
        open_.insert(open_.end(), now_.begin(), now_.end());
        now_.clear();
        phases_.push_back({instruction, part, barrier, norm});
    }

    bool own(int index, RowMode mode) const {
        return key_.attention == AttentionMode::own && mode != RowMode::rows && plan_of_[size_t(index)] >= 0;
    }

    void add_instruction(int index) {
        const Instruction &code = program_.instructions[size_t(index)];
        const int rows = int(code.rows);
        const RowMode mode = key_.mode[size_t(rows)];
        const int by_rows = mode == RowMode::rows ? rows : kNotByRows; // of ops that are split by rows only in that mode
        switch (code.op) {
        case Op::linear:
        case Op::linear_gated:
            if (mode == RowMode::tiles) {
                inputs(code, rows);
                scratch(kPrepared, true, rows);
                phase(index, Part::prepare);
                scratch(kPrepared, false);
                outputs(code, kNotByRows);
                phase(index, Part::tiles);
            } else {
                inputs(code, by_rows);
                outputs(code, by_rows);
                phase(index, mode == RowMode::rows ? Part::whole : Part::few);
            }
            return;
        case Op::rope_write: {
            const int split = own(index, mode) ? kByItems + plan_of_[size_t(index)] : by_rows;
            for (const Operand &operand : code.in)
                touch(operand, true, split);
            cache(code, true, split);
            return phase(index, own(index, mode) ? Part::own : Part::whole);
        }
        case Op::attention: {
            const int split = own(index, mode) ? kByItems + plan_of_[size_t(index)] : kNotByRows;
            inputs(code, split);
            cache(code, false, split);
            if (key_.attention == AttentionMode::spans) {
                scratch(kStates, true);
                outputs(code, kNotByRows); // plans that do not divide spans write in the first phase
                phase(index, Part::spans);
                scratch(kStates, false);
                outputs(code, kNotByRows);
                return phase(index, Part::merge);
            }
            outputs(code, kNotByRows);
            return phase(index, Part::whole);
        }
        case Op::moe:
            inputs(code, kNotByRows);
            scratch(kExperts, true);
            phase(index, Part::route);
            for (Part part : {Part::prepare, Part::expand, Part::squeeze, Part::contract}) {
                inputs(code, kNotByRows);
                scratch(kExperts, true);
                phase(index, part);
            }
            inputs(code, by_rows);
            scratch(kExperts, false);
            outputs(code, by_rows);
            return phase(index, Part::combine);
        case Op::select_rows:
            inputs(code, kNotByRows);
            outputs(code, rows);
            return phase(index, Part::whole);
        default:
            inputs(code, rows);
            outputs(code, rows);
            return phase(index, Part::whole);
        }
    }
};

} // namespace

std::vector<Phase> make_schedule(const Program &program, const std::vector<int> &plan_of, const ScheduleKey &key) {
    return Scheduler(program, plan_of, key).run();
}

} // namespace ew
