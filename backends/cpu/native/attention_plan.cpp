#include "attention_plan.h"

#include <algorithm>

namespace ew {
namespace {

constexpr int64_t kMaxStateFloats = int64_t(4) << 20; // 16 MB: beyond it there are items enough without spans
constexpr int kItemsPerThread = 4;
constexpr int kMinRows = 8; // fewer rows an item waste the loads of keys that its rows share

// Splits a list of costs into consecutive runs of about equal cost. Returns the largest run's share of the ideal.
double balance(const std::vector<int64_t> &costs, int threads, std::vector<int> &starts) {
    int64_t total = 0;
    for (int64_t cost : costs)
        total += cost;
    starts.assign(size_t(threads) + 1, int(costs.size()));
    starts[0] = 0;
    int64_t before = 0, largest = 0, mine = 0;
    int thread = 0;
    for (size_t i = 0; i < costs.size(); ++i) {
        const int owner = total > 0 ? int(std::min<int64_t>((2 * before + costs[i]) * threads / (2 * total), threads - 1)) : 0;
        while (thread < owner) {
            starts[size_t(++thread)] = int(i);
            mine = 0;
        }
        mine += costs[i];
        before += costs[i];
        largest = std::max(largest, mine);
    }
    return total > 0 ? double(largest) * threads / double(total) : 1;
}

} // namespace

void AttentionPlan::make(int threads, int sequences, const int32_t *seq_starts, const int32_t *positions) {
    AttentionShape shape{};
    shape.q_heads = q_heads;
    shape.window = window;
    const int heads = q_heads / kv_heads;

    // As many rows an item as the kernel keeps at once, fewer where that leaves threads without work.
    int block = std::max(kMaxChunkQueries / heads, 1);
    auto count = [&](int rows) {
        int64_t items = 0;
        for (int s = 0; s < sequences; ++s)
            items += (seq_starts[s + 1] - seq_starts[s] + rows - 1) / rows;
        return items * kv_heads;
    };
    while (block > kMinRows && count(block) < int64_t(kItemsPerThread) * threads)
        block = std::max(block / 2, kMinRows);

    items.clear();
    std::vector<int64_t> costs;
    bool long_context = false;
    for (int s = 0; s < sequences; ++s)
        for (int head = 0; head < kv_heads; ++head)
            for (int row = seq_starts[s]; row < seq_starts[s + 1]; row += block) {
                const int rows = std::min(block, seq_starts[s + 1] - row);
                const int last = positions[row + rows - 1];
                const int first = ew::first_span(shape, positions[row]);
                const int spans = last_span(last) - first + 1;
                items.push_back({s, head, row, rows, first, spans, 0});
                costs.push_back(int64_t(rows) * (last - first_key(shape, positions[row]) + 1) + 16);
                long_context |= spans > 1;
            }
    by_spans = false;
    whole = int64_t(items.size()) == int64_t(sequences) * kv_heads;
    const double share = balance(costs, threads, starts);
    if (threads == 1 || !long_context || share < 1.2)
        return;

    // Few long contexts: divide them by spans instead.
    KvLayout layout{};
    layout.kv_heads = kv_heads;
    layout.value_dim = value_dim;
    units.clear();
    costs.clear();
    state_floats = 0;
    for (size_t i = 0; i < items.size(); ++i) {
        AttentionItem &item = items[i];
        item.states = state_floats;
        state_floats += int64_t(item.rows) * heads * attention_state_floats(layout) * item.spans;
        const int first = first_key(shape, positions[item.row0]), last = positions[item.row0 + item.rows - 1];
        for (int span = item.first_span; span < item.first_span + item.spans; ++span) {
            units.push_back({int(i), span});
            const int low = std::max(first, span * kAttentionSpan), high = std::min(last + 1, (span + 1) * kAttentionSpan);
            costs.push_back(int64_t(item.rows) * std::max(high - low, 0) + 16);
        }
    }
    if (state_floats > kMaxStateFloats)
        return;
    std::vector<int> by_unit;
    if (balance(costs, threads, by_unit) > 0.9 * share)
        return;
    by_spans = true;
    starts = std::move(by_unit);
}

} // namespace ew
