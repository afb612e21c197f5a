// Linears on int8 activations: weights of 2, 3, 4 or 8 bits, sums of products in int32 within a group, fp32 across groups.
//
// Sums within a group are exact, so they may be split over several registers in any way; the fp32 steps are, for each group
// in order, y += (weight scale * activation scale) * sum and, where the weight has offsets, y += offset * (activation scale *
// sum of codes). A group is the activation's: a weight's group may be several of them, and a scale an output is all of them.
// Columns kept apart come last: the dot product of their bf16 values, in order, added to the sum of the groups.
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
/// The header's f16 numbers of activation group `group`: `which` 0 for scales, 1 for what stands beside them.
EW_INLINE F16 header_f16(const BlockInput& in, int tile, int64_t group, int which) {
  const uint8_t* header = in.tile + tile * in.tile_bytes + which * in.second_bytes;
  return load_f16(reinterpret_cast<const uint16_t*>(header) + (group >> in.group_shift) * 16);
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

/// How codes of one width lie in the body: a step of `kQuads` times 4 k in `kBytes` bytes. `Raw` is what is loaded once for
/// all of a step's quads, and `quad<Q>` gives the bytes of the four k from 4Q.
template <int Bits>
struct PackedCodes;

template <>
struct PackedCodes<8> {
  static constexpr int kQuads = 2, kBytes = 128;
  struct Raw { const uint8_t* p; };
  EW_INLINE_LAMBDA static Raw load(const uint8_t* p) { return {p}; }
  template <int Q>
  EW_INLINE_LAMBDA static B64 quad(Raw raw) { return load_bytes(raw.p + 64 * Q); }
};

template <>
struct PackedCodes<4> {
  static constexpr int kQuads = 2, kBytes = 64;
  using Raw = B64;
  EW_INLINE_LAMBDA static Raw load(const uint8_t* p) { return load_bytes(p); }
  template <int Q>
  EW_INLINE_LAMBDA static B64 quad(Raw raw) { return Q == 0 ? low_nibbles(raw) : high_nibbles(raw); }
};

template <>
struct PackedCodes<2> {
  static constexpr int kQuads = 4, kBytes = 64;
  using Raw = B64;
  EW_INLINE_LAMBDA static Raw load(const uint8_t* p) { return load_bytes(p); }
  template <int Q>
  EW_INLINE_LAMBDA static B64 quad(Raw raw) { return bit_pairs<Q>(raw); }
};

template <>
struct PackedCodes<3> {
  static constexpr int kQuads = 4, kBytes = 96;
  struct Raw { B64 low; const uint8_t* high; };
  EW_INLINE_LAMBDA static Raw load(const uint8_t* p) { return {loadu_bytes(p), p + 64}; }
  template <int Q>
  EW_INLINE_LAMBDA static B64 quad(Raw raw) { return add_fours<Q>(bit_pairs<Q>(raw.low), raw.high); }
};

/// Where the weight's scales stand, and whether its codes have an offset.
enum class Scales {
  channel,  // one f32 an output, applied at the end; codes are stored 128 too large
  group,    // one f16 an output and group; codes are stored 128 too large
  offset,   // f16 pairs: scale, and offset or zero point
};

template <int Bits, Scales Kind>
struct Integer {
  static constexpr int kBlockRows = kIntegerRows;
  static constexpr int kBlockTiles = EW_ISA_NS::kBlockTiles;

  template <int Rows, int Tiles>
  __attribute__((noinline)) static void block(const BlockInput& input, const BlockOutput& output) {
    using Code = PackedCodes<Bits>;
    const BlockInput in = input;
    const BlockOutput out = output;
    // Few sums leave the adders waiting for one another: even and odd quads then have a sum each.
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
          sum[m][t][0] = Kind == Scales::offset ? zero_i32() : set1_i32(words[g]);
          if constexpr (kChains == 2) sum[m][t][1] = zero_i32();
        });
      });
      for (int64_t k = 0; k < in.group; k += 4 * Code::kQuads) {
        typename Code::Raw raw[Tiles];
        unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
          const uint8_t* p = body + t * in.tile_bytes;
          raw[t] = Code::load(p);
          unroll<(Code::kBytes + 63) / 64>([&](auto line) EW_INLINE_LAMBDA {
            prefetch_t0(p + in.prefetch_bytes + 64 * line);
          });
        });
        unroll<Code::kQuads>([&](auto q) EW_INLINE_LAMBDA {
          B64 w[Tiles];
          unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA { w[t] = Code::template quad<q>(raw[t]); });
          constexpr int kChain = q % 2 * (kChains - 1);
          unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
            const S8x4 a = broadcast_s8x4(codes + m * in.row_bytes + 4 * q);
            unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
              I16& total = sum[m][t][kChain];
              if constexpr (Bits == 8) total = dot4_u8s8(total, w[t], a);
              else total = dot4_u4s8(total, w[t], a);
            });
          });
        });
        body += Code::kBytes;
        codes += 4 * Code::kQuads;
      }
      keep_sums(sum);
      unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
        F16 scale = zero(), offset = zero();
        if constexpr (Kind != Scales::channel) scale = header_f16(in, t, g, 0);
        if constexpr (Kind == Scales::offset) {
          offset = header_f16(in, t, g, 1);
          if (in.zero_points) offset = neg(mul(scale, offset));
        }
        unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
          const F16 total = to_f32(kChains == 1 ? sum[m][t][0] : add(sum[m][t][0], sum[m][t][kChains - 1]));
          F16 both = activation_scale(in, m, g);
          if constexpr (Kind != Scales::channel) both = mul(scale, both);
          F16 value = fmadd(total, both, y.get(m, t));
          if constexpr (Kind == Scales::offset) {
            const float* words = reinterpret_cast<const float*>(in.rows + m * in.row_bytes + in.layout.words);
            value = fmadd(offset, set1(words[g]), value);
          }
          y.set(m, t, value);
        });
      });
    }
    if constexpr (Kind == Scales::channel) {
      unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
        const F16 scale = load(reinterpret_cast<const float*>(in.tile + t * in.tile_bytes));
        unroll<Rows>([&](auto m) EW_INLINE_LAMBDA { y.set(m, t, mul(y.get(m, t), scale)); });
      });
      if (in.outlier_pairs > 0) add_outliers(in, y);
    }
    unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
      unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA { store_outputs(out, m, t, y.get(m, t)); });
    });
  }

  /// y += the columns kept apart.
  template <int Rows, int Tiles>
  EW_INLINE_LAMBDA static void add_outliers(const BlockInput& in, FloatSums<Rows, Tiles>& y) {
    F16 sum[Rows][Tiles];
    unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
      unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA { sum[m][t] = zero(); });
    });
    const uint8_t* body = in.tile + in.header_bytes + in.k_padded * kTileRows;
    const uint8_t* values = in.rows + in.layout.outliers;
    for (int64_t pair = 0; pair < in.outlier_pairs; pair++) {
      unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
        const BF2 a = broadcast_bf2(reinterpret_cast<const uint16_t*>(values + m * in.row_bytes));
        unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
          sum[m][t] = dot2_bf16(sum[m][t], load_bytes(body + t * in.tile_bytes), a);
        });
      });
      body += 64;
      values += 4;
    }
    unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
      unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA { y.set(m, t, add(y.get(m, t), sum[m][t])); });
    });
  }
};

}  // namespace ew::EW_ISA_NS
