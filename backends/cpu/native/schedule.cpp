#include "schedule.h"

namespace ew {
namespace {

constexpr int kNotByRows = -1;

// One region of memory that a phase reads or writes. `split` is the kind of rows when every thread touches only its
// own rows of it; two such regions are disjoint between threads if they lie at the same place with the same row size.
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
    Scheduler(const Program &program, const ScheduleKey &key) : program_(program), key_(key) {}

    std::vector<Phase> run() {
        for (size_t i = 0; i < program_.instructions.size(); ++i)
            add_instruction(int(i));
        return std::move(phases_);
    }

  private:
    const Program &program_;
    const ScheduleKey &key_;
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

    void phase(int instruction, Part part) {
        bool barrier = false;
        for (const Access &a : now_)
            for (const Access &b : open_)
                barrier |= conflict(a, b);
        if (barrier)
            open_.clear();
        open_.insert(open_.end(), now_.begin(), now_.end());
        now_.clear();
        phases_.push_back({instruction, part, barrier});
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
        case Op::rope_write:
            for (const Operand &operand : code.in)
                touch(operand, true, by_rows);
            cache(code, true, by_rows);
            return phase(index, Part::whole);
        case Op::attention:
            inputs(code, kNotByRows);
            cache(code, false, kNotByRows);
            if (key_.spans) {
                scratch(kStates, true);
                outputs(code, kNotByRows); // plans that do not divide spans write in the first phase
                phase(index, Part::spans);
                scratch(kStates, false);
                outputs(code, kNotByRows);
                return phase(index, Part::merge);
            }
            outputs(code, kNotByRows);
            return phase(index, Part::whole);
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

std::vector<Phase> make_schedule(const Program &program, const ScheduleKey &key) {
    return Scheduler(program, key).run();
}

} // namespace ew
