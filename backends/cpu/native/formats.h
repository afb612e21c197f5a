// Weight and activation formats, and the packed layout of a linear's weight: the one layout that every ISA variant reads.
//
// A weight [n, k] is cut into tiles of 16 output rows, stored tile after tile, each 64-byte aligned; n is padded to 16 with
// zero rows and k to `k_padded`. Within a tile the scales stand in front (the header), so that a thread reads one sequential
// stream, and the body interleaves the 16 outputs so that one 64-byte load feeds 16 lanes. G is the weight's group, or 32 for
// an integer format with one scale a channel, whose header counts one group:
//
//   format     k padded to  header                                      body
//   f32        1            -                                           [k][16] f32
//   bf16       2            -                                           [k/2][16][2] bf16
//   fp8        4            [16] f32 scale                              [k/4][4][2][4][2] u8: 4 rows, a pair of k, row, k
//   int8       32           [16] f32 scale                              [k/4][16][4] u8 = code + 128
//   int8_gG    G            [k/G][16] f16 scale                         [k/4][16][4] u8 = code + 128
//   uint8…     G            [k/G][16] f16 scale, [k/G][16] f16 second   [k/4][16][4] u8
//   int4…      G            the same                                    [k/8][16][4] u8: low nibble k+j, high k+4+j
//   int2…      G            the same                                    [k/16][16][4] u8: bits 2q, 2q+1 hold k+4q+j
//   int3…      G            the same                                    [k/16] of: [16][4] u8, the low bits as int2;
//                                                                       [32] u8, the third bits: with i = 4*row + j,
//                                                                       k+4q+j's is bit (2q+2 + i/32) % 8 of byte i % 32
//
// Headers and tiles are padded to a multiple of 64 bytes. The value of a code:
//   symmetric (int8)   w = scale * code, code -127..127 (-128 is legal)
//   offset             w = scale * code + second. GGUF's Q4_1 (offset = minimum) and Q4_0 (-8 * scale) are such
//   zero (names _zp)   w = scale * (code - second): the kernels add the offset -(scale * second), which fp32 holds exactly
//   fp8                w = scale * code, code a float8 e4m3fn (NaN stays NaN)
// An int8 weight may also keep some columns apart, unrounded (LLM.int8(), Dettmers et al. 2022): their codes are 0, and
// [ceil(c/2)][16][2] bf16 of the c columns, zeros beyond, stand behind the body.
//
// A fused gate/up weight interleaves whole tiles: tile 2i holds gate rows 16i.., tile 2i + 1 holds up rows 16i..; each half
// is padded to 16 on its own and `n` counts the padded rows of both.
//
// Functions are `static`: this header is compiled for several instruction sets, and a shared inline copy could be the one
// that this machine lacks.
#pragma once

#include <cstdint>

namespace ew {

enum class WeightKind : int32_t { f32, bf16, fp8, symmetric, offset, zero };

struct WeightFormat {
  WeightKind kind = WeightKind::f32;
  int32_t bits = 32;
  int32_t group = 0;  // k values that share a scale; 0: all of an output's
};

enum class ActivationKind : int32_t {
  f32,
  bf16,
  group,  // int8, a scale a row and group, found at run time
  token,  // int8, a scale a row, found at run time
  fixed,  // int8, one scale given with the weight
};

struct ActivationFormat {
  ActivationKind kind = ActivationKind::f32;
  int32_t group = 0;   // of ActivationKind::group
  float scale = 0.0f;  // of ActivationKind::fixed
};

/// The format of a name as recipes, graphs and program.json write it; false where there is none. formats.cpp.
bool parse_weight_format(const char* name, WeightFormat& format);
bool parse_activation_format(const char* name, ActivationFormat& format);
constexpr const char kWeightFormatNames[] =
    "f32, bf16, fp8, int8, and uint8, int4, int3, int2 with or without _zp; the integers also in groups, _g16 to _g256";

/// What a weight's products use where nothing else is said: groups of the weight's own size, at most 128; of 32 where the
/// weight has one scale an output.
ActivationFormat default_activation(WeightFormat format);

/// Whether a product may take the two: the default, or for integer weights also one scale a row, or one given scale.
bool activation_fits(WeightFormat weight, ActivationFormat activation);

constexpr int64_t kTileRows = 16;          // outputs of one tile: the lanes of a vector
constexpr int32_t kChannelStep = 32;       // k is padded to this where an integer format has no groups
constexpr int64_t kLargestSum = 65536;     // so many products of 8-bit codes cannot leave an int32

static constexpr bool is_integer(WeightFormat format) { return format.kind >= WeightKind::symmetric; }
/// Whether columns may be kept apart.
static constexpr bool takes_outliers(WeightFormat format) {
  return format.kind == WeightKind::symmetric && format.group == 0;
}
/// Whether a second number stands beside each scale.
static constexpr bool has_offsets(WeightFormat format) { return format.kind >= WeightKind::offset; }

static constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

/// k rounded up to what the format's body holds.
static constexpr int64_t padded_k(WeightFormat format, int64_t k) {
  const int64_t step = is_integer(format)                      ? (format.group != 0 ? format.group : kChannelStep)
                       : format.kind == WeightKind::fp8  ? 4
                       : format.kind == WeightKind::bf16 ? 2
                                                         : 1;
  return round_up(k, step);
}

/// Scales of one output.
static constexpr int64_t weight_groups(WeightFormat format, int64_t k_padded) {
  return format.group != 0 ? k_padded / format.group : 1;
}

/// Bytes of a tile before its body.
static constexpr int64_t tile_header_bytes(WeightFormat format, int64_t k_padded) {
  if (has_offsets(format)) return weight_groups(format, k_padded) * 64;
  if (format.group != 0) return round_up(weight_groups(format, k_padded) * 32, 64);
  return format.kind == WeightKind::symmetric || format.kind == WeightKind::fp8 ? 64 : 0;
}

/// Bytes of a tile's body: the codes of 16 rows.
static constexpr int64_t tile_body_bytes(WeightFormat format, int64_t k_padded) {
  return round_up(k_padded * kTileRows * format.bits / 8, 64);
}

/// A packed weight in memory, and how its input is rounded. Not the owner of what it points at; `data` is 64-byte aligned.
struct LinearWeight {
  WeightFormat format;
  ActivationFormat activation;
  int64_t n;            // outputs; columns beyond n of the last tile are computed and never stored
  int64_t k;            // inputs
  int64_t k_padded;     // padded_k(format, k)
  int64_t group;        // k values whose products are summed as integers: they share all scales. 1 for the float formats
  int64_t tile_bytes;   // distance between tiles
  int64_t tiles;        // ceil(n / 16)
  int64_t outliers;     // columns kept apart, at `columns`, ascending
  const int32_t* columns;
  const int32_t* keep;  // where there are outliers: [k], 0 in those columns, -1 elsewhere
  const uint8_t* data;
};

static constexpr LinearWeight make_linear_weight(WeightFormat format, ActivationFormat activation, int64_t n, int64_t k,
                                                 const uint8_t* data) {
  const int64_t k_padded = padded_k(format, k);
  int64_t group = 1;
  if (activation.kind == ActivationKind::group) {
    group = activation.group;
  } else if (is_integer(format)) {
    group = format.group != 0 ? format.group : k_padded <= kLargestSum ? k_padded : kChannelStep;
  }
  const int64_t tile_bytes = tile_header_bytes(format, k_padded) + tile_body_bytes(format, k_padded);
  return {format, activation, n,       k,       k_padded, group, tile_bytes, (n + kTileRows - 1) / kTileRows,
          0,      nullptr,    nullptr, data};
}

/// Keeps `count` ascending columns apart; both tables must outlive the weight.
static constexpr void set_outliers(LinearWeight& weight, const int32_t* columns, int64_t count, const int32_t* keep) {
  weight.outliers = count;
  weight.columns = columns;
  weight.keep = keep;
  weight.tile_bytes += (count + 1) / 2 * 64;
}

/// Bytes that a weight of these dimensions takes in weights.bin.
static constexpr int64_t linear_weight_bytes(const LinearWeight& weight) { return weight.tiles * weight.tile_bytes; }

}  // namespace ew
