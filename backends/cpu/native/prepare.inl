// Prepared activations: what a linear reads instead of x. Quantisation to int8 happens here, once per row, so that every
// thread of the following linear reads the same codes.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace ew::EW_ISA_NS {

/// Where a prepared row keeps its parts, in bytes from its start.
///   Float formats: the k_padded values. Integer formats: [k_padded] int8 codes, [groups] f32 scales, [groups] words, and
///   [outliers, padded to even] bf16 values of the columns kept apart. The word is what the weight's offset multiplies:
///   where w = scale * code + offset the f32 activation scale * sum of codes; for int8 (stored as code + 128) the
///   i32 -128 * sum of codes, from which the sum of products starts.
struct PreparedLayout {
  int64_t groups;
  int64_t scales;
  int64_t words;
  int64_t outliers;
  int64_t row_bytes;
};

EW_INLINE PreparedLayout prepared_layout(const LinearWeight& weight) {
  PreparedLayout layout = {};
  int64_t bytes = weight.k_padded;
  if (weight.activation.kind == ActivationKind::f32) {
    bytes *= 4;
  } else if (weight.activation.kind == ActivationKind::bf16) {
    bytes *= 2;
  } else {
    layout.groups = weight.k_padded / weight.group;
    layout.scales = weight.k_padded;
    layout.words = layout.scales + layout.groups * 4;
    layout.outliers = layout.words + layout.groups * 4;
    bytes = layout.outliers + round_up(weight.outliers, 2) * 2;
  }
  // An odd number of cache lines: rows then start in different sets of the L1 cache.
  layout.row_bytes = round_up(bytes, 64) | 64;
  return layout;
}

static int64_t prepared_row_bytes(const LinearWeight& weight) { return prepared_layout(weight).row_bytes; }

/// Below this a scale would be subnormal or 127 / max|x| infinite; such values count as zero.
constexpr float kLeastMaximum = 0x1p-100f;

/// 16 columns of a row from column k: zeros beyond the row's end and in columns kept apart (whatever they hold).
/// `whole`: the row has them all.
template <bool Outliers>
EW_INLINE F16 load_kept(const LinearWeight& weight, const float* x, int64_t k, bool whole) {
  const int64_t columns = weight.k > k ? weight.k - k : 0;
  const F16 value = whole ? loadu(x + k) : load_partial(x + k, columns);
  if constexpr (Outliers) return as_f32(and_(as_i32(value), load_partial(weight.keep + k, columns)));
  else return value;
}

/// Magnitudes order alike as floats and as integers, and NaN comes out largest.
EW_INLINE I16 larger_magnitude(I16 largest, F16 value) { return max(largest, as_i32(abs(value))); }
EW_INLINE float magnitude(I16 largest) { return lane(as_f32(set1_i32(reduce_max(largest))), 0); }

struct RowScale {
  float scale, inverse;
};
EW_INLINE RowScale scale_of(float maximum) {
  const bool is_zero = maximum < kLeastMaximum;
  return {is_zero ? 0.0f : maximum / 127.0f, is_zero ? 0.0f : 127.0f / maximum};
}

/// Stores a group's scale and its word.
EW_INLINE void finish_group(const LinearWeight& weight, const PreparedLayout& layout, uint8_t* row, int64_t g, float scale,
                            int32_t sum) {
  reinterpret_cast<float*>(row + layout.scales)[g] = scale;
  if (has_offsets(weight.format)) {
    reinterpret_cast<float*>(row + layout.words)[g] = scale * static_cast<float>(sum);
  } else {
    reinterpret_cast<int32_t*>(row + layout.words)[g] = -128 * sum;
  }
}

/// One scale a group, whose values stay in registers between the search for the largest and the rounding.
template <int Group, bool Outliers>
EW_INLINE void quantise_groups(const LinearWeight& weight, const PreparedLayout& layout, const float* x, uint8_t* row) {
  constexpr int kVectors = Group / 16;
  int8_t* codes = reinterpret_cast<int8_t*>(row);
  for (int64_t g = 0; g < layout.groups; g++) {
    const int64_t k = g * Group;
    const bool whole = k + Group <= weight.k;
    F16 value[kVectors];
    I16 largest = zero_i32();
    unroll<kVectors>([&](auto i) EW_INLINE_LAMBDA {
      value[i] = load_kept<Outliers>(weight, x, k + 16 * i, whole);
      largest = larger_magnitude(largest, value[i]);
    });
    const RowScale found = scale_of(magnitude(largest));
    const F16 inverse = set1(found.inverse);
    I16 sum = zero_i32();
    unroll<kVectors>([&](auto i) EW_INLINE_LAMBDA {
      const I16 code = round_to_i16(mul(value[i], inverse));
      store_i8(codes + k + 16 * i, code);
      sum = add(sum, code);
    });
    finish_group(weight, layout, row, g, found.scale, reduce_add(sum));
  }
}

/// One scale for the whole row, `code` of 16 values by it; every group's slot gets the scale.
template <bool Outliers, class Code>
EW_INLINE void quantise_whole(const LinearWeight& weight, const PreparedLayout& layout, const float* x, float scale,
                              uint8_t* row, Code code_of) {
  int8_t* codes = reinterpret_cast<int8_t*>(row);
  for (int64_t g = 0; g < layout.groups; g++) {
    I16 sum = zero_i32();
    for (int64_t k = g * weight.group; k < (g + 1) * weight.group; k += 16) {
      const I16 code = code_of(load_kept<Outliers>(weight, x, k, k + 16 <= weight.k));
      store_i8(codes + k, code);
      sum = add(sum, code);
    }
    finish_group(weight, layout, row, g, scale, reduce_add(sum));
  }
}

template <bool Outliers>
static void quantise_by_row(const LinearWeight& weight, const PreparedLayout& layout, const float* x, uint8_t* row) {
  I16 largest = zero_i32();
  for (int64_t k = 0; k < weight.k; k += 16) {
    largest = larger_magnitude(largest, load_kept<Outliers>(weight, x, k, k + 16 <= weight.k));
  }
  const float maximum = magnitude(largest);
  if (weight.activation.kind == ActivationKind::token) {
    const RowScale found = scale_of(maximum);
    const F16 inverse = set1(found.inverse);
    quantise_whole<Outliers>(weight, layout, x, found.scale, row, [&](F16 value) EW_INLINE_LAMBDA {
      return round_to_i16(mul(value, inverse));
    });
  } else {
    // Values beyond the calibrated range saturate. NaN would too: it makes the row's scale NaN instead.
    const F16 scale = set1(weight.activation.scale), most = set1(127.0f), least = set1(-127.0f);
    const float stored = maximum != maximum ? maximum : weight.activation.scale;
    quantise_whole<Outliers>(weight, layout, x, stored, row, [&](F16 value) EW_INLINE_LAMBDA {
      return round_to_i16(min(max(div(value, scale), least), most));
    });
  }
}

template <bool Outliers>
static void quantise_row(const LinearWeight& weight, const PreparedLayout& layout, const float* x, uint8_t* row) {
  if (weight.activation.kind != ActivationKind::group) return quantise_by_row<Outliers>(weight, layout, x, row);
  switch (weight.activation.group) {
    case 16: return quantise_groups<16, Outliers>(weight, layout, x, row);
    case 32: return quantise_groups<32, Outliers>(weight, layout, x, row);
    case 64: return quantise_groups<64, Outliers>(weight, layout, x, row);
    default: return quantise_groups<128, Outliers>(weight, layout, x, row);
  }
}

/// The columns kept apart, in bf16; a zero behind an odd number of them.
EW_INLINE void copy_outliers(const LinearWeight& weight, const PreparedLayout& layout, const float* x, uint8_t* row) {
  uint16_t* values = reinterpret_cast<uint16_t*>(row + layout.outliers);
  for (int64_t i = 0; i < weight.outliers; i++) values[i] = f32_to_bf16(x[weight.columns[i]]);
  if (weight.outliers % 2 != 0) values[weight.outliers] = 0;
}

EW_INLINE void prepare_row(const LinearWeight& weight, const PreparedLayout& layout, const float* x, uint8_t* row) {
  switch (weight.activation.kind) {
    case ActivationKind::f32:
      for (int64_t k = 0; k < weight.k; k += 16) {
        store_partial(reinterpret_cast<float*>(row) + k, load_partial(x + k, weight.k - k), weight.k - k);
      }
      return;
    case ActivationKind::bf16:
      for (int64_t k = 0; k < weight.k_padded; k += 16) {
        const F16 value = load_partial(x + k, weight.k - k);
        store_bf16_partial(reinterpret_cast<uint16_t*>(row) + k, value, weight.k_padded - k);
      }
      return;
    default:
      if (weight.outliers == 0) return quantise_row<false>(weight, layout, x, row);
      quantise_row<true>(weight, layout, x, row);
      copy_outliers(weight, layout, x, row);
  }
}

static void prepare(const LinearWeight& weight, const float* x, int64_t ldx, int64_t rows, uint8_t* prepared) {
  const PreparedLayout layout = prepared_layout(weight);
  for (int64_t m = 0; m < rows; m++) prepare_row(weight, layout, x + m * ldx, prepared + m * layout.row_bytes);
}

}  // namespace ew::EW_ISA_NS
