// Kernels that handle one row of f32 values: norms and activations.
#pragma once

#include "kernels.h"
#include "simd_math.h"

namespace ew::EW_ISA_NS {

/// Sum of value(i, lanes) over `dim` columns, 16 at a time: four partial sums in a fixed order, so that the adder's latency
/// does not bound the row. `value` gets the first column and the number of columns that exist, and gives 0 beyond them.
template <class Value>
EW_INLINE float sum_columns(int64_t dim, Value value) {
  F16 part[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 64 <= dim; i += 64) {
    unroll<4>([&](auto p) EW_INLINE_LAMBDA { part[p] = add(part[p], value(i + 16 * p, 16)); });
  }
  for (; i < dim; i += 16) part[0] = add(part[0], value(i, dim - i < 16 ? dim - i : 16));
  return reduce_add(add(add(part[0], part[1]), add(part[2], part[3])));
}

/// Calls body(first column, columns) for each 16 columns.
template <class Body>
EW_INLINE void for_columns(int64_t dim, Body body) {
  int64_t i = 0;
  for (; i + 16 <= dim; i += 16) body(i, int64_t{16});
  if (i < dim) body(i, dim - i);
}

/// 1 / sqrt(x), rounded twice.
EW_INLINE float inverse_sqrt(float x) { return lane(div(set1(1.0f), sqrt(set1(x))), 0); }

/// What a norm normalises: x + residual. Where sum_out is given it is written first and read from there afterwards, since
/// sum_out may be x or the residual itself.
struct NormInput {
  const float* x;
  const float* residual;

  EW_INLINE_LAMBDA F16 at(int64_t i, int64_t n) const {
    const F16 value = load_partial(x + i, n);
    return residual == nullptr ? value : add(value, load_partial(residual + i, n));
  }
};

EW_INLINE NormInput norm_input(const float* x, const float* residual, float* sum_out, int64_t dim) {
  const NormInput sum = {x, residual};
  if (sum_out == nullptr) return sum;
  for_columns(dim, [&](int64_t i, int64_t n) EW_INLINE_LAMBDA { store_partial(sum_out + i, sum.at(i, n), n); });
  return {sum_out, nullptr};
}

static void rms_norm(const float* x, const float* residual, float* sum_out, const float* w, float w_offset, float eps,
                     int64_t dim, float* y) {
  const NormInput input = norm_input(x, residual, sum_out, dim);
  const float squares = sum_columns(dim, [&](int64_t i, int64_t n) EW_INLINE_LAMBDA {
    const F16 value = input.at(i, n);
    return mul(value, value);
  });
  const F16 inverse = set1(inverse_sqrt(squares / static_cast<float>(dim) + eps));
  for_columns(dim, [&](int64_t i, int64_t n) EW_INLINE_LAMBDA {
    F16 normed = mul(input.at(i, n), inverse);
    if (w != nullptr) normed = mul(normed, add(load_partial(w + i, n), set1(w_offset)));
    store_partial(y + i, normed, n);
  });
}

static void layer_norm(const float* x, const float* residual, float* sum_out, const float* w, const float* bias,
                       float eps, int64_t dim, float* y) {
  const NormInput input = norm_input(x, residual, sum_out, dim);
  const float total = sum_columns(dim, [&](int64_t i, int64_t n) EW_INLINE_LAMBDA { return input.at(i, n); });
  const F16 mean = set1(total / static_cast<float>(dim));
  const float squares = sum_columns(dim, [&](int64_t i, int64_t n) EW_INLINE_LAMBDA {
    const F16 centred = select(first_n(n), sub(input.at(i, n), mean), zero());
    return mul(centred, centred);
  });
  const F16 inverse = set1(inverse_sqrt(squares / static_cast<float>(dim) + eps));
  for_columns(dim, [&](int64_t i, int64_t n) EW_INLINE_LAMBDA {
    F16 normed = mul(sub(input.at(i, n), mean), inverse);
    if (w != nullptr) normed = mul(normed, load_partial(w + i, n));
    if (bias != nullptr) normed = add(normed, load_partial(bias + i, n));
    store_partial(y + i, normed, n);
  });
}

/// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
EW_INLINE F16 gelu_tanh(F16 x) {
  const F16 cubic = mul(mul(x, x), mul(x, set1(0.044715f)));
  const F16 t = tanh(mul(set1(0.7978845608028654f), add(x, cubic)));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), t));
}

template <Activation Kind>
EW_INLINE F16 activate(F16 x) {
  // max keeps its second operand where x is NaN.
  const auto relu = [](F16 v) EW_INLINE_LAMBDA { return max(zero(), v); };
  if constexpr (Kind == Activation::silu) return mul(x, sigmoid(x));
  if constexpr (Kind == Activation::gelu) {
    return mul(mul(set1(0.5f), x), add(set1(1.0f), erf(mul(x, set1(0.7071067811865476f)))));
  }
  if constexpr (Kind == Activation::gelu_tanh) return gelu_tanh(x);
  if constexpr (Kind == Activation::relu) return relu(x);
  if constexpr (Kind == Activation::relu2) return mul(relu(x), relu(x));
  if constexpr (Kind == Activation::sigmoid) return sigmoid(x);
  if constexpr (Kind == Activation::tanh) return tanh(x);
  if constexpr (Kind == Activation::quick_gelu) return mul(x, sigmoid(mul(x, set1(1.702f))));
  if constexpr (Kind == Activation::exp) return exp(x);
  if constexpr (Kind == Activation::softplus) return softplus(x);
  return x;
}

/// Calls body with the kind as a compile-time constant, outside the loop over the row.
template <class Body>
EW_INLINE void with_activation(int kind, Body body) {
  switch (static_cast<Activation>(kind)) {
#define EW_CASE(name) \
  case Activation::name: return body(Index<static_cast<int>(Activation::name)>{});
    EW_CASE(identity)
    EW_CASE(silu)
    EW_CASE(gelu)
    EW_CASE(gelu_tanh)
    EW_CASE(relu)
    EW_CASE(relu2)
    EW_CASE(sigmoid)
    EW_CASE(tanh)
    EW_CASE(quick_gelu)
    EW_CASE(exp)
    EW_CASE(softplus)
#undef EW_CASE
  }
}

static void activation(int kind, const float* x, float* y, int64_t n) {
  with_activation(kind, [&](auto fixed) EW_INLINE_LAMBDA {
    for_columns(n, [&](int64_t i, int64_t count) EW_INLINE_LAMBDA {
      store_partial(y + i, activate<static_cast<Activation>(fixed.value)>(load_partial(x + i, count)), count);
    });
  });
}

static void gated(int kind, const float* gate, const float* up, float* y, int64_t n) {
  with_activation(kind, [&](auto fixed) EW_INLINE_LAMBDA {
    for_columns(n, [&](int64_t i, int64_t count) EW_INLINE_LAMBDA {
      const F16 activated = activate<static_cast<Activation>(fixed.value)>(load_partial(gate + i, count));
      store_partial(y + i, mul(activated, load_partial(up + i, count)), count);
    });
  });
}

}  // namespace ew::EW_ISA_NS
