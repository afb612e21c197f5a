// The executor: a lowered program, its weights and its KV pools, and the team of threads that runs steps.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "attention_plan.h"
#include "generic.h"
#include "kernels.h"
#include "kv_pools.h"
#include "memory.h"
#include "program.h"
#include "schedule.h"
#include "thread_pool.h"

namespace ew {

struct EngineOptions {
    std::string weights;  // path of weights.bin
    bool copy = false;    // read the weights into (huge) pages of our own instead of mapping the file
    int64_t max_tokens = 0;
    int64_t max_rows = 0; // logit rows a step
    int threads = 0;      // 0: usable_cpus()
};

// A step's inputs: T tokens of S sequences laid end to end, G tables of P pages a sequence, R rows of logits wanted.
struct StepInput {
    int64_t tokens_count, sequences, groups, table_width, logits_count;
    const int32_t *tokens, *positions; // [T]
    const int32_t *seq_starts;         // [S + 1]
    const int32_t *context_lens;       // [S]
    const int32_t *page_tables;        // [G, S, P]
    const int32_t *logit_rows;         // [R]
    float *logits;                     // out: [R, vocab_size]
};

// Time spent in an instruction over all steps since profiling began, on thread 0, in nanoseconds.
struct Profile {
    int64_t work = 0, waiting = 0; // waiting: at the barriers before its phases
};

struct MemoryUse {
    int64_t weights, pool, arena, scratch;
};

class Engine {
  public:
    // Throws std::invalid_argument for a program that is damaged or does not fit the weights, std::runtime_error for
    // a file that cannot be read.
    Engine(const std::string &program, const EngineOptions &options, const Kernels &kernels);
    // Another program of the same weights file, beside `other`: it works with the other's weights, threads and pools of
    // keys and values, and only one of them runs at a time. Either may be closed first; what is shared goes with the last.
    // Throws std::invalid_argument where the programs' vocabularies or caches differ.
    Engine(const std::string &program, const Engine &other, int64_t max_tokens, int64_t max_rows);

    // Makes new, zeroed pools of so many pages a KV group, for all engines that share them; the old ones are gone.
    void create_pool(const std::vector<int64_t> &pages);
    // Copies pages sources[i] to destinations[i], in order, in every layer of the group.
    void copy_pages(int64_t group, const int32_t *sources, const int32_t *destinations, int64_t count);
    // Sets every number of the pools: for tests, which fill them with NaN to see that nothing unwritten is read. Codes
    // of int8 become the number's bytes.
    void fill_pool(float value);

    // Runs one step. Throws std::invalid_argument where the input is malformed (nothing has run then) and
    // std::runtime_error where an index that the model computed is out of range, or another step is running.
    void step(const StepInput &input);

    // Begins (and clears) or ends the measuring of times; one entry an instruction.
    void set_profiling(bool on);
    const std::vector<Profile> &profile() const { return profile_; }

    void close();
    MemoryUse memory() const;
    const Program &program() const { return program_; }
    int threads() const { return pool_ ? pool_->threads() : 0; }
    const char *isa() const { return kernels_.name; }
    const Kernels &kernels() const { return kernels_; }
    // The team, for whoever works between steps; empty once closed.
    std::shared_ptr<ThreadPool> team() const { return pool_; }

  private:
    struct Scratch { // a thread's own, parts of one mapping
        uint8_t *prepared, *tiles, *attention, *generic;
        float *normed, *sum; // of a norm that the thread computes for itself: kFewRows rows
    };
    static constexpr int64_t kFewRows = 4;           // up to here every thread prepares all rows for itself
    static constexpr int64_t kRowChunk = 64;         // rows that a thread prepares and multiplies at a time
    static constexpr int64_t kTileFloats = 64 * 256; // numbers of gate and up computed before they become one
    struct CachedSchedule {
        ScheduleKey key;
        std::vector<Phase> phases;
    };

    // engine.cpp
    void check_limits() const;
    void set_up(Program program);
    void plan_scratch();
    void validate(const StepInput &input);
    RowMode row_mode(int64_t rows) const;
    const std::vector<Phase> &schedule(const ScheduleKey &key);
    void open_check() const;

    // execute.cpp
    void run_thread(int thread);
    void run_measured();
    void run_phase(const Phase &phase, int thread);
    void run_rows(const Instruction &code, Part part, int thread);
    void run_embedding(const Instruction &code, int64_t begin, int64_t end);
    void run_norm(const Instruction &code, int64_t begin, int64_t end, const Scratch *own);
    void run_generic_rows(const Instruction &code, int64_t begin, int64_t end, const Scratch &scratch);
    void run_linear(const Instruction &code, const Phase &phase, int thread);
    void run_rope_write(const Instruction &code, Part part, int thread);
    void rope_write(const Instruction &code, int64_t row, int64_t head0, int64_t head1);
    void run_attention(const Instruction &code, Part part, int thread);
    void prepare_rows(const Instruction &code, const LinearWeight &weight, int64_t rows, const float *x,
                      int64_t stride, uint8_t *prepared) const;
    void linear_rows(const Instruction &code, int64_t begin, int64_t end, int64_t t0, int64_t t1,
                     const uint8_t *prepared);
    void gated_tiles(const LinearWeight &weight, const uint8_t *prepared, int64_t rows, int64_t pair0, int64_t pair1,
                     int64_t columns, const float *bias, const Instruction &code, float *y, int64_t ldy,
                     const Scratch &scratch) const;
    void gated_row(const Instruction &code, const float *gate, const float *up, float *y, int64_t n) const;

    // moe.cpp
    void plan_experts();
    void run_moe(const Instruction &code, Part part, int thread);
    void route(const Instruction &code);

    // Row `row` of an operand of this step.
    uint8_t *row_bytes(const Operand &operand, int64_t row) const {
        const auto &value = program_.values[size_t(operand.index)];
        if (operand.index == redirected_)
            return reinterpret_cast<uint8_t *>(input_.logits + row * program_.vocab_size + operand.column);
        const auto &rows = rows_[size_t(value.rows)];
        return rows.arena + value.offset * rows.count + row * value.row_bytes + operand.column * 4;
    }
    float *row_f32(const Operand &operand, int64_t row) const { return reinterpret_cast<float *>(row_bytes(operand, row)); }
    int32_t *row_i32(const Operand &operand, int64_t row) const {
        return reinterpret_cast<int32_t *>(row_bytes(operand, row));
    }
    int64_t row_stride(const Operand &operand) const { // numbers
        return operand.index == redirected_ ? program_.vocab_size : program_.values[size_t(operand.index)].row_bytes / 4;
    }
    const uint8_t *weight_data(int index) const { return weights_->data() + program_.weights[size_t(index)].offset; }
    const float *vector_or_null(int index) const {
        return index < 0 ? nullptr : reinterpret_cast<const float *>(weight_data(index));
    }
    const uint8_t *pool_layer(int group, int layer) const {
        return kv_->layer(size_t(group), size_t(layer));
    }
    const int32_t *page_table(int group, int sequence) const {
        return input_.page_tables + (int64_t(group) * input_.sequences + sequence) * input_.table_width;
    }
    // A kind of rows' share of one thread.
    void share(RowKind rows, int thread, int64_t &begin, int64_t &end) const;
    void report(const Instruction &code, const char *what);

    const Kernels &kernels_;
    EngineOptions options_;
    Program program_;
    Mapping arena_, scratch_memory_, states_;
    // Shared with the engines beside this one; empty once closed.
    std::shared_ptr<Mapping> weights_;
    std::shared_ptr<ThreadPool> pool_;
    std::shared_ptr<KvPools> kv_;
    const std::shared_ptr<std::mutex> busy_; // held by the one that runs, or changes what is shared
    const bool beside_;
    std::vector<Scratch> scratch_;
    uint8_t *prepared_ = nullptr; // rows prepared together
    int redirected_ = -1;         // the value that is the caller's logits array itself
    std::vector<AttentionPlan> attention_;
    std::vector<int> plan_of_; // of an attention or rope_write: its plan; else -1
    std::vector<std::unique_ptr<CachedSchedule>> schedules_;
    std::vector<Profile> profile_; // empty: not measured

    // Experts: a token's choices sorted by expert, and the rows between the two matrices (moe.cpp).
    struct Experts {
        std::vector<int32_t> first; // [experts + 1]: rows [first[e], first[e + 1]) belong to expert e
        std::vector<int32_t> token; // [row]
        std::vector<int32_t> row;   // [token * top_k + j], -1 where the index was out of range
        std::vector<int64_t> cost;  // [experts + 1]: running cost, in tiles of one row
        Mapping memory;
        uint8_t *prepared = nullptr, *squeezed = nullptr;
        float *hidden = nullptr, *out = nullptr;
    } experts_;

    // This step
    StepInput input_{};
    struct Rows {
        uint8_t *arena = nullptr;
        int64_t count = 0;
    } rows_[kRowKinds];
    std::vector<int32_t> sequence_of_; // [T]
    const std::vector<Phase> *phases_ = nullptr;
    RowMode mode_[kRowKinds] = {};
    std::atomic<int> failed_{-1}; // an instruction whose data was out of range
    const char *failure_ = "";
};

// [begin, end): part `part` of `parts` of `count` things, cut at multiples of `align`.
inline void divide(int64_t count, int parts, int part, int64_t align, int64_t &begin, int64_t &end) {
    const int64_t blocks = (count + align - 1) / align;
    begin = blocks * part / parts * align;
    end = blocks * (part + 1) / parts * align;
    if (end > count)
        end = count;
    if (begin > end)
        begin = end;
}

} // namespace ew
