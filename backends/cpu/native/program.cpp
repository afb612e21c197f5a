#include "program.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <stdexcept>

#include "json.h"

namespace ew {
namespace {

constexpr int64_t kMaxExtent = int64_t(1) << 40; // no size in a program is larger; products of two fit 128 bits
constexpr int64_t kMaxRowBytes = int64_t(1) << 31;

const ElementwiseRule kElementwise[] = {
#define EW_RULE(name, inputs, type) {#name, inputs, ElementwiseRule::Type::type}
    EW_RULE(neg, 1, common), EW_RULE(abs, 1, common), EW_RULE(sign, 1, common), EW_RULE(square, 1, common),
    EW_RULE(bitwise_not, 1, i32), EW_RULE(exp, 1, f32), EW_RULE(exp2, 1, f32), EW_RULE(expm1, 1, f32),
    EW_RULE(log, 1, f32), EW_RULE(log2, 1, f32), EW_RULE(log10, 1, f32), EW_RULE(log1p, 1, f32),
    EW_RULE(sqrt, 1, f32), EW_RULE(rsqrt, 1, f32), EW_RULE(reciprocal, 1, f32), EW_RULE(sin, 1, f32),
    EW_RULE(cos, 1, f32), EW_RULE(tan, 1, f32), EW_RULE(asin, 1, f32), EW_RULE(acos, 1, f32), EW_RULE(atan, 1, f32),
    EW_RULE(sinh, 1, f32), EW_RULE(cosh, 1, f32), EW_RULE(tanh, 1, f32), EW_RULE(sigmoid, 1, f32),
    EW_RULE(erf, 1, f32), EW_RULE(relu, 1, f32), EW_RULE(relu2, 1, f32), EW_RULE(silu, 1, f32), EW_RULE(gelu, 1, f32),
    EW_RULE(gelu_tanh, 1, f32), EW_RULE(softplus, 1, f32), EW_RULE(elu, 1, f32), EW_RULE(mish, 1, f32),
    EW_RULE(hardswish, 1, f32), EW_RULE(hardsigmoid, 1, f32), EW_RULE(log_sigmoid, 1, f32), EW_RULE(floor, 1, f32),
    EW_RULE(ceil, 1, f32), EW_RULE(round, 1, f32), EW_RULE(trunc, 1, f32), EW_RULE(logical_not, 1, to_i32),
    EW_RULE(isnan, 1, to_i32), EW_RULE(isinf, 1, to_i32), EW_RULE(add, 2, common), EW_RULE(sub, 2, common),
    EW_RULE(mul, 2, common), EW_RULE(minimum, 2, common), EW_RULE(maximum, 2, common),
    EW_RULE(floor_divide, 2, common), EW_RULE(remainder, 2, common), EW_RULE(fmod, 2, common), EW_RULE(div, 2, f32),
    EW_RULE(pow, 2, f32), EW_RULE(atan2, 2, f32), EW_RULE(eq, 2, to_i32), EW_RULE(ne, 2, to_i32),
    EW_RULE(lt, 2, to_i32), EW_RULE(le, 2, to_i32), EW_RULE(gt, 2, to_i32), EW_RULE(ge, 2, to_i32),
    EW_RULE(logical_and, 2, to_i32), EW_RULE(logical_or, 2, to_i32), EW_RULE(logical_xor, 2, to_i32),
    EW_RULE(bitwise_and, 2, i32), EW_RULE(bitwise_or, 2, i32), EW_RULE(bitwise_xor, 2, i32),
    EW_RULE(shift_left, 2, i32), EW_RULE(shift_right, 2, i32), EW_RULE(where, 3, where), EW_RULE(clamp, 3, common),
    EW_RULE(fma, 3, common), EW_RULE(lerp, 3, f32),
#undef EW_RULE
};
static_assert(sizeof kElementwise / sizeof kElementwise[0] == size_t(Elementwise::count), "one rule a kind");

const char *const kReductions[] = {"sum", "mean", "prod", "max", "min", "any", "all", "argmax", "argmin", "dot"};
const char *const kScatters[] = {"set", "add"};
const char *const kCumulations[] = {"sum", "mean", "prod"}; // numbered as reductions; mean is refused below
const char *const kOps[] = {"embedding", "linear", "linear_gated", "rms_norm", "layer_norm", "activation",
                            "gated_activation", "rope", "rope_write", "attention", "moe", "select_rows",
                            "elementwise", "copy", "reduce", "softmax", "cumulate", "topk", "gather", "scatter"};

const char *const kActivations[] = {"identity", "silu", "gelu", "gelu_tanh", "relu", "relu2",
                                    "sigmoid", "tanh", "quick_gelu", "exp", "softplus"};
static_assert(sizeof kActivations / sizeof kActivations[0] == kActivationCount, "one name an activation");

[[noreturn]] void refuse(const std::string &where, const std::string &what) {
    throw std::invalid_argument("cannot load the program: " + where + ": " + what);
}

std::string number(int64_t n) { return std::to_string(n); }

// One JSON object with the name of its place, for messages.
struct Node {
    const Json &json;
    std::string where;

    Node(const Json &json_, std::string where_) : json(json_), where(std::move(where_)) {
        if (json.type != Json::Type::object)
            refuse(where, "expected an object");
    }
    bool has(const char *key) const {
        const Json *found = json.find(key);
        return found && found->type != Json::Type::null;
    }
    const Json &get(const char *key) const {
        const Json *found = json.find(key);
        if (!found)
            refuse(where, std::string("'") + key + "' is missing");
        return *found;
    }
    const std::vector<Json> &list(const char *key) const {
        const Json &found = get(key);
        if (found.type != Json::Type::array)
            refuse(where, std::string("'") + key + "' must be a list");
        return found.array;
    }
    std::string text(const char *key) const {
        const Json &found = get(key);
        if (found.type != Json::Type::string)
            refuse(where, std::string("'") + key + "' must be a string");
        return found.string;
    }
    std::string text_or(const char *key, const char *other) const { return has(key) ? text(key) : other; }
    static int64_t to_integer(const Json &found, const std::string &where, const char *key, int64_t low, int64_t high) {
        if (found.type != Json::Type::number || found.number != std::floor(found.number) ||
            !(found.number >= double(low) && found.number <= double(high)))
            refuse(where, std::string("'") + key + "' must be a whole number from " + number(low) + " to " +
                              number(high));
        return int64_t(found.number);
    }
    int64_t integer(const char *key, int64_t low, int64_t high) const {
        return to_integer(get(key), where, key, low, high);
    }
    int64_t integer_or(const char *key, int64_t other, int64_t low, int64_t high) const {
        return has(key) ? integer(key, low, high) : other;
    }
    float real_or(const char *key, double other) const {
        if (!has(key))
            return float(other);
        const Json &found = get(key);
        if (found.type != Json::Type::number)
            refuse(where, std::string("'") + key + "' must be a number");
        return float(found.number);
    }
    float real(const char *key) const {
        get(key);
        if (!has(key))
            refuse(where, std::string("'") + key + "' must be a number");
        return real_or(key, 0);
    }
    bool flag_or(const char *key, bool other) const {
        if (!has(key))
            return other;
        const Json &found = get(key);
        if (found.type != Json::Type::boolean)
            refuse(where, std::string("'") + key + "' must be true or false");
        return found.boolean;
    }
    template <size_t N> int choice(const char *key, const char *const (&names)[N]) const {
        const std::string found = text(key);
        std::string all;
        for (size_t i = 0; i < N; ++i) {
            if (found == names[i])
                return int(i);
            all += std::string(i ? ", " : "") + names[i];
        }
        refuse(where, std::string("unknown ") + key + " '" + found + "'; known: " + all);
    }
};

class Parser {
  public:
    Parser(const Json &document, int64_t weights_bytes) : root_(document, "document"), weights_bytes_(weights_bytes) {}

    Program parse() {
        if (root_.integer("version", 0, kMaxExtent) != 1)
            refuse("version", "found " + number(root_.integer("version", 0, kMaxExtent)) +
                                  ", this executor reads 1; rebuild the engine");
        program_.vocab_size = root_.integer("vocab_size", 1, std::numeric_limits<int32_t>::max());
        program_.token_limit = program_.vocab_size;
        program_.position_limit = std::numeric_limits<int32_t>::max();
        parse_values();
        parse_weights();
        parse_groups();
        parse_instructions();
        parse_output();
        return std::move(program_);
    }

  private:
    Node root_;
    const int64_t weights_bytes_;
    Program program_;

    DType dtype(const Node &node) const {
        const std::string found = node.text("dtype");
        if (found == "f32")
            return DType::f32;
        if (found == "i32")
            return DType::i32;
        refuse(node.where, "unknown dtype '" + found + "'; known: f32, i32");
    }

    void parse_values() {
        const auto &list = root_.list("values");
        for (size_t i = 0; i < list.size(); ++i) {
            const Node node(list[i], "value " + number(int64_t(i)));
            Value value;
            value.name = node.text_or("name", "");
            value.dtype = dtype(node);
            const std::string rows = node.text("rows");
            if (rows != "tokens" && rows != "logits")
                refuse(node.where, "unknown rows '" + rows + "'; known: tokens, logits");
            value.rows = rows == "tokens" ? RowKind::tokens : RowKind::logits;
            value.width = node.integer("width", 1, kMaxRowBytes / 4);
            value.row_bytes = node.integer("row_bytes", 4, kMaxRowBytes);
            value.offset = node.integer("offset", 0, kMaxRowBytes);
            if (value.row_bytes % 4 != 0 || value.row_bytes < value.width * 4)
                refuse(node.where, "row_bytes " + number(value.row_bytes) + " must be a multiple of 4 and hold " +
                                       number(value.width) + " numbers");
            if (value.offset % 64 != 0)
                refuse(node.where, "offset " + number(value.offset) + " must be a multiple of 64");
            int64_t &arena = program_.arena_row_bytes[size_t(value.rows)];
            arena = std::max(arena, (value.offset + value.row_bytes + 63) / 64 * 64);
            program_.values.push_back(std::move(value));
        }
    }

    static ActivationFormat parse_activation(const Node &node, WeightFormat format, const std::string &weight) {
        ActivationFormat activation = default_activation(format);
        if (node.has("activation")) {
            const std::string name = node.text("activation");
            if (!parse_activation_format(name.c_str(), activation) || !activation_fits(format, activation))
                refuse(node.where, "a weight of format " + weight + " does not take the activation '" + name + "'");
        }
        if (activation.kind == ActivationKind::fixed) {
            activation.scale = node.real("activation_scale");
            if (!(activation.scale > 0 && activation.scale <= std::numeric_limits<float>::max()))
                refuse(node.where, "'activation_scale' must be a finite number above 0");
        } else if (node.has("activation_scale")) {
            refuse(node.where, "'activation_scale' belongs to the activation int8_static alone");
        }
        return activation;
    }

    // The columns that an int8 weight keeps apart.
    static void parse_columns(const Node &node, Weight &weight) {
        if (!takes_outliers(weight.linear.format) || weight.experts != 1)
            refuse(node.where, "only an int8 weight that is no stack of experts keeps columns apart");
        const auto &list = node.list("columns");
        if (list.empty())
            refuse(node.where, "'columns' is empty");
        if (weight.k > std::numeric_limits<int32_t>::max())
            refuse(node.where, "too large");
        int64_t least = 0;
        for (const Json &entry : list) {
            const int64_t column = Node::to_integer(entry, node.where, "columns", least, weight.k - 1);
            weight.columns.push_back(int32_t(column));
            least = column + 1;
        }
        set_outliers(weight.linear, weight.columns.data(), int64_t(weight.columns.size()), nullptr);
    }

    void parse_weights() {
        const auto &list = root_.list("weights");
        for (size_t i = 0; i < list.size(); ++i) {
            Node node(list[i], "weight " + number(int64_t(i)));
            Weight weight;
            weight.name = node.text_or("name", "");
            if (!weight.name.empty())
                node.where += " (" + weight.name + ")";
            static const char *const kinds[] = {"linear", "table", "vector"};
            weight.kind = Weight::Kind(node.choice("kind", kinds));
            weight.n = node.integer("n", 1, kMaxExtent);
            weight.k = weight.kind == Weight::Kind::vector ? 1 : node.integer("k", 1, kMaxExtent);
            weight.offset = node.integer("offset", 0, int64_t(1) << 52);
            weight.bytes = node.integer("bytes", 1, int64_t(1) << 52);
            if (weight.n > kMaxExtent / weight.k)
                refuse(node.where, "too large");
            int64_t needed = weight.n * weight.k * 4;
            if (weight.kind == Weight::Kind::linear) {
                weight.experts = node.integer_or("experts", 1, 1, 1 << 20);
                weight.gated = node.flag_or("gated", false);
                WeightFormat format;
                const std::string name = node.text("format");
                if (!parse_weight_format(name.c_str(), format))
                    refuse(node.where, "unknown format '" + name + "'; known: " + kWeightFormatNames);
                const ActivationFormat activation = parse_activation(node, format, name);
                if (weight.gated && weight.n % 2 != 0)
                    refuse(node.where, "a gated weight has an even number of rows, found " + number(weight.n));
                // The kernels see a gated weight as a plain one whose rows are the padded, interleaved halves.
                const int64_t rows = weight.gated ? 2 * ((weight.n / 2 + 15) / 16 * 16) : weight.n;
                weight.linear = make_linear_weight(format, activation, rows, weight.k, nullptr);
                if (node.has("columns"))
                    parse_columns(node, weight);
                needed = weight.expert_bytes();
                if (needed > (int64_t(1) << 52) / weight.experts)
                    refuse(node.where, "too large");
                needed *= weight.experts;
            } else {
                const std::string format = node.text("format");
                if (format != "f32" && !(format == "i32" && weight.kind == Weight::Kind::vector))
                    refuse(node.where, "format '" + format + "' does not fit this kind of weight");
                weight.dtype = format == "f32" ? DType::f32 : DType::i32;
            }
            if (weight.bytes != needed)
                refuse(node.where, "found " + number(weight.bytes) + " bytes, its shape and format need " +
                                       number(needed));
            if (weight.offset % 64 != 0 || weight.offset > weights_bytes_ ||
                weight.bytes > weights_bytes_ - weight.offset)
                refuse(node.where, "bytes " + number(weight.offset) + " to " + number(weight.offset + weight.bytes) +
                                       " do not lie in the weights file of " + number(weights_bytes_) +
                                       " bytes (offsets are multiples of 64)");
            if (!weight.columns.empty()) { // now that k is known to be no larger than the file
                weight.keep.assign(size_t(weight.k), -1);
                for (int32_t column : weight.columns)
                    weight.keep[size_t(column)] = 0;
                weight.linear.keep = weight.keep.data();
            }
            program_.weights.push_back(std::move(weight));
        }
    }

    void parse_groups() {
        const auto &list = root_.list("kv_groups");
        for (size_t g = 0; g < list.size(); ++g) {
            const Node node(list[g], "KV group " + number(int64_t(g)));
            KvGroup group;
            group.window = int(node.integer("window", 0, std::numeric_limits<int32_t>::max()));
            group.format = KvFormat(node.choice("format", kKvFormatNames));
            group.page_size = int(node.integer("page_size", 16, 32));
            if (group.page_size != 16 && group.page_size != 32)
                refuse(node.where, "page_size must be 16 or 32, found " + number(group.page_size));
            for (const Json &entry : node.list("layers")) {
                const Node layer(entry, node.where + ", layer " + number(int64_t(group.layers.size())));
                KvLayer kv;
                kv.kv_heads = int(layer.integer("kv_heads", 1, 1 << 16));
                kv.key_dim = int(layer.integer("key_dim", 1, 1 << 16));
                kv.value_dim = int(layer.integer("value_dim", 1, 1 << 16));
                const KvFormat format =
                    layer.has("format") ? KvFormat(layer.choice("format", kKvFormatNames)) : group.format;
                kv.layout = make_kv_layout(format, kv.kv_heads, kv.key_dim, kv.value_dim, group.page_size);
                group.layers.push_back(kv);
            }
            if (group.layers.empty())
                refuse(node.where, "has no layers");
            program_.groups.push_back(std::move(group));
        }
    }

    // ---- operands -------------------------------------------------------------------------------------------

    Operand operand(const Json &json, const std::string &where, bool generic) const {
        Operand result;
        if (json.type == Json::Type::null)
            return result;
        const Node node(json, where);
        int64_t width = 1;
        if (node.has("value")) {
            result.source = Operand::Source::value;
            result.index = int(node.integer("value", 0, int64_t(program_.values.size()) - 1));
            width = program_.values[size_t(result.index)].width;
            result.dtype = program_.values[size_t(result.index)].dtype;
        } else if (generic && node.has("weight")) {
            result.source = Operand::Source::weight;
            result.index = int(node.integer("weight", 0, int64_t(program_.weights.size()) - 1));
            const Weight &weight = program_.weights[size_t(result.index)];
            if (weight.kind == Weight::Kind::linear)
                refuse(where, "a packed matrix cannot be the operand of a generic op");
            width = weight.n * weight.k;
            result.dtype = weight.dtype;
        } else if (generic && node.has("scalar")) {
            result.source = Operand::Source::scalar;
            if (node.get("scalar").type != Json::Type::number)
                refuse(where, "'scalar' must be a number");
            result.scalar = node.get("scalar").number;
        } else if (generic && node.has("input")) {
            static const char *const inputs[] = {"tokens", "positions"};
            result.source = node.choice("input", inputs) == 0 ? Operand::Source::tokens : Operand::Source::positions;
            result.dtype = DType::i32;
        } else {
            refuse(where, generic ? "an operand names a value, weight, scalar or input" : "an operand names a value");
        }
        result.column = node.integer_or("column", 0, 0, width - 1);
        result.width = node.integer_or("width", width - result.column, 1, width - result.column);
        return result;
    }

    static bool same(const Operand &a, const Operand &b) {
        return a.source == b.source && a.index == b.index && a.column == b.column && a.width == b.width;
    }

    // Do two operands share memory, in any row?
    bool overlap(const Operand &a, const Operand &b) const {
        if (a.source != Operand::Source::value || b.source != Operand::Source::value)
            return false;
        const Value &x = program_.values[size_t(a.index)], &y = program_.values[size_t(b.index)];
        if (x.rows != y.rows)
            return false;
        if (a.index == b.index || (x.offset == y.offset && x.row_bytes == y.row_bytes))
            return a.column < b.column + b.width && b.column < a.column + a.width;
        return x.offset < y.offset + y.row_bytes && y.offset < x.offset + x.row_bytes;
    }

    RowKind rows_of(const Operand &operand) const { return program_.values[size_t(operand.index)].rows; }

    // ---- instructions ---------------------------------------------------------------------------------------

    struct Context {
        const Node &node;
        Node attrs;
        Instruction &code;
    };

    void parse_instructions() {
        const auto &list = root_.list("instructions");
        for (size_t i = 0; i < list.size(); ++i) {
            Node node(list[i], "instruction " + number(int64_t(i)));
            Instruction code;
            code.op = Op(node.choice("op", kOps));
            code.name = kOps[size_t(code.op)];
            code.module = node.text_or("module", "");
            node.where += " (" + code.where() + ")";
            const bool generic = code.op >= Op::elementwise;
            for (const Json &entry : node.list("in"))
                code.in.push_back(operand(entry, node.where + ", input " + number(int64_t(code.in.size())), generic));
            for (const Json &entry : node.list("out"))
                code.out.push_back(operand(entry, node.where + ", output " + number(int64_t(code.out.size())), false));
            if (node.has("weights"))
                for (const Json &entry : node.list("weights"))
                    code.weights.push_back(int(Node::to_integer(entry, node.where, "weights", -1,
                                                                int64_t(program_.weights.size()) - 1)));
            static const Json empty = [] {
                Json json;
                json.type = Json::Type::object;
                return json;
            }();
            Context context{node, Node(node.has("attrs") ? node.get("attrs") : empty, node.where), code};
            check_rows(context);
            check(context);
            program_.instructions.push_back(std::move(code));
        }
    }

    void check_rows(Context &context) const {
        Instruction &code = context.code;
        bool known = false;
        const Operand *all[2 * kMaxOperands];
        size_t count = 0;
        if (code.in.size() > kMaxOperands || code.out.size() > kMaxOperands)
            refuse(context.node.where, "too many operands");
        for (const auto *list : {&code.in, &code.out})
            for (const Operand &operand : *list)
                if (operand.source == Operand::Source::value)
                    all[count++] = &operand;
        code.rows = RowKind::tokens;
        for (size_t i = 0; i < count; ++i) {
            const RowKind rows = rows_of(*all[i]);
            if (known && rows != code.rows && code.op != Op::select_rows)
                refuse(context.node.where, "its operands have different kinds of rows");
            code.rows = rows;
            known = true;
        }
    }

    void operands(const Context &context, size_t in_low, size_t in_high, size_t out_low, size_t out_high,
                  size_t weights) const {
        const Instruction &code = context.code;
        auto list = [&](const char *what, size_t found, size_t low, size_t high) {
            if (found < low || found > high)
                refuse(context.node.where, "expected " + number(int64_t(low)) +
                                               (low == high ? "" : " to " + number(int64_t(high))) + " " + what +
                                               ", found " + number(int64_t(found)));
        };
        list("inputs", code.in.size(), in_low, in_high);
        list("outputs", code.out.size(), out_low, out_high);
        list("weights", code.weights.size(), weights, weights);
    }

    void expect(const Context &context, const Operand &operand, const char *what, int64_t width,
                DType dtype = DType::f32) const {
        if (!operand.present())
            refuse(context.node.where, std::string(what) + " is missing");
        if (operand.dtype != dtype)
            refuse(context.node.where, std::string(what) + " must be " + (dtype == DType::f32 ? "f32" : "i32"));
        if (operand.width != width)
            refuse(context.node.where, std::string(what) + " is " + number(operand.width) + " wide, expected " +
                                           number(width));
    }

    void apart(const Context &context, bool in_place_allowed) const {
        const Instruction &code = context.code;
        for (size_t o = 0; o < code.out.size(); ++o) {
            for (const Operand &input : code.in)
                if (overlap(code.out[o], input) && !(in_place_allowed && same_place(code.out[o], input)))
                    refuse(context.node.where, "an output overlaps an input");
            for (size_t p = 0; p < o; ++p)
                if (overlap(code.out[o], code.out[p]))
                    refuse(context.node.where, "two outputs overlap");
        }
    }

    // Exactly the same memory: the same operand, or one of a value that reuses the other's place.
    bool same_place(const Operand &a, const Operand &b) const {
        if (same(a, b))
            return true;
        const Value &x = program_.values[size_t(a.index)], &y = program_.values[size_t(b.index)];
        return x.offset == y.offset && x.row_bytes == y.row_bytes && a.column == b.column && a.width == b.width;
    }

    const Weight *weight(const Context &context, size_t slot) const {
        const int index = context.code.weights[slot];
        return index < 0 ? nullptr : &program_.weights[size_t(index)];
    }
    const Weight &matrix(const Context &context, size_t slot, bool gated, int64_t experts) const {
        const Weight *found = weight(context, slot);
        if (!found || found->kind != Weight::Kind::linear || found->gated != gated || found->experts != experts)
            refuse(context.node.where, "weight " + number(int64_t(slot)) + " must be a linear one, " +
                                           (gated ? "gated" : "not gated") + ", of " + number(experts) + " experts");
        return *found;
    }
    void vector(const Context &context, size_t slot, const char *what, int64_t n, bool required = false) const {
        const Weight *found = weight(context, slot);
        if (!found && !required)
            return;
        if (!found || found->kind == Weight::Kind::linear || found->dtype != DType::f32 || found->n * found->k != n)
            refuse(context.node.where, std::string(what) + " must be an f32 vector of " + number(n));
    }

    void activation(Context &context, bool gated) const {
        Instruction &code = context.code;
        if (gated && context.attrs.text("activation") == "swiglu_oai") {
            code.activation = kSwigluOai;
            context.attrs.real("alpha");
            context.attrs.real("limit");
        } else {
            code.activation = context.attrs.choice("activation", kActivations);
        }
        code.alpha = context.attrs.real_or("alpha", 0);
        code.limit = context.attrs.real_or("limit", 0);
    }

    void rope_tables(Context &context, int head_dim, bool required) {
        Instruction &code = context.code;
        const Weight *cosines = weight(context, 0), *sines = weight(context, 1);
        if (!cosines && !sines && !required)
            return;
        if (code.rows != RowKind::tokens)
            refuse(context.node.where, "positions belong to tokens, not to logit rows");
        code.rotary_dim = int(context.attrs.integer("rotary_dim", 2, head_dim));
        code.interleaved = context.attrs.flag_or("interleaved", false);
        if (code.rotary_dim % 2 != 0)
            refuse(context.node.where, "rotary_dim must be even");
        for (const Weight *table : {cosines, sines}) {
            if (!table || table->kind != Weight::Kind::table || table->k != code.rotary_dim / 2)
                refuse(context.node.where, "cos and sin must be tables of " + number(code.rotary_dim / 2) +
                                               " columns");
            program_.position_limit = std::min(program_.position_limit, table->n);
        }
    }

    const KvLayer &kv_layer(Context &context) {
        Instruction &code = context.code;
        const Node &attrs = context.attrs;
        if (code.rows != RowKind::tokens)
            refuse(context.node.where, "attention works on tokens, not on logit rows");
        if (program_.groups.empty())
            refuse(context.node.where, "the program has no KV groups");
        code.group = int(attrs.integer("group", 0, int64_t(program_.groups.size()) - 1));
        const KvGroup &group = program_.groups[size_t(code.group)];
        code.layer = int(attrs.integer("layer", 0, int64_t(group.layers.size()) - 1));
        const KvLayer &layer = group.layers[size_t(code.layer)];
        code.kv_heads = int(attrs.integer("kv_heads", layer.kv_heads, layer.kv_heads));
        code.key_dim = int(attrs.integer("key_dim", layer.key_dim, layer.key_dim));
        code.value_dim = int(attrs.integer("value_dim", layer.value_dim, layer.value_dim));
        code.q_heads = int(attrs.integer("q_heads", 1, 1 << 16));
        if (code.q_heads % code.kv_heads != 0)
            refuse(context.node.where, number(code.q_heads) + " query heads cannot share " + number(code.kv_heads) +
                                           " kv heads");
        return layer;
    }

    void check(Context &context) {
        Instruction &code = context.code;
        const Node &attrs = context.attrs;
        const std::string &where = context.node.where;
        switch (code.op) {
        case Op::embedding: return check_embedding(context);
        case Op::linear: {
            operands(context, 1, 1, 1, 1, 2);
            const Weight &w = matrix(context, 0, false, 1);
            code.inner = attrs.integer_or("inner", 1, 1, 1 << 20);
            expect(context, code.in[0], "x", code.inner * w.k);
            expect(context, code.out[0], "y", code.inner * w.n);
            vector(context, 1, "bias", w.n);
            return apart(context, false);
        }
        case Op::linear_gated: {
            operands(context, 1, 1, 1, 1, 2);
            const Weight &w = matrix(context, 0, true, 1);
            expect(context, code.in[0], "x", w.k);
            expect(context, code.out[0], "y", w.n / 2);
            vector(context, 1, "bias (in packed order)", w.linear.n);
            activation(context, true);
            return apart(context, false);
        }
        case Op::rms_norm:
        case Op::layer_norm: {
            operands(context, 1, 2, 1, 2, code.op == Op::rms_norm ? 1 : 2);
            const int64_t width = code.in[0].width;
            code.dim = attrs.integer_or("dim", width, 1, width);
            code.eps = attrs.real("eps");
            code.weight_offset = attrs.real_or("weight_offset", 0);
            if (width % code.dim != 0)
                refuse(where, "dim " + number(code.dim) + " does not divide the width " + number(width));
            for (const Operand &operand : code.in)
                expect(context, operand, "input", width);
            for (const Operand &operand : code.out)
                expect(context, operand, "output", width);
            if (code.in.size() != code.out.size())
                refuse(where, "a residual and a sum go together");
            if (code.in.size() == 2 && code.dim != width)
                refuse(where, "the form with a residual normalises whole rows");
            for (size_t slot = 0; slot < code.weights.size(); ++slot)
                vector(context, slot, slot ? "bias" : "weight", code.dim);
            return apart(context, true);
        }
        case Op::activation:
            operands(context, 1, 1, 1, 1, 0);
            expect(context, code.in[0], "x", code.in[0].width);
            expect(context, code.out[0], "y", code.in[0].width);
            activation(context, false);
            return apart(context, true);
        case Op::gated_activation:
            operands(context, 2, 2, 1, 1, 0);
            for (const Operand *operand : {&code.in[0], &code.in[1], &code.out[0]})
                expect(context, *operand, "gate, up and y", code.in[0].width);
            activation(context, true);
            return apart(context, true);
        case Op::rope: {
            operands(context, 1, 1, 1, 1, 2);
            code.q_heads = int(attrs.integer("heads", 1, 1 << 16));
            code.key_dim = int(attrs.integer("head_dim", 1, 1 << 16));
            expect(context, code.in[0], "x", int64_t(code.q_heads) * code.key_dim);
            if (!same(code.in[0], code.out[0]))
                refuse(where, "rope works in place: its output is its input");
            return rope_tables(context, code.key_dim, true);
        }
        case Op::rope_write: {
            operands(context, 3, 3, 0, 0, 2);
            const KvLayer &layer = kv_layer(context);
            if (code.in[0].present())
                expect(context, code.in[0], "q", int64_t(code.q_heads) * layer.key_dim);
            expect(context, code.in[1], "k", int64_t(layer.kv_heads) * layer.key_dim);
            expect(context, code.in[2], "v", int64_t(layer.kv_heads) * layer.value_dim);
            if (overlap(code.in[0], code.in[1]) || overlap(code.in[0], code.in[2]) ||
                overlap(code.in[1], code.in[2]))
                refuse(where, "q, k and v overlap");
            return rope_tables(context, layer.key_dim, false);
        }
        case Op::attention: {
            operands(context, 1, 1, 1, 1, 2);
            const KvLayer &layer = kv_layer(context);
            code.scale = attrs.real("scale");
            code.softcap = attrs.real_or("softcap", 0);
            const int window = program_.groups[size_t(code.group)].window;
            code.window = int(attrs.integer_or("window", window, window, window));
            expect(context, code.in[0], "q", int64_t(code.q_heads) * layer.key_dim);
            expect(context, code.out[0], "o", int64_t(code.q_heads) * layer.value_dim);
            vector(context, 0, "sinks", code.q_heads);
            vector(context, 1, "alibi", code.q_heads);
            return apart(context, false);
        }
        case Op::moe: {
            operands(context, 3, 3, 1, 1, 4);
            code.experts = attrs.integer("experts", 1, 1 << 20);
            code.top_k = attrs.integer("top_k", 1, code.experts);
            const Weight &up = matrix(context, 0, true, code.experts), &down = matrix(context, 2, false, code.experts);
            for (const Weight *stack : {&up, &down})
                if (stack->linear.outliers > 0 || stack->linear.activation.kind == ActivationKind::fixed)
                    refuse(where, "experts take neither columns kept apart nor the activation int8_static");
            expect(context, code.in[0], "x", up.k);
            expect(context, code.in[1], "index", code.top_k, DType::i32);
            expect(context, code.in[2], "weight", code.top_k);
            expect(context, code.out[0], "y", down.n);
            if (down.k != up.n / 2)
                refuse(where, "down has " + number(down.k) + " columns, gate_up " + number(up.n / 2) + " outputs");
            vector(context, 1, "gate_up_bias (in packed order)", code.experts * up.linear.n);
            vector(context, 3, "down_bias", code.experts * down.n);
            activation(context, true);
            return apart(context, false);
        }
        case Op::select_rows:
            operands(context, 1, 1, 1, 1, 0);
            expect(context, code.in[0], "x", code.in[0].width, code.in[0].dtype);
            expect(context, code.out[0], "y", code.in[0].width, code.in[0].dtype);
            if (rows_of(code.in[0]) != RowKind::tokens || rows_of(code.out[0]) != RowKind::logits)
                refuse(where, "takes token rows to logit rows");
            code.rows = RowKind::logits;
            return;
        default: return check_generic(context);
        }
    }

    void check_embedding(Context &context) {
        Instruction &code = context.code;
        const Node &attrs = context.attrs;
        static const char *const names[] = {"tokens", "positions", "value"};
        const int kind = attrs.choice("index", names);
        code.index = kind == 0   ? Operand::Source::tokens
                     : kind == 1 ? Operand::Source::positions
                                 : Operand::Source::value;
        const bool from_value = code.index == Operand::Source::value;
        operands(context, from_value, from_value, 1, 1, 1);
        const Weight *table = weight(context, 0);
        if (!table || table->kind == Weight::Kind::vector || table->gated || table->experts != 1)
            refuse(context.node.where, "the table must be a linear or table weight");
        if (table->linear.outliers > 0)
            refuse(context.node.where, "the table keeps columns apart, which a look-up does not read");
        code.scale = attrs.real_or("scale", 1);
        code.index_offset = attrs.integer_or("offset", 0, -kMaxExtent, kMaxExtent);
        int64_t count = 1;
        if (from_value) {
            expect(context, code.in[0], "index", code.in[0].width, DType::i32);
            count = code.in[0].width;
        } else if (code.rows != RowKind::tokens) {
            refuse(context.node.where, "tokens and positions do not belong to logit rows");
        }
        if (count > 1 << 20)
            refuse(context.node.where, "too many indices a row");
        expect(context, code.out[0], "y", count * table->k);
        if (!from_value) { // an index from a value is checked as it is read, these two before the step
            if (code.index_offset < 0 || code.index_offset >= table->n)
                refuse(context.node.where, "offset " + number(code.index_offset) + " does not lie in the table of " +
                                               number(table->n) + " rows");
            int64_t &limit =
                code.index == Operand::Source::tokens ? program_.token_limit : program_.position_limit;
            limit = std::min(limit, table->n - code.index_offset);
        }
        apart(context, false);
    }

    // ---- generic ops ----------------------------------------------------------------------------------------

    void parse_walk(Context &context, size_t operands) {
        Instruction &code = context.code;
        Walk &walk = code.walk;
        const auto &shape = context.attrs.list("shape");
        if (shape.size() > kMaxDims)
            refuse(context.node.where, "more than " + number(kMaxDims) + " dimensions");
        walk.dims = int(shape.size());
        int64_t count = 1;
        for (int d = 0; d < walk.dims; ++d) {
            walk.shape[size_t(d)] = Node::to_integer(shape[size_t(d)], context.node.where, "shape", 1, 1 << 28);
            count *= walk.shape[size_t(d)];
            if (count > int64_t(1) << 31)
                refuse(context.node.where, "shape is too large");
        }
        const auto &strides = context.attrs.list("strides");
        if (strides.size() != operands)
            refuse(context.node.where, "expected strides of " + number(int64_t(operands)) + " operands, found " +
                                           number(int64_t(strides.size())));
        for (size_t p = 0; p < operands; ++p) {
            const auto &list = strides[p].array;
            if (strides[p].type == Json::Type::null || list.empty())
                continue; // zeros: a scalar or an absent operand
            if (strides[p].type != Json::Type::array || list.size() != shape.size())
                refuse(context.node.where, "strides must be as many as dimensions");
            for (int d = 0; d < walk.dims; ++d)
                walk.strides[p][size_t(d)] =
                    Node::to_integer(list[size_t(d)], context.node.where, "strides", 0, int64_t(1) << 31);
        }
    }

    // The farthest element operand `p` reaches must lie inside it. `axis` may have another extent for it.
    void check_reach(const Context &context, size_t p, const Operand &operand, int axis = -1, int64_t extent = 0) const {
        if (!operand.present())
            return;
        const Walk &walk = context.code.walk;
        int64_t reach = 0;
        for (int d = 0; d < walk.dims; ++d)
            reach += ((d == axis ? extent : walk.shape[size_t(d)]) - 1) * walk.strides[p][size_t(d)];
        if (operand.source != Operand::Source::scalar && reach >= operand.width)
            refuse(context.node.where, "operand " + number(int64_t(p)) + " reaches element " + number(reach) +
                                           " of " + number(operand.width));
        if (operand.source == Operand::Source::scalar && reach != 0)
            refuse(context.node.where, "a scalar has strides of 0");
    }

    void expect_type(const Context &context, const Operand &operand, const char *what, DType dtype) const {
        if (operand.present() && operand.source != Operand::Source::scalar && operand.dtype != dtype)
            refuse(context.node.where, std::string(what) + " must be " + (dtype == DType::f32 ? "f32" : "i32"));
    }

    // An operand is written where it is read only if both walk it alike.
    void apart_generic(const Context &context) const {
        const Instruction &code = context.code;
        apart(context, true);
        for (size_t o = 0; o < code.out.size(); ++o)
            for (size_t i = 0; i < code.in.size(); ++i)
                if (overlap(code.out[o], code.in[i]) &&
                    code.walk.strides[i] != code.walk.strides[code.in.size() + o])
                    refuse(context.node.where, "an output overlaps an input that is walked differently");
    }
    // A position must be written once: distinct positions of the walk lie in distinct elements.
    void check_injective(const Context &context, size_t p, const std::vector<int> &skip = {}) const {
        const Walk &walk = context.code.walk;
        std::vector<std::pair<int64_t, int64_t>> dims; // stride, extent
        for (int d = 0; d < walk.dims; ++d)
            if (walk.shape[size_t(d)] > 1 && std::find(skip.begin(), skip.end(), d) == skip.end())
                dims.emplace_back(walk.strides[p][size_t(d)], walk.shape[size_t(d)]);
        std::sort(dims.begin(), dims.end());
        int64_t reach = 0;
        for (const auto &[stride, extent] : dims) {
            if (stride <= reach)
                refuse(context.node.where, "an output's elements are written more than once");
            reach += stride * (extent - 1);
        }
    }

    int parse_axis(const Context &context, const Json &json) const {
        return int(Node::to_integer(json, context.node.where, "axis", 0, int64_t(context.code.walk.dims) - 1));
    }

    void check_generic(Context &context) {
        Instruction &code = context.code;
        const Node &attrs = context.attrs;
        const std::string &where = context.node.where;
        if (!code.weights.empty())
            refuse(where, "a generic op takes weights as operands");
        if (code.in.size() + code.out.size() > kMaxOperands)
            refuse(where, "too many operands");
        for (const Operand &input : code.in)
            if ((input.source == Operand::Source::tokens || input.source == Operand::Source::positions) &&
                code.rows != RowKind::tokens)
                refuse(where, "tokens and positions do not belong to logit rows");
        for (const Operand &input : code.in)
            if (!input.present())
                refuse(where, "an input is missing");
        parse_walk(context, code.in.size() + code.out.size());
        const size_t first_out = code.in.size();
        bool any_out = false;
        for (const Operand &output : code.out)
            any_out |= output.present();
        if (!any_out)
            refuse(where, "has no output");

        switch (code.op) {
        case Op::elementwise: {
            code.kind = -1;
            const std::string name = attrs.text("kind");
            for (int i = 0; i < int(Elementwise::count); ++i)
                if (name == kElementwise[i].name)
                    code.kind = i;
            if (code.kind < 0)
                refuse(where, "unknown kind '" + name + "'");
            const ElementwiseRule &rule = kElementwise[code.kind];
            operands(context, size_t(rule.inputs), size_t(rule.inputs), 1, 1, 0);
            bool real = false, typed = false;
            const size_t first = rule.type == ElementwiseRule::Type::where ? 1 : 0;
            for (size_t i = first; i < code.in.size(); ++i) {
                const bool scalar = code.in[i].source == Operand::Source::scalar;
                typed |= !scalar;
                real |= !scalar && code.in[i].dtype == DType::f32;
                real |= scalar && code.in[i].scalar != std::floor(code.in[i].scalar);
            }
            DType result = real || (!typed && code.out[0].dtype == DType::f32) ? DType::f32 : DType::i32;
            if (rule.type == ElementwiseRule::Type::f32)
                result = DType::f32;
            if (rule.type == ElementwiseRule::Type::i32 && result != DType::i32)
                refuse(where, name + " works on i32");
            if (first == 1)
                expect_type(context, code.in[0], "the condition", DType::i32);
            // The type the op computes in; scalars take it.
            for (Operand &input : code.in)
                if (input.source == Operand::Source::scalar)
                    input.dtype = result;
            if (first == 1 && code.in[0].source == Operand::Source::scalar)
                code.in[0].dtype = DType::i32;
            code.k = result == DType::f32 ? 0 : 1;
            const bool to_i32 = rule.type == ElementwiseRule::Type::to_i32;
            expect_type(context, code.out[0], "the output", to_i32 ? DType::i32 : result);
            break;
        }
        case Op::copy:
            operands(context, 1, 1, 1, 1, 0);
            if (code.in[0].source == Operand::Source::scalar)
                code.in[0].dtype = code.out[0].dtype;
            break;
        case Op::reduce: {
            code.kind = attrs.choice("kind", kReductions);
            const bool dot = code.kind == int(Reduction::dot);
            operands(context, dot ? 2 : 1, dot ? 2 : 1, 1, 1, 0);
            std::set<int> seen;
            for (const Json &entry : attrs.list("axes"))
                if (!seen.insert(parse_axis(context, entry)).second)
                    refuse(where, "an axis is named twice");
            code.axes.assign(seen.begin(), seen.end());
            for (int axis : code.axes)
                if (code.walk.strides[first_out][size_t(axis)] != 0 && code.walk.shape[size_t(axis)] > 1)
                    refuse(where, "the output's stride along a reduced axis is 0");
            const auto kind = Reduction(code.kind);
            const bool index = kind == Reduction::argmax || kind == Reduction::argmin;
            if (index && code.axes.size() != 1)
                refuse(where, "argmax and argmin take one axis");
            if (index || kind == Reduction::any || kind == Reduction::all)
                expect_type(context, code.out[0], "the output", DType::i32);
            else if (kind == Reduction::mean || dot)
                expect_type(context, code.out[0], "the output", DType::f32);
            else
                expect_type(context, code.out[0], "the output", code.in[0].dtype);
            if (code.in[0].source == Operand::Source::scalar)
                refuse(where, "cannot reduce a scalar");
            check_reach(context, first_out, code.out[0]);
            for (size_t i = 0; i < code.in.size(); ++i)
                check_reach(context, i, code.in[i]);
            check_injective(context, first_out, code.axes);
            return apart(context, false);
        }
        case Op::softmax:
            operands(context, 1, 1, 1, 1, 0);
            code.axis = parse_axis(context, attrs.get("axis"));
            code.log = attrs.flag_or("log", false);
            expect_type(context, code.in[0], "the input", DType::f32);
            expect_type(context, code.out[0], "the output", DType::f32);
            break;
        case Op::cumulate:
            operands(context, 1, 1, 1, 1, 0);
            code.axis = parse_axis(context, attrs.get("axis"));
            code.kind = attrs.choice("kind", kCumulations);
            if (code.kind == int(Reduction::mean))
                refuse(where, "unknown kind 'mean'; known: sum, prod");
            if (code.in[0].source == Operand::Source::scalar)
                code.in[0].dtype = code.out[0].dtype;
            expect_type(context, code.out[0], "the output", code.in[0].dtype);
            break;
        case Op::topk: {
            operands(context, 1, 1, 1, 2, 0);
            code.axis = parse_axis(context, attrs.get("axis"));
            code.extent = code.walk.shape[size_t(code.axis)];
            code.k = attrs.integer("k", 1, code.extent);
            code.largest = attrs.flag_or("largest", true);
            if (code.in[0].source == Operand::Source::scalar)
                refuse(where, "cannot sort a scalar");
            expect_type(context, code.out[0], "the values", code.in[0].dtype);
            if (code.out.size() == 2)
                expect_type(context, code.out[1], "the indices", DType::i32);
            check_reach(context, 0, code.in[0]);
            const int64_t extent = code.walk.shape[size_t(code.axis)];
            code.walk.shape[size_t(code.axis)] = code.k;
            for (size_t o = 0; o < code.out.size(); ++o)
                if (code.out[o].present()) {
                    check_reach(context, first_out + o, code.out[o]);
                    check_injective(context, first_out + o);
                }
            code.walk.shape[size_t(code.axis)] = extent;
            return apart(context, false);
        }
        case Op::gather:
            operands(context, 2, 2, 1, 1, 0);
            code.axis = parse_axis(context, attrs.get("axis"));
            code.extent = attrs.integer("extent", 1, 1 << 28);
            expect_type(context, code.in[1], "the index", DType::i32);
            if (code.in[0].source == Operand::Source::scalar || code.in[1].source == Operand::Source::scalar)
                refuse(where, "a scalar cannot be gathered");
            expect_type(context, code.out[0], "the output", code.in[0].dtype);
            check_reach(context, 0, code.in[0], code.axis, code.extent);
            check_reach(context, 1, code.in[1]);
            check_reach(context, first_out, code.out[0]);
            check_injective(context, first_out);
            return apart(context, false);
        case Op::scatter:
            operands(context, 2, 2, 1, 1, 0);
            code.axis = parse_axis(context, attrs.get("axis"));
            code.extent = attrs.integer("extent", 1, 1 << 28);
            code.kind = attrs.choice("kind", kScatters);
            expect_type(context, code.in[0], "the index", DType::i32);
            if (code.in[0].source == Operand::Source::scalar)
                refuse(where, "the index cannot be a scalar");
            if (code.in[1].source == Operand::Source::scalar)
                code.in[1].dtype = code.out[0].dtype;
            expect_type(context, code.in[1], "the source", code.out[0].dtype);
            check_reach(context, 0, code.in[0]);
            check_reach(context, 1, code.in[1]);
            check_reach(context, first_out, code.out[0], code.axis, code.extent);
            return apart(context, false);
        default: refuse(where, "not a generic op");
        }
        for (size_t i = 0; i < code.in.size(); ++i)
            check_reach(context, i, code.in[i]);
        for (size_t o = 0; o < code.out.size(); ++o) {
            check_reach(context, first_out + o, code.out[o]);
            check_injective(context, first_out + o);
        }
        apart_generic(context);
    }

    void parse_output() {
        program_.output = operand(root_.get("output"), "output", false);
        const Operand &output = program_.output;
        if (output.source != Operand::Source::value || output.dtype != DType::f32 ||
            rows_of(output) != RowKind::logits || output.width != program_.vocab_size)
            refuse("output", "must be an f32 value of logit rows, " + number(program_.vocab_size) + " wide");
    }
};

} // namespace

const ElementwiseRule &elementwise_rule(Elementwise kind) { return kElementwise[size_t(kind)]; }

Program parse_program(const std::string &json, int64_t weights_bytes) {
    const Json document = JsonReader::parse(json);
    return Parser(document, weights_bytes).parse();
}

} // namespace ew
