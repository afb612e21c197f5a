// The exponential of a softmax, in base 2: scores arrive multiplied by log2(e), so that e^s = 2^(s log2 e).
#pragma once

#include "simd.h"

namespace ew::EW_ISA_NS {

static constexpr float kLog2E = 1.44269504088896341f;

/// 2^x for x <= 127, relative error 2e-7; exactly 1 at 0, exactly 0 below -125 (so at minus infinity), NaN at NaN.
/// Minimax polynomial of degree 5 on the fraction; adding 1.5 * 2^23 leaves the integer part in the low bits.
EW_INLINE F16 softmax_exp2(F16 x) {
  const F16 magic = set1(12582912.0f);
  const F16 shifted = add(x, magic);
  const F16 fraction = sub(x, sub(shifted, magic));
  F16 power = set1(0.001326472731307149f);
  power = fmadd(power, fraction, set1(0.009671512991189957f));
  power = fmadd(power, fraction, set1(0.05550733581185341f));
  power = fmadd(power, fraction, set1(0.24022242426872253f));
  power = fmadd(power, fraction, set1(0.6931470036506653f));
  power = fmadd(power, fraction, set1(1.0f));
  const F16 scale = as_f32(add(shift_left<23>(as_i32(shifted)), set1_i32(0x3f800000)));
  return select(cmp_lt(x, set1(-125.0f)), zero(), mul(power, scale));
}

EW_INLINE float softmax_exp2(float x) { return lane(softmax_exp2(set1(x)), 0); }

}  // namespace ew::EW_ISA_NS
