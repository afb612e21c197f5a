// Passes over a row of logits for drawing; draw.h says what each gives, noise.h has the noise.
#pragma once

#include "draw.h"
#include "noise.h"
#include "sample.inl"
#include "simd.h"

namespace ew::EW_ISA_NS {

/// The largest of up to 64 values; lanes of `nan` where one is NaN.
EW_INLINE float block_maximum(const float* x, int64_t n, M16& nan) {
  const F16 minus_infinity = set1(-__builtin_inff());
  if (n >= kDrawBlock) {
    const F16 a = loadu(x), b = loadu(x + 16), c = loadu(x + 32), d = loadu(x + 48);
    // A NaN in any of four makes their sum NaN; so do infinities of both signs, which the caller tells apart.
    nan = or_(nan, is_nan(add(add(a, b), add(c, d))));
    return reduce_max(max(max(a, b), max(c, d)));
  }
  F16 most = minus_infinity;
  for (int64_t i = 0; i < n; i += 16) {
    const F16 v = load_partial(x + i, n - i);
    nan = or_(nan, and_(first_n(n - i), is_nan(v)));
    most = max(select(first_n(n - i), v, minus_infinity), most);
  }
  return reduce_max(most);
}

static float block_maxima(const float* x, int64_t n, float* maxima) {
  float largest = -__builtin_inff();
  M16 nan = first_n(0);
  for (int64_t i = 0; i < n; i += kDrawBlock) {
    const float most = block_maximum(x + i, n - i, nan);
    maxima[i / kDrawBlock] = most;
    if (most > largest) largest = most;
  }
  if (any(nan)) {  // rare: look at each value
    for (int64_t i = 0; i < n; i++) {
      if (x[i] != x[i]) return x[i];
    }
  }
  return largest;
}

static void mask(float* x, const uint32_t* allowed, int64_t n, float* maxima) {
  const F16 minus_infinity = set1(-__builtin_inff());
  int32_t lane_bit[16];
  for (int lane = 0; lane < 16; lane++) lane_bit[lane] = 1 << lane;
  const I16 bit = loadu(lane_bit);
  for (int64_t i = 0; i < n; i += 16) {
    const uint32_t half = (allowed[i / 32] >> (i % 32)) & 0xffffu;
    if (half == 0xffffu) continue;
    const M16 off = cmp_eq(and_(set1_i32(static_cast<int32_t>(half)), bit), zero_i32());
    store_partial(x + i, select(off, minus_infinity, load_partial(x + i, n - i)), n - i);
  }
  block_maxima(x, n, maxima);
}

/// 2^30 * 2^s, rounded to a whole number. No fused operation: runtime/sampler.py repeats it.
EW_INLINE I16 draw_weight(F16 x, F16 largest, F16 scale) {
  const F16 s = mul(sub(x, largest), scale);
  const F16 magic = set1(12582912.0f);  // 1.5 * 2^23: leaves the whole part in the low bits
  const F16 shifted = add(s, magic);
  const F16 fraction = sub(s, sub(shifted, magic));
  F16 power = set1(0.001326472731307149f);
  power = add(mul(power, fraction), set1(0.009671512991189957f));
  power = add(mul(power, fraction), set1(0.05550733581185341f));
  power = add(mul(power, fraction), set1(0.24022242426872253f));
  power = add(mul(power, fraction), set1(0.6931470036506653f));
  power = add(mul(power, fraction), set1(1.0f));
  const F16 two_to = as_f32(add(shift_left<23>(as_i32(shifted)), set1_i32((127 + 30) << 23)));
  return select(cmp_lt(s, set1(-31.0f)), zero_i32(), round_to_i16(mul(power, two_to)));
}

static uint64_t weigh(const float* x, int64_t n, float largest, float scale, int32_t* weights) {
  const F16 top = set1(largest), factor = set1(scale);
  constexpr int64_t flush = 16 * 8192;  // halves of a weight are below 2^16: 8192 of them fit a lane
  uint64_t total = 0;
  for (int64_t start = 0; start < n; start += flush) {
    const int64_t stop = start + flush < n ? start + flush : n;
    I16 low = zero_i32(), high = zero_i32();
    for (int64_t i = start; i < stop; i += 16) {
      I16 w = draw_weight(load_partial(x + i, stop - i), top, factor);
      if (stop - i < 16) w = select(first_n(stop - i), w, zero_i32());
      store_partial(weights + i, w, stop - i);
      low = add(low, and_(w, set1_i32(0xffff)));
      high = add(high, shift_right<16>(w));
    }
    int32_t lows[16], highs[16];
    storeu(lows, low);
    storeu(highs, high);
    for (int lane = 0; lane < 16; lane++) {
      total += static_cast<uint32_t>(lows[lane]) + (static_cast<uint64_t>(static_cast<uint32_t>(highs[lane])) << 16);
    }
  }
  return total;
}

/// The sum of weights whose low and high halves were added up lane by lane.
EW_INLINE uint64_t joined(I16 low, I16 high) {
  return static_cast<uint32_t>(reduce_add(low)) + (static_cast<uint64_t>(static_cast<uint32_t>(reduce_add(high))) << 16);
}

/// Calls use(first id, weights) for every block of 64 that has any weight; weights past the end are 0.
template <class Use>
EW_INLINE void each_weighed(const float* x, int64_t n, const float* maxima, float largest, float scale, Use&& use) {
  int32_t weights[kDrawBlock];
  for (int64_t block = 0; block < n; block += kDrawBlock) {
    if ((maxima[block / kDrawBlock] - largest) * scale < -31.0f) continue;
    for (int64_t i = 0; i < kDrawBlock; i += 16) {
      const int64_t rest = n - block - i;
      const int64_t lanes = rest < 0 ? 0 : rest < 16 ? rest : 16;
      const I16 w = draw_weight(load_partial(x + block + (lanes ? i : 0), lanes), set1(largest), set1(scale));
      storeu(weights + i, select(first_n(lanes), w, zero_i32()));
    }
    use(block, weights);
  }
}

static uint64_t weigh_larger(const float* x, int64_t n, const float* maxima, float largest, float scale, DrawPlace place,
                             uint64_t* before) {
  uint64_t total = 0, larger = 0;
  const F16 value = set1(place.value);
  each_weighed(x, n, maxima, largest, scale, [&](int64_t block, const int32_t* weights) EW_INLINE_LAMBDA {
    // 64 weights of up to 2^30 do not fit 32 bits: the low 16 bits and the others are added up apart.
    I16 all_low = zero_i32(), all_high = zero_i32(), low = zero_i32(), high = zero_i32();
    for (int64_t i = 0; i < kDrawBlock && block + i < n; i += 16) {
      const I16 w = loadu(weights + i);
      const int64_t rest = n - block - i;
      const F16 v = load_partial(x + block + i, rest < 16 ? rest : 16);
      const int64_t lower = place.id - block - i;
      const M16 earlier = first_n(lower < 0 ? 0 : lower < 16 ? lower : 16);
      const M16 counts = or_(cmp_gt(v, value), and_(cmp_eq(v, value), earlier));
      const I16 l = and_(w, set1_i32(0xffff)), h = shift_right<16>(w);
      all_low = add(all_low, l);
      all_high = add(all_high, h);
      low = add(low, select(counts, l, zero_i32()));
      high = add(high, select(counts, h, zero_i32()));
    }
    total += joined(all_low, all_high);
    larger += joined(low, high);
  });
  *before = larger;
  return total;
}

static uint64_t weigh_depths(const float* x, int64_t n, const float* maxima, float largest, float scale, uint64_t* depths) {
  uint64_t total = 0, sum = 0;
  each_weighed(x, n, maxima, largest, scale, [&](int64_t block, const int32_t* weights) EW_INLINE_LAMBDA {
    int32_t depth[kDrawBlock];
    for (int64_t i = 0; i < kDrawBlock; i += 16) {
      const int64_t rest = n - block - i;
      const int64_t lanes = rest < 0 ? 0 : rest < 16 ? rest : 16;
      const F16 v = load_partial(x + block + (lanes ? i : 0), lanes);
      const F16 bits = mul(sub(set1(largest), v), set1(scale));
      // Where there is no weight the depth may be anything, and does not count.
      storeu(depth + i, round_to_i16(mul(select(cmp_lt(bits, set1(32.0f)), bits, zero()), set1(16384.0f))));
    }
    for (int i = 0; i < kDrawBlock; i++) {
      total += static_cast<uint32_t>(weights[i]);
      sum += static_cast<uint64_t>(static_cast<uint32_t>(weights[i])) * static_cast<uint32_t>(weights[i] ? depth[i] : 0);
    }
  });
  *depths = sum;
  return total;
}

static uint64_t weigh_nearer(const float* x, int64_t n, const float* maxima, float largest, float scale, double mean,
                             DrawPlace place) {
  uint64_t nearer = 0;
  each_weighed(x, n, maxima, largest, scale, [&](int64_t block, const int32_t* weights) EW_INLINE_LAMBDA {
    const int64_t count = n - block < kDrawBlock ? n - block : kDrawBlock;
    for (int64_t i = 0; i < count; i++) {
      const float depth = (largest - x[block + i]) * scale;
      const float distance = static_cast<float>(__builtin_fabs(static_cast<double>(depth) - mean));
      const bool counts = (distance < place.value) | ((distance == place.value) & (block + i < place.id));
      nearer += counts ? static_cast<uint32_t>(weights[i]) : 0u;
    }
  });
  return nearer;
}

static int64_t within(const float* x, int64_t n, const float* maxima, float least, float most, int32_t* ids) {
  const F16 low = set1(least), high = set1(most);
  int64_t count = 0;
  for (int64_t block = 0; block < n; block += kDrawBlock) {
    if (!(maxima[block / kDrawBlock] >= least)) continue;
    const int64_t stop = block + kDrawBlock < n ? block + kDrawBlock : n;
    for (int64_t i = block; i < stop; i += 16) {
      const F16 v = load_partial(x + i, stop - i);
      uint32_t found = bits(and_(cmp_ge(v, low), cmp_le(v, high)));
      if (stop - i < 16) found &= (1u << (stop - i)) - 1;
      for (; found; found &= found - 1) ids[count++] = static_cast<int32_t>(i + __builtin_ctz(found));
    }
  }
  return count;
}

/// leading[i] = the first 24 bits of 1 - u of ids first .. first + 63.
EW_INLINE void noise_leading(uint64_t stream, int64_t first, int32_t* leading) {
  typedef uint64_t Words __attribute__((vector_size(64)));
  const Words ramp = Words{0, 1, 2, 3, 4, 5, 6, 7} * kNoiseGamma;
  uint64_t rest[kDrawBlock];
  uint64_t counter = stream + static_cast<uint64_t>(first + 1) * kNoiseGamma;
  for (int i = 0; i < kDrawBlock; i += 8, counter += 8 * kNoiseGamma) {
    const Words z = ~noise_mix<Words>(ramp + counter);
    __builtin_memcpy(rest + i, &z, sizeof z);
  }
  for (int i = 0; i < kDrawBlock; i++) leading[i] = static_cast<int32_t>(rest[i] >> 40);
}

// Most ids are passed over without their noise. With s = (x - largest) / T and u the uniform number behind the noise g,
// g <= -log(1 - u): an id can only beat the best score B if 1 - u <= exp(s - B). The test is done in fp32 on the leading
// 24 bits of 1 - u, with a margin for its roundings; what passes is scored exactly.
static int64_t noisy_argmax(const float* x, int64_t n, const float* maxima, int64_t top, const DrawCut& cut, float scale,
                            double temperature, uint64_t stream) {
  const float largest = x[top];
  double best = gumbel(noise_bits(stream, top));
  int64_t best_id = top;
  float log2_best = static_cast<float>(best * 1.4426950408889634);
  F16 factor = set1(static_cast<float>(1.001 * __builtin_exp(-best) * 0x1p24));
  const F16 least = set1(cut.least);
  int32_t leading[kDrawBlock];
  for (int64_t block = 0; block < n; block += kDrawBlock) {
    const float most = maxima[block / kDrawBlock];
    if (!(most >= cut.least) || (most - largest) * scale < log2_best - 54.0f) continue;  // 1 - u is at least 2^-53
    const int64_t stop = block + kDrawBlock < n ? block + kDrawBlock : n;
    noise_leading(stream, block, leading);
    for (int64_t i = block; i < stop; i += 16) {
      const F16 v = load_partial(x + i, stop - i);
      const F16 reach = mul(softmax_exp2(mul(sub(v, set1(largest)), set1(scale))), factor);
      uint32_t able = bits(and_(cmp_ge(v, least), cmp_le(to_f32(loadu(leading + (i - block))), reach)));
      if (stop - i < 16) able &= (1u << (stop - i)) - 1;
      for (; able; able &= able - 1) {
        const int64_t id = i + __builtin_ctz(able);
        if (x[id] == cut.least && id > cut.last_id) continue;
        const double score =
            (static_cast<double>(x[id]) - static_cast<double>(largest)) / temperature + gumbel(noise_bits(stream, id));
        if (score > best || (score == best && id < best_id)) {
          best = score;
          best_id = id;
          log2_best = static_cast<float>(best * 1.4426950408889634);
          factor = set1(static_cast<float>(1.001 * __builtin_exp(-best) * 0x1p24));
        }
      }
    }
  }
  return best_id;
}

}  // namespace ew::EW_ISA_NS
