// Attention over the paged cache (see attention.h for the layout and the interface).
//
// One call walks a chunk of queries span by span, so that a span's keys and values are fetched once for all of them.
// Within a span, a tile of up to six queries shares every load:
//   1. scores: each key step (16 tokens) times each query's factor, in registers over the whole key;
//   2. softmax: per query, over the keys that it sees and no others;
//   3. values: each value step (16 columns) times each query's weight, in registers over the whole span.
// A query's sums run over its own keys in ascending order whatever tile it stands in. Keys that a query must not see
// may hold anything (a page's old content, NaN): their scores are replaced, their values skipped or blanked.
#pragma once

#include "attention.h"
#include "kv_cache.inl"
#include "simd.h"
#include "simd_math.h"
#include "softmax.inl"

namespace ew::EW_ISA_NS {

#if defined(EW_ISA_AVX512)
static constexpr int kTileQueries = 6, kTileBlocks = 4;  // 24 sums, 4 keys and a factor in 32 registers
#else
static constexpr int kTileQueries = 4, kTileBlocks = 1;
#endif
static_assert(kTileQueries <= kMaxTileQueries);
static constexpr int kSpanBlocks = kAttentionSpan / kKvBlockTokens;
static constexpr int kAheadBlocks = 4;  // prefetch distance: 64 tokens
static constexpr int kTilesOfCodes = 4;  // so many read int8's codes each for itself; more share them as bf16
static constexpr int kScoreStride = kAttentionSpan + 16;

/// Keys [begin, end) of a span, counted from its first.
struct KeyRange {
  int begin, end;
  bool empty() const { return begin >= end; }
};

EW_INLINE int smaller(int a, int b) { return a < b ? a : b; }
EW_INLINE int larger(int a, int b) { return a > b ? a : b; }

/// The keys of one span that a query at `position` sees.
EW_INLINE KeyRange visible_keys(const AttentionShape& shape, int span, int position) {
  const int base = span * kAttentionSpan;
  return {larger(first_key(shape, position) - base, 0), smaller(position + 1 - base, kAttentionSpan)};
}

/// One call's arguments and its scratch. Query i of the call is head i % group of row i / group.
template <class Cache>
struct Call {
  using Element = typename Cache::Element;
  const AttentionShape& shape;
  const KvLayout& layout;
  const uint8_t* pool_layer;
  const int32_t* page_table;
  int kv_head, group;
  const int32_t* positions;
  int64_t query_stride, state_floats;
  BlockParts<Cache> parts;
  Element* queries;  // [kMaxChunkQueries][query_stride], the chunk's
  float* scores;     // [kTileQueries][kScoreStride]
  Element* weights;  // [kTileQueries][kScoreStride]
  float* states;     // [kMaxChunkQueries][state_floats]
  float* partial;    // [kTileQueries][state_floats]
  uint8_t* widened;  // [kSpanBlocks] blocks of a format that is widened, else nothing

  Call(const AttentionShape& shape_, const KvLayout& layout_, const uint8_t* pool, const int32_t* table, int head,
       const int32_t* positions_, void* scratch)
      : shape(shape_), layout(layout_), pool_layer(pool), page_table(table), kv_head(head),
        group(shape_.q_heads / layout_.kv_heads), positions(positions_),
        query_stride(padded_to_16(layout_.key_dim) + 16), state_floats(attention_state_floats(layout_)), parts(layout_) {
    float* next = static_cast<float*>(scratch);
    queries = reinterpret_cast<Element*>(next);
    next += kMaxChunkQueries * query_stride;
    scores = next;
    next += kMaxTileQueries * kScoreStride;
    weights = reinterpret_cast<Element*>(next);
    next += kMaxTileQueries * kScoreStride;
    states = next;
    next += kMaxChunkQueries * state_floats;
    partial = next;
    next += kMaxTileQueries * state_floats;
    widened = static_cast<uint8_t*>(scratch) + ((next - static_cast<float*>(scratch)) + 15) / 16 * 64;
  }

  /// The same call on blocks of another form, whose queries and weights are prepared alike.
  template <class Other>
  explicit Call(const Call<Other>& other)
      : shape(other.shape), layout(other.layout), pool_layer(other.pool_layer), page_table(other.page_table),
        kv_head(other.kv_head), group(other.group), positions(other.positions), query_stride(other.query_stride),
        state_floats(other.state_floats), parts(other.layout), queries(other.queries), scores(other.scores),
        weights(other.weights), states(other.states), partial(other.partial), widened(other.widened) {}

  int position(int query) const { return positions[query / group]; }
  KeyRange visible(int span, int query) const { return visible_keys(shape, span, position(query)); }
};

/// Where the blocks of one span lie: those that some query of the chunk sees, and what comes after them.
struct SpanBlocks {
  int first, last;                                    // blocks [first, last] are set
  const uint8_t* block[kSpanBlocks + kAheadBlocks];  // the entries after `last` are only prefetched
};

// --- Scores -----------------------------------------------------------------------------------------------------------

/// scores[q][16 b ..] = query q times the 16 keys of block b, as they are stored: before the attention's own scale.
template <class Cache, int Queries, int Blocks, bool Prefetch>
static __attribute__((noinline)) void score_blocks(const typename Cache::Element* queries, int64_t query_stride,
                                                   const uint8_t* const* blocks, const uint8_t* const* ahead,
                                                   int64_t ahead_offset, const BlockParts<Cache>& parts,
                                                   float* scores) {
  constexpr int step_bytes = 16 * Cache::lane_bytes;
  if constexpr (Prefetch && Cache::scaled) {
    unroll<Blocks>([&](auto b) EW_INLINE_LAMBDA {
      prefetch_t1(ahead[b] + parts.key_scales);
      prefetch_t1(ahead[b] + parts.value_scales);
    });
  }
  F16 sum[Queries][Blocks];
  unroll<Queries>([&](auto q) EW_INLINE_LAMBDA {
    unroll<Blocks>([&](auto b) EW_INLINE_LAMBDA { sum[q][b] = zero(); });
  });
  for (int step = 0; step < parts.key_steps; ++step) {
    typename Cache::Vector keys[Blocks];
    unroll<Blocks>([&](auto b) EW_INLINE_LAMBDA {
      keys[b] = Cache::load_lanes(blocks[b] + step * step_bytes);
      if constexpr (Prefetch) prefetch_t1(ahead[b] + ahead_offset + step * step_bytes);
    });
    unroll<Queries>([&](auto q) EW_INLINE_LAMBDA {
      const auto factor = Cache::broadcast(queries + q * query_stride + step * Cache::pack);
      unroll<Blocks>([&](auto b) EW_INLINE_LAMBDA { sum[q][b] = Cache::multiply(sum[q][b], keys[b], factor); });
    });
  }
  unroll<Queries>([&](auto q) EW_INLINE_LAMBDA {
    unroll<Blocks>([&](auto b) EW_INLINE_LAMBDA {
      F16 score = sum[q][b];
      if constexpr (Cache::scaled) {
        score = mul(score, load(reinterpret_cast<const float*>(blocks[b] + parts.key_scales)));
      }
      store(scores + q * kScoreStride + b * 16, score);
    });
  });
}

/// Scores of a tile for every block with a key of `range`. Prefetches the next 64 tokens, at the end the first values.
template <class Cache, int Queries, bool Prefetch>
static void score_span(const Call<Cache>& call, const typename Cache::Element* queries, const SpanBlocks& span,
                       KeyRange range) {
  const int begin = range.begin / kKvBlockTokens, end = (range.end + kKvBlockTokens - 1) / kKvBlockTokens;
  for (int b = begin; b < end;) {
    const bool more = b + kAheadBlocks <= span.last;
    const uint8_t* const* ahead = more ? span.block + b + kAheadBlocks : span.block + begin;
    const int64_t offset = more ? 0 : call.parts.values;
    float* scores = call.scores + b * kKvBlockTokens;
    if (end - b >= kTileBlocks) {
      score_blocks<Cache, Queries, kTileBlocks, Prefetch>(queries, call.query_stride, span.block + b, ahead, offset,
                                                          call.parts, scores);
      b += kTileBlocks;
    } else {
      score_blocks<Cache, Queries, 1, Prefetch>(queries, call.query_stride, span.block + b, ahead, offset,
                                                call.parts, scores);
      b += 1;
    }
  }
}

// --- Softmax ----------------------------------------------------------------------------------------------------------

/// Scores in base-2 units where something more than the scale changes them: cap first, then position.
static void transform_scores(const AttentionShape& shape, float slope, int first_distance, float* scores, int begin,
                             int end) {
  for (int b = begin; b < end; ++b) {
    F16 score = mul(load(scores + b * 16), set1(shape.scale));
    if (shape.softcap > 0) score = mul(set1(shape.softcap), tanh(div(score, set1(shape.softcap))));
    if (slope != 0) {
      const F16 distance = to_f32(add(iota(), set1_i32(first_distance + b * 16)));
      score = fmadd(set1(slope), distance, score);
    }
    store(scores + b * 16, mul(score, set1(kLog2E)));
  }
}

/// The largest score over the keys that a query sees, and what scores are multiplied by to be in base-2 units.
struct ScoreRange {
  float largest, multiplier;
  float maximum() const { return largest * multiplier; }
};

/// Scores of keys that the query does not see become minus infinity, in the first and the last block of `range`.
template <class Cache>
static ScoreRange finish_scores(const Call<Cache>& call, int query, int span, KeyRange range, float* scores) {
  const AttentionShape& shape = call.shape;
  const int begin = range.begin / 16, end = (range.end + 15) / 16;
  const float slope = shape.alibi ? shape.alibi[call.kv_head * call.group + query % call.group] : 0.0f;
  float multiplier = shape.scale * kLog2E;
  if (shape.softcap > 0 || slope != 0 || !(shape.scale > 0)) {
    transform_scores(shape, slope, span * kAttentionSpan - call.position(query), scores, begin, end);
    multiplier = 1.0f;
  }
  const F16 unseen = set1(-__builtin_inff());
  float* first = scores + begin * 16;
  float* last = scores + (end - 1) * 16;
  store(first, select(first_n(range.begin - begin * 16), unseen, load(first)));
  store(last, select(first_n(range.end - (end - 1) * 16), load(last), unseen));

  F16 even = load(first), odd = even;
  int b = begin + 1;
  for (; b + 2 <= end; b += 2) {
    even = max(load(scores + b * 16), even);
    odd = max(load(scores + b * 16 + 16), odd);
  }
  if (b < end) even = max(load(last), even);
  return {reduce_max(max(even, odd)), multiplier};
}

/// The softmax weights of one query over keys `range` of a span, unnormalised; returns their sum. The largest score is
/// taken off first, so that it weighs exactly 1 however large it is.
template <class Cache>
static float weigh_scores(const Call<Cache>& call, const SpanBlocks& blocks, ScoreRange score, KeyRange range,
                          const float* scores, typename Cache::Element* weights) {
  const F16 scale = set1(score.multiplier), largest = set1(score.largest);
  F16 sum = zero();
  for (int b = range.begin / 16; b < (range.end + 15) / 16; ++b) {
    const F16 weight = softmax_exp2(mul(sub(load(scores + b * 16), largest), scale));
    if constexpr (Cache::scaled) {
      // The scale of a token that the query does not see may be NaN; its weight is zero.
      const F16 scales = load(reinterpret_cast<const float*>(blocks.block[b] + call.parts.value_scales));
      Cache::store_weights(weights + b * 16, select(cmp_eq(weight, zero()), zero(), mul(weight, scales)));
      sum = add(sum, weight);
    } else {
      sum = add(sum, Cache::store_weights(weights + b * 16, weight));
    }
  }
  return reduce_add(sum);
}

// --- Values -----------------------------------------------------------------------------------------------------------

/// Values of one span as value steps: step s holds tokens [s * pack, (s + 1) * pack), steps_per_block of them a block.
template <class Cache>
struct SpanValues {
  static constexpr int steps_per_block = kKvBlockTokens / Cache::pack;
  const SpanBlocks& span;
  int64_t offset;      // of the values within a block
  int64_t step_bytes;  // one step, all columns
  int64_t columns;     // padded to 16

  const uint8_t* at(int step) const {
    return span.block[step / steps_per_block] + offset + step % steps_per_block * step_bytes;
  }
  /// What to fetch while `step` is read: the values 64 tokens on, at the end the next span's first keys.
  const uint8_t* ahead(int step) const {
    const int block = step / steps_per_block + kAheadBlocks;
    return span.block[block] + (block <= span.last ? offset : 0) + step % steps_per_block * step_bytes;
  }
};

/// output[q][column ..] += weights[q] times values, for steps [begin, end) and `Columns` vectors of columns.
template <class Cache, int Queries, int Columns, bool Prefetch>
static __attribute__((noinline)) void add_columns(const typename Cache::Element* weights,
                                                  const SpanValues<Cache>& values, int begin, int end, float* output,
                                                  int64_t output_stride, int64_t column) {
  constexpr int per_block = SpanValues<Cache>::steps_per_block;
  const int64_t step_bytes = values.step_bytes;
  F16 sum[Queries][Columns];
  unroll<Queries>([&](auto q) EW_INLINE_LAMBDA {
    unroll<Columns>([&](auto c) EW_INLINE_LAMBDA { sum[q][c] = load(output + q * output_stride + column + c * 16); });
  });
  for (int step = begin; step < end;) {
    const int stop = smaller(end, (step / per_block + 1) * per_block);
    const uint8_t* value = values.at(step) + column * Cache::lane_bytes;
    const uint8_t* ahead = values.ahead(step) + column * Cache::lane_bytes;
    for (; step < stop; ++step) {
      typename Cache::Vector lanes[Columns];
      unroll<Columns>([&](auto c) EW_INLINE_LAMBDA {
        lanes[c] = Cache::load_lanes(value + c * 16 * Cache::lane_bytes);
        if constexpr (Prefetch && (c % (4 / Cache::lane_bytes) == 0)) prefetch_t1(ahead + c * 16 * Cache::lane_bytes);
      });
      unroll<Queries>([&](auto q) EW_INLINE_LAMBDA {
        const auto factor = Cache::broadcast(weights + q * kScoreStride + step * Cache::pack);
        unroll<Columns>([&](auto c) EW_INLINE_LAMBDA { sum[q][c] = Cache::multiply(sum[q][c], lanes[c], factor); });
      });
      value += step_bytes;
      ahead += step_bytes;
    }
  }
  unroll<Queries>([&](auto q) EW_INLINE_LAMBDA {
    unroll<Columns>([&](auto c) EW_INLINE_LAMBDA { store(output + q * output_stride + column + c * 16, sum[q][c]); });
  });
}

/// The same for all columns. Where the registers cannot hold them at once, 64 tokens at a time, so that memory is read
/// nearly in order.
template <class Cache, int Queries, bool Prefetch>
static void add_values(const typename Cache::Element* weights, const SpanValues<Cache>& values, int begin, int end,
                       float* output, int64_t output_stride) {
  constexpr int wide = Queries <= kTileQueries / 2 ? kTileBlocks * 2 : kTileBlocks;
  constexpr int group = 64 / Cache::pack;
  const int64_t columns = values.columns;
  for (int step = begin, stop; step < end; step = stop) {
    stop = columns <= wide * 16 ? end : smaller(end, (step / group + 1) * group);
    int64_t column = 0;
    for (; column + wide * 16 <= columns; column += wide * 16) {
      add_columns<Cache, Queries, wide, Prefetch>(weights, values, step, stop, output, output_stride, column);
    }
    if constexpr (wide > 4) {
      for (; column + 64 <= columns; column += 64) {
        add_columns<Cache, Queries, 4, Prefetch>(weights, values, step, stop, output, output_stride, column);
      }
    }
    for (; column < columns; column += 16) {
      add_columns<Cache, Queries, 1, Prefetch>(weights, values, step, stop, output, output_stride, column);
    }
  }
}

/// One query, one step of which only elements [first, last) are its own; its weights for the others are zero.
template <class Cache>
static void add_part_of_step(const typename Cache::Element* weights, const SpanValues<Cache>& values, int step,
                             int first, int last, float* output) {
  const auto factor = Cache::broadcast(weights + step * Cache::pack);
  const uint8_t* value = values.at(step);
  for (int64_t column = 0; column < values.columns; column += 16) {
    const auto lanes = Cache::keep(Cache::load_lanes(value + column * Cache::lane_bytes), first, last);
    store(output + column, Cache::multiply(load(output + column), lanes, factor));
  }
}

/// One query, tokens [begin, end) of the span.
template <class Cache>
static void add_tokens(const typename Cache::Element* weights, const SpanValues<Cache>& values, int begin, int end,
                       float* output) {
  constexpr int pack = Cache::pack;
  if (begin >= end) return;
  int step = begin / pack;
  if (begin % pack != 0) {
    add_part_of_step<Cache>(weights, values, step, begin % pack, smaller(end - step * pack, pack), output);
    ++step;
  }
  if (step < end / pack) {
    add_values<Cache, 1, false>(weights, values, step, end / pack, output, 0);
    step = end / pack;
  }
  if (step * pack < end) add_part_of_step<Cache>(weights, values, step, 0, end - step * pack, output);
}

// --- Tiles and spans --------------------------------------------------------------------------------------------------

/// The states over one span of `Queries` queries from `query` on; `slot` is the first one's place in the chunk.
template <class Cache, int Queries, bool Prefetch>
static void tile_states(const Call<Cache>& call, const SpanBlocks& blocks, int span, int query, int slot,
                        float* states) {
  constexpr int pack = Cache::pack;
  KeyRange range[Queries], any = {kAttentionSpan, 0};
  KeyRange common = {0, kAttentionSpan / pack};  // steps that every query sees whole
  for (int q = 0; q < Queries; ++q) {
    range[q] = call.visible(span, query + q);
    states[q * call.state_floats + 1] = 0.0f;
    common = {larger(common.begin, (range[q].begin + pack - 1) / pack), smaller(common.end, range[q].end / pack)};
    if (!range[q].empty()) any = {smaller(any.begin, range[q].begin), larger(any.end, range[q].end)};
  }
  if (any.empty()) return;
  if (common.empty()) common = {kAttentionSpan / pack, kAttentionSpan / pack};

  score_span<Cache, Queries, Prefetch>(call, call.queries + slot * call.query_stride, blocks, any);
  const SpanValues<Cache> values = {blocks, call.parts.values, call.parts.value_step,
                                    padded_to_16(call.layout.value_dim)};
  // Each stage for all queries before the next, so that the chains of one query's stage hide behind another's.
  ScoreRange score[Queries];
  for (int q = 0; q < Queries; ++q) {
    if (range[q].empty()) continue;
    score[q] = finish_scores(call, query + q, span, range[q], call.scores + q * kScoreStride);
  }
  for (int q = 0; q < Queries; ++q) {
    if (range[q].empty()) continue;
    float* state = states + q * call.state_floats;
    state[0] = score[q].maximum();
    state[1] = weigh_scores(call, blocks, score[q], range[q], call.scores + q * kScoreStride,
                            call.weights + q * kScoreStride);
  }
  float* outputs = states + 16;
  for (int q = 0; q < Queries; ++q) {
    if (range[q].empty()) continue;
    float* output = outputs + q * call.state_floats;
    auto* weights = call.weights + q * kScoreStride;
    for (int64_t column = 0; column < values.columns; column += 16) store(output + column, zero());
    add_tokens<Cache>(weights, values, range[q].begin, smaller(range[q].end, common.begin * pack), output);
  }
  if (common.empty()) return;
  add_values<Cache, Queries, Prefetch>(call.weights, values, common.begin, common.end, outputs, call.state_floats);
  for (int q = 0; q < Queries; ++q) {
    add_tokens<Cache>(call.weights + q * kScoreStride, values, common.end * pack, range[q].end,
                      outputs + q * call.state_floats);
  }
}

template <class Cache, bool Prefetch, int Queries = kTileQueries>
static void tile_states_of(int count, const Call<Cache>& call, const SpanBlocks& blocks, int span, int query, int slot,
                           float* states) {
  if (count == Queries) return tile_states<Cache, Queries, Prefetch>(call, blocks, span, query, slot, states);
  if constexpr (Queries > 1) {
    tile_states_of<Cache, Prefetch, Queries - 1>(count, call, blocks, span, query, slot, states);
  }
}

/// A chunk is cut into the fewest tiles, of nearly equal size.
EW_INLINE int tiles_of(int queries) { return (queries + kTileQueries - 1) / kTileQueries; }

/// The states over one span of the chunk's `count` queries, tile by tile, stored at place(first query): done(first, size)
/// takes a tile's. Where it fetches, the first tile does: the others find the span in cache.
template <bool Fetch, class Cache, class Place, class Done>
static void each_tile(const Call<Cache>& call, const SpanBlocks& blocks, int span, int begin, int count, Place place,
                      Done done) {
  const int tiles = tiles_of(count);
  for (int tile = 0; tile < tiles; ++tile) {
    const int i = count * tile / tiles, size = count * (tile + 1) / tiles - i;
    if (Fetch && tile == 0) {
      tile_states_of<Cache, Fetch>(size, call, blocks, span, begin + i, i, place(i));
    } else {
      tile_states_of<Cache, false>(size, call, blocks, span, begin + i, i, place(i));
    }
    done(i, size);
  }
}

template <class Cache, class Place, class Done>
static void chunk_states(const Call<Cache>& call, const SpanBlocks& blocks, int span, int begin, int count,
                         Place place, Done done) {
  each_tile<true>(call, blocks, span, begin, count, place, done);
}

/// Few tiles read the codes of int8 themselves; many share them as bf16. The sums are the same.
template <class Place, class Done>
static void chunk_states(const Call<CacheInt8>& call, const SpanBlocks& blocks, int span, int begin, int count,
                         Place place, Done done) {
  if (tiles_of(count) <= kTilesOfCodes) return each_tile<true>(call, blocks, span, begin, count, place, done);
  const Call<CacheWidened> wide(call);
  const int64_t bytes = widened_block_bytes(call.layout);
  SpanBlocks widened;
  widened.first = blocks.first;
  widened.last = blocks.last;
  for (int b = blocks.first; b <= blocks.last; ++b) {
    uint8_t* block = call.widened + (b - blocks.first) * bytes;
    widen_block(call.parts, wide.parts, blocks.block[b], blocks.block[b + kAheadBlocks], block);
    widened.block[b] = block;
  }
  for (int b = 1; b <= kAheadBlocks; ++b) widened.block[blocks.last + b] = call.widened;
  each_tile<false>(wide, widened, span, begin, count, place, done);
}

/// The blocks of a span that queries [begin, end) see; false where they see none.
template <class Cache>
static bool locate_blocks(const Call<Cache>& call, int span, int begin, int end, SpanBlocks& blocks) {
  KeyRange any = {kAttentionSpan, 0};
  int furthest = 0;
  for (int row = begin / call.group; row * call.group < end; ++row) {
    const KeyRange range = visible_keys(call.shape, span, call.positions[row]);
    if (!range.empty()) any = {smaller(any.begin, range.begin), larger(any.end, range.end)};
    furthest = larger(furthest, call.positions[row]);
  }
  if (any.empty()) return false;
  blocks.first = any.begin / kKvBlockTokens;
  blocks.last = (any.end - 1) / kKvBlockTokens;
  for (int b = blocks.first; b <= blocks.last + kAheadBlocks; ++b) {
    const int token = span * kAttentionSpan + b * kKvBlockTokens;
    blocks.block[b] = token <= furthest
                          ? kv_block(call.layout, call.pool_layer, call.page_table, call.kv_head, token)
                          : blocks.block[blocks.first];
  }
  return true;
}

/// Prepares queries [begin, begin + count) as the format multiplies them.
template <class Cache>
static void load_queries(const Call<Cache>& call, const float* q, int64_t ldq, int begin, int count) {
  const int dim = call.layout.key_dim;
  for (int i = 0; i < count; ++i) {
    const float* query = q + (begin + i) / call.group * ldq + (begin + i) % call.group * dim;
    auto* prepared = call.queries + i * call.query_stride;
    for (int d = 0; d < dim; d += 16) Cache::store_query(prepared + d, load_partial(query + d, dim - d));
  }
}

/// total = total and then part, of consecutive spans: the running maximum of Milakov & Gimelshein 2018, algorithm 3.
static void merge_states(float* total, const float* part, int64_t floats) {
  if (part[1] == 0.0f) return;
  if (total[1] == 0.0f) {
    for (int64_t i = 0; i < floats; i += 16) store(total + i, load(part + i));
    return;
  }
  const float maximum = total[0] > part[0] ? total[0] : part[0];
  const float keep = softmax_exp2(total[0] - maximum), join = softmax_exp2(part[0] - maximum);
  total[0] = maximum;
  total[1] = total[1] * keep + part[1] * join;
  for (int64_t i = 16; i < floats; i += 16) {
    store(total + i, fmadd(load(part + i), set1(join), mul(load(total + i), set1(keep))));
  }
}

/// The attention output of one query head from its state over all keys.
static void write_output(const AttentionShape& shape, const float* state, int head, int value_dim, float* out) {
  float sum = state[1], keep = 1.0f;
  if (shape.sinks) {
    const float sink = shape.sinks[head] * kLog2E;
    const float maximum = state[0] > sink ? state[0] : sink;
    keep = softmax_exp2(state[0] - maximum);
    sum = sum * keep + softmax_exp2(sink - maximum);
  }
  const F16 factor = set1(keep / sum);
  for (int d = 0; d < value_dim; d += 16) store_partial(out + d, mul(load(state + 16 + d), factor), value_dim - d);
}

template <class Cache>
static void attention_of(const AttentionShape& shape, const KvLayout& layout, const uint8_t* pool_layer,
                         const int32_t* page_table, int kv_head, const float* q, int64_t ldq,
                         const int32_t* positions, int rows, float* out, int64_t ldo, void* scratch) {
  const Call<Cache> call(shape, layout, pool_layer, page_table, kv_head, positions, scratch);
  for (int begin = 0; begin < rows * call.group; begin += kMaxChunkQueries) {
    const int count = smaller(rows * call.group - begin, kMaxChunkQueries);
    load_queries(call, q, ldq, begin, count);
    int from = INT32_MAX, to = 0;
    for (int i = 0; i < count; ++i) {
      from = smaller(from, first_span(shape, call.position(begin + i)));
      to = larger(to, last_span(call.position(begin + i)));
      call.states[i * call.state_floats + 1] = 0.0f;
    }
    SpanBlocks blocks;
    for (int span = from; span <= to; ++span) {
      if (!locate_blocks(call, span, begin, begin + count, blocks)) continue;
      auto merge = [&](int i, int size) {
        for (int j = 0; j < size; ++j) {
          merge_states(call.states + (i + j) * call.state_floats, call.partial + j * call.state_floats,
                       call.state_floats);
        }
      };
      chunk_states(call, blocks, span, begin, count, [&](int) { return call.partial; }, merge);
    }
    for (int i = 0; i < count; ++i) {
      const int row = (begin + i) / call.group, head = (begin + i) % call.group;
      write_output(shape, call.states + i * call.state_floats, kv_head * call.group + head, layout.value_dim,
                   out + row * ldo + head * layout.value_dim);
    }
  }
}

template <class Cache>
static void attention_span_of(const AttentionShape& shape, const KvLayout& layout, const uint8_t* pool_layer,
                              const int32_t* page_table, int kv_head, const float* q, int64_t ldq,
                              const int32_t* positions, int rows, int span, float* states, void* scratch) {
  const Call<Cache> call(shape, layout, pool_layer, page_table, kv_head, positions, scratch);
  for (int begin = 0; begin < rows * call.group; begin += kMaxChunkQueries) {
    const int count = smaller(rows * call.group - begin, kMaxChunkQueries);
    load_queries(call, q, ldq, begin, count);
    SpanBlocks blocks;
    float* first = states + begin * call.state_floats;
    if (!locate_blocks(call, span, begin, begin + count, blocks)) {
      for (int i = 0; i < count; ++i) first[i * call.state_floats + 1] = 0.0f;
      continue;
    }
    chunk_states(call, blocks, span, begin, count, [&](int i) { return first + i * call.state_floats; },
                 [](int, int) {});
  }
}

// --- Table entries ----------------------------------------------------------------------------------------------------

static void attention(const AttentionShape& shape, const KvLayout& layout, const uint8_t* pool_layer,
                      const int32_t* page_table, int kv_head, const float* q, int64_t ldq, const int32_t* positions,
                      int rows, float* out, int64_t ldo, void* scratch) {
  switch (layout.format) {
    case KvFormat::f32:
      return attention_of<CacheF32>(shape, layout, pool_layer, page_table, kv_head, q, ldq, positions, rows, out, ldo,
                                    scratch);
    case KvFormat::bf16:
      return attention_of<CacheBf16>(shape, layout, pool_layer, page_table, kv_head, q, ldq, positions, rows, out, ldo,
                                     scratch);
    case KvFormat::int8:
      return attention_of<CacheInt8>(shape, layout, pool_layer, page_table, kv_head, q, ldq, positions, rows, out, ldo,
                                     scratch);
  }
}

static void attention_span(const AttentionShape& shape, const KvLayout& layout, const uint8_t* pool_layer,
                           const int32_t* page_table, int kv_head, const float* q, int64_t ldq,
                           const int32_t* positions, int rows, int span, float* states, void* scratch) {
  switch (layout.format) {
    case KvFormat::f32:
      return attention_span_of<CacheF32>(shape, layout, pool_layer, page_table, kv_head, q, ldq, positions, rows, span,
                                         states, scratch);
    case KvFormat::bf16:
      return attention_span_of<CacheBf16>(shape, layout, pool_layer, page_table, kv_head, q, ldq, positions, rows,
                                          span, states, scratch);
    case KvFormat::int8:
      return attention_span_of<CacheInt8>(shape, layout, pool_layer, page_table, kv_head, q, ldq, positions, rows,
                                          span, states, scratch);
  }
}

static void attention_merge(const AttentionShape& shape, const KvLayout& layout, int kv_head, int rows, float* states,
                            int64_t span_stride, int spans, float* out, int64_t ldo) {
  const int group = shape.q_heads / layout.kv_heads;
  const int64_t floats = attention_state_floats(layout);
  for (int i = 0; i < rows * group; ++i) {
    float* total = states + i * floats;
    for (int span = 1; span < spans; ++span) merge_states(total, total + span * span_stride, floats);
    write_output(shape, total, kv_head * group + i % group, layout.value_dim,
                 out + i / group * ldo + i % group * layout.value_dim);
  }
}

}  // namespace ew::EW_ISA_NS
