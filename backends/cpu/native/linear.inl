// The linear kernel: choice of the format's block kernel.
#pragma once

#include "linear_float.inl"
#include "linear_integer.inl"

namespace ew::EW_ISA_NS {

static void linear(const LinearWeight& weight, const uint8_t* prepared, int64_t rows, int64_t t0, int64_t t1,
                   const float* bias, float* y, int64_t ldy) {
  switch (weight.format) {
    case WeightFormat::f32: return linear_format<Float<Float32Step>>(weight, prepared, rows, t0, t1, bias, y, ldy);
    case WeightFormat::bf16: return linear_format<Float<Bfloat16Step>>(weight, prepared, rows, t0, t1, bias, y, ldy);
    case WeightFormat::int8: return linear_format<Int8<false>>(weight, prepared, rows, t0, t1, bias, y, ldy);
    case WeightFormat::int8_g32: return linear_format<Int8<true>>(weight, prepared, rows, t0, t1, bias, y, ldy);
    case WeightFormat::int4_g32:
    case WeightFormat::int4_g64:
    case WeightFormat::int4_g128: return linear_format<Int4>(weight, prepared, rows, t0, t1, bias, y, ldy);
  }
}

}  // namespace ew::EW_ISA_NS
