// Prepared activations: what a linear reads instead of x. Quantisation to int8 happens here, once per row, so that every
// thread of the following linear reads the same codes.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace ew::EW_ISA_NS {

/// Where a prepared row keeps its parts, in bytes from its start.
///   f32, bf16: the k_padded values.   Integer formats: [k_padded] int8 codes, [groups] f32 scales, [groups] words, where
///   the word is what the weight's offset multiplies: for int4 (w = scale * code + offset) the f32 activation scale *
///   sum of codes; for int8 (stored as code + 128) the i32 -128 * sum of codes, from which the sum of products starts.
struct PreparedLayout {
  int64_t groups;
  int64_t scales;
  int64_t words;
  int64_t row_bytes;
};

EW_INLINE PreparedLayout prepared_layout(const LinearWeight& weight) {
  PreparedLayout layout = {};
  int64_t bytes = weight.k_padded;
  if (weight.format == WeightFormat::f32) {
    bytes *= 4;
  } else if (weight.format == WeightFormat::bf16) {
    bytes *= 2;
  } else {
    layout.groups = weight.k_padded / weight.group;
    layout.scales = weight.k_padded;
    layout.words = layout.scales + layout.groups * 4;
    bytes = layout.words + layout.groups * 4;
  }
  // An odd number of cache lines: rows then start in different sets of the L1 cache.
  layout.row_bytes = round_up(bytes, 64) | 64;
  return layout;
}

static int64_t prepared_row_bytes(const LinearWeight& weight) { return prepared_layout(weight).row_bytes; }

/// Below this a group's scale would be subnormal or 127 / max|x| infinite; such a group counts as zero.
constexpr float kLeastMaximum = 0x1p-100f;

/// Quantises up to `Group` columns (zeros beyond `columns`) and returns the sum of the codes.
template <int Group>
EW_INLINE int32_t quantise_group(const float* x, int64_t columns, int8_t* codes, float* scale) {
  constexpr int kVectors = Group / 16;
  F16 value[kVectors];
  I16 largest = zero_i32();
  unroll<kVectors>([&](auto i) EW_INLINE_LAMBDA {
    value[i] = columns >= Group ? loadu(x + 16 * i) : load_partial(x + 16 * i, columns > 16 * i ? columns - 16 * i : 0);
    // Magnitudes order alike as floats and as integers, and NaN comes out largest.
    largest = max(largest, as_i32(abs(value[i])));
  });
  const float maximum = lane(as_f32(set1_i32(reduce_max(largest))), 0);
  const bool is_zero = maximum < kLeastMaximum;
  *scale = is_zero ? 0.0f : maximum / 127.0f;
  const F16 inverse = set1(is_zero ? 0.0f : 127.0f / maximum);
  I16 sum = zero_i32();
  unroll<kVectors>([&](auto i) EW_INLINE_LAMBDA {
    const I16 code = round_to_i16(mul(value[i], inverse));
    store_i8(codes + 16 * i, code);
    sum = add(sum, code);
  });
  return reduce_add(sum);
}

template <int Group>
EW_INLINE void quantise_row(const LinearWeight& weight, const PreparedLayout& layout, const float* x, uint8_t* row) {
  int8_t* codes = reinterpret_cast<int8_t*>(row);
  float* scales = reinterpret_cast<float*>(row + layout.scales);
  for (int64_t g = 0; g < layout.groups; g++) {
    const int64_t k = g * Group;
    const int32_t sum = quantise_group<Group>(x + k, weight.k - k, codes + k, scales + g);
    if (is_int4(weight.format)) {
      reinterpret_cast<float*>(row + layout.words)[g] = scales[g] * static_cast<float>(sum);
    } else {
      reinterpret_cast<int32_t*>(row + layout.words)[g] = -128 * sum;
    }
  }
}

EW_INLINE void prepare_row(const LinearWeight& weight, const PreparedLayout& layout, const float* x, uint8_t* row) {
  switch (weight.format) {
    case WeightFormat::f32:
      for (int64_t k = 0; k < weight.k; k += 16) {
        store_partial(reinterpret_cast<float*>(row) + k, load_partial(x + k, weight.k - k), weight.k - k);
      }
      return;
    case WeightFormat::bf16:
      for (int64_t k = 0; k < weight.k_padded; k += 16) {
        const F16 value = load_partial(x + k, weight.k - k);
        store_bf16_partial(reinterpret_cast<uint16_t*>(row) + k, value, weight.k_padded - k);
      }
      return;
    case WeightFormat::int8:
    case WeightFormat::int8_g32:
    case WeightFormat::int4_g32: return quantise_row<32>(weight, layout, x, row);
    case WeightFormat::int4_g64: return quantise_row<64>(weight, layout, x, row);
    case WeightFormat::int4_g128: return quantise_row<128>(weight, layout, x, row);
  }
}

static void prepare(const LinearWeight& weight, const float* x, int64_t ldx, int64_t rows, uint8_t* prepared) {
  const PreparedLayout layout = prepared_layout(weight);
  for (int64_t m = 0; m < rows; m++) prepare_row(weight, layout, x + m * ldx, prepared + m * layout.row_bytes);
}

}  // namespace ew::EW_ISA_NS
