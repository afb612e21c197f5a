// simd.h for any machine: four 16-byte compiler vectors per 16 lanes (SSE2, NEON, or whatever the compiler makes of them).
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ew::EW_ISA_NS {

typedef float Floats4 __attribute__((vector_size(16)));
typedef int32_t Ints4 __attribute__((vector_size(16)));
typedef uint32_t Words4 __attribute__((vector_size(16)));

struct F16 { Floats4 q[4]; };  // q[i] holds the lanes 4i .. 4i+3
struct I16 { Ints4 q[4]; };
struct B64 { Words4 q[4]; };  // little-endian words
struct S8x4 { int8_t v[4]; };
struct BF2 { uint16_t v[2]; };
struct M16 { Ints4 q[4]; };  // all ones or all zeros in each lane

template <class Vector, class Body>
EW_INLINE Vector by_quarter(Body&& body) {
  return {body(0), body(1), body(2), body(3)};
}

// Lanes.
EW_INLINE Floats4 four(float a) { return Floats4{a, a, a, a}; }
EW_INLINE Ints4 four_i32(int32_t a) { return Ints4{a, a, a, a}; }
EW_INLINE F16 set1(float a) { return {four(a), four(a), four(a), four(a)}; }
EW_INLINE F16 zero() { return set1(0.0f); }
EW_INLINE I16 set1_i32(int32_t a) { return {four_i32(a), four_i32(a), four_i32(a), four_i32(a)}; }
EW_INLINE I16 zero_i32() { return set1_i32(0); }
EW_INLINE I16 iota() { return {Ints4{0, 1, 2, 3}, Ints4{4, 5, 6, 7}, Ints4{8, 9, 10, 11}, Ints4{12, 13, 14, 15}}; }
#define EW_QUARTERS(Vector, expression) by_quarter<Vector>([&](int i) EW_INLINE_LAMBDA { return (expression); })
EW_INLINE F16 as_f32(I16 a) { return EW_QUARTERS(F16, (Floats4)a.q[i]); }
EW_INLINE I16 as_i32(F16 a) { return EW_QUARTERS(I16, (Ints4)a.q[i]); }
EW_INLINE I16 as_i32(B64 a) { return EW_QUARTERS(I16, (Ints4)a.q[i]); }
EW_INLINE B64 as_bytes(I16 a) { return EW_QUARTERS(B64, (Words4)a.q[i]); }

// Masks.
EW_INLINE M16 first_n(int64_t n) { return EW_QUARTERS(M16, iota().q[i] < four_i32(static_cast<int32_t>(n))); }
EW_INLINE M16 and_(M16 a, M16 b) { return EW_QUARTERS(M16, a.q[i] & b.q[i]); }
EW_INLINE M16 or_(M16 a, M16 b) { return EW_QUARTERS(M16, a.q[i] | b.q[i]); }
EW_INLINE M16 not_(M16 a) { return EW_QUARTERS(M16, ~a.q[i]); }
EW_INLINE uint32_t bits(M16 a) {
  uint32_t set = 0;
  for (int i = 0; i < 16; i++) set |= static_cast<uint32_t>(a.q[i / 4][i % 4] & 1) << i;
  return set;
}
EW_INLINE bool any(M16 a) {
  const Ints4 merged = (a.q[0] | a.q[1]) | (a.q[2] | a.q[3]);
  return (merged[0] | merged[1] | merged[2] | merged[3]) != 0;
}
EW_INLINE I16 select(M16 m, I16 a, I16 b) { return EW_QUARTERS(I16, (a.q[i] & m.q[i]) | (b.q[i] & ~m.q[i])); }
EW_INLINE F16 select(M16 m, F16 a, F16 b) { return as_f32(select(m, as_i32(a), as_i32(b))); }

// Memory.
template <class Vector>
EW_INLINE Vector load_raw(const void* p) {
  Vector a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
EW_INLINE F16 loadu(const float* p) { return load_raw<F16>(p); }
EW_INLINE F16 load(const float* p) { return load_raw<F16>(p); }
EW_INLINE I16 loadu(const int32_t* p) { return load_raw<I16>(p); }
EW_INLINE I16 load(const int32_t* p) { return load_raw<I16>(p); }
EW_INLINE B64 loadu_bytes(const void* p) { return load_raw<B64>(p); }
EW_INLINE B64 load_bytes(const void* p) { return load_raw<B64>(p); }
EW_INLINE void storeu(float* p, F16 a) { __builtin_memcpy(p, &a, sizeof a); }
EW_INLINE void store(float* p, F16 a) { __builtin_memcpy(p, &a, sizeof a); }
EW_INLINE void storeu(int32_t* p, I16 a) { __builtin_memcpy(p, &a, sizeof a); }
EW_INLINE void store(int32_t* p, I16 a) { __builtin_memcpy(p, &a, sizeof a); }
EW_INLINE void storeu_bytes(void* p, B64 a) { __builtin_memcpy(p, &a, sizeof a); }
EW_INLINE void store_bytes(void* p, B64 a) { __builtin_memcpy(p, &a, sizeof a); }
EW_INLINE F16 load_partial(const float* p, int64_t n) {
  if (n >= 16) return loadu(p);
  float whole[16] = {};
  for (int64_t i = 0; i < n; i++) whole[i] = p[i];
  return loadu(whole);
}
EW_INLINE I16 load_partial(const int32_t* p, int64_t n) {
  if (n >= 16) return loadu(p);
  int32_t whole[16] = {};
  for (int64_t i = 0; i < n; i++) whole[i] = p[i];
  return loadu(whole);
}
EW_INLINE void store_partial(float* p, F16 a, int64_t n) {
  float whole[16];
  storeu(whole, a);
  for (int64_t i = 0; i < n && i < 16; i++) p[i] = whole[i];
}
EW_INLINE void store_partial(int32_t* p, I16 a, int64_t n) {
  int32_t whole[16];
  storeu(whole, a);
  for (int64_t i = 0; i < n && i < 16; i++) p[i] = whole[i];
}
EW_INLINE void prefetch_t0(const void* p) { __builtin_prefetch(p, 0, 3); }
EW_INLINE void prefetch_t1(const void* p) { __builtin_prefetch(p, 0, 2); }

// f32 arithmetic. Fused where the machine fuses: a fused result from the C library would cost a call per lane.
EW_INLINE F16 add(F16 a, F16 b) { return EW_QUARTERS(F16, a.q[i] + b.q[i]); }
EW_INLINE F16 sub(F16 a, F16 b) { return EW_QUARTERS(F16, a.q[i] - b.q[i]); }
EW_INLINE F16 mul(F16 a, F16 b) { return EW_QUARTERS(F16, a.q[i] * b.q[i]); }
EW_INLINE F16 div(F16 a, F16 b) { return EW_QUARTERS(F16, a.q[i] / b.q[i]); }
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
EW_INLINE Floats4 fma_quarter(Floats4 a, Floats4 b, Floats4 c) {
  Floats4 r;
  for (int j = 0; j < 4; j++) r[j] = __builtin_fmaf(a[j], b[j], c[j]);
  return r;
}
#else
EW_INLINE Floats4 fma_quarter(Floats4 a, Floats4 b, Floats4 c) { return a * b + c; }
#endif
EW_INLINE F16 fmadd(F16 a, F16 b, F16 c) { return EW_QUARTERS(F16, fma_quarter(a.q[i], b.q[i], c.q[i])); }
EW_INLINE F16 fnmadd(F16 a, F16 b, F16 c) { return EW_QUARTERS(F16, fma_quarter(-a.q[i], b.q[i], c.q[i])); }
EW_INLINE M16 cmp_lt(F16 a, F16 b) { return EW_QUARTERS(M16, (Ints4)(a.q[i] < b.q[i])); }
EW_INLINE M16 cmp_le(F16 a, F16 b) { return EW_QUARTERS(M16, (Ints4)(a.q[i] <= b.q[i])); }
EW_INLINE M16 cmp_gt(F16 a, F16 b) { return EW_QUARTERS(M16, (Ints4)(a.q[i] > b.q[i])); }
EW_INLINE M16 cmp_ge(F16 a, F16 b) { return EW_QUARTERS(M16, (Ints4)(a.q[i] >= b.q[i])); }
EW_INLINE M16 cmp_eq(F16 a, F16 b) { return EW_QUARTERS(M16, (Ints4)(a.q[i] == b.q[i])); }
EW_INLINE M16 is_nan(F16 a) { return EW_QUARTERS(M16, (Ints4)(a.q[i] != a.q[i])); }
EW_INLINE F16 min(F16 a, F16 b) { return select(cmp_lt(a, b), a, b); }
EW_INLINE F16 max(F16 a, F16 b) { return select(cmp_gt(a, b), a, b); }
#if defined(__SSE2__)
EW_INLINE F16 sqrt(F16 a) { return EW_QUARTERS(F16, (Floats4)_mm_sqrt_ps((__m128)a.q[i])); }
#else
EW_INLINE Floats4 sqrt_quarter(Floats4 a) {
  Floats4 r;
  for (int j = 0; j < 4; j++) r[j] = __builtin_sqrtf(a[j]);
  return r;
}
EW_INLINE F16 sqrt(F16 a) { return EW_QUARTERS(F16, sqrt_quarter(a.q[i])); }
#endif

// i32 arithmetic. Sums go through unsigned words: wrapping is defined there.
EW_INLINE I16 add(I16 a, I16 b) { return EW_QUARTERS(I16, (Ints4)((Words4)a.q[i] + (Words4)b.q[i])); }
EW_INLINE I16 sub(I16 a, I16 b) { return EW_QUARTERS(I16, (Ints4)((Words4)a.q[i] - (Words4)b.q[i])); }
EW_INLINE I16 mul(I16 a, I16 b) { return EW_QUARTERS(I16, (Ints4)((Words4)a.q[i] * (Words4)b.q[i])); }
EW_INLINE I16 and_(I16 a, I16 b) { return EW_QUARTERS(I16, a.q[i] & b.q[i]); }
EW_INLINE I16 or_(I16 a, I16 b) { return EW_QUARTERS(I16, a.q[i] | b.q[i]); }
EW_INLINE I16 xor_(I16 a, I16 b) { return EW_QUARTERS(I16, a.q[i] ^ b.q[i]); }
template <int N> EW_INLINE I16 shift_left(I16 a) { return EW_QUARTERS(I16, (Ints4)((Words4)a.q[i] << N)); }
template <int N> EW_INLINE I16 shift_right(I16 a) { return EW_QUARTERS(I16, (Ints4)((Words4)a.q[i] >> N)); }
template <int N> EW_INLINE I16 shift_right_arithmetic(I16 a) { return EW_QUARTERS(I16, a.q[i] >> N); }
EW_INLINE M16 cmp_lt(I16 a, I16 b) { return EW_QUARTERS(M16, a.q[i] < b.q[i]); }
EW_INLINE M16 cmp_gt(I16 a, I16 b) { return EW_QUARTERS(M16, a.q[i] > b.q[i]); }
EW_INLINE M16 cmp_eq(I16 a, I16 b) { return EW_QUARTERS(M16, a.q[i] == b.q[i]); }
EW_INLINE I16 min(I16 a, I16 b) { return select(cmp_lt(a, b), a, b); }
EW_INLINE I16 max(I16 a, I16 b) { return select(cmp_gt(a, b), a, b); }

// Conversions.
// Adding 2^23, where the unit of a float is 1, lets the adder round to nearest even; from there on every float is an
// integer already, and NaN fails the comparison and passes through.
EW_INLINE F16 round_nearest(F16 a) {
  const F16 big = set1(8388608.0f);
  const F16 magnitude = as_f32(and_(as_i32(a), set1_i32(INT32_MAX)));
  const F16 rounded = sub(add(magnitude, big), big);
  const F16 chosen = select(cmp_lt(magnitude, big), rounded, magnitude);
  return as_f32(or_(as_i32(chosen), and_(as_i32(a), set1_i32(INT32_MIN))));
}
#if defined(__SSE2__)
EW_INLINE I16 round_to_i16(F16 a) { return EW_QUARTERS(I16, (Ints4)_mm_cvtps_epi32((__m128)a.q[i])); }
EW_INLINE F16 to_f32(I16 a) { return EW_QUARTERS(F16, (Floats4)_mm_cvtepi32_ps((__m128i)a.q[i])); }
#else
EW_INLINE I16 round_to_i16(F16 a) {
  const F16 r = round_nearest(a);
  I16 whole;
  for (int i = 0; i < 16; i++) {
    const float x = r.q[i / 4][i % 4];
    whole.q[i / 4][i % 4] = x >= -2147483648.0f && x < 2147483648.0f ? static_cast<int32_t>(x) : INT32_MIN;
  }
  return whole;
}
EW_INLINE F16 to_f32(I16 a) { return EW_QUARTERS(F16, __builtin_convertvector(a.q[i], Floats4)); }
#endif
EW_INLINE I16 widen_u16(const uint16_t* p) {
  return EW_QUARTERS(I16, (Ints4{p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]}));
}
EW_INLINE void narrow_u16(uint16_t* p, I16 a) {
  for (int i = 0; i < 16; i++) p[i] = static_cast<uint16_t>(a.q[i / 4][i % 4]);
}
struct U16x16 { uint16_t value[16]; };  // for ragged ends
EW_INLINE U16x16 load_u16_partial(const uint16_t* p, int64_t n) {
  U16x16 whole = {};
  for (int64_t i = 0; i < n && i < 16; i++) whole.value[i] = p[i];
  return whole;
}
EW_INLINE void store_u16_partial(uint16_t* p, const U16x16& whole, int64_t n) {
  for (int64_t i = 0; i < n && i < 16; i++) p[i] = whole.value[i];
}
// The exponent and fraction of a half, moved to their f32 places, are 2^112 times too small; subnormals included.
EW_INLINE F16 load_f16(const uint16_t* p) {
  const I16 h = widen_u16(p);
  const I16 sign = shift_left<16>(and_(h, set1_i32(0x8000)));
  const I16 magnitude = and_(h, set1_i32(0x7fff));
  const I16 finite = as_i32(mul(as_f32(shift_left<13>(magnitude)), as_f32(set1_i32(0x77800000))));  // * 2^112
  const I16 special = or_(shift_left<13>(magnitude), set1_i32(0x7f800000));
  return as_f32(or_(sign, select(cmp_lt(magnitude, set1_i32(0x7c00)), finite, special)));
}
EW_INLINE F16 load_f16_partial(const uint16_t* p, int64_t n) { return load_f16(load_u16_partial(p, n).value); }
EW_INLINE void store_f16(uint16_t* p, F16 a) {
  const I16 u = as_i32(a);
  const I16 sign = shift_right<16>(and_(u, set1_i32(INT32_MIN)));
  const I16 magnitude = and_(u, set1_i32(INT32_MAX));
  // Normal halves: rebias the exponent by -112 and round the 13 dropped bits to nearest even; a carry may reach infinity.
  const I16 odd = and_(shift_right<13>(magnitude), set1_i32(1));
  const I16 normal = shift_right<13>(add(magnitude, add(odd, set1_i32(static_cast<int32_t>(0xc8000fffu)))));
  // Subnormal halves: adding 0.5 lets the adder round at 2^-24, the unit of a subnormal half.
  const I16 subnormal = sub(as_i32(add(as_f32(magnitude), set1(0.5f))), set1_i32(0x3f000000));
  const I16 finite = select(cmp_lt(magnitude, set1_i32(0x38800000)), subnormal, normal);
  const I16 infinite = select(cmp_gt(magnitude, set1_i32(0x7f800000)), set1_i32(0x7e00), set1_i32(0x7c00));
  narrow_u16(p, or_(sign, select(cmp_lt(magnitude, set1_i32(0x477ff000)), finite, infinite)));
}
EW_INLINE void store_f16_partial(uint16_t* p, F16 a, int64_t n) {
  U16x16 whole;
  store_f16(whole.value, a);
  store_u16_partial(p, whole, n);
}
EW_INLINE F16 load_bf16(const uint16_t* p) { return as_f32(shift_left<16>(widen_u16(p))); }
EW_INLINE F16 load_bf16_partial(const uint16_t* p, int64_t n) { return load_bf16(load_u16_partial(p, n).value); }
EW_INLINE void store_bf16(uint16_t* p, F16 a) {
  const I16 u = as_i32(a);
  const I16 odd = and_(shift_right<16>(u), set1_i32(1));
  const I16 rounded = shift_right<16>(add(u, add(odd, set1_i32(0x7fff))));
  narrow_u16(p, select(is_nan(a), set1_i32(0x7fc0), rounded));
}
EW_INLINE void store_bf16_partial(uint16_t* p, F16 a, int64_t n) {
  U16x16 whole;
  store_bf16(whole.value, a);
  store_u16_partial(p, whole, n);
}
EW_INLINE I16 load_i8(const int8_t* p) {
  return EW_QUARTERS(I16, (Ints4{p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]}));
}
EW_INLINE I16 load_u8(const uint8_t* p) {
  return EW_QUARTERS(I16, (Ints4{p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]}));
}
EW_INLINE void store_i8(int8_t* p, I16 a) {
  const I16 clamped = min(max(a, set1_i32(-128)), set1_i32(127));
  for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(clamped.q[i / 4][i % 4]);
}
struct Codes { F16 first, second; };  // of each lane's pair
EW_INLINE Codes load_codes(const uint8_t* p) {
  I16 first, second;
  for (int i = 0; i < 16; i++) {
    first.q[i / 4][i % 4] = static_cast<int8_t>(p[2 * i]);
    second.q[i / 4][i % 4] = static_cast<int8_t>(p[2 * i + 1]);
  }
  return {to_f32(first), to_f32(second)};
}
EW_INLINE B64 widen_codes(const uint8_t* p) {
  const Codes codes = load_codes(p);  // the low half of a small whole number's f32 is zero
  return as_bytes(or_(as_i32(codes.second), shift_right<16>(as_i32(codes.first))));
}
EW_INLINE F16 load_twice(const float* p) {
  return EW_QUARTERS(F16, (Floats4{p[2 * i], p[2 * i], p[2 * i + 1], p[2 * i + 1]}));
}

// Across lanes.
EW_INLINE F16 swap_pairs(F16 a) {
  return EW_QUARTERS(F16, (Floats4{a.q[i][1], a.q[i][0], a.q[i][3], a.q[i][2]}));
}
template <class Combine>
EW_INLINE float fold_lanes(F16 a, Combine combine) {
  const Floats4 half[2] = {combine(a.q[0], a.q[2]), combine(a.q[1], a.q[3])};
  const Floats4 b = combine(half[0], half[1]);
  const Floats4 c = combine(b, Floats4{b[2], b[3], b[0], b[1]});
  return combine(c, Floats4{c[1], c[0], c[3], c[2]})[0];
}
EW_INLINE Floats4 pick(Ints4 mask, Floats4 a, Floats4 b) { return (Floats4)(((Ints4)a & mask) | ((Ints4)b & ~mask)); }
EW_INLINE float reduce_add(F16 a) {
  return fold_lanes(a, [](Floats4 x, Floats4 y) EW_INLINE_LAMBDA { return x + y; });
}
EW_INLINE float reduce_max(F16 a) {
  return fold_lanes(a, [](Floats4 x, Floats4 y) EW_INLINE_LAMBDA { return pick((Ints4)(x > y), x, y); });
}
EW_INLINE float reduce_min(F16 a) {
  return fold_lanes(a, [](Floats4 x, Floats4 y) EW_INLINE_LAMBDA { return pick((Ints4)(x < y), x, y); });
}
EW_INLINE float lane(F16 a, int i) { return a.q[i / 4][i % 4]; }
EW_INLINE int32_t lane(I16 a, int i) { return a.q[i / 4][i % 4]; }
EW_INLINE int32_t reduce_add(I16 a) {
  uint32_t sum = 0;
  for (int i = 0; i < 16; i++) sum += static_cast<uint32_t>(lane(a, i));
  return static_cast<int32_t>(sum);
}
EW_INLINE int32_t reduce_max(I16 a) {
  int32_t most = lane(a, 0);
  for (int i = 1; i < 16; i++) most = lane(a, i) > most ? lane(a, i) : most;
  return most;
}
EW_INLINE int32_t reduce_min(I16 a) {
  int32_t least = lane(a, 0);
  for (int i = 1; i < 16; i++) least = lane(a, i) < least ? lane(a, i) : least;
  return least;
}

// Dot products.
EW_INLINE void keep_in_register(I16&) {}
EW_INLINE void keep_in_register(F16&) {}
EW_INLINE B64 low_nibbles(B64 a) { return EW_QUARTERS(B64, a.q[i] & 0x0f0f0f0fu); }
EW_INLINE B64 high_nibbles(B64 a) { return EW_QUARTERS(B64, (a.q[i] >> 4) & 0x0f0f0f0fu); }
template <int Q> EW_INLINE B64 bit_pairs(B64 a) { return EW_QUARTERS(B64, (a.q[i] >> (2 * Q)) & 0x03030303u); }
template <int Q> EW_INLINE B64 add_fours(B64 a, const uint8_t* p) {
  Words4 plane[2];
  __builtin_memcpy(plane, p, sizeof plane);
  return EW_QUARTERS(B64, a.q[i] | ((Q < 3 ? plane[i % 2] >> (2 * Q + i / 2) : plane[i % 2] << (2 - i / 2)) & 0x04040404u));
}
struct Fp8Pairs { B64 first, second; };
EW_INLINE uint32_t fp8_pair(uint32_t codes) {
  const uint32_t second = fp8_to_bf16(static_cast<uint8_t>(codes >> 8));
  return fp8_to_bf16(static_cast<uint8_t>(codes)) | second << 16;
}
EW_INLINE Words4 fp8_quarter(uint32_t a, uint32_t b) {
  return Words4{fp8_pair(a), fp8_pair(a >> 16), fp8_pair(b), fp8_pair(b >> 16)};
}
EW_INLINE Fp8Pairs fp8_pairs(B64 a) {
  return {EW_QUARTERS(B64, fp8_quarter(a.q[i][0], a.q[i][1])), EW_QUARTERS(B64, fp8_quarter(a.q[i][2], a.q[i][3]))};
}
EW_INLINE S8x4 broadcast_s8x4(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
EW_INLINE BF2 broadcast_bf2(const uint16_t* p) { return {{p[0], p[1]}}; }
#if defined(__SSE2__)
EW_INLINE Ints4 two_i16(int32_t first, int32_t second) {
  return four_i32(static_cast<int32_t>((static_cast<uint32_t>(first) & 0xffffu) | static_cast<uint32_t>(second) << 16));
}
EW_INLINE Ints4 multiply_pairs(Words4 a, Ints4 b) { return (Ints4)_mm_madd_epi16((__m128i)a, (__m128i)b); }
EW_INLINE I16 dot4_u8s8(I16 acc, B64 w, S8x4 a) {
  const Ints4 even = two_i16(a.v[0], a.v[2]), odd = two_i16(a.v[1], a.v[3]);
  return EW_QUARTERS(I16, acc.q[i] + multiply_pairs(w.q[i] & 0x00ff00ffu, even) +
                              multiply_pairs((w.q[i] >> 8) & 0x00ff00ffu, odd));
}
#else
EW_INLINE I16 dot4_u8s8(I16 acc, B64 w, S8x4 a) {
  return EW_QUARTERS(I16, acc.q[i] + (Ints4)(w.q[i] & 255u) * a.v[0] + (Ints4)((w.q[i] >> 8) & 255u) * a.v[1] +
                              (Ints4)((w.q[i] >> 16) & 255u) * a.v[2] + (Ints4)(w.q[i] >> 24) * a.v[3]);
}
#endif
EW_INLINE I16 dot4_u4s8(I16 acc, B64 w, S8x4 a) { return dot4_u8s8(acc, w, a); }
EW_INLINE F16 dot2_bf16(F16 acc, Codes w, BF2 a) {
  const F16 first = as_f32(set1_i32(static_cast<int32_t>(static_cast<uint32_t>(a.v[0]) << 16)));
  const F16 second = as_f32(set1_i32(static_cast<int32_t>(static_cast<uint32_t>(a.v[1]) << 16)));
  return fmadd(w.second, second, fmadd(w.first, first, acc));
}
EW_INLINE F16 dot2_bf16(F16 acc, B64 w, BF2 a) {
  const I16 high_half = set1_i32(static_cast<int32_t>(0xffff0000u));
  return dot2_bf16(acc, Codes{as_f32(shift_left<16>(as_i32(w))), as_f32(and_(as_i32(w), high_half))}, a);
}
#undef EW_QUARTERS

}  // namespace ew::EW_ISA_NS
