// The paged key/value cache and attention: the data's layout and the kernels' interface.
//
// A pool layer is an array of pages, 64-byte aligned. A page holds `page_size` consecutive tokens of one sequence for
// every kv head, in blocks of 16 tokens:
//
//   page  = [kv_head][page_size / 16] blocks
//   block = [K block | V block]
//
//   format   K block                             V block
//   f32      [key_dim][16 tokens]                [16 tokens][value_dim padded to 16]
//   bf16     [key_dim / 2, up][16 tokens][2]     [8 token pairs][value_dim padded to 16][2]
//   int8     as bf16, a byte a code              as bf16, a byte a code, then [16 tokens] key scales and [16] value scales
//
// So a step of 64 bytes (int8: 32) is 16 tokens of a key feature (or of a pair), or 16 value features of a token (or of
// a pair), and one loop over steps serves every format. Both blocks are padded to 64 bytes.
//
// int8: code = round to nearest even of x * (127 / max|x|) over one token's vector of one head, x ~ code * max|x| / 127;
// the scale, max|x| / 127, is f32. A vector whose max|x| is below 2^-100 has scale and codes 0.
//
// Keys are summed in spans of 512 that begin at absolute multiples of 512. Each span starts from a fresh state, and
// the states are merged in order. A row's bits therefore depend on its query, its position and the cached keys and
// values alone: not on the other rows of the call, nor on which thread computed which span.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ew {

enum class KvFormat : int32_t { f32 = 0, bf16 = 1, int8 = 2 };

/// As recipes, graphs and program.json write them, by value of the enumeration.
constexpr const char* kKvFormatNames[] = {"f32", "bf16", "int8"};

constexpr int kKvBlockTokens = 16;
constexpr int kKvScaleBytes = 2 * kKvBlockTokens * 4;  // of an int8 block: a scale a token for keys, one for values
constexpr int kAttentionSpan = 512;
constexpr int kMaxTileQueries = 6;    // queries that share each load of keys and values
constexpr int kMaxChunkQueries = 96;  // queries that go through a span while its keys and values are in cache

struct KvLayout {
  KvFormat format;
  int kv_heads, key_dim, value_dim;
  int page_size;                         // tokens: 16 or 32
  int64_t k_block_bytes, v_block_bytes;  // 16 tokens of one head
  int64_t block_bytes;                   // both, and the scales of int8
  int64_t page_bytes;                    // all heads of one page
};

static inline int64_t padded_to_16(int64_t n) { return (n + 15) / 16 * 16; }

static inline KvLayout make_kv_layout(KvFormat format, int kv_heads, int key_dim, int value_dim, int page_size) {
  KvLayout layout{format, kv_heads, key_dim, value_dim, page_size, 0, 0, 0, 0};
  const int64_t pack = format == KvFormat::f32 ? 1 : 2;        // elements on a lane,
  const int64_t lane_bytes = format == KvFormat::int8 ? 2 : 4;  // and the bytes that they take
  layout.k_block_bytes = ((key_dim + pack - 1) / pack * 16 * lane_bytes + 63) / 64 * 64;
  layout.v_block_bytes = kKvBlockTokens / pack * padded_to_16(value_dim) * lane_bytes;
  layout.block_bytes = layout.k_block_bytes + layout.v_block_bytes + (format == KvFormat::int8 ? kKvScaleBytes : 0);
  layout.page_bytes = layout.block_bytes * (page_size / kKvBlockTokens) * kv_heads;
  return layout;
}

struct AttentionShape {
  int q_heads;         // a multiple of kv_heads; query head h reads kv head h / (q_heads / kv_heads)
  float scale;         // a score is scale * (q . k)
  float softcap;       // 0, or cap: the score becomes cap * tanh(score / cap)
  int window;          // 0, or how many keys a query sees: position - window + 1 .. position
  const float* sinks;  // null, or [q_heads]: a logit that joins the softmax's denominator only
  const float* alibi;  // null, or [q_heads]: slope * (key position - query position) is added to the score
};

/// The first key that a query at `position` sees; the last is `position` itself.
static inline int first_key(const AttentionShape& shape, int position) {
  return shape.window > 0 && position >= shape.window ? position - shape.window + 1 : 0;
}

/// A query at `position` needs spans first_span .. last_span, both included.
static inline int first_span(const AttentionShape& shape, int position) {
  return first_key(shape, position) / kAttentionSpan;
}
static inline int last_span(int position) { return position / kAttentionSpan; }

/// Floats of one query's state over some keys: [0] the largest score in base-2 units, [1] the sum of exponentials
/// (0 where the query sees none of the keys), [16..] the unnormalised output.
static inline int64_t attention_state_floats(const KvLayout& layout) { return 16 + padded_to_16(layout.value_dim); }

/// A block of int8 codes as bf16, with its scales.
static inline int64_t widened_block_bytes(const KvLayout& layout) {
  const KvLayout bf16 = make_kv_layout(KvFormat::bf16, 1, layout.key_dim, layout.value_dim, kKvBlockTokens);
  return bf16.block_bytes + kKvScaleBytes;
}
/// Bytes of one span in that form, which many queries read.
static inline int64_t attention_widened_bytes(const KvLayout& layout) {
  return layout.format == KvFormat::int8 ? kAttentionSpan / kKvBlockTokens * widened_block_bytes(layout) : 0;
}

/// Bytes that a thread must bring to `attention` or `attention_span`, 64-byte aligned, for any number of rows.
static inline size_t attention_scratch_bytes(const KvLayout& layout) {
  const int64_t queries = kMaxChunkQueries * (padded_to_16(layout.key_dim) + 16);
  const int64_t scores = kMaxTileQueries * (kAttentionSpan + 16);
  const int64_t states = (kMaxChunkQueries + kMaxTileQueries) * attention_state_floats(layout);
  const int64_t floats = (queries + 2 * scores + states + 15) / 16 * 16;
  return static_cast<size_t>(floats * 4 + attention_widened_bytes(layout));
}

/// This part of an instruction set's kernel table. A "row" is one token; its queries are the q_heads / kv_heads query
/// heads that read the given kv head.
struct AttentionKernels {
  /// Stores one token's keys and values of kv heads [head0, head1) in slot `slot` of its page.
  /// k: [kv_heads][key_dim], v: [kv_heads][value_dim]. Threads may write different tokens of one page at once.
  void (*kv_write)(const KvLayout&, uint8_t* page, int slot, const float* k, const float* v, int head0, int head1);

  /// Rotates the first `rotary_dim` features of each head of one token, in place. cos, sin: [rotary_dim / 2].
  /// Feature i pairs with i + rotary_dim / 2, or 2 i with 2 i + 1 where interleaved.
  void (*rope)(float* x, int64_t heads, int64_t head_stride, const float* cos, const float* sin, int rotary_dim,
               bool interleaved);

  /// Attention of `rows` tokens of one sequence for one kv head. Row r sits at positions[r] and sees the keys
  /// first_key(positions[r]) .. positions[r], which are written. `q` points at the first of the kv head's query heads
  /// in row 0, `out` likewise; heads lie key_dim (value_dim) apart, rows ldq (ldo) floats apart.
  /// `page_table` is the sequence's; entries of pages wholly before the first visible key may be anything.
  void (*attention)(const AttentionShape&, const KvLayout&, const uint8_t* pool_layer, const int32_t* page_table,
                    int kv_head, const float* q, int64_t ldq, const int32_t* positions, int rows, float* out,
                    int64_t ldo, void* scratch);

  /// The same in two steps, to divide a long context among threads: the states of one span of keys, at
  /// states[(row * q_heads / kv_heads + head) * attention_state_floats()], 64-byte aligned ...
  void (*attention_span)(const AttentionShape&, const KvLayout&, const uint8_t* pool_layer, const int32_t* page_table,
                         int kv_head, const float* q, int64_t ldq, const int32_t* positions, int rows, int span,
                         float* states, void* scratch);
  /// ... then the merge of `spans` consecutive ones, `span_stride` floats apart, ascending from the first span of any
  /// row to the last. Overwrites the first span's states. `out` is bit for bit that of `attention`.
  void (*attention_merge)(const AttentionShape&, const KvLayout&, int kv_head, int rows, float* states,
                          int64_t span_stride, int spans, float* out, int64_t ldo);

  /// Index of the largest of n values, the lowest on ties; -1 where any value is NaN.
  int64_t (*argmax)(const float* x, int64_t n);
  /// log(sum(exp(x))) of n values; NaN where any is.
  float (*logsumexp)(const float* x, int64_t n);
  /// y = softmax(x) of n values; y may be x.
  void (*softmax)(const float* x, float* y, int64_t n);
};

}  // namespace ew
