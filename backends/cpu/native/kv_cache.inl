// The cache's formats: how keys and values are stored, and how the attention loops read them.
//
// A format is a struct with the same members, so that the loops of attention.inl are written once:
//   Element   a prepared query feature or a softmax weight         pack     elements in 4 bytes
//   Vector    64 bytes of cached keys or values                    Factor   `pack` elements on every lane
//   multiply  sum += vector * factor, lane by lane, `pack` products each
//   keep      zero in place of all but elements [first, last) of each lane's pack, whatever they hold
//   store     16 softmax weights, rounded as the format rounds them; returns the values stored
// A format with integer codes would carry its scales behind each block.
#pragma once

#include "attention.h"
#include "simd.h"

namespace ew::EW_ISA_NS {

struct CacheF32 {
  using Element = float;
  using Vector = F16;
  using Factor = F16;
  static constexpr int pack = 1;

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
  static constexpr int pack = 2;

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
  }
}

}  // namespace ew::EW_ISA_NS
