// simd.h for AVX2 with FMA and F16C: two registers per 16 lanes, `lo` the lanes 0-7 and `hi` the lanes 8-15.
#pragma once

#include <immintrin.h>

namespace ew::EW_ISA_NS {

struct F16 { __m256 lo, hi; };
struct I16 { __m256i lo, hi; };
struct B64 { __m256i lo, hi; };
struct S8x4 { __m256i v; };
struct BF2 { __m256i v; };
struct M16 { __m256 lo, hi; };  // all ones or all zeros in each lane

// Lanes.
EW_INLINE F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
EW_INLINE F16 set1(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
EW_INLINE I16 zero_i32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
EW_INLINE I16 set1_i32(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
EW_INLINE I16 iota() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
EW_INLINE F16 as_f32(I16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
EW_INLINE I16 as_i32(F16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
EW_INLINE I16 as_i32(B64 a) { return {a.lo, a.hi}; }
EW_INLINE B64 as_bytes(I16 a) { return {a.lo, a.hi}; }

// Masks.
EW_INLINE M16 as_mask(I16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
EW_INLINE M16 first_n(int64_t n) {
  const __m256i count = _mm256_set1_epi32(static_cast<int32_t>(n));
  return as_mask({_mm256_cmpgt_epi32(count, iota().lo), _mm256_cmpgt_epi32(count, iota().hi)});
}
EW_INLINE M16 and_(M16 a, M16 b) { return {_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)}; }
EW_INLINE M16 or_(M16 a, M16 b) { return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)}; }
EW_INLINE M16 not_(M16 a) {
  const __m256 ones = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
  return {_mm256_xor_ps(a.lo, ones), _mm256_xor_ps(a.hi, ones)};
}
EW_INLINE uint32_t bits(M16 a) {
  return static_cast<uint32_t>(_mm256_movemask_ps(a.lo)) | static_cast<uint32_t>(_mm256_movemask_ps(a.hi)) << 8;
}
EW_INLINE bool any(M16 a) { return bits(a) != 0; }
EW_INLINE F16 select(M16 m, F16 a, F16 b) {
  return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}
EW_INLINE I16 select(M16 m, I16 a, I16 b) { return as_i32(select(m, as_f32(a), as_f32(b))); }

// Memory.
EW_INLINE const __m256i* wide(const void* p) { return static_cast<const __m256i*>(p); }
EW_INLINE __m256i* wide(void* p) { return static_cast<__m256i*>(p); }
EW_INLINE F16 loadu(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
EW_INLINE F16 load(const float* p) { return loadu(p); }
EW_INLINE I16 loadu(const int32_t* p) { return {_mm256_loadu_si256(wide(p)), _mm256_loadu_si256(wide(p) + 1)}; }
EW_INLINE I16 load(const int32_t* p) { return loadu(p); }
EW_INLINE I16 load_partial(const int32_t* p, int64_t n) {
  const I16 m = as_i32(F16{first_n(n).lo, first_n(n).hi});
  return {_mm256_maskload_epi32(p, m.lo), _mm256_maskload_epi32(p + 8, m.hi)};
}
EW_INLINE F16 load_partial(const float* p, int64_t n) {
  const I16 m = as_i32(F16{first_n(n).lo, first_n(n).hi});
  return {_mm256_maskload_ps(p, m.lo), _mm256_maskload_ps(p + 8, m.hi)};
}
EW_INLINE void storeu(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
EW_INLINE void store(float* p, F16 a) { storeu(p, a); }
EW_INLINE void storeu(int32_t* p, I16 a) {
  _mm256_storeu_si256(wide(p), a.lo);
  _mm256_storeu_si256(wide(p) + 1, a.hi);
}
EW_INLINE void store(int32_t* p, I16 a) { storeu(p, a); }
EW_INLINE void store_partial(float* p, F16 a, int64_t n) {
  const I16 m = as_i32(F16{first_n(n).lo, first_n(n).hi});
  _mm256_maskstore_ps(p, m.lo, a.lo);
  _mm256_maskstore_ps(p + 8, m.hi, a.hi);
}
EW_INLINE void store_partial(int32_t* p, I16 a, int64_t n) {
  const I16 m = as_i32(F16{first_n(n).lo, first_n(n).hi});
  _mm256_maskstore_epi32(p, m.lo, a.lo);
  _mm256_maskstore_epi32(p + 8, m.hi, a.hi);
}
EW_INLINE B64 loadu_bytes(const void* p) { return {_mm256_loadu_si256(wide(p)), _mm256_loadu_si256(wide(p) + 1)}; }
EW_INLINE B64 load_bytes(const void* p) { return loadu_bytes(p); }
EW_INLINE void storeu_bytes(void* p, B64 a) {
  _mm256_storeu_si256(wide(p), a.lo);
  _mm256_storeu_si256(wide(p) + 1, a.hi);
}
EW_INLINE void store_bytes(void* p, B64 a) { storeu_bytes(p, a); }
EW_INLINE void prefetch_t0(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
EW_INLINE void prefetch_t1(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

// f32 arithmetic.
EW_INLINE F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
EW_INLINE F16 sub(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
EW_INLINE F16 mul(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
EW_INLINE F16 div(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
EW_INLINE F16 fmadd(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
EW_INLINE F16 fnmadd(F16 a, F16 b, F16 c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
EW_INLINE F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
EW_INLINE F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
EW_INLINE F16 sqrt(F16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
EW_INLINE F16 round_nearest(F16 a) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, nearest), _mm256_round_ps(a.hi, nearest)};
}
template <int Predicate>
EW_INLINE M16 compare(F16 a, F16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, Predicate), _mm256_cmp_ps(a.hi, b.hi, Predicate)};
}
EW_INLINE M16 cmp_lt(F16 a, F16 b) { return compare<_CMP_LT_OQ>(a, b); }
EW_INLINE M16 cmp_le(F16 a, F16 b) { return compare<_CMP_LE_OQ>(a, b); }
EW_INLINE M16 cmp_gt(F16 a, F16 b) { return compare<_CMP_GT_OQ>(a, b); }
EW_INLINE M16 cmp_ge(F16 a, F16 b) { return compare<_CMP_GE_OQ>(a, b); }
EW_INLINE M16 cmp_eq(F16 a, F16 b) { return compare<_CMP_EQ_OQ>(a, b); }
EW_INLINE M16 is_nan(F16 a) { return compare<_CMP_UNORD_Q>(a, a); }

// i32 arithmetic.
EW_INLINE I16 add(I16 a, I16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
EW_INLINE I16 sub(I16 a, I16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
EW_INLINE I16 mul(I16 a, I16 b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
EW_INLINE I16 min(I16 a, I16 b) { return {_mm256_min_epi32(a.lo, b.lo), _mm256_min_epi32(a.hi, b.hi)}; }
EW_INLINE I16 max(I16 a, I16 b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
EW_INLINE I16 and_(I16 a, I16 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
EW_INLINE I16 or_(I16 a, I16 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
EW_INLINE I16 xor_(I16 a, I16 b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
template <int N> EW_INLINE I16 shift_left(I16 a) { return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)}; }
template <int N> EW_INLINE I16 shift_right(I16 a) { return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)}; }
template <int N> EW_INLINE I16 shift_right_arithmetic(I16 a) {
  return {_mm256_srai_epi32(a.lo, N), _mm256_srai_epi32(a.hi, N)};
}
EW_INLINE M16 cmp_gt(I16 a, I16 b) {
  return as_mask({_mm256_cmpgt_epi32(a.lo, b.lo), _mm256_cmpgt_epi32(a.hi, b.hi)});
}
EW_INLINE M16 cmp_lt(I16 a, I16 b) { return cmp_gt(b, a); }
EW_INLINE M16 cmp_eq(I16 a, I16 b) {
  return as_mask({_mm256_cmpeq_epi32(a.lo, b.lo), _mm256_cmpeq_epi32(a.hi, b.hi)});
}

// Conversions.
EW_INLINE I16 round_to_i16(F16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
EW_INLINE F16 to_f32(I16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
struct U16x16 { uint16_t value[16]; };  // for ragged ends: AVX2 has no masked 16-bit access
EW_INLINE U16x16 load_u16_partial(const uint16_t* p, int64_t n) {
  U16x16 whole = {};
  for (int64_t i = 0; i < n && i < 16; i++) whole.value[i] = p[i];
  return whole;
}
EW_INLINE void store_u16_partial(uint16_t* p, const U16x16& whole, int64_t n) {
  for (int64_t i = 0; i < n && i < 16; i++) p[i] = whole.value[i];
}
EW_INLINE const __m128i* half(const void* p) { return static_cast<const __m128i*>(p); }
EW_INLINE __m128i* half(void* p) { return static_cast<__m128i*>(p); }
EW_INLINE F16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(half(p))), _mm256_cvtph_ps(_mm_loadu_si128(half(p) + 1))};
}
EW_INLINE F16 load_f16_partial(const uint16_t* p, int64_t n) { return load_f16(load_u16_partial(p, n).value); }
EW_INLINE void store_f16(uint16_t* p, F16 a) {
  _mm_storeu_si128(half(p), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128(half(p) + 1, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
EW_INLINE void store_f16_partial(uint16_t* p, F16 a, int64_t n) {
  U16x16 whole;
  store_f16(whole.value, a);
  store_u16_partial(p, whole, n);
}
EW_INLINE F16 load_bf16(const uint16_t* p) {
  const I16 u = {_mm256_cvtepu16_epi32(_mm_loadu_si128(half(p))), _mm256_cvtepu16_epi32(_mm_loadu_si128(half(p) + 1))};
  return as_f32(shift_left<16>(u));
}
EW_INLINE F16 load_bf16_partial(const uint16_t* p, int64_t n) { return load_bf16(load_u16_partial(p, n).value); }
EW_INLINE void store_bf16(uint16_t* p, F16 a) {
  const I16 u = as_i32(a);
  const I16 odd = and_(shift_right<16>(u), set1_i32(1));
  const I16 rounded = shift_right<16>(add(u, add(odd, set1_i32(0x7fff))));
  const I16 r = select(is_nan(a), set1_i32(0x7fc0), rounded);
  // packus works within 128-bit halves: restore the order of the four quarters.
  _mm256_storeu_si256(wide(p), _mm256_permute4x64_epi64(_mm256_packus_epi32(r.lo, r.hi), 0xd8));
}
EW_INLINE void store_bf16_partial(uint16_t* p, F16 a, int64_t n) {
  U16x16 whole;
  store_bf16(whole.value, a);
  store_u16_partial(p, whole, n);
}
EW_INLINE I16 load_i8(const int8_t* p) {
  const __m128i b = _mm_loadu_si128(half(p));
  return {_mm256_cvtepi8_epi32(b), _mm256_cvtepi8_epi32(_mm_srli_si128(b, 8))};
}
EW_INLINE I16 load_u8(const uint8_t* p) {
  const __m128i b = _mm_loadu_si128(half(p));
  return {_mm256_cvtepu8_epi32(b), _mm256_cvtepu8_epi32(_mm_srli_si128(b, 8))};
}
EW_INLINE void store_i8(int8_t* p, I16 a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  _mm_storeu_si128(half(p), _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
struct Codes { F16 first, second; };  // of each lane's pair
EW_INLINE Codes load_codes(const uint8_t* p) {
  const I16 pairs = {_mm256_cvtepi8_epi16(_mm_loadu_si128(half(p))), _mm256_cvtepi8_epi16(_mm_loadu_si128(half(p) + 1))};
  return {to_f32(shift_right_arithmetic<16>(shift_left<16>(pairs))), to_f32(shift_right_arithmetic<16>(pairs))};
}
EW_INLINE B64 widen_codes(const uint8_t* p) {
  const Codes codes = load_codes(p);  // the low half of a small whole number's f32 is zero
  return as_bytes(or_(as_i32(codes.second), shift_right<16>(as_i32(codes.first))));
}
EW_INLINE F16 load_twice(const float* p) {
  const __m256 a = _mm256_loadu_ps(p);
  return {_mm256_permutevar8x32_ps(a, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
          _mm256_permutevar8x32_ps(a, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
}

// Across lanes.
EW_INLINE F16 swap_pairs(F16 a) { return {_mm256_permute_ps(a.lo, 0xb1), _mm256_permute_ps(a.hi, 0xb1)}; }
template <class Combine>
EW_INLINE float fold_lanes(F16 a, Combine combine) {
  __m256 b = combine(a.lo, a.hi);
  b = combine(b, _mm256_permute2f128_ps(b, b, 1));
  b = combine(b, _mm256_permute_ps(b, 0x4e));
  b = combine(b, _mm256_permute_ps(b, 0xb1));
  return _mm256_cvtss_f32(b);
}
EW_INLINE float reduce_add(F16 a) {
  return fold_lanes(a, [](__m256 x, __m256 y) EW_INLINE_LAMBDA { return _mm256_add_ps(x, y); });
}
EW_INLINE float reduce_max(F16 a) {
  return fold_lanes(a, [](__m256 x, __m256 y) EW_INLINE_LAMBDA { return _mm256_max_ps(x, y); });
}
EW_INLINE float reduce_min(F16 a) {
  return fold_lanes(a, [](__m256 x, __m256 y) EW_INLINE_LAMBDA { return _mm256_min_ps(x, y); });
}
template <class Combine>
EW_INLINE int32_t fold_lanes(I16 a, Combine combine) {
  __m256i b = combine(a.lo, a.hi);
  b = combine(b, _mm256_permute4x64_epi64(b, 0x4e));
  b = combine(b, _mm256_shuffle_epi32(b, 0x4e));
  b = combine(b, _mm256_shuffle_epi32(b, 0xb1));
  return _mm256_cvtsi256_si32(b);
}
EW_INLINE int32_t reduce_add(I16 a) {
  return fold_lanes(a, [](__m256i x, __m256i y) EW_INLINE_LAMBDA { return _mm256_add_epi32(x, y); });
}
EW_INLINE int32_t reduce_max(I16 a) {
  return fold_lanes(a, [](__m256i x, __m256i y) EW_INLINE_LAMBDA { return _mm256_max_epi32(x, y); });
}
EW_INLINE int32_t reduce_min(I16 a) {
  return fold_lanes(a, [](__m256i x, __m256i y) EW_INLINE_LAMBDA { return _mm256_min_epi32(x, y); });
}
EW_INLINE float lane(F16 a, int i) {
  const __m256 half_of_i = i < 8 ? a.lo : a.hi;
  return _mm256_cvtss_f32(_mm256_permutevar8x32_ps(half_of_i, _mm256_set1_epi32(i & 7)));
}
EW_INLINE int32_t lane(I16 a, int i) {
  const __m256i half_of_i = i < 8 ? a.lo : a.hi;
  return _mm256_cvtsi256_si32(_mm256_permutevar8x32_epi32(half_of_i, _mm256_set1_epi32(i & 7)));
}

// Dot products.
EW_INLINE void keep_in_register(I16&) {}
EW_INLINE void keep_in_register(F16&) {}
EW_INLINE B64 low_nibbles(B64 a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
EW_INLINE B64 high_nibbles(B64 a) {
  return low_nibbles({_mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4)});
}
template <int Q> EW_INLINE B64 bit_pairs(B64 a) {
  const __m256i mask = _mm256_set1_epi8(3);
  return {_mm256_and_si256(_mm256_srli_epi16(a.lo, 2 * Q), mask), _mm256_and_si256(_mm256_srli_epi16(a.hi, 2 * Q), mask)};
}
template <int Q> EW_INLINE B64 add_fours(B64 a, const uint8_t* p) {
  const __m256i plane = _mm256_loadu_si256(wide(p)), four = _mm256_set1_epi8(4);
  const __m256i lo = Q < 3 ? _mm256_srli_epi16(plane, 2 * Q) : _mm256_slli_epi16(plane, 2);
  const __m256i hi = Q < 3 ? _mm256_srli_epi16(plane, 2 * Q + 1) : _mm256_slli_epi16(plane, 1);
  return {_mm256_or_si256(a.lo, _mm256_and_si256(lo, four)), _mm256_or_si256(a.hi, _mm256_and_si256(hi, four))};
}
struct Fp8Pairs { B64 first, second; };
/// High and low bytes of the bf16 by themselves, then interleaved: by shifts for normal codes, whose exponent's bias grows by
/// 112, and from tables for the subnormal codes 0..7 and for NaN. Halves of `first` and `second` from 32 codes.
EW_INLINE void fp8_half(__m256i a, __m256i& first, __m256i& second) {
  const auto table = [](uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) EW_INLINE_LAMBDA {
    return _mm256_broadcastsi128_si256(_mm_setr_epi32(static_cast<int>(w0), static_cast<int>(w1), static_cast<int>(w2),
                                                      static_cast<int>(w3)));
  };
  const __m256i magnitude = _mm256_and_si256(a, _mm256_set1_epi8(0x7f));
  // As signed bytes: code + 1 is at most 8, or -128 for NaN.
  const __m256i normal = _mm256_cmpgt_epi8(_mm256_add_epi8(magnitude, _mm256_set1_epi8(1)), _mm256_set1_epi8(8));
  const __m256i low = _mm256_shuffle_epi8(table(0x30201000, 0x70605040, 0xb0a09080, 0xf0e0d0c0), magnitude);
  const __m256i exponent = _mm256_and_si256(_mm256_srli_epi16(a, 4), _mm256_set1_epi8(7));
  const __m256i high = _mm256_or_si256(exponent, _mm256_set1_epi8(0x38));
  const __m256i low_special = _mm256_shuffle_epi8(table(0xc0800000, 0x60402000, 0, 0xf0000000), magnitude);
  const __m256i high_special = _mm256_shuffle_epi8(table(0x37373700, 0x38383838, 0, 0x7f000000), magnitude);
  const __m256i low_bytes = _mm256_blendv_epi8(low_special, low, normal);
  __m256i high_bytes = _mm256_blendv_epi8(high_special, high, normal);
  high_bytes = _mm256_or_si256(high_bytes, _mm256_andnot_si256(_mm256_set1_epi8(0x7f), a));
  first = _mm256_unpacklo_epi8(low_bytes, high_bytes);
  second = _mm256_unpackhi_epi8(low_bytes, high_bytes);
}
EW_INLINE Fp8Pairs fp8_pairs(B64 a) {
  Fp8Pairs pairs;
  fp8_half(a.lo, pairs.first.lo, pairs.second.lo);
  fp8_half(a.hi, pairs.first.hi, pairs.second.hi);
  return pairs;
}
EW_INLINE __m256i broadcast_4_bytes(const void* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}
EW_INLINE S8x4 broadcast_s8x4(const int8_t* p) { return {broadcast_4_bytes(p)}; }
EW_INLINE BF2 broadcast_bf2(const uint16_t* p) { return {broadcast_4_bytes(p)}; }
// VPMADDUBSW would saturate at 2 * 255 * 127: bytes 0 and 2, then 1 and 3 of each lane, widened to 16 bits, are exact.
EW_INLINE __m256i dot4_half(__m256i acc, __m256i w, __m256i even, __m256i odd) {
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), even));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_srli_epi16(w, 8), odd));
}
EW_INLINE I16 dot4_u8s8(I16 acc, B64 w, S8x4 a) {
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(a.v, 8), 8);
  const __m256i odd = _mm256_srai_epi16(a.v, 8);
  return {dot4_half(acc.lo, w.lo, even, odd), dot4_half(acc.hi, w.hi, even, odd)};
}
// 2 * 15 * 128 fits 16 bits, so nothing saturates.
EW_INLINE I16 dot4_u4s8(I16 acc, B64 w, S8x4 a) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(_mm256_maddubs_epi16(w.lo, a.v), ones)),
          _mm256_add_epi32(acc.hi, _mm256_madd_epi16(_mm256_maddubs_epi16(w.hi, a.v), ones))};
}
EW_INLINE F16 dot2_bf16(F16 acc, Codes w, BF2 a) {
  const I16 pair = {a.v, a.v};
  acc = fmadd(w.first, as_f32(shift_left<16>(pair)), acc);
  return fmadd(w.second, as_f32(and_(pair, set1_i32(static_cast<int32_t>(0xffff0000u)))), acc);
}
EW_INLINE F16 dot2_bf16(F16 acc, B64 w, BF2 a) {
  const I16 high_half = set1_i32(static_cast<int32_t>(0xffff0000u));
  return dot2_bf16(acc, Codes{as_f32(shift_left<16>(as_i32(w))), as_f32(and_(as_i32(w), high_half))}, a);
}

}  // namespace ew::EW_ISA_NS
