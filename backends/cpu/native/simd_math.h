// Elementary functions on 16 lanes: deterministic, free of calls, within a few units in the last place of f32.
//
// NaN gives NaN; overflow and underflow go to infinity and zero as IEEE does. Accuracy is checked against float64 in
// tests/backends/cpu/test_row_kernels.py.
#pragma once

#include "simd.h"

namespace ew::EW_ISA_NS {

/// Horner's rule: c0 + c1 x + c2 x^2 + ..., coefficients from the constant term up.
template <int N>
EW_INLINE F16 polynomial(F16 x, const float (&coefficients)[N]) {
  F16 sum = set1(coefficients[N - 1]);
  unroll<N - 1>([&](auto i) EW_INLINE_LAMBDA { sum = fmadd(sum, x, set1(coefficients[N - 2 - i])); });
  return sum;
}

/// x * 2^n for whole n in -252..254 held as f32. In two factors, so that results may be subnormal or overflow correctly.
EW_INLINE F16 scale_by_power_of_2(F16 x, F16 n) {
  const I16 whole = round_to_i16(n);
  const I16 first = shift_right_arithmetic<1>(whole);
  const I16 second = sub(whole, first);
  const F16 factor1 = as_f32(shift_left<23>(add(first, set1_i32(127))));
  const F16 factor2 = as_f32(shift_left<23>(add(second, set1_i32(127))));
  return mul(mul(x, factor1), factor2);
}

/// e^r for |r| <= 0.35: the Taylor series, whose first dropped term is below 2^-27.
EW_INLINE F16 exp_reduced(F16 r) {
  static constexpr float kInverseFactorials[] = {1.0f,      1.0f,       1.0f / 2,   1.0f / 6,
                                                 1.0f / 24, 1.0f / 120, 1.0f / 720, 1.0f / 5040};
  return polynomial(r, kInverseFactorials);
}

/// 2^x.
EW_INLINE F16 exp2(F16 x) {
  // NaN stays because min and max keep their second operand.
  const F16 clamped = min(set1(130.0f), max(set1(-152.0f), x));
  const F16 n = round_nearest(clamped);
  return scale_by_power_of_2(exp_reduced(mul(sub(clamped, n), set1(0.6931471805599453f))), n);
}

/// e^x. The multiple of ln 2 is removed in two parts, the first with few enough bits that its product is exact.
EW_INLINE F16 exp(F16 x) {
  const F16 clamped = min(set1(90.0f), max(set1(-106.0f), x));
  const F16 n = round_nearest(mul(clamped, set1(1.4426950408889634f)));
  const F16 r = fnmadd(n, set1(-2.12194440e-4f), fnmadd(n, set1(0.693359375f), clamped));
  return scale_by_power_of_2(exp_reduced(r), n);
}

/// 1 / (1 + e^-x).
EW_INLINE F16 sigmoid(F16 x) { return div(set1(1.0f), add(set1(1.0f), exp(neg(x)))); }

/// tanh, after Cephes' tanhf: an odd polynomial near zero, where 1 - 2 / (e^2x + 1) would cancel.
EW_INLINE F16 tanh(F16 x) {
  static constexpr float kNearZero[] = {-3.33332819422e-1f, 1.33314422036e-1f, -5.37397155531e-2f, 2.06390887954e-2f,
                                        -5.70498872745e-3f};
  const F16 magnitude = abs(x);
  const F16 square = mul(x, x);
  const F16 small = fmadd(mul(polynomial(square, kNearZero), square), x, x);
  const F16 large = sub(set1(1.0f), div(set1(2.0f), add(exp(add(magnitude, magnitude)), set1(1.0f))));
  return select(cmp_lt(magnitude, set1(0.625f)), small, copy_sign(large, x));
}

/// The error function: an odd polynomial near zero, 1 - e^p(|x|) beyond (minimax coefficients after N. Juffa).
EW_INLINE F16 erf(F16 x) {
  static constexpr float kNearZero[] = {1.28379166e-1f,  -3.76125336e-1f, 1.12819925e-1f,
                                        -2.67681349e-2f, 4.99119423e-3f,  -5.96761703e-4f};
  static constexpr float kExponent[] = {-1.28717512e-1f, -6.34846687e-1f, -1.06777877e-1f, 2.42546219e-2f,
                                        -3.88396438e-3f, 3.83197126e-4f,  -1.72853470e-5f};
  const F16 magnitude = abs(x);
  const F16 small = fmadd(polynomial(mul(x, x), kNearZero), x, x);
  // Beyond 4, erf is 1 in f32; clamped there so that the polynomial stays in its range.
  const F16 t = min(set1(4.0f), magnitude);
  const F16 large = sub(set1(1.0f), exp(sub(mul(polynomial(t, kExponent), t), t)));
  return select(cmp_lt(magnitude, set1(0.927734375f)), small, copy_sign(large, x));
}

/// The natural logarithm, after Cephes' logf: -inf at 0, NaN below.
EW_INLINE F16 log(F16 x) {
  static constexpr float kNearOne[] = {3.3333331174e-1f,  -2.4999993993e-1f, 2.0000714765e-1f,
                                       -1.6668057665e-1f, 1.4249322787e-1f,  -1.2420140846e-1f,
                                       1.1676998740e-1f,  -1.1514610310e-1f, 7.0376836292e-2f};
  const M16 subnormal = cmp_lt(x, set1(1.17549435e-38f));
  const F16 scaled = select(subnormal, mul(x, set1(8388608.0f)), x);
  // x = 2^exponent * fraction with the fraction in [sqrt(1/2), sqrt(2)).
  const I16 shifted = sub(as_i32(scaled), set1_i32(0x3f3504f3));
  const F16 exponent = add(to_f32(shift_right_arithmetic<23>(shifted)), select(subnormal, set1(-23.0f), zero()));
  const F16 fraction = as_f32(add(and_(shifted, set1_i32(0x007fffff)), set1_i32(0x3f3504f3)));
  const F16 r = sub(fraction, set1(1.0f));
  const F16 square = mul(r, r);
  F16 y = mul(mul(polynomial(r, kNearOne), r), square);
  y = fmadd(exponent, set1(-2.12194440e-4f), y);
  y = fnmadd(square, set1(0.5f), y);
  y = fmadd(exponent, set1(0.693359375f), add(r, y));
  const F16 infinity = as_f32(set1_i32(0x7f800000));
  y = select(cmp_lt(x, infinity), y, x);  // infinity and NaN
  y = select(cmp_eq(x, zero()), neg(infinity), y);
  return select(cmp_lt(x, zero()), as_f32(set1_i32(0x7fc00000)), y);
}

/// log(1 + u) for u in 0..1. The quotient corrects for the rounding of 1 + u (W. Kahan).
EW_INLINE F16 log1p_unit(F16 u) {
  const F16 w = add(set1(1.0f), u);
  const F16 corrected = mul(log(w), div(u, sub(w, set1(1.0f))));
  return select(cmp_eq(w, set1(1.0f)), u, corrected);
}

/// log(1 + e^x).
EW_INLINE F16 softplus(F16 x) { return add(max(zero(), x), log1p_unit(exp(neg(abs(x))))); }

// --- Below this line: functions that only attention and sampling use. ---------------------------------------------------

}  // namespace ew::EW_ISA_NS
