// The native kernels: one table of functions per ISA variant, and the promises that every kernel keeps.
//
// Start here. The executor walks a program's instructions and calls these functions; nothing else of the kernels is visible
// to it. The same sources (`*.inl`, written on the 16-lane vocabulary of simd.h) are compiled three times, for AVX-512, for
// AVX2 and for any machine, and `kernels()` picks one table when the library is first used.
//
// Promises
//   One answer. Within a variant, a row's result depends on that row and the weights alone: not on how many rows stand in
//     the call, which range of tiles it covers, or which thread runs it. So the executor may split work as it likes, and a
//     request reads the same bits alone or in a batch.
//   Integer sums are exact, fp32 sums have one fixed order over k, and nothing is compiled with fast-math or contraction.
//   Kernels allocate nothing, start no threads, throw nothing, and write only what they say.
//   A NaN or infinity in a row's input may make that row's output NaN; it reaches no other row.
//
// A linear takes two steps, because its input is quantised once and then read by every thread:
//
//   prepare(weight, x, ldx, rows, prepared)                  each row of x becomes one block of prepared_row_bytes(weight)
//   linear(weight, prepared, rows, t0, t1, bias, y, ldy)     outputs 16*t0 .. 16*t1-1 of each row
//
// A prepared row depends only on x and on how the weight rounds its input (activation, k, group, columns kept apart):
// siblings that share these may share it. Its content belongs to the variant. Today: f32 and bf16 hold the values; the
// integer formats hold k int8 codes, then a f32 scale per group, then a 32-bit word per group that carries the sum of the
// codes for the weight's offset, then the columns kept apart in bf16.
// Activations are quantised symmetrically. With a scale of a row and group, or of a row: max|x| / 127, code = round to
// nearest even of x * (127 / max|x|); where max|x| is below 2^-100 it counts as zero. With one given scale: code = round to
// nearest even of x / scale, clamped to -127..127; a row that holds NaN has the scale NaN. Columns kept apart are zero
// before all that.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention.h"
#include "draw.h"
#include "formats.h"

namespace ew {

/// Activations of one input, and the activation of a gated pair. The order is the native contract of program.json.
enum class Activation : int32_t {
  identity = 0,
  silu = 1,       // x * sigmoid(x)
  gelu = 2,       // x * (1 + erf(x / sqrt 2)) / 2
  gelu_tanh = 3,  // the tanh approximation of gelu
  relu = 4,
  relu2 = 5,  // relu(x)^2
  sigmoid = 6,
  tanh = 7,
  quick_gelu = 8,  // x * sigmoid(1.702 x)
  exp = 9,
  softplus = 10,  // log(1 + exp(x))
};
constexpr int32_t kActivationCount = 11;

struct Kernels {
  const char* name;  // "avx512", "avx2" or "portable"

  // --- Linears (linear.inl) -------------------------------------------------------------------------------------------
  /// Bytes of one prepared row: a multiple of 64.
  int64_t (*prepared_row_bytes)(const LinearWeight& weight);

  /// x: [rows][ldx] f32, of which weight.k columns are read. prepared: 64-byte aligned, rows * prepared_row_bytes.
  void (*prepare)(const LinearWeight& weight, const float* x, int64_t ldx, int64_t rows, uint8_t* prepared);

  /// y[m * ldy + o] = bias[o] + sum_k x[m][k] * w[o][k] for outputs o in [16 * t0, min(16 * t1, n)). `y` and `bias` (which
  /// may be null) point at output 0 whatever t0 is. Only those columns are written.
  void (*linear)(const LinearWeight& weight, const uint8_t* prepared, int64_t rows, int64_t t0, int64_t t1,
                 const float* bias, float* y, int64_t ldy);

  /// out[r * ldo + c] = scale * w[ids[r]][c] for c < weight.k: the rows of a packed weight, dequantised (any format but with
  /// columns kept apart; a tied head and embedding are stored once). Every id must lie in 0..n-1: the caller checks.
  void (*embedding)(const LinearWeight& weight, const int32_t* ids, int64_t rows, float scale, float* out, int64_t ldo);

  // --- Rows (rows.inl): each call handles one row of `dim` values; y may be x ------------------------------------------
  /// s = x + residual (or x where residual is null), stored to sum_out where that is given;
  /// y = s / sqrt(mean(s^2) + eps) * (w + w_offset), with w = 1 and no offset where w is null.
  void (*rms_norm)(const float* x, const float* residual, float* sum_out, const float* w, float w_offset, float eps,
                   int64_t dim, float* y);

  /// s as above; y = (s - mean(s)) / sqrt(var(s) + eps) * w + bias, w = 1 and bias = 0 where null.
  void (*layer_norm)(const float* x, const float* residual, float* sum_out, const float* w, const float* bias, float eps,
                     int64_t dim, float* y);

  /// y[i] = kind(x[i]), an Activation. y may be x.
  void (*activation)(int kind, const float* x, float* y, int64_t n);

  /// y[i] = kind(gate[i]) * up[i]. y may be gate or up.
  void (*gated)(int kind, const float* gate, const float* up, float* y, int64_t n);

  // --- Attention, cache, rotary embedding, sampling rows (attention.h) ------------------------------------------------
  AttentionKernels attention;

  // --- Passes over rows of logits for drawing tokens (draw.h) ---------------------------------------------------------
  DrawKernels draw;
};

/// The variant in use: the best that the machine runs, or the one that ENGINEWRIGHT_ISA names. Decided once.
/// Throws std::runtime_error where ENGINEWRIGHT_ISA names a variant that is unknown or that the machine lacks.
const Kernels& kernels();

/// The named variant, or null where it is unknown or the machine lacks it.
const Kernels* kernels_by_name(const char* name);

/// Names of the variants that this machine runs, best first.
std::vector<std::string> available_isas();

}  // namespace ew
