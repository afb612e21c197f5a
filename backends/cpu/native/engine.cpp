#include "engine.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace ew {
namespace {

constexpr int64_t kRowsPerThread = 32; // from here a thread has rows enough to keep them through all instructions
constexpr int kMaxRowThreads = 16;     // beyond it, dividing rows would read the weights too often
constexpr int64_t kSlack = 4096;       // after an arena: vector loads may begin, not only end, near its end

int64_t page_aligned(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

[[noreturn]] void refuse(const std::string &what) { throw std::invalid_argument("malformed step: " + what); }

std::string number(int64_t n) { return std::to_string(n); }

} // namespace

Engine::Engine(const std::string &program, const EngineOptions &options, const Kernels &kernels)
    : kernels_(kernels), options_(options), busy_(std::make_shared<std::mutex>()), beside_(false) {
    check_limits();
    weights_ = std::make_shared<Mapping>(options.copy ? Mapping::file_copy(options.weights)
                                                      : Mapping::file(options.weights));
    Program parsed = parse_program(program, int64_t(weights_->size()));
    pool_ = std::make_shared<ThreadPool>(options.threads ? options.threads : usable_cpus());
    kv_ = std::make_shared<KvPools>(parsed.groups);
    set_up(std::move(parsed));
}

Engine::Engine(const std::string &program, const Engine &other, int64_t max_tokens, int64_t max_rows)
    : kernels_(other.kernels_), options_(other.options_), busy_(other.busy_), beside_(true) {
    options_.max_tokens = max_tokens;
    options_.max_rows = max_rows;
    check_limits();
    {
        std::lock_guard<std::mutex> lock(*busy_);
        other.open_check();
        weights_ = other.weights_;
        pool_ = other.pool_;
        kv_ = other.kv_;
    }
    Program parsed = parse_program(program, int64_t(weights_->size()));
    if (parsed.vocab_size != other.program_.vocab_size)
        throw std::invalid_argument("a vocabulary of " + number(parsed.vocab_size) + ", expected " +
                                    number(other.program_.vocab_size) + " as in the program beside it");
    if (const std::string found = kv_->difference(parsed.groups); !found.empty())
        throw std::invalid_argument(found + " as in the program beside it");
    set_up(std::move(parsed));
}

void Engine::check_limits() const {
    const EngineOptions &o = options_;
    if (o.max_tokens < 1 || o.max_tokens > 1 << 20 || o.max_rows < 1 || o.max_rows > 1 << 20)
        throw std::invalid_argument("max_tokens and max_rows must lie between 1 and 1048576");
    if (o.threads < 0 || o.threads > 1024)
        throw std::invalid_argument("threads must lie between 1 and 1024 (0: one a core)");
}

// What an engine has of its own: the program over the mapped weights, its values' memory, and its plans.
void Engine::set_up(Program program) {
    program_ = std::move(program);
    for (Weight &weight : program_.weights)
        weight.linear.data = weights_->data() + weight.offset;
    for (Instruction &code : program_.instructions)
        if (code.op == Op::elementwise || code.op == Op::copy)
            simplify(code.walk, int(code.in.size() + code.out.size()));

    arena_ = Mapping::anonymous(size_t(page_aligned(program_.arena_row_bytes[0] * options_.max_tokens + kSlack) +
                                       page_aligned(program_.arena_row_bytes[1] * options_.max_rows + kSlack)),
                                true);
    rows_[0].arena = arena_.data();
    rows_[1].arena = arena_.data() + page_aligned(program_.arena_row_bytes[0] * options_.max_tokens + kSlack);
    sequence_of_.resize(size_t(options_.max_tokens));
    plan_scratch();
    plan_experts();

    // Logits go straight into the caller's array where the output is a value of its own.
    if (program_.values[size_t(program_.output.index)].width == program_.vocab_size)
        redirected_ = program_.output.index;

    for (const Instruction &code : program_.instructions) {
        plan_of_.push_back(-1);
        if (code.op != Op::attention && code.op != Op::rope_write)
            continue;
        auto same = [&](const AttentionPlan &plan) {
            return plan.group == code.group && plan.kv_heads == code.kv_heads && plan.q_heads == code.q_heads &&
                   plan.value_dim == code.value_dim;
        };
        const auto found = std::find_if(attention_.begin(), attention_.end(), same);
        plan_of_.back() = int(found - attention_.begin());
        if (found == attention_.end()) {
            AttentionPlan plan;
            plan.group = code.group;
            plan.kv_heads = code.kv_heads;
            plan.q_heads = code.q_heads;
            plan.value_dim = code.value_dim;
            plan.window = program_.groups[size_t(code.group)].window;
            attention_.push_back(std::move(plan));
        }
    }
}

// Scratch of each thread, and the rows that all threads prepare together: sizes for the largest step.
void Engine::plan_scratch() {
    int64_t own = 0, together = 0, attention = 0, generic = 0, normed = 0;
    bool gated = false;
    for (const Instruction &code : program_.instructions) {
        if (code.op == Op::linear || code.op == Op::linear_gated) {
            const int64_t bytes =
                kernels_.prepared_row_bytes(program_.weights[size_t(code.weights[0])].linear) * code.inner;
            own = std::max(own, bytes * std::max(kFewRows, std::max<int64_t>(kRowChunk / code.inner, 1)));
            together = std::max(together,
                                bytes * (code.rows == RowKind::tokens ? options_.max_tokens : options_.max_rows));
        }
        gated |= code.op == Op::linear_gated || code.op == Op::moe;
        if (code.op == Op::rms_norm || code.op == Op::layer_norm)
            normed = std::max(normed, page_aligned(kFewRows * code.in[0].width * 4));
        if (code.op == Op::attention)
            attention = std::max(
                attention, int64_t(attention_scratch_bytes(
                               program_.groups[size_t(code.group)].layers[size_t(code.layer)].layout)));
        if (code.op >= Op::elementwise)
            generic = std::max(generic, generic_scratch_bytes(code));
    }
    const int64_t tiles = gated ? 2 * kTileFloats * 4 : 0;
    own = page_aligned(own);
    attention = page_aligned(attention);
    generic = page_aligned(generic);
    const int64_t each = own + tiles + attention + generic + 2 * normed;
    scratch_memory_ = Mapping::anonymous(size_t(each * pool_->threads() + page_aligned(together)), false);
    uint8_t *at = scratch_memory_.data();
    for (int thread = 0; thread < pool_->threads(); ++thread, at += each) {
        uint8_t *const rows = at + own + tiles + attention + generic;
        scratch_.push_back({at, at + own, at + own + tiles, at + own + tiles + attention,
                            reinterpret_cast<float *>(rows), reinterpret_cast<float *>(rows + normed)});
    }
    prepared_ = at;
}

void Engine::open_check() const {
    if (!pool_)
        throw std::runtime_error("the engine is closed");
}

void Engine::close() {
    std::lock_guard<std::mutex> lock(*busy_);
    pool_.reset();
    kv_.reset();
    weights_.reset();
    for (Mapping *memory : {&arena_, &scratch_memory_, &states_, &experts_.memory})
        memory->release();
}

// ---- pools --------------------------------------------------------------------------------------------------------

void Engine::create_pool(const std::vector<int64_t> &pages) {
    std::lock_guard<std::mutex> lock(*busy_);
    open_check();
    kv_->create(pages);
}

void Engine::copy_pages(int64_t group, const int32_t *sources, const int32_t *destinations, int64_t count) {
    std::lock_guard<std::mutex> lock(*busy_);
    open_check();
    kv_->copy(group, sources, destinations, count);
}

void Engine::fill_pool(float value) {
    std::lock_guard<std::mutex> lock(*busy_);
    open_check();
    kv_->fill(value);
}

void Engine::set_profiling(bool on) {
    std::lock_guard<std::mutex> lock(*busy_);
    profile_.assign(on ? program_.instructions.size() : 0, Profile());
}

// What is shared counts for the engine that brought it.
MemoryUse Engine::memory() const {
    MemoryUse use{0, 0, int64_t(arena_.size()),
                  int64_t(scratch_memory_.size() + states_.size() + experts_.memory.size())};
    if (pool_ && !beside_) {
        use.weights = int64_t(weights_->size());
        use.pool = kv_->bytes();
    }
    return use;
}

// ---- steps --------------------------------------------------------------------------------------------------------

RowMode Engine::row_mode(int64_t rows) const {
    if (rows <= kFewRows)
        return RowMode::few;
    const int threads = pool_->threads();
    return threads <= kMaxRowThreads && rows >= kRowsPerThread * threads ? RowMode::rows : RowMode::tiles;
}

const std::vector<Phase> &Engine::schedule(const ScheduleKey &key) {
    for (const auto &cached : schedules_)
        if (cached->key == key)
            return cached->phases;
    schedules_.push_back(std::make_unique<CachedSchedule>(CachedSchedule{key, make_schedule(program_, plan_of_, key)}));
    return schedules_.back()->phases;
}

// Everything that a kernel will rely on, so that no input can make one read or write outside its memory.
void Engine::validate(const StepInput &in) {
    const int64_t tokens = in.tokens_count, sequences = in.sequences;
    if (tokens < 1 || tokens > options_.max_tokens)
        refuse(number(tokens) + " tokens, expected 1 to " + number(options_.max_tokens));
    if (in.logits_count > options_.max_rows)
        refuse(number(in.logits_count) + " logit rows, at most " + number(options_.max_rows));
    if (sequences < 1 || sequences > tokens)
        refuse(number(sequences) + " sequences of " + number(tokens) + " tokens");
    if (in.groups != int64_t(kv_->groups()))
        refuse("page tables of " + number(in.groups) + " KV groups, expected " + number(int64_t(kv_->groups())));
    if (in.seq_starts[0] != 0 || in.seq_starts[sequences] != tokens)
        refuse("seq_starts runs from " + number(in.seq_starts[0]) + " to " + number(in.seq_starts[sequences]) +
               ", expected 0 to " + number(tokens));
    for (int64_t t = 0; t < tokens; ++t)
        if (in.tokens[t] < 0 || in.tokens[t] >= program_.token_limit)
            refuse("token id " + number(in.tokens[t]) + " in row " + number(t) + ", the vocabulary has " +
                   number(program_.token_limit));
    for (int64_t r = 0; r < in.logits_count; ++r)
        if (in.logit_rows[r] < 0 || in.logit_rows[r] >= tokens)
            refuse("logit row " + number(in.logit_rows[r]) + " of " + number(tokens) + " rows");
    for (int64_t s = 0; s < sequences; ++s)
        if (in.seq_starts[s + 1] <= in.seq_starts[s])
            refuse("sequence " + number(s) + " has no rows");
    kv_->begin_step();
    for (int64_t s = 0; s < sequences; ++s) {
        const int64_t begin = in.seq_starts[s], end = in.seq_starts[s + 1], context = in.context_lens[s];
        const int64_t first = context - (end - begin);
        if (first < 0 || context > program_.position_limit)
            refuse("sequence " + number(s) + " has " + number(end - begin) + " rows of a context of " +
                   number(context) + ", the limit is " + number(program_.position_limit));
        for (int64_t t = begin; t < end; ++t) {
            if (in.positions[t] != first + t - begin)
                refuse("position " + number(in.positions[t]) + " in row " + number(t) + ", expected " +
                       number(first + t - begin) + " (a sequence's rows are the last of its context)");
            sequence_of_[size_t(t)] = int32_t(s);
        }
        for (int64_t g = 0; g < in.groups; ++g) {
            const KvGroup &group = program_.groups[size_t(g)];
            const int64_t pages = kv_->pages(size_t(g));
            const int64_t page_size = group.page_size;
            if (context > in.table_width * page_size)
                refuse("a page table of " + number(in.table_width) + " pages cannot hold a context of " +
                       number(context));
            const int32_t *table = in.page_tables + (g * sequences + s) * in.table_width;
            const int64_t visible = group.window > 0 && first >= group.window ? first - group.window + 1 : 0;
            for (int64_t p = visible / page_size; p <= (context - 1) / page_size; ++p) {
                if (table[p] < 0 || table[p] >= pages)
                    refuse("sequence " + number(s) + ", KV group " + number(g) + ": page " + number(table[p]) +
                           " for positions from " + number(p * page_size) + ", the pool has " + number(pages) +
                           (pages ? "" : " (create_pool comes first)"));
                if (p < first / page_size)
                    continue;
                if (kv_->mark_written(size_t(g), table[p]))
                    refuse("page " + number(table[p]) + " of KV group " + number(g) + " is written twice");
            }
        }
    }
}

void Engine::step(const StepInput &input) {
    std::unique_lock<std::mutex> lock(*busy_, std::try_to_lock);
    if (!lock)
        throw std::runtime_error("another step is running on this engine");
    open_check();
    validate(input);
    input_ = input;
    rows_[0].count = input.tokens_count;
    rows_[1].count = input.logits_count;
    ScheduleKey key{{row_mode(input.tokens_count), row_mode(input.logits_count)}, AttentionMode::own};
    std::copy(key.mode.begin(), key.mode.end(), mode_);
    int64_t state_floats = 0;
    for (AttentionPlan &plan : attention_) {
        plan.make(pool_->threads(), int(input.sequences), input.seq_starts, input.positions);
        if (plan.by_spans) {
            key.attention = AttentionMode::spans;
            state_floats = std::max(state_floats, plan.state_floats);
        } else if (!plan.whole && key.attention == AttentionMode::own) {
            key.attention = AttentionMode::apart;
        }
    }
    if (state_floats * 4 > int64_t(states_.size()))
        states_ = Mapping::anonymous(size_t(page_aligned(state_floats * 4)), false);
    phases_ = &schedule(key);
    failed_ = -1;
    auto body = [this](int thread) { run_thread(thread); };
    pool_->run(body);
    if (redirected_ < 0)
        for (int64_t r = 0; r < input.logits_count; ++r)
            std::memcpy(input.logits + r * program_.vocab_size, row_bytes(program_.output, r),
                        size_t(program_.vocab_size) * 4);
    const int failed = failed_;
    if (failed >= 0)
        throw std::runtime_error(program_.instructions[size_t(failed)].where() + ": " + failure_);
}

} // namespace ew
