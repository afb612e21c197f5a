// The cache's formats: how keys and values are stored, and how the attention loops read them.
//
// A format is a struct with the same members, so that the loops of attention.inl are written once:
//   Element   a prepared query feature or a softmax weight         pack     elements in 4 bytes
//   Vector    64 bytes of cached keys or values                    Factor   `pack` elements on every lane
//   multiply  sum += vector * factor, lane by lane, `pack` products each
//   keep      zero in place of all but elements [first, last) of each lane's pack, whatever they hold
//   store     16 softmax weights, rounded as the format rounds them; returns the values stored
//   scaled    whether each token's keys and values carry a scale, behind the block. A key's multiplies its score, a
//             value's its softmax weight before that is rounded; the weights' sum takes them without.
//   lane_bytes  what the `pack` elements of a lane take in memory: 64 bytes of Vector may be half as many there
#pragma once

#include "attention.h"
#include "simd.h"

namespace ew::EW_ISA_NS {

struct CacheF32 {
  using Element = float;
  using Vector = F16;
  using Factor = F16;
  static constexpr int pack = 1, lane_bytes = 4;
  static constexpr bool scaled = false;

  EW_INLINE Vector load_lanes(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
  EW_INLINE Vector keep(Vector v, int, int) { return v; }
  EW_INLINE Factor broadcast(const Element* p) { return set1(*p); }
  EW_INLINE F16 multiply(F16 sum, Vector v, Factor factor) { return fmadd(v, factor, sum); }
  EW_INLINE void store_query(Element* out, F16 x) { storeu(out, x); }
  EW_INLINE F16 store_weights(Element* out, F16 x) {
    storeu(out, x);
    return x;
  }

  static void write_token(const KvLayout& layout, uint8_t* block, int token, const float* k, const float* v) {
    float* keys = reinterpret_cast<float*>(block) + token;
    for (int d = 0; d < layout.key_dim; ++d) keys[d * kKvBlockTokens] = k[d];
    float* values = reinterpret_cast<float*>(block + layout.k_block_bytes) + token * padded_to_16(layout.value_dim);
    for (int d = 0; d < layout.value_dim; d += 16) {
      storeu(values + d, load_partial(v + d, layout.value_dim - d));
    }
  }
};

struct CacheBf16 {
  using Element = uint16_t;
  using Vector = B64;
  using Factor = BF2;
  static constexpr int pack = 2, lane_bytes = 4;
  static constexpr bool scaled = false;

  EW_INLINE Vector load_lanes(const uint8_t* p) { return load_bytes(p); }
  EW_INLINE Vector keep(Vector v, int first, int last) {
    const uint32_t mask = (first == 0 ? 0x0000ffffu : 0u) | (last == 2 ? 0xffff0000u : 0u);
    return as_bytes(and_(as_i32(v), set1_i32(static_cast<int32_t>(mask))));
  }
  EW_INLINE Factor broadcast(const Element* p) { return broadcast_bf2(p); }
  EW_INLINE F16 multiply(F16 sum, Vector v, Factor factor) { return dot2_bf16(sum, v, factor); }
  EW_INLINE void store_query(Element* out, F16 x) { store_bf16(out, x); }
  EW_INLINE F16 store_weights(Element* out, F16 x) {
#if defined(EW_ISA_AVX512)
    const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), rounded);
    return widen_bf16(rounded);
#else
    store_bf16(out, x);
    return load_bf16(out);
#endif
  }

  // Two-byte stores, never a read: the neighbour in a token pair may be another thread's.
  static void write_token(const KvLayout& layout, uint8_t* block, int token, const float* k, const float* v) {
    uint16_t rounded[16];
    uint16_t* keys = reinterpret_cast<uint16_t*>(block) + token * 2;
    for (int d = 0; d < layout.key_dim; d += 16) {
      store_bf16(rounded, load_partial(k + d, layout.key_dim - d));
      for (int pair = 0; pair < 8 && d + pair * 2 < layout.key_dim; ++pair) {  // an odd last feature pairs with zero
        __builtin_memcpy(keys + (d / 2 + pair) * kKvBlockTokens * 2, rounded + pair * 2, 4);
      }
    }
    uint16_t* values = reinterpret_cast<uint16_t*>(block + layout.k_block_bytes);
    values += token / 2 * padded_to_16(layout.value_dim) * 2 + token % 2;
    for (int d = 0; d < layout.value_dim; d += 16) {
      store_bf16(rounded, load_partial(v + d, layout.value_dim - d));
      for (int lane = 0; lane < 16; ++lane) values[(d + lane) * 2] = rounded[lane];
    }
  }
};

/// int8 codes and a scale a token, multiplied as bf16, which holds every code exactly.
struct CacheInt8 : CacheBf16 {
  static constexpr int lane_bytes = 2;
  static constexpr bool scaled = true;

  using Vector = Codes;
  EW_INLINE Vector load_lanes(const uint8_t* p) { return load_codes(p); }
  EW_INLINE F16 multiply(F16 sum, Vector v, Factor factor) { return dot2_bf16(sum, v, factor); }
  EW_INLINE Vector keep(Vector v, int, int) { return v; }  // codes are finite, whatever they are: times zero they vanish

  // One- and two-byte stores, as above.
  static void write_token(const KvLayout& layout, uint8_t* block, int token, const float* k, const float* v) {
    int8_t codes[16];
    float* scales = reinterpret_cast<float*>(block + layout.k_block_bytes + layout.v_block_bytes) + token;
    const F16 key = set1(rounding(k, layout.key_dim, scales[0]));
    uint8_t* keys = block + token * 2;
    for (int d = 0; d < layout.key_dim; d += 16) {
      store_i8(codes, round_to_i16(mul(load_partial(k + d, layout.key_dim - d), key)));
      for (int pair = 0; pair < 8 && d + pair * 2 < layout.key_dim; ++pair) {
        __builtin_memcpy(keys + (d / 2 + pair) * kKvBlockTokens * 2, codes + pair * 2, 2);
      }
    }
    const F16 value = set1(rounding(v, layout.value_dim, scales[kKvBlockTokens]));
    uint8_t* values = block + layout.k_block_bytes + token / 2 * padded_to_16(layout.value_dim) * 2 + token % 2;
    for (int d = 0; d < layout.value_dim; d += 16) {
      store_i8(codes, round_to_i16(mul(load_partial(v + d, layout.value_dim - d), value)));
      for (int lane = 0; lane < 16; ++lane) values[(d + lane) * 2] = static_cast<uint8_t>(codes[lane]);
    }
  }

 private:
  /// What a vector is multiplied by to become codes; sets its scale. An infinity or a NaN anywhere in it becomes the scale.
  static float rounding(const float* x, int n, float& scale) {
    I16 largest = zero_i32();  // bits of the magnitudes: they order as integers, NaN last
    for (int d = 0; d < n; d += 16) largest = max(as_i32(abs(load_partial(x + d, n - d))), largest);
    const int32_t bits = reduce_max(largest);
    float limit;
    __builtin_memcpy(&limit, &bits, 4);
    const bool none = limit < 0x1p-100f;
    scale = none ? 0.0f : limit / 127.0f;
    return none ? 0.0f : 127.0f / limit;
  }
};

/// Blocks of int8 that are widened to bf16 already: once for all the tiles of a chunk. The same sums.
struct CacheWidened : CacheBf16 {
  static constexpr bool scaled = true;
  EW_INLINE Vector keep(Vector v, int, int) { return v; }
};

/// Where the parts of a block lie: keys at 0, values, scales of keys, scales of values.
template <class Cache>
struct BlockParts {
  int key_steps;        // of 16 lanes
  int64_t values;       // bytes from the block's begin
  int64_t value_step;   // bytes from one step (all columns) to the next
  int64_t key_scales, value_scales;

  explicit BlockParts(const KvLayout& layout) {
    key_steps = (layout.key_dim + Cache::pack - 1) / Cache::pack;
    values = (key_steps * 16 * Cache::lane_bytes + 63) / 64 * 64;
    value_step = padded_to_16(layout.value_dim) * Cache::lane_bytes;
    key_scales = values + kKvBlockTokens / Cache::pack * value_step;
    value_scales = key_scales + kKvScaleBytes / 2;
  }
};

/// One block of int8 as bf16.
static void widen_block(const BlockParts<CacheInt8>& from, const BlockParts<CacheWidened>& to, const uint8_t* block,
                        const uint8_t* ahead, uint8_t* out) {
  const auto widen = [&](int64_t i, uint8_t* wide) {
    prefetch_t1(ahead + i);
    store_bytes(wide, widen_codes(block + i));
    store_bytes(wide + 64, widen_codes(block + i + 32));
  };
  for (int64_t i = 0; i < from.values; i += 64) widen(i, out + i * 2);  // the step that pads an odd number is overwritten
  for (int64_t i = from.values; i < from.key_scales; i += 64) widen(i, out + to.values + (i - from.values) * 2);
  prefetch_t1(ahead + from.key_scales);
  prefetch_t1(ahead + from.value_scales);
  __builtin_memcpy(out + to.key_scales, block + from.key_scales, kKvScaleBytes);
}

/// Where the block of `token` of one kv head begins.
EW_INLINE const uint8_t* kv_block(const KvLayout& layout, const uint8_t* pool_layer, const int32_t* page_table,
                                  int kv_head, int token) {
  const int page = token / layout.page_size, slot = token % layout.page_size;
  const int block = kv_head * (layout.page_size / kKvBlockTokens) + slot / kKvBlockTokens;
  return pool_layer + page_table[page] * layout.page_bytes + block * layout.block_bytes;
}

template <class Cache>
static void write_heads(const KvLayout& layout, uint8_t* page, int slot, const float* k, const float* v, int head0,
                        int head1) {
  const int blocks = layout.page_size / kKvBlockTokens;
  for (int head = head0; head < head1; ++head) {
    uint8_t* block = page + (head * blocks + slot / kKvBlockTokens) * layout.block_bytes;
    Cache::write_token(layout, block, slot % kKvBlockTokens, k + head * layout.key_dim, v + head * layout.value_dim);
  }
}

static void kv_write(const KvLayout& layout, uint8_t* page, int slot, const float* k, const float* v, int head0,
                     int head1) {
  switch (layout.format) {
    case KvFormat::f32: return write_heads<CacheF32>(layout, page, slot, k, v, head0, head1);
    case KvFormat::bf16: return write_heads<CacheBf16>(layout, page, slot, k, v, head0, head1);
    case KvFormat::int8: return write_heads<CacheInt8>(layout, page, slot, k, v, head0, head1);
  }
}

}  // namespace ew::EW_ISA_NS
