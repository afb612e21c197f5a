// The noise of sampling: Gumbel numbers as a pure function of (seed, position, token id), the same bits on every machine.
//
// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) read at counter `id` of the
// stream of (seed, position). The logarithms use additions, multiplications and divisions alone, in double precision and
// never fused, so that runtime/sampler.py repeats them bit for bit. Everything here is `static`: the file is compiled once
// per ISA variant, and no copy may serve another's callers.
#pragma once

#include <stdint.h>

#define EW_NOISE static inline __attribute__((always_inline))

namespace ew {

constexpr uint64_t kNoiseGamma = 0x9E3779B97F4A7C15u;

/// Of one number or of a vector of them.
template <class Words>
EW_NOISE Words noise_mix(Words z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

EW_NOISE uint64_t noise_stream(uint64_t seed, int64_t position) {
  return noise_mix<uint64_t>(noise_mix<uint64_t>(seed + kNoiseGamma) + static_cast<uint64_t>(position) * kNoiseGamma);
}

/// The random bits of one token id.
EW_NOISE uint64_t noise_bits(uint64_t stream, int64_t id) {
  return noise_mix<uint64_t>(stream + static_cast<uint64_t>(id + 1) * kNoiseGamma);
}

/// Natural logarithm of a positive normal number, to about 1e-15: log(m) = 2 atanh((m - 1) / (m + 1)) of the mantissa.
EW_NOISE double noise_log(double x) {
  union {
    double value;
    uint64_t bits;
  } m = {x};
  int exponent = static_cast<int>(m.bits >> 52) - 1022;
  m.bits = (m.bits & 0x000fffffffffffffu) | 0x3fe0000000000000u;  // in [0.5, 1)
  if (m.value < 0.7071067811865476) {
    m.value += m.value;
    exponent--;
  }
  const double s = (m.value - 1.0) / (m.value + 1.0), square = s * s;
  double series = 1.0 / 21;
  for (int k = 9; k >= 0; k--) {
    series = series * square;
    series = series + 1.0 / (2 * k + 1);
  }
  return exponent * 0.6931471805599453 + (s + s) * series;
}

EW_NOISE double gumbel(uint64_t bits) {
  const double uniform = (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;  // exact, in (0, 1)
  return -noise_log(-noise_log(uniform));
}

}  // namespace ew
