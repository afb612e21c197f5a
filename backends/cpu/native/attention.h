// The paged key/value cache and attention: data layout and the kernels' interface.
//
// A pool layer is an array of pages; a page holds `page_size` consecutive tokens of one sequence for every kv head:
//
//   page  = [kv_head][page_size / 16 blocks]
//   block = [K block | V block], 16 tokens of one head
//
//   format   K block                             V block
//   f32      [key_dim][16 tokens]                [16 tokens][value_dim padded to 16]
//   bf16     [ceil(key_dim / 2)][16 tokens][2]   [8 token pairs][value_dim padded to 16][2]
//
// So sixteen scores, or sixteen output columns, are one vector; every block is a whole number of cache lines.
//
// Attention works on spans of 512 keys that begin at absolute multiples of 512. Each span is summed from a fresh
// state and the states are merged in order, so a row's bits depend only on its query, its position and the cached
// keys and values: not on the other rows of the call, nor on which threads computed which span.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ew {

enum class KvFormat : int32_t { f32 = 0, bf16 = 1 };

constexpr int kKvBlockTokens = 16;
constexpr int kAttentionSpan = 512;
constexpr int kMaxTileRows = 6;         // query rows that share each load of keys and values
constexpr int kAttentionChunkRows = 96; // query rows whose states are kept while one span's keys are in cache

struct KvLayout {
    KvFormat format;
    int kv_heads, key_dim, value_dim;
    int page_size;         // tokens, 16 or 32
    int64_t k_block_bytes; // 16 tokens of one head
    int64_t v_block_bytes;
    int64_t block_bytes; // k + v
    int64_t page_bytes;  // all heads of one page

    int64_t value_dim_padded() const { return (value_dim + 15) / 16 * 16; }
};

inline KvLayout make_kv_layout(KvFormat format, int kv_heads, int key_dim, int value_dim, int page_size) {
    KvLayout layout{format, kv_heads, key_dim, value_dim, page_size, 0, 0, 0, 0};
    const int64_t key_elements = format == KvFormat::bf16 ? (key_dim + 1) / 2 * 2 : key_dim;
    const int64_t element_bytes = format == KvFormat::bf16 ? 2 : 4;
    layout.k_block_bytes = key_elements * kKvBlockTokens * element_bytes;
    layout.v_block_bytes = layout.value_dim_padded() * kKvBlockTokens * element_bytes;
    layout.block_bytes = layout.k_block_bytes + layout.v_block_bytes;
    layout.page_bytes = layout.block_bytes * (page_size / kKvBlockTokens) * kv_heads;
    return layout;
}

struct AttentionShape {
    int q_heads;         // a multiple of kv_heads; q head h reads kv head h / (q_heads / kv_heads)
    float scale;         // scores are scale * (q . k)
    float softcap;       // 0, or the cap: scores become cap * tanh(score / cap)
    int window;          // 0, or the number of keys a query sees: position - window + 1 .. position
    const float *sinks;  // null, or [q_heads]: a logit that joins the softmax's denominator
    const float *alibi;  // null, or [q_heads]: slope * (key position - query position) joins the score
};

// The first key a query at `position` sees.
inline int first_key(const AttentionShape &shape, int position) {
    return shape.window > 0 && position >= shape.window ? position - shape.window + 1 : 0;
}
// The spans a query at `position` needs: first_span .. last_span, both included.
inline int first_span(const AttentionShape &shape, int position) {
    return first_key(shape, position) / kAttentionSpan;
}
inline int last_span(int position) { return position / kAttentionSpan; }

// The state of one query row (one head of one token) over one span: floats
//   [0] the largest score in base-2 units, [1] the sum of exponentials (0: the row sees no key of the span),
//   [16 ..] the unnormalised output, value_dim padded to 16.
inline int64_t attention_state_floats(const KvLayout &layout) { return 16 + layout.value_dim_padded(); }

// Query rows of one kv head for `rows` tokens: state index = row * (q_heads / kv_heads) + head within the group.
inline int64_t attention_states(const AttentionShape &shape, const KvLayout &layout, int rows) {
    return int64_t(rows) * (shape.q_heads / layout.kv_heads);
}

// Bytes a thread must own to call `attention` or `attention_span`, for any number of rows. 64-byte aligned.
inline size_t attention_scratch_bytes(const KvLayout &layout) {
    const size_t query = size_t(kAttentionChunkRows) * ((layout.key_dim + 15) / 16 * 16 + 16) * 4;
    const size_t scores = size_t(kMaxTileRows) * (kAttentionSpan + 16) * 4;
    const size_t states = size_t(kAttentionChunkRows + kMaxTileRows) * attention_state_floats(layout) * 4;
    return query + 2 * scores + states + 4096;
}

// This part's entries of an instruction set's kernel table.
struct AttentionKernels {
    // Stores one token's keys and values of kv heads [head0, head1) in its page. k: [kv_heads][key_dim],
    // v: [kv_heads][value_dim]. Different tokens of a page may be written by different threads.
    void (*kv_write)(const KvLayout &, uint8_t *page, int slot, const float *k, const float *v, int head0, int head1);

    // Rotates the first rotary_dim features of each head of one token, in place. cos, sin: [rotary_dim / 2].
    void (*rope)(float *x, int64_t heads, int64_t head_stride, const float *cos, const float *sin, int rotary_dim,
                 bool interleaved);

    // Attention of `rows` tokens of one sequence for the query heads of one kv head. Row r sits at positions[r] and
    // sees keys first_key(positions[r]) .. positions[r], all of them written. q points at the first query head of
    // the kv head in row 0 and out likewise; heads lie key_dim (value_dim) apart, rows ldq (ldo) floats apart.
    // page_table: the sequence's; entries before the page of the earliest visible key are never read from.
    void (*attention)(const AttentionShape &, const KvLayout &, const uint8_t *pool_layer, const int32_t *page_table,
                      int kv_head, const float *q, int64_t ldq, const int32_t *positions, int rows, float *out,
                      int64_t ldo, void *scratch);

    // The same in two steps, to divide one long context among threads: the states of one span of keys
    // (attention_states() of them, attention_state_floats() apart), then the merge of consecutive spans, whose
    // arrays of states lie `span_stride` floats apart. The result is bit for bit that of `attention`.
    void (*attention_span)(const AttentionShape &, const KvLayout &, const uint8_t *pool_layer,
                           const int32_t *page_table, int kv_head, const float *q, int64_t ldq,
                           const int32_t *positions, int rows, int span, float *states, void *scratch);
    void (*attention_merge)(const AttentionShape &, const KvLayout &, int kv_head, int rows, const float *states,
                            int64_t span_stride, int spans, float *out, int64_t ldo);

    // Index of the largest of n values (the lowest index on ties); -1 where any value is NaN.
    int64_t (*argmax)(const float *x, int64_t n);
    // log(sum(exp(x))) of n values.
    float (*logsumexp)(const float *x, int64_t n);
    // y = softmax(x) of n values; y may be x.
    void (*softmax)(const float *x, float *y, int64_t n);
};

} // namespace ew
