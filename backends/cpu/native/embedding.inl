// The embedding lookup: rows of a packed weight, dequantised. A tied head and embedding share one weight.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace ew::EW_ISA_NS {

/// Reads one output row of a tile. `lane_of_tile` is the row's place among the tile's 16.
struct PackedRow {
  const LinearWeight& weight;
  const uint8_t* tile;
  const uint8_t* body;
  int lane_of_tile;

  EW_INLINE_LAMBDA PackedRow(const LinearWeight& w, int64_t row)
      : weight(w),
        tile(w.data + row / kTileRows * w.tile_bytes),
        body(tile + tile_header_bytes(w.format, w.k_padded)),
        lane_of_tile(static_cast<int>(row % kTileRows)) {}

  EW_INLINE_LAMBDA float header_f16(int64_t first) const {
    return lane(load_f16(reinterpret_cast<const uint16_t*>(tile) + first), lane_of_tile);
  }

  EW_INLINE_LAMBDA void copy_f32(float scale, float* out) const {
    const float* values = reinterpret_cast<const float*>(body) + lane_of_tile;
    for (int64_t k = 0; k < weight.k; k++) out[k] = values[k * 16] * scale;
  }
  EW_INLINE_LAMBDA void copy_bf16(float scale, float* out) const {
    const uint16_t* values = reinterpret_cast<const uint16_t*>(body) + lane_of_tile * 2;
    for (int64_t k = 0; k < weight.k; k++) out[k] = bf16_to_f32(values[k / 2 * 32 + k % 2]) * scale;
  }
  EW_INLINE_LAMBDA void copy_int8(float scale, float* out) const {
    const uint8_t* codes = body + lane_of_tile * 4;
    const bool grouped = weight.format == WeightFormat::int8_g32;
    float weight_scale = grouped ? 0.0f : reinterpret_cast<const float*>(tile)[lane_of_tile];
    for (int64_t k = 0; k < weight.k; k++) {
      if (grouped && k % 32 == 0) weight_scale = header_f16(k / 32 * 16);
      out[k] = static_cast<float>(codes[k / 4 * 64 + k % 4] - 128) * weight_scale * scale;
    }
  }
  EW_INLINE_LAMBDA void copy_int4(float scale, float* out) const {
    const int64_t groups = weight.k_padded / weight.group;
    const uint8_t* codes = body + lane_of_tile * 4;
    for (int64_t g = 0; g < groups; g++) {
      const float weight_scale = header_f16(g * 16);
      const float offset = header_f16((groups + g) * 16);
      const int64_t end = (g + 1) * weight.group < weight.k ? (g + 1) * weight.group : weight.k;
      for (int64_t k = g * weight.group; k < end; k++) {
        const int code = codes[k / 8 * 64 + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15;
        out[k] = (static_cast<float>(code) * weight_scale + offset) * scale;  // the product is exact: 4 bits by 11
      }
    }
  }
};

static void embedding(const LinearWeight& weight, const int32_t* ids, int64_t rows, float scale, float* out,
                      int64_t ldo) {
  for (int64_t r = 0; r < rows; r++) {
    const PackedRow row(weight, ids[r]);
    float* y = out + r * ldo;
    switch (weight.format) {
      case WeightFormat::f32: row.copy_f32(scale, y); break;
      case WeightFormat::bf16: row.copy_bf16(scale, y); break;
      case WeightFormat::int8:
      case WeightFormat::int8_g32: row.copy_int8(scale, y); break;
      case WeightFormat::int4_g32:
      case WeightFormat::int4_g64:
      case WeightFormat::int4_g128: row.copy_int4(scale, y); break;
    }
  }
}

}  // namespace ew::EW_ISA_NS
