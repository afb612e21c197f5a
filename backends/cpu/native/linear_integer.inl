// Linears on int8 activations: weights of 4 or 8 bits, sums of products in int32 within a group, fp32 across groups.
//
// Sums within a group are exact, so they may be split over several registers in any way; the fp32 steps are, for each group
// in order, y += (weight scale * activation scale) * sum and, for int4, y += offset * (activation scale * sum of codes).
#pragma once

#include "linear_blocks.inl"

namespace ew::EW_ISA_NS {

/// Sums of one block. Where a block is large, its fp32 sums live in the L1 cache: they are touched once a group, and the
/// registers are better spent on the int32 sums.
template <int Rows, int Tiles>
struct FloatSums {
  static constexpr bool kInMemory = Rows * Tiles > 8;
  alignas(64) float memory[kInMemory ? Rows * Tiles * 16 : 16];
  F16 registers[kInMemory ? 1 : Rows * Tiles];

  EW_INLINE_LAMBDA F16 get(int row, int tile) const {
    if constexpr (kInMemory) return load(memory + (row * Tiles + tile) * 16);
    else return registers[row * Tiles + tile];
  }
  EW_INLINE_LAMBDA void set(int row, int tile, F16 value) {
    if constexpr (kInMemory) store(memory + (row * Tiles + tile) * 16, value);
    else registers[row * Tiles + tile] = value;
  }
  EW_INLINE_LAMBDA void clear() {
    unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
      unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA { set(m, t, zero()); });
    });
  }
};

EW_INLINE const int8_t* codes_of_row(const BlockInput& in, int row) {
  return reinterpret_cast<const int8_t*>(in.rows + row * in.row_bytes);
}
EW_INLINE F16 activation_scale(const BlockInput& in, int row, int64_t group) {
  return set1(reinterpret_cast<const float*>(in.rows + row * in.row_bytes + in.layout.scales)[group]);
}
/// The header's f16 numbers of one group: `which` 0 for scales, 1 for offsets.
EW_INLINE F16 header_f16(const BlockInput& in, int tile, int64_t group, int which) {
  const uint8_t* header = in.tile + tile * in.tile_bytes + which * in.layout.groups * 32;
  return load_f16(reinterpret_cast<const uint16_t*>(header) + group * 16);
}

EW_INLINE void prefetch_header(const BlockInput& in) {
  for (int64_t i = 0; i < in.header_bytes; i += 64) prefetch_t0(in.tile + in.prefetch_bytes + i);
}

/// Ends a group's loop (see keep_in_register).
template <int Rows, int Tiles, int Chains>
EW_INLINE void keep_sums(I16 (&sum)[Rows][Tiles][Chains]) {
  unroll<Rows * Tiles * Chains>([&](auto i) EW_INLINE_LAMBDA {
    keep_in_register(sum[i / (Tiles * Chains)][i / Chains % Tiles][i % Chains]);
  });
}

struct Int4 {
  static constexpr int kBlockRows = kIntegerRows;

  template <int Rows, int Tiles>
  __attribute__((noinline)) static void block(const BlockInput& input, const BlockOutput& output) {
    const BlockInput in = input;
    const BlockOutput out = output;
    // Few sums leave the adders waiting for one another: low and high nibbles then have a sum each.
    constexpr int kChains = Rows * Tiles <= 4 ? 2 : 1;
    FloatSums<Rows, Tiles> y;
    y.clear();
    prefetch_header(in);
    const uint8_t* body = in.tile + in.header_bytes;
    const int8_t* codes = codes_of_row(in, 0);
    for (int64_t g = 0; g < in.layout.groups; g++) {
      I16 sum[Rows][Tiles][kChains];
      unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
        unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
          unroll<kChains>([&](auto c) EW_INLINE_LAMBDA { sum[m][t][c] = zero_i32(); });
        });
      });
      for (int64_t k = 0; k < in.group; k += 8) {
        B64 low[Tiles], high[Tiles];
        unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
          const uint8_t* p = body + t * in.tile_bytes;
          const B64 pairs = load_bytes(p);
          prefetch_t0(p + in.prefetch_bytes);
          low[t] = low_nibbles(pairs);
          high[t] = high_nibbles(pairs);
        });
        unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
          const S8x4 a = broadcast_s8x4(codes + m * in.row_bytes);
          unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA { sum[m][t][0] = dot4_u4s8(sum[m][t][0], low[t], a); });
        });
        unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
          const S8x4 a = broadcast_s8x4(codes + m * in.row_bytes + 4);
          unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
            sum[m][t][kChains - 1] = dot4_u4s8(sum[m][t][kChains - 1], high[t], a);
          });
        });
        body += 64;
        codes += 8;
      }
      keep_sums(sum);
      unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
        const F16 scale = header_f16(in, t, g, 0);
        const F16 offset = header_f16(in, t, g, 1);
        unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
          const float* words = reinterpret_cast<const float*>(in.rows + m * in.row_bytes + in.layout.words);
          const I16 total = kChains == 1 ? sum[m][t][0] : add(sum[m][t][0], sum[m][t][kChains - 1]);
          const F16 scaled = fmadd(to_f32(total), mul(scale, activation_scale(in, m, g)), y.get(m, t));
          y.set(m, t, fmadd(offset, set1(words[g]), scaled));
        });
      });
    }
    unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
      unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA { store_outputs(out, m, t, y.get(m, t)); });
    });
  }
};

/// int8: one weight scale per output (GroupScales false), or one per output and group (true).
template <bool GroupScales>
struct Int8 {
  static constexpr int kBlockRows = kIntegerRows;

  template <int Rows, int Tiles>
  __attribute__((noinline)) static void block(const BlockInput& input, const BlockOutput& output) {
    const BlockInput in = input;
    const BlockOutput out = output;
    constexpr int kChains = Rows * Tiles <= 4 ? 2 : 1;
    FloatSums<Rows, Tiles> y;
    y.clear();
    prefetch_header(in);
    const uint8_t* body = in.tile + in.header_bytes;
    const int8_t* codes = codes_of_row(in, 0);
    for (int64_t g = 0; g < in.layout.groups; g++) {
      I16 sum[Rows][Tiles][kChains];
      unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
        // Stored codes are 128 too large: begin at -128 times the sum of the activations' codes.
        const int32_t* words = reinterpret_cast<const int32_t*>(in.rows + m * in.row_bytes + in.layout.words);
        unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
          sum[m][t][0] = set1_i32(words[g]);
          if constexpr (kChains == 2) sum[m][t][1] = zero_i32();
        });
      });
      for (int64_t k = 0; k < in.group; k += 8) {
        unroll<2>([&](auto half) EW_INLINE_LAMBDA {
          B64 w[Tiles];
          unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
            const uint8_t* p = body + t * in.tile_bytes + half * 64;
            w[t] = load_bytes(p);
            prefetch_t0(p + in.prefetch_bytes);
          });
          constexpr int kChain = half * (kChains - 1);
          unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
            const S8x4 a = broadcast_s8x4(codes + m * in.row_bytes + half * 4);
            unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
              sum[m][t][kChain] = dot4_u8s8(sum[m][t][kChain], w[t], a);
            });
          });
        });
        body += 128;
        codes += 8;
      }
      keep_sums(sum);
      unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
        F16 weight_scale = zero();
        if constexpr (GroupScales) weight_scale = header_f16(in, t, g, 0);
        unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
          const F16 total = to_f32(kChains == 1 ? sum[m][t][0] : add(sum[m][t][0], sum[m][t][kChains - 1]));
          F16 scale = activation_scale(in, m, g);
          if constexpr (GroupScales) scale = mul(weight_scale, scale);
          y.set(m, t, fmadd(total, scale, y.get(m, t)));
        });
      });
    }
    unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
      const F16 scale = load(reinterpret_cast<const float*>(in.tile + t * in.tile_bytes));
      unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
        store_outputs(out, m, t, GroupScales ? y.get(m, t) : mul(y.get(m, t), scale));
      });
    });
  }
};

}  // namespace ew::EW_ISA_NS
