// The linear kernel: choice of the format's block kernel.
#pragma once

#include "linear_float.inl"
#include "linear_integer.inl"

namespace ew::EW_ISA_NS {

static void linear(const LinearWeight& weight, const uint8_t* prepared, int64_t rows, int64_t t0, int64_t t1,
                   const float* bias, float* y, int64_t ldy) {
  const auto run = [&](auto format) EW_INLINE_LAMBDA {
    linear_format<decltype(format)>(weight, prepared, rows, t0, t1, bias, y, ldy);
  };
  switch (weight.format.kind) {
    case WeightKind::f32: return run(Float<Float32Step>{});
    case WeightKind::bf16: return run(Float<Bfloat16Step>{});
    case WeightKind::fp8: return run(Fp8{});
    case WeightKind::symmetric:
      return weight.format.group == 0 ? run(Integer<8, Scales::channel>{}) : run(Integer<8, Scales::group>{});
    case WeightKind::offset:
    case WeightKind::zero:
      switch (weight.format.bits) {
        case 2: return run(Integer<2, Scales::offset>{});
        case 3: return run(Integer<3, Scales::offset>{});
        case 4: return run(Integer<4, Scales::offset>{});
        default: return run(Integer<8, Scales::offset>{});
      }
  }
}

}  // namespace ew::EW_ISA_NS
