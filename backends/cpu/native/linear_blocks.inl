// The walk over a linear's rows and tiles, common to all formats, and what a format's block kernel reads and writes.
//
// A block is Rows activation rows x Tiles weight tiles (16 outputs each), summed over all of k in registers. Blocks of any
// size do the same arithmetic in the same order per row and output, so the walk is free to choose them.
#pragma once

#include "kernels.h"
#include "prepare.inl"
#include "simd.h"

namespace ew::EW_ISA_NS {

// The largest block: as many sums as the register file holds beside the weights. The float formats keep two per output; fp8
// has more rows instead of two tiles where it can, since a decoded tile then serves them all.
#if defined(EW_ISA_AVX512)
constexpr int kIntegerRows = 8;
constexpr int kFloat32Rows = 6;
constexpr int kBfloat16Rows = 6;
constexpr int kFp8Rows = 12;
constexpr int kBlockTiles = 2;
constexpr int kFp8Tiles = 1;
#elif defined(EW_ISA_AVX2)
constexpr int kIntegerRows = 4;
constexpr int kFloat32Rows = 3;
constexpr int kBfloat16Rows = 2;
constexpr int kFp8Rows = 2;
constexpr int kBlockTiles = 1;
constexpr int kFp8Tiles = 1;
#else
constexpr int kIntegerRows = 2;
constexpr int kFloat32Rows = 2;
constexpr int kBfloat16Rows = 2;
constexpr int kFp8Rows = 2;
constexpr int kBlockTiles = 1;
constexpr int kFp8Tiles = 1;
#endif

/// Up to this many rows memory is the bound and a thread reads one stream of tiles, far ahead; beyond, two tiles share each
/// load of activations.
constexpr int64_t kStreamRows = 2;
/// Rows whose prepared activations stay in the L2 cache while the weights pass by.
constexpr int64_t kChunkRows = 64;
/// How far ahead of its use a tile's memory is requested in a single stream. Two tiles at once request the next two.
constexpr int64_t kPrefetchBytes = 8192;

struct BlockInput {
  const uint8_t* tile;    // the first tile
  const uint8_t* rows;    // the first prepared row
  int64_t tile_bytes;
  int64_t row_bytes;
  int64_t k_padded;
  int64_t group;         // of LinearWeight: k values that share all scales
  int64_t group_shift;   // group g of them lies in the weight's group g >> group_shift
  int64_t header_bytes;
  int64_t second_bytes;  // from a group's scale to what stands beside it
  bool zero_points;      // that is a zero point, else an offset
  int64_t outlier_pairs;
  PreparedLayout layout;
  int64_t prefetch_bytes;
};

/// Where a block's results go: y points at the first row and output of the block, and `outputs` of them exist from there.
struct BlockOutput {
  const float* bias;  // null, or at the first output
  float* y;
  int64_t ldy;
  int64_t outputs;
};

EW_INLINE void store_outputs(const BlockOutput& out, int row, int tile, F16 sum) {
  const int64_t count = out.outputs - 16 * tile;
  if (out.bias != nullptr) sum = add(sum, load_partial(out.bias + 16 * tile, count));
  float* y = out.y + row * out.ldy + 16 * tile;
  if (count >= 16) {
    storeu(y, sum);
  } else {
    store_partial(y, sum, count);
  }
}

/// All rows of one chunk against `Tiles` tiles: full blocks, and the last two as even as can be (9 rows are 5 + 4).
template <class Format, int Tiles>
EW_INLINE void linear_rows(BlockInput in, BlockOutput out, int64_t rows) {
  constexpr int64_t kMost = Format::kBlockRows;
  while (rows > 0) {
    const int64_t taken = rows <= kMost ? rows : rows < 2 * kMost ? (rows + 1) / 2 : kMost;
    unroll<Format::kBlockRows>([&](auto i) EW_INLINE_LAMBDA {
      if (taken == i + 1) Format::template block<i + 1, Tiles>(in, out);
    });
    in.rows += taken * in.row_bytes;
    out.y += taken * out.ldy;
    rows -= taken;
  }
}

EW_INLINE int64_t group_shift(const LinearWeight& weight) {
  if (weight.format.group == 0) return 62;  // all groups are the weight's only one
  int64_t shift = 0;
  while ((weight.group << shift) < weight.format.group) shift++;
  return shift;
}

/// The whole call. Chunks of rows are outermost, so that one chunk's activations stay in cache; inside, each tile is read
/// from memory once and serves all rows of the chunk.
template <class Format>
static void linear_format(const LinearWeight& weight, const uint8_t* prepared, int64_t rows, int64_t t0, int64_t t1,
                          const float* bias, float* y, int64_t ldy) {
  const PreparedLayout layout = prepared_layout(weight);
  for (int64_t m = 0; m < rows; m += kChunkRows) {
    const int64_t chunk = rows - m < kChunkRows ? rows - m : kChunkRows;
    const bool one_stream = chunk <= kStreamRows;
    BlockInput in = {.tile = nullptr,
                     .rows = prepared + m * layout.row_bytes,
                     .tile_bytes = weight.tile_bytes,
                     .row_bytes = layout.row_bytes,
                     .k_padded = weight.k_padded,
                     .group = weight.group,
                     .group_shift = group_shift(weight),
                     .header_bytes = tile_header_bytes(weight.format, weight.k_padded),
                     .second_bytes = weight_groups(weight.format, weight.k_padded) * 32,
                     .zero_points = weight.format.kind == WeightKind::zero,
                     .outlier_pairs = (weight.outliers + 1) / 2,
                     .layout = layout,
                     .prefetch_bytes = one_stream ? kPrefetchBytes : Format::kBlockTiles * weight.tile_bytes};
    const auto output = [&](int64_t t) EW_INLINE_LAMBDA {
      const int64_t o = kTileRows * t;
      return BlockOutput{bias == nullptr ? nullptr : bias + o, y + m * ldy + o, ldy, weight.n - o};
    };
    int64_t t = t0;
    if (!one_stream) {
      for (; t + Format::kBlockTiles <= t1; t += Format::kBlockTiles) {
        in.tile = weight.data + t * weight.tile_bytes;
        linear_rows<Format, Format::kBlockTiles>(in, output(t), chunk);
      }
    }
    for (; t < t1; t++) {
      in.tile = weight.data + t * weight.tile_bytes;
      linear_rows<Format, 1>(in, output(t), chunk);
    }
  }
}

}  // namespace ew::EW_ISA_NS
