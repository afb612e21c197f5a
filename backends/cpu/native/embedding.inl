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

  EW_INLINE_LAMBDA float header_f16(int64_t index) const {
    return lane(load_f16(reinterpret_cast<const uint16_t*>(tile) + index * kTileRows), lane_of_tile);
  }
  EW_INLINE_LAMBDA float header_f32() const { return reinterpret_cast<const float*>(tile)[lane_of_tile]; }

  EW_INLINE_LAMBDA void copy_f32(float scale, float* out) const {
    const float* values = reinterpret_cast<const float*>(body) + lane_of_tile;
    for (int64_t k = 0; k < weight.k; k++) out[k] = values[k * 16] * scale;
  }
  EW_INLINE_LAMBDA void copy_bf16(float scale, float* out) const {
    const uint16_t* values = reinterpret_cast<const uint16_t*>(body) + lane_of_tile * 2;
    for (int64_t k = 0; k < weight.k; k++) out[k] = bf16_to_f32(values[k / 2 * 32 + k % 2]) * scale;
  }
  EW_INLINE_LAMBDA void copy_fp8(float scale, float* out) const {
    const uint8_t* codes = body + lane_of_tile / 4 * 16 + lane_of_tile % 4 * 2;
    const float weight_scale = header_f32();
    for (int64_t k = 0; k < weight.k; k++) {
      out[k] = bf16_to_f32(fp8_to_bf16(codes[k / 4 * 64 + k % 4 / 2 * 8 + k % 2])) * kFp8Unit * weight_scale * scale;
    }
  }

  /// The stored integer at column k.
  template <int Bits>
  EW_INLINE_LAMBDA int code(int64_t k) const {
    constexpr int64_t kStep = Bits == 8 ? 4 : Bits == 4 ? 8 : 16;
    const int64_t quad = k % kStep / 4, byte = lane_of_tile * 4 + k % 4;
    const uint8_t* step = body + k / kStep * (Bits == 3 ? 96 : 64);
    if (Bits == 8) return step[byte];
    if (Bits == 4) return step[byte] >> (4 * quad) & 15;
    const int low = step[byte] >> (2 * quad) & 3;
    if (Bits == 2) return low;
    return low + 4 * (step[64 + byte % 32] >> (2 * quad + 2 + byte / 32) % 8 & 1);
  }

  template <int Bits>
  EW_INLINE_LAMBDA void copy_integers(float scale, float* out) const {
    const int64_t groups = weight_groups(weight.format, weight.k_padded), size = weight.k_padded / groups;
    const WeightKind kind = weight.format.kind;
    for (int64_t g = 0; g < groups; g++) {
      const bool channel = kind == WeightKind::symmetric && weight.format.group == 0;
      const float weight_scale = channel ? header_f32() : header_f16(g);
      const float second = has_offsets(weight.format) ? header_f16(groups + g) : 0.0f;
      const int64_t end = (g + 1) * size < weight.k ? (g + 1) * size : weight.k;
      for (int64_t k = g * size; k < end; k++) {
        const float value = static_cast<float>(code<Bits>(k));
        // The products of f16 scales are exact: at most 8 bits by 11.
        if (kind == WeightKind::symmetric) out[k] = (value - 128.0f) * weight_scale * scale;
        else if (kind == WeightKind::zero) out[k] = (value - second) * weight_scale * scale;
        else out[k] = (value * weight_scale + second) * scale;
      }
    }
  }
};

static void embedding(const LinearWeight& weight, const int32_t* ids, int64_t rows, float scale, float* out,
                      int64_t ldo) {
  for (int64_t r = 0; r < rows; r++) {
    const PackedRow row(weight, ids[r]);
    float* y = out + r * ldo;
    switch (weight.format.kind) {
      case WeightKind::f32: row.copy_f32(scale, y); break;
      case WeightKind::bf16: row.copy_bf16(scale, y); break;
      case WeightKind::fp8: row.copy_fp8(scale, y); break;
      default:
        switch (weight.format.bits) {
          case 2: row.copy_integers<2>(scale, y); break;
          case 3: row.copy_integers<3>(scale, y); break;
          case 4: row.copy_integers<4>(scale, y); break;
          default: row.copy_integers<8>(scale, y);
        }
    }
  }
}

}  // namespace ew::EW_ISA_NS
