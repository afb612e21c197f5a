// simd.h for AVX-512 (F, BW, DQ, VL, VNNI, BF16): one register per 16 lanes.
#pragma once

#include <immintrin.h>

namespace ew::EW_ISA_NS {

struct F16 { __m512 v; };
struct I16 { __m512i v; };
struct B64 { __m512i v; };
struct S8x4 { __m512i v; };
struct BF2 { __m512i v; };
struct M16 { __mmask16 v; };

// Masks.
EW_INLINE M16 first_n(int64_t n) { return {static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1)}; }
EW_INLINE M16 and_(M16 a, M16 b) { return {static_cast<__mmask16>(a.v & b.v)}; }
EW_INLINE M16 or_(M16 a, M16 b) { return {static_cast<__mmask16>(a.v | b.v)}; }
EW_INLINE M16 not_(M16 a) { return {static_cast<__mmask16>(~a.v)}; }
EW_INLINE bool any(M16 a) { return a.v != 0; }
EW_INLINE uint32_t bits(M16 a) { return a.v; }
EW_INLINE F16 select(M16 m, F16 a, F16 b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
EW_INLINE I16 select(M16 m, I16 a, I16 b) { return {_mm512_mask_blend_epi32(m.v, b.v, a.v)}; }

// Memory.
EW_INLINE F16 load(const float* p) { return {_mm512_load_ps(p)}; }
EW_INLINE F16 loadu(const float* p) { return {_mm512_loadu_ps(p)}; }
EW_INLINE F16 load_partial(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_n(n).v, p)}; }
EW_INLINE void store(float* p, F16 a) { _mm512_store_ps(p, a.v); }
EW_INLINE void storeu(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
EW_INLINE void store_partial(float* p, F16 a, int64_t n) { _mm512_mask_storeu_ps(p, first_n(n).v, a.v); }
EW_INLINE I16 load(const int32_t* p) { return {_mm512_load_si512(p)}; }
EW_INLINE I16 loadu(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
EW_INLINE I16 load_partial(const int32_t* p, int64_t n) { return {_mm512_maskz_loadu_epi32(first_n(n).v, p)}; }
EW_INLINE void store(int32_t* p, I16 a) { _mm512_store_si512(p, a.v); }
EW_INLINE void storeu(int32_t* p, I16 a) { _mm512_storeu_si512(p, a.v); }
EW_INLINE void store_partial(int32_t* p, I16 a, int64_t n) { _mm512_mask_storeu_epi32(p, first_n(n).v, a.v); }
EW_INLINE B64 load_bytes(const void* p) { return {_mm512_load_si512(p)}; }
EW_INLINE B64 loadu_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
EW_INLINE void store_bytes(void* p, B64 a) { _mm512_store_si512(p, a.v); }
EW_INLINE void storeu_bytes(void* p, B64 a) { _mm512_storeu_si512(p, a.v); }
EW_INLINE void prefetch_t0(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
EW_INLINE void prefetch_t1(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

// Lanes.
EW_INLINE F16 zero() { return {_mm512_setzero_ps()}; }
EW_INLINE F16 set1(float a) { return {_mm512_set1_ps(a)}; }
EW_INLINE I16 zero_i32() { return {_mm512_setzero_si512()}; }
EW_INLINE I16 set1_i32(int32_t a) { return {_mm512_set1_epi32(a)}; }
EW_INLINE I16 iota() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
EW_INLINE F16 as_f32(I16 a) { return {_mm512_castsi512_ps(a.v)}; }
EW_INLINE I16 as_i32(F16 a) { return {_mm512_castps_si512(a.v)}; }
EW_INLINE I16 as_i32(B64 a) { return {a.v}; }
EW_INLINE B64 as_bytes(I16 a) { return {a.v}; }

// f32 arithmetic.
EW_INLINE F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
EW_INLINE F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
EW_INLINE F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
EW_INLINE F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
EW_INLINE F16 fmadd(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
EW_INLINE F16 fnmadd(F16 a, F16 b, F16 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
EW_INLINE F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
EW_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
EW_INLINE F16 sqrt(F16 a) { return {_mm512_sqrt_ps(a.v)}; }
EW_INLINE F16 round_nearest(F16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
EW_INLINE M16 cmp_lt(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
EW_INLINE M16 cmp_le(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
EW_INLINE M16 cmp_gt(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
EW_INLINE M16 cmp_ge(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
EW_INLINE M16 cmp_eq(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
EW_INLINE M16 is_nan(F16 a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }

// i32 arithmetic.
EW_INLINE I16 add(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
EW_INLINE I16 sub(I16 a, I16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
EW_INLINE I16 mul(I16 a, I16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
EW_INLINE I16 min(I16 a, I16 b) { return {_mm512_min_epi32(a.v, b.v)}; }
EW_INLINE I16 max(I16 a, I16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
EW_INLINE I16 and_(I16 a, I16 b) { return {_mm512_and_si512(a.v, b.v)}; }
EW_INLINE I16 or_(I16 a, I16 b) { return {_mm512_or_si512(a.v, b.v)}; }
EW_INLINE I16 xor_(I16 a, I16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N> EW_INLINE I16 shift_left(I16 a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> EW_INLINE I16 shift_right(I16 a) { return {_mm512_srli_epi32(a.v, N)}; }
template <int N> EW_INLINE I16 shift_right_arithmetic(I16 a) { return {_mm512_srai_epi32(a.v, N)}; }
EW_INLINE M16 cmp_lt(I16 a, I16 b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
EW_INLINE M16 cmp_gt(I16 a, I16 b) { return {_mm512_cmpgt_epi32_mask(a.v, b.v)}; }
EW_INLINE M16 cmp_eq(I16 a, I16 b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }

// Conversions.
EW_INLINE I16 round_to_i16(F16 a) {
  return {_mm512_cvt_roundps_epi32(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
EW_INLINE F16 to_f32(I16 a) {
  return {_mm512_cvt_roundepi32_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
EW_INLINE __m256i load_u16_partial(const uint16_t* p, int64_t n) { return _mm256_maskz_loadu_epi16(first_n(n).v, p); }
EW_INLINE F16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
EW_INLINE F16 load_f16_partial(const uint16_t* p, int64_t n) { return {_mm512_cvtph_ps(load_u16_partial(p, n))}; }
EW_INLINE __m256i to_f16_bits(F16 a) { return _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
EW_INLINE void store_f16(uint16_t* p, F16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_f16_bits(a)); }
EW_INLINE void store_f16_partial(uint16_t* p, F16 a, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_n(n).v, to_f16_bits(a));
}
EW_INLINE F16 widen_bf16(__m256i bits) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
EW_INLINE F16 load_bf16(const uint16_t* p) {
  return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
EW_INLINE F16 load_bf16_partial(const uint16_t* p, int64_t n) { return widen_bf16(load_u16_partial(p, n)); }
// Integer rounding rather than VCVTNEPS2BF16, which flushes subnormals: the same bits in every variant.
EW_INLINE __m256i to_bf16_bits(F16 a) {
  __m512i u = as_i32(a).v;
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(is_nan(a).v, rounded, _mm512_set1_epi32(0x7fc0)));
}
EW_INLINE void store_bf16(uint16_t* p, F16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16_bits(a)); }
EW_INLINE void store_bf16_partial(uint16_t* p, F16 a, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_n(n).v, to_bf16_bits(a));
}
EW_INLINE I16 load_i8(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
EW_INLINE I16 load_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
EW_INLINE void store_i8(int8_t* p, I16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v));
}
EW_INLINE B64 widen_codes(const uint8_t* p) {
  const __m128i* codes = reinterpret_cast<const __m128i*>(p);
  const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes)));
  const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes + 1)));
  return {reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low))};
}
using Codes = B64;
EW_INLINE Codes load_codes(const uint8_t* p) { return widen_codes(p); }
EW_INLINE F16 load_twice(const float* p) {
  const __m512i pairs = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  return {_mm512_permutexvar_ps(pairs, _mm512_castps256_ps512(_mm256_loadu_ps(p)))};
}

// Across lanes.
EW_INLINE F16 swap_pairs(F16 a) { return {_mm512_permute_ps(a.v, 0xb1)}; }
template <class Combine>
EW_INLINE float fold_lanes(F16 a, Combine combine) {
  F16 b = combine(a, F16{_mm512_shuffle_f32x4(a.v, a.v, 0x4e)});
  b = combine(b, F16{_mm512_shuffle_f32x4(b.v, b.v, 0xb1)});
  b = combine(b, F16{_mm512_permute_ps(b.v, 0x4e)});
  b = combine(b, F16{_mm512_permute_ps(b.v, 0xb1)});
  return _mm512_cvtss_f32(b.v);
}
EW_INLINE float reduce_add(F16 a) { return fold_lanes(a, [](F16 x, F16 y) EW_INLINE_LAMBDA { return add(x, y); }); }
EW_INLINE float reduce_max(F16 a) { return fold_lanes(a, [](F16 x, F16 y) EW_INLINE_LAMBDA { return max(x, y); }); }
EW_INLINE float reduce_min(F16 a) { return fold_lanes(a, [](F16 x, F16 y) EW_INLINE_LAMBDA { return min(x, y); }); }
EW_INLINE int32_t reduce_add(I16 a) { return _mm512_reduce_add_epi32(a.v); }
EW_INLINE int32_t reduce_max(I16 a) { return _mm512_reduce_max_epi32(a.v); }
EW_INLINE int32_t reduce_min(I16 a) { return _mm512_reduce_min_epi32(a.v); }
EW_INLINE float lane(F16 a, int i) { return _mm512_cvtss_f32(_mm512_permutexvar_ps(_mm512_set1_epi32(i), a.v)); }
EW_INLINE int32_t lane(I16 a, int i) {
  return _mm512_cvtsi512_si32(_mm512_permutexvar_epi32(_mm512_set1_epi32(i), a.v));
}

// Dot products.
/// Nothing but a promise that the value is in a register here. Without it GCC 12 may keep an accumulator's home in memory
/// and store to it in every round of a loop.
EW_INLINE void keep_in_register(I16& a) { asm("" : "+v"(a.v)); }
EW_INLINE void keep_in_register(F16& a) { asm("" : "+v"(a.v)); }
EW_INLINE B64 low_nibbles(B64 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
EW_INLINE B64 high_nibbles(B64 a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
template <int Q> EW_INLINE B64 bit_pairs(B64 a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 2 * Q), _mm512_set1_epi8(3))};
}
template <int Q> EW_INLINE B64 add_fours(B64 a, const uint8_t* p) {
  const __m512i plane = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  constexpr int kLow = Q < 3 ? 2 * Q : 2, kHigh = Q < 3 ? 2 * Q + 1 : 1;  // shifts that bring the bit to its place
  const __m512i shifts = _mm512_inserti64x4(_mm512_set1_epi16(kLow), _mm256_set1_epi16(kHigh), 1);
  const __m512i placed = Q < 3 ? _mm512_srlv_epi16(plane, shifts) : _mm512_sllv_epi16(plane, shifts);
  return {_mm512_ternarylogic_epi32(a.v, placed, _mm512_set1_epi8(4), 0xf8)};  // a | (placed & 4)
}
struct Fp8Pairs { B64 first, second; };
/// High and low bytes of the bf16 by themselves, then interleaved: by shifts for normal codes, whose exponent's bias grows by
/// 112, and from tables for the subnormal codes 0..7 and for NaN.
EW_INLINE Fp8Pairs fp8_pairs(B64 a) {
  const auto table = [](uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) EW_INLINE_LAMBDA {
    return _mm512_broadcast_i32x4(_mm_setr_epi32(static_cast<int>(w0), static_cast<int>(w1), static_cast<int>(w2),
                                                 static_cast<int>(w3)));
  };
  const __m512i magnitude = _mm512_and_si512(a.v, _mm512_set1_epi8(0x7f));
  const __mmask64 special =
      _mm512_cmpge_epu8_mask(_mm512_sub_epi8(magnitude, _mm512_set1_epi8(8)), _mm512_set1_epi8(0x7f - 8));
  __m512i low = _mm512_shuffle_epi8(table(0x30201000, 0x70605040, 0xb0a09080, 0xf0e0d0c0), magnitude);
  low = _mm512_mask_shuffle_epi8(low, special, table(0xc0800000, 0x60402000, 0, 0xf0000000), magnitude);
  __m512i high = _mm512_ternarylogic_epi32(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(7), _mm512_set1_epi8(0x38), 0xea);
  high = _mm512_mask_shuffle_epi8(high, special, table(0x37373700, 0x38383838, 0, 0x7f000000), magnitude);
  high = _mm512_ternarylogic_epi32(high, a.v, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);  // high | (a & 0x80)
  return {{_mm512_unpacklo_epi8(low, high)}, {_mm512_unpackhi_epi8(low, high)}};
}
EW_INLINE __m512i broadcast_4_bytes(const void* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}
EW_INLINE S8x4 broadcast_s8x4(const int8_t* p) { return {broadcast_4_bytes(p)}; }
EW_INLINE BF2 broadcast_bf2(const uint16_t* p) { return {broadcast_4_bytes(p)}; }
EW_INLINE I16 dot4_u8s8(I16 acc, B64 w, S8x4 a) { return {_mm512_dpbusd_epi32(acc.v, w.v, a.v)}; }
EW_INLINE I16 dot4_u4s8(I16 acc, B64 w, S8x4 a) { return dot4_u8s8(acc, w, a); }
EW_INLINE F16 dot2_bf16(F16 acc, B64 w, BF2 a) {
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(w.v), reinterpret_cast<__m512bh>(a.v))};
}

}  // namespace ew::EW_ISA_NS
