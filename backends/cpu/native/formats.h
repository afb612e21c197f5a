// Weight formats and the packed layout of a linear's weight: the one layout that every ISA variant reads.
//
// A weight [n, k] is cut into tiles of 16 output rows, stored tile after tile, each 64-byte aligned; n is padded to 16 with
// zero rows and k to `k_padded` with codes that mean zero. Within a tile the scales stand in front (the header), so that a
// thread reads one sequential stream, and the body interleaves the 16 outputs so that one 64-byte load feeds 16 lanes:
//
//   format     k padded to  header                                   body
//   f32        1            -                                        [k][16] f32
//   bf16       2            -                                        [k/2][16][2] bf16
//   int8       32           [16] f32 scale                           [k/4][16][4] u8 = code + 128
//   int8_g32   32           [k/32][16] f16 scale                     [k/4][16][4] u8 = code + 128
//   int4_gG    G            [k/G][16] f16 scale, [k/G][16] f16 offset  [k/8][16][4] u8: low nibble k+j, high nibble k+4+j
//
// Headers are padded to a multiple of 64 bytes. int8: w = scale * code, code -127..127 (-128 is legal).
// int4: w = scale * code + offset, code 0..15, so GGUF's Q4_1 (offset = minimum) and Q4_0 (offset = -8 * scale) and zero
// points (offset = -scale * zero) are all the same format.
//
// A fused gate/up weight interleaves whole tiles: tile 2i holds gate rows 16i.., tile 2i + 1 holds up rows 16i..; each half
// is padded to 16 on its own and `n` counts the padded rows of both.
//
// Functions are `static`: this header is compiled for several instruction sets, and a shared inline copy could be the one
// that this machine lacks.
#pragma once

#include <cstdint>

namespace ew {

enum class WeightFormat : int32_t { f32 = 0, bf16 = 1, int8 = 2, int8_g32 = 3, int4_g32 = 4, int4_g64 = 5, int4_g128 = 6 };

/// As recipes, graphs and program.json write them, by value of the enumeration.
constexpr const char* kWeightFormatNames[] = {"f32", "bf16", "int8", "int8_g32", "int4_g32", "int4_g64", "int4_g128"};

constexpr int64_t kTileRows = 16;  // outputs of one tile: the lanes of a vector

/// k values that share one activation scale: the weight's own group, or 32 where the weight has one scale per output.
/// 1 for the float formats, whose activations carry no scale.
static constexpr int32_t activation_group(WeightFormat format) {
  switch (format) {
    case WeightFormat::int4_g64: return 64;
    case WeightFormat::int8:
    case WeightFormat::int8_g32:
    case WeightFormat::int4_g32: return 32;
    case WeightFormat::int4_g128: return 128;
    case WeightFormat::f32:
    case WeightFormat::bf16: return 1;
  }
  return 1;
}

static constexpr bool is_int4(WeightFormat format) {
  return format == WeightFormat::int4_g32 || format == WeightFormat::int4_g64 || format == WeightFormat::int4_g128;
}

static constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

/// k rounded up to what the format's body holds.
static constexpr int64_t padded_k(WeightFormat format, int64_t k) {
  return round_up(k, format == WeightFormat::bf16 ? 2 : activation_group(format));
}

/// Bytes of a tile before its body.
static constexpr int64_t tile_header_bytes(WeightFormat format, int64_t k_padded) {
  const int64_t groups = k_padded / activation_group(format);
  if (format == WeightFormat::int8) return 64;
  if (format == WeightFormat::int8_g32) return round_up(groups * 32, 64);
  if (is_int4(format)) return groups * 64;
  return 0;
}

static constexpr int64_t tile_bytes(WeightFormat format, int64_t k_padded) {
  const int64_t header = tile_header_bytes(format, k_padded);
  if (format == WeightFormat::f32) return k_padded * 64;
  if (format == WeightFormat::bf16) return k_padded * 32;
  return header + k_padded * (is_int4(format) ? 8 : 16);
}

/// A packed weight in memory. Not the owner of `data`, which is 64-byte aligned.
struct LinearWeight {
  WeightFormat format;
  int64_t n;           // outputs; columns beyond n of the last tile are computed and never stored
  int64_t k;           // inputs
  int64_t k_padded;    // padded_k(format, k)
  int32_t group;       // activation_group(format)
  int64_t tile_bytes;  // distance between tiles
  int64_t tiles;       // ceil(n / 16)
  const uint8_t* data;
};

static constexpr LinearWeight make_linear_weight(WeightFormat format, int64_t n, int64_t k, const uint8_t* data) {
  const int64_t k_padded = padded_k(format, k);
  return {format, n, k, k_padded, activation_group(format), tile_bytes(format, k_padded), (n + kTileRows - 1) / kTileRows,
          data};
}

/// Bytes that a weight of these dimensions takes in weights.bin.
static constexpr int64_t linear_weight_bytes(const LinearWeight& weight) { return weight.tiles * weight.tile_bytes; }

}  // namespace ew
