// Linears on f32, bf16 and fp8 weights: f32 activations for f32, bf16 for the others, summed in fp32.
//
// Every output has two sums, over the even and the odd steps of k (a step is one k for f32, a pair for the others), added at
// the end: for one row, one sum alone would wait for the adder; and all row counts must use the same order.
#pragma once

#include "linear_blocks.inl"

namespace ew::EW_ISA_NS {

struct Float32Step {
  static constexpr int kBlockRows = kFloat32Rows;
  static constexpr int kActivationBytes = 4;  // one row's activations of one step
  using Activations = F16;
  EW_INLINE_LAMBDA static Activations broadcast(const uint8_t* a) { return set1(*reinterpret_cast<const float*>(a)); }
  EW_INLINE_LAMBDA static F16 multiply(F16 sum, const uint8_t* w, Activations a) {
    return fmadd(load(reinterpret_cast<const float*>(w)), a, sum);
  }
};

struct Bfloat16Step {
  static constexpr int kBlockRows = kBfloat16Rows;
  static constexpr int kActivationBytes = 4;
  using Activations = BF2;
  EW_INLINE_LAMBDA static Activations broadcast(const uint8_t* a) {
    return broadcast_bf2(reinterpret_cast<const uint16_t*>(a));
  }
  EW_INLINE_LAMBDA static F16 multiply(F16 sum, const uint8_t* w, Activations a) {
    return dot2_bf16(sum, load_bytes(w), a);
  }
};

template <class Step>
struct Float {
  static constexpr int kBlockRows = Step::kBlockRows;
  static constexpr int kBlockTiles = EW_ISA_NS::kBlockTiles;

  template <int Rows, int Tiles>
  __attribute__((noinline)) static void block(const BlockInput& input, const BlockOutput& output) {
    const BlockInput in = input;
    const BlockOutput out = output;
    F16 sum[Rows][Tiles][2];
    unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
      unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA { sum[m][t][0] = sum[m][t][1] = zero(); });
    });
    const uint8_t* w = in.tile;
    const uint8_t* a = in.rows;
    const auto step = [&](auto parity) EW_INLINE_LAMBDA {
      unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA { prefetch_t0(w + t * in.tile_bytes + in.prefetch_bytes); });
      unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
        const auto value = Step::broadcast(a + m * in.row_bytes);
        unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
          sum[m][t][parity] = Step::multiply(sum[m][t][parity], w + t * in.tile_bytes, value);
        });
      });
      w += 64;
      a += Step::kActivationBytes;
    };
    const int64_t steps = in.tile_bytes / 64;
    for (int64_t pair = 0; pair < steps / 2; pair++) unroll<2>(step);
    if (steps % 2 != 0) step(Index<0>{});
    unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
      unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA { store_outputs(out, m, t, add(sum[m][t][0], sum[m][t][1])); });
    });
  }
};

/// fp8: codes become bf16 exactly, and the output's scale multiplies the sum.
struct Fp8 {
  static constexpr int kBlockRows = kFp8Rows;
  static constexpr int kBlockTiles = kFp8Tiles;

  template <int Rows, int Tiles>
  __attribute__((noinline)) static void block(const BlockInput& input, const BlockOutput& output) {
    const BlockInput in = input;
    const BlockOutput out = output;
    F16 sum[Rows][Tiles][2];
    unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
      unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA { sum[m][t][0] = sum[m][t][1] = zero(); });
    });
    const uint8_t* w = in.tile + in.header_bytes;
    const uint8_t* a = in.rows;
    for (int64_t k = 0; k < in.k_padded; k += 4) {
      Fp8Pairs pairs[Tiles];
      unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
        pairs[t] = fp8_pairs(load_bytes(w + t * in.tile_bytes));
        prefetch_t0(w + t * in.tile_bytes + in.prefetch_bytes);
      });
      unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
        unroll<2>([&](auto parity) EW_INLINE_LAMBDA {
          const BF2 value = broadcast_bf2(reinterpret_cast<const uint16_t*>(a + m * in.row_bytes + 4 * parity));
          unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
            sum[m][t][parity] = dot2_bf16(sum[m][t][parity], parity == 0 ? pairs[t].first : pairs[t].second, value);
          });
        });
      });
      w += 64;
      a += 8;
    }
    unroll<Tiles>([&](auto t) EW_INLINE_LAMBDA {
      const F16 scale = load(reinterpret_cast<const float*>(in.tile + t * in.tile_bytes));
      unroll<Rows>([&](auto m) EW_INLINE_LAMBDA {
        store_outputs(out, m, t, mul(mul(add(sum[m][t][0], sum[m][t][1]), set1(kFp8Unit)), scale));
      });
    });
  }
};

}  // namespace ew::EW_ISA_NS
