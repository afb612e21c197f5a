// The 16-lane vector vocabulary that every kernel is written in.
//
// A kernel source (`*.inl`) is compiled once per ISA variant by isa_avx512.cpp, isa_avx2.cpp and isa_portable.cpp.
// Each defines EW_ISA_NS (the namespace of the variant) and one of EW_ISA_AVX512, EW_ISA_AVX2, EW_ISA_PORTABLE, and the
// kernel sees the same names whatever the machine offers. Nothing here or in a kernel may come from the standard
// library as a function: an inline `std::` function compiled with AVX-512 could be the copy that the linker keeps for
// everyone (one definition rule), and would then fault on an older machine.
//
// Types
//   F16  16 lanes of f32          I16  16 lanes of i32          M16  16 truth values
//   B64  64 bytes of packed weights or values: 16 lanes of 4 bytes, or 16 lanes of 2 bf16
//   S8x4 four int8, and BF2 two bf16, each broadcast to all 16 lanes: the activation side of a dot product
//
// Memory     load, loadu, store, storeu (float* -> F16, int32_t* -> I16; `u` = no 64-byte alignment needed)
//            load_partial(p, n) / store_partial(p, v, n): the first n lanes, 0 <= n <= 16; the rest reads as 0
//            load_f16, load_bf16 (+_partial) -> F16; store_f16, store_bf16 (+_partial), rounding to nearest even
//            load_i8, load_u8 -> I16; store_i8 (saturating)         load_bytes, loadu_bytes, store_bytes, B64
//            load_twice(p): p0 p0 p1 p1 .. p7 p7                    prefetch_t0, prefetch_t1
// Lanes      zero, set1 (f32); zero_i32, set1_i32; iota() = 0 1 .. 15; lane(v, i)
// f32        add sub mul div fmadd(a,b,c)=a*b+c fnmadd(a,b,c)=c-a*b min max abs neg sqrt round_nearest copy_sign(x, sign)
//            min(a,b) is a<b?a:b and max(a,b) is a>b?a:b, so the SECOND operand is kept where either is NaN
// i32        add sub mul min max and_ or_ xor_ shift_left<n> shift_right<n> (logical) shift_right_arithmetic<n>
// Masks      cmp_lt cmp_le cmp_gt cmp_ge cmp_eq (f32: false on NaN; i32: lt gt eq) is_nan first_n(n) and_ or_ not_
//            any(m) bits(m) select(m, a, b) = m ? a : b
// Convert    round_to_i16 (f32 -> i32 lanes, nearest even) to_f32 (i32 -> f32) as_i32 as_f32 (same bits)
// Across     reduce_add, reduce_max, reduce_min: lanes i and i+8, then +4, +2, +1. The order is part of the contract.
//            swap_pairs: lanes 1 0 3 2 ..
// Dot        dot4_u8s8(acc, w, a): acc[l] += sum_j w.u8[4l+j] * a.s8[j], exact for all codes
//            dot4_u4s8: the same where every w byte is <= 15 (a cheaper form exists on AVX2)
//            dot2_bf16(acc, w, a): acc[l] += w.bf16[2l] * a[0] + w.bf16[2l+1] * a[1], fp32 sums, order fixed per variant
//            broadcast_s8x4(p), broadcast_bf2(p); the dots also take the pointer itself
//            widen_codes(p): 32 int8 as bf16, in order, exactly; load_codes(p) -> Codes: the same in the form that its
//            dot2_bf16 multiplies soonest, with the same bits
// Nibbles    low_nibbles(b), high_nibbles(b): each byte's half as a byte 0..15; bit_pairs<Q>(b): (byte >> 2Q) & 3
//            add_fours<Q>(b, p): b | 4 in every byte i whose bit is set: bit (2Q + 2 + i / 32) % 8 of p[i % 32]
// Fp8        fp8_pairs(b): float8 e4m3fn codes times 2^-8 as bf16, `first` and `second`: within each 16 bytes, codes
//            8p + 2l and 8p + 2l + 1 become lane l of 4 of half p. The shifted exponent saves an addition
// Unroll     unroll<N>([&](auto i) EW_INLINE_LAMBDA { ... }): N copies of the body, i a compile-time constant
//
// Floating point is exact IEEE (-ffp-contract=off, no fast-math): fmadd is fused on avx512 and avx2, and on portable where
// the machine has it. Results may differ between variants; within one they depend on the operands alone.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if !defined(EW_ISA_NS)
#error "simd.h is compiled once per variant: include it from isa_avx512.cpp, isa_avx2.cpp or isa_portable.cpp"
#endif

#define EW_INLINE static inline __attribute__((always_inline))
#define EW_INLINE_LAMBDA __attribute__((always_inline))

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own AVX-512 header trips the first (its bug 105593); every function that passes a vector here is inlined, so the
// calling convention that the second warns of never matters.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace ew::EW_ISA_NS {

/// The bf16 of one float8 e4m3fn code (4 bits of exponent with bias 7, no infinity; Micikevicius et al. 2022) times 2^-8.
EW_INLINE uint16_t fp8_to_bf16(uint8_t code) {
  constexpr uint16_t subnormal[8] = {0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860};
  const uint32_t sign = (code & 0x80u) << 8, magnitude = code & 0x7fu;
  if (magnitude == 0x7f) return static_cast<uint16_t>(sign | 0x7ff0);
  return static_cast<uint16_t>(sign | (magnitude < 8 ? subnormal[magnitude] : (magnitude << 4) + 0x3800));
}
constexpr float kFp8Unit = 256.0f;  // what undoes the 2^-8

}  // namespace ew::EW_ISA_NS

#if defined(EW_ISA_AVX512)
#include "simd_avx512.h"
#elif defined(EW_ISA_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace ew::EW_ISA_NS {

/// A compile-time index, so that a lambda's parameter can be an array subscript or a template argument.
template <int Value>
struct Index {
  static constexpr int value = Value;
  EW_INLINE_LAMBDA constexpr operator int() const { return Value; }
};

template <int... Values>
struct Indices {};

/// Unrolling by fold expression, because GCC leaves arrays of accumulators in memory when plain loops nest.
template <class Body, int... Values>
EW_INLINE void unroll_indices(Body&& body, Indices<Values...>) {
  (body(Index<Values>{}), ...);
}

#if defined(__clang__)
template <class T, T... Values>
struct IndicesFrom {
  using type = Indices<Values...>;
};
template <int N>
using IndicesUpTo = typename __make_integer_seq<IndicesFrom, int, N>::type;
#else
template <int N>
using IndicesUpTo = Indices<__integer_pack(N)...>;
#endif

template <int N, class Body>
EW_INLINE void unroll(Body&& body) {
  unroll_indices(body, IndicesUpTo<N>{});
}

EW_INLINE I16 dot4_u8s8(I16 acc, B64 w, const int8_t* a) { return dot4_u8s8(acc, w, broadcast_s8x4(a)); }
EW_INLINE I16 dot4_u4s8(I16 acc, B64 w, const int8_t* a) { return dot4_u4s8(acc, w, broadcast_s8x4(a)); }
EW_INLINE F16 dot2_bf16(F16 acc, B64 w, const uint16_t* a) { return dot2_bf16(acc, w, broadcast_bf2(a)); }

EW_INLINE F16 neg(F16 a) { return as_f32(xor_(as_i32(a), set1_i32(INT32_MIN))); }
EW_INLINE F16 abs(F16 a) { return as_f32(and_(as_i32(a), set1_i32(INT32_MAX))); }
EW_INLINE F16 copy_sign(F16 magnitude, F16 sign) {
  return as_f32(or_(and_(as_i32(magnitude), set1_i32(INT32_MAX)), and_(as_i32(sign), set1_i32(INT32_MIN))));
}

/// One value's round trip, for kernels that end in a scalar.
EW_INLINE float bf16_to_f32(uint16_t bits) {
  union {
    uint32_t u;
    float f;
  } value = {static_cast<uint32_t>(bits) << 16};
  return value.f;
}
EW_INLINE uint16_t f32_to_bf16(float x) {
  union {
    float f;
    uint32_t u;
  } value = {x};
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((value.u + 0x7fff + ((value.u >> 16) & 1)) >> 16);
}

}  // namespace ew::EW_ISA_NS
