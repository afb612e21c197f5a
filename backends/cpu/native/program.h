// The lowered program as typed structs (the schema is instructions.md), read from JSON and checked entirely: after
// parse_program every index, shape and offset is known to stay inside its value, weight, table or cache.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "attention.h"
#include "kernels.h"

namespace ew {

enum class DType { f32, i32 };
enum class RowKind { tokens = 0, logits = 1 };
constexpr int kRowKinds = 2;

struct Value {
    std::string name;
    DType dtype;
    RowKind rows;
    int64_t width, row_bytes, offset; // elements, bytes, bytes a row from the arena's start
};

struct Weight {
    enum class Kind { linear, table, vector };
    std::string name;
    Kind kind;
    DType dtype = DType::f32;  // of tables and vectors
    LinearWeight linear{};     // kind linear: geometry of one expert; data is set when the weights are mapped
    std::vector<int32_t> columns, keep; // what linear points at where columns are kept apart
    int64_t n = 0, k = 1;      // rows and columns; a vector has k = 1
    int64_t experts = 1;
    bool gated = false;
    int64_t offset = 0, bytes = 0;

    int64_t expert_bytes() const { return linear.tiles * linear.tile_bytes; }
};

struct KvLayer {
    int kv_heads, key_dim, value_dim;
    KvLayout layout;
};
struct KvGroup {
    int window = 0;
    KvFormat format = KvFormat::f32; // of its layers, unless they say otherwise
    int page_size = 16;
    std::vector<KvLayer> layers;
};

// Where an operand's numbers come from.
struct Operand {
    enum class Source { none, value, weight, scalar, tokens, positions };
    Source source = Source::none;
    int index = -1; // of the value or weight
    int64_t column = 0, width = 0;
    DType dtype = DType::f32;
    double scalar = 0;

    bool present() const { return source != Source::none; }
};

enum class Op {
    embedding, linear, linear_gated, rms_norm, layer_norm, activation, gated_activation, rope, rope_write, attention,
    moe, select_rows, elementwise, copy, reduce, softmax, cumulate, topk, gather, scatter,
};

// A gated activation beyond the kernels' own: both halves clamped to `limit`, then (up + 1) * gate * sigmoid(alpha * gate).
constexpr int kSwigluOai = kActivationCount;

constexpr int kMaxDims = 6;
constexpr int kMaxOperands = 4; // inputs plus outputs of a generic op

// The iteration space of a generic op and how its operands (inputs, then outputs) walk through it.
struct Walk {
    int dims = 0;
    std::array<int64_t, kMaxDims> shape{};
    std::array<std::array<int64_t, kMaxDims>, kMaxOperands> strides{}; // elements, >= 0
    int64_t count() const {
        int64_t result = 1;
        for (int d = 0; d < dims; ++d)
            result *= shape[d];
        return result;
    }
};

struct Instruction {
    Op op;
    std::string name, module;
    RowKind rows;
    std::vector<Operand> in, out;
    std::vector<int> weights;

    // Attributes; which of them mean something depends on the op.
    int64_t inner = 1, dim = 0;
    float eps = 0, weight_offset = 0, scale = 1, softcap = 0, alpha = 0, limit = 0;
    int activation = -1;                         // an Activation of kernels.h, or kSwigluOai
    Operand::Source index = Operand::Source::none; // embedding
    int64_t index_offset = 0;
    int group = 0, layer = 0, window = 0;
    int q_heads = 0, kv_heads = 0, key_dim = 0, value_dim = 0, rotary_dim = 0;
    bool interleaved = false;
    int64_t top_k = 0, experts = 0;
    // Generic ops
    int kind = 0; // Elementwise, Reduction or Scatter below
    Walk walk;
    int axis = -1;
    std::vector<int> axes;
    int64_t extent = 0, k = 0;
    bool largest = true, log = false;

    std::string where() const { return name + (module.empty() ? "" : " of " + module); }
};

enum class Reduction { sum, mean, prod, max, min, any, all, argmax, argmin, dot };
enum class Scatter { set, add };
enum class Elementwise {
    // unary, in the type of the input
    neg, abs, sign, square, bitwise_not,
    // unary, f32
    exp, exp2, expm1, log, log2, log10, log1p, sqrt, rsqrt, reciprocal, sin, cos, tan, asin, acos, atan, sinh, cosh,
    tanh, sigmoid, erf, relu, relu2, silu, gelu, gelu_tanh, softplus, elu, mish, hardswish, hardsigmoid, log_sigmoid,
    floor, ceil, round, trunc,
    // unary, to i32
    logical_not, isnan, isinf,
    // binary, common type
    add, sub, mul, minimum, maximum, floor_divide, remainder, fmod,
    // binary, f32
    div, pow, atan2,
    // binary, to i32
    eq, ne, lt, le, gt, ge, logical_and, logical_or, logical_xor,
    // binary, i32 only
    bitwise_and, bitwise_or, bitwise_xor, shift_left, shift_right,
    // ternary
    where, clamp, fma, lerp,
    count
};

struct ElementwiseRule {
    const char *name;
    int inputs;
    enum class Type { common, f32, i32, to_i32, where } type;
};
const ElementwiseRule &elementwise_rule(Elementwise kind);

struct Program {
    int64_t vocab_size = 0;
    std::vector<Value> values;
    std::vector<Weight> weights;
    std::vector<KvGroup> groups;
    std::vector<Instruction> instructions;
    Operand output;
    std::array<int64_t, kRowKinds> arena_row_bytes{}; // bytes a row of each arena
    int64_t token_limit = 0;                          // token ids lie in [0, token_limit)
    int64_t position_limit = 0;                       // positions lie in [0, position_limit)
};

// Reads and checks a program against a weights file of `weights_bytes` bytes. Throws std::invalid_argument with a
// message that names the instruction, what was found and what is needed.
Program parse_program(const std::string &json, int64_t weights_bytes);

} // namespace ew
