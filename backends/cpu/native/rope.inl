// Rotary position embedding (Su et al. 2021, RoFormer, equation 34), in place on one token's heads.
#pragma once

#include "attention.h"
#include "simd.h"

namespace ew::EW_ISA_NS {

// (a, b) -> (a cos - b sin, b cos + a sin)
EW_INLINE void rotate(F16& a, F16& b, F16 cos, F16 sin) {
  const F16 rotated = fnmadd(b, sin, mul(a, cos));
  b = fmadd(a, sin, mul(b, cos));
  a = rotated;
}

static void rope_halves(float* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i += 16) {
    const int n = half - i;
    F16 a = load_partial(x + i, n), b = load_partial(x + half + i, n);
    rotate(a, b, load_partial(cos + i, n), load_partial(sin + i, n));
    store_partial(x + i, a, n);
    store_partial(x + half + i, b, n);
  }
}

// Eight pairs a vector, each lane with its partner swapped in. Even lanes hold a and need -sin, odd lanes hold b.
static void rope_interleaved(float* x, const float* cos, const float* sin, int half) {
  const F16 odd = to_f32(and_(iota(), set1_i32(1)));
  const F16 sign = sub(add(odd, odd), set1(1.0f));
  float pair_cos[8], pair_sin[8];
  for (int i = 0; i < half; i += 8) {
    const int pairs = half - i < 8 ? half - i : 8;
    for (int j = 0; j < 8; ++j) {
      pair_cos[j] = j < pairs ? cos[i + j] : 0.0f;
      pair_sin[j] = j < pairs ? sin[i + j] : 0.0f;
    }
    const F16 v = load_partial(x + 2 * i, 2 * pairs);
    const F16 signed_sin = mul(load_twice(pair_sin), sign);
    store_partial(x + 2 * i, fmadd(swap_pairs(v), signed_sin, mul(v, load_twice(pair_cos))), 2 * pairs);
  }
}

static void rope(float* x, int64_t heads, int64_t head_stride, const float* cos, const float* sin, int rotary_dim,
                 bool interleaved) {
  for (int64_t head = 0; head < heads; ++head) {
    if (interleaved) {
      rope_interleaved(x + head * head_stride, cos, sin, rotary_dim / 2);
    } else {
      rope_halves(x + head * head_stride, cos, sin, rotary_dim / 2);
    }
  }
}

}  // namespace ew::EW_ISA_NS
