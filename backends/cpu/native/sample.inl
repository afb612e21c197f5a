// Rows of logits: the largest, the log of the sum of exponentials, the softmax. One order whatever the threads.
#pragma once

#include "attention.h"
#include "simd.h"
#include "softmax.inl"

namespace ew::EW_ISA_NS {

static int64_t argmax(const float* x, int64_t n) {
  F16 largest = set1(-__builtin_inff());
  M16 nan = first_n(0);
  for (int64_t i = 0; i + 16 <= n; i += 16) {
    const F16 v = loadu(x + i);
    nan = or_(nan, is_nan(v));
    largest = max(v, largest);
  }
  if (any(nan)) return -1;
  float best = reduce_max(largest);
  for (int64_t i = n / 16 * 16; i < n; ++i) {
    if (x[i] != x[i]) return -1;
    if (x[i] > best) best = x[i];
  }
  const F16 target = set1(best);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const M16 found = cmp_eq(loadu(x + i), target);
    if (any(found)) return i + __builtin_ctz(bits(found));
  }
  while (x[i] != best) ++i;
  return i;
}

/// Largest value, and the sum of 2^((x - largest) log2 e) in four interleaved chains; a NaN makes the sum NaN.
struct RowSum {
  float largest, sum;
};

EW_INLINE F16 row_weights(F16 x, float largest) {
  return softmax_exp2(mul(sub(x, set1(largest)), set1(kLog2E)));
}

/// The sum alone, given the largest value.
static float sum_below(const float* x, int64_t n, float largest) {
  F16 sum[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    unroll<4>([&](auto c) EW_INLINE_LAMBDA { sum[c] = add(sum[c], row_weights(loadu(x + i + c * 16), largest)); });
  }
  for (; i < n; i += 16) {
    const F16 weight = row_weights(load_partial(x + i, n - i), largest);
    sum[0] = add(sum[0], select(first_n(n - i), weight, zero()));
  }
  return reduce_add(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
}

static RowSum sum_row(const float* x, int64_t n) {
  F16 most = set1(-__builtin_inff());
  const F16 lowest = most;
  for (int64_t i = 0; i < n; i += 16) {
    most = max(n - i >= 16 ? loadu(x + i) : select(first_n(n - i), load_partial(x + i, n - i), lowest), most);
  }
  const float largest = reduce_max(most);
  return {largest, sum_below(x, n, largest)};
}

static float logsumexp(const float* x, int64_t n) {
  const RowSum row = sum_row(x, n);
  if (row.sum != row.sum && row.largest == -__builtin_inff()) {  // nothing but minus infinity, unless a NaN hides
    for (int64_t i = 0; i < n; ++i) {
      if (x[i] != x[i]) return x[i];
    }
    return row.largest;
  }
  return row.largest + static_cast<float>(__builtin_log(static_cast<double>(row.sum)));
}

static void softmax(const float* x, float* y, int64_t n) {
  const RowSum row = sum_row(x, n);
  const F16 factor = set1(1.0f / row.sum);
  for (int64_t i = 0; i < n; i += 16) {
    store_partial(y + i, mul(row_weights(load_partial(x + i, n - i), row.largest), factor), n - i);
  }
}

}  // namespace ew::EW_ISA_NS
