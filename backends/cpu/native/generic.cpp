#include "generic.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace ew {
namespace {

constexpr int kBlock = 128; // elements that an elementwise op loads, computes and stores at a time

// ---- scalar functions, with torch's conventions where those are visible ------------------------------------------

// Two's complement arithmetic that wraps.
inline int32_t wrap(uint32_t x) { return int32_t(x); }
inline int32_t wrap64(int64_t x) { return int32_t(uint32_t(uint64_t(x))); }

inline int32_t to_int(float x) { // as the processor's truncating conversion
    return x >= -2147483648.0f && x < 2147483648.0f ? int32_t(x) : std::numeric_limits<int32_t>::min();
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float gelu(float x) { return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f)); }
inline float gelu_tanh(float x) {
    return 0.5f * x * (1.0f + std::tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}
inline float clip(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

inline float floor_divide(float a, float b) {
    if (b == 0)
        return a / b;
    const float rest = std::fmod(a, b);
    float quotient = (a - rest) / b;
    if (rest != 0 && (b < 0) != (rest < 0))
        quotient -= 1;
    if (quotient == 0)
        return std::copysign(0.0f, a / b);
    const float whole = std::floor(quotient);
    return quotient - whole > 0.5f ? whole + 1 : whole;
}
inline int32_t floor_divide(int32_t a, int32_t b) {
    if (b == 0)
        return 0;
    const int64_t quotient = int64_t(a) / b, rest = int64_t(a) % b;
    return wrap64(quotient - (rest != 0 && (rest < 0) != (b < 0)));
}
inline float remainder(float a, float b) {
    const float rest = std::fmod(a, b);
    return rest != 0 && (b < 0) != (rest < 0) ? rest + b : rest;
}
inline int32_t remainder(int32_t a, int32_t b) {
    if (b == 0)
        return 0;
    const int64_t rest = int64_t(a) % b;
    return int32_t(rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest);
}
inline float truncated_remainder(float a, float b) { return std::fmod(a, b); }
inline int32_t truncated_remainder(int32_t a, int32_t b) { return b == 0 ? 0 : int32_t(int64_t(a) % b); }

// NaN wins in minimum and maximum.
inline float minimum(float a, float b) { return a != a || a < b ? a : b; }
inline float maximum(float a, float b) { return a != a || a > b ? a : b; }
inline int32_t minimum(int32_t a, int32_t b) { return a < b ? a : b; }
inline int32_t maximum(int32_t a, int32_t b) { return a > b ? a : b; }

inline float add(float a, float b) { return a + b; }
inline float sub(float a, float b) { return a - b; }
inline float mul(float a, float b) { return a * b; }
inline int32_t add(int32_t a, int32_t b) { return wrap(uint32_t(a) + uint32_t(b)); }
inline int32_t sub(int32_t a, int32_t b) { return wrap(uint32_t(a) - uint32_t(b)); }
inline int32_t mul(int32_t a, int32_t b) { return wrap(uint32_t(a) * uint32_t(b)); }

// ---- elementwise ----------------------------------------------------------------------------------------------------

template <class T, class Out, class F> void map1(F f, const T *a, Out *y, int n) {
    for (int i = 0; i < n; ++i)
        y[i] = Out(f(a[i]));
}
template <class T, class Out, class F> void map2(F f, const T *a, const T *b, Out *y, int n) {
    for (int i = 0; i < n; ++i)
        y[i] = Out(f(a[i], b[i]));
}

// Kinds that exist for both types. Returns false for any other.
template <class T> bool apply_common(Elementwise kind, const T *a, const T *b, const T *c, T *y, int32_t *yi, int n) {
    using K = Elementwise;
    switch (kind) {
    case K::neg: map1([](T x) { return sub(T(0), x); }, a, y, n); return true;
    case K::abs: map1([](T x) { return x < 0 ? sub(T(0), x) : x; }, a, y, n); return true;
    case K::sign: map1([](T x) { return T((x > 0) - (x < 0)); }, a, y, n); return true;
    case K::square: map1([](T x) { return mul(x, x); }, a, y, n); return true;
    case K::logical_not: map1([](T x) { return x == 0; }, a, yi, n); return true;
    case K::add: map2([](T p, T q) { return add(p, q); }, a, b, y, n); return true;
    case K::sub: map2([](T p, T q) { return sub(p, q); }, a, b, y, n); return true;
    case K::mul: map2([](T p, T q) { return mul(p, q); }, a, b, y, n); return true;
    case K::minimum: map2([](T p, T q) { return minimum(p, q); }, a, b, y, n); return true;
    case K::maximum: map2([](T p, T q) { return maximum(p, q); }, a, b, y, n); return true;
    case K::floor_divide: map2([](T p, T q) { return floor_divide(p, q); }, a, b, y, n); return true;
    case K::remainder: map2([](T p, T q) { return remainder(p, q); }, a, b, y, n); return true;
    case K::fmod: map2([](T p, T q) { return truncated_remainder(p, q); }, a, b, y, n); return true;
    case K::eq: map2([](T p, T q) { return p == q; }, a, b, yi, n); return true;
    case K::ne: map2([](T p, T q) { return p != q; }, a, b, yi, n); return true;
    case K::lt: map2([](T p, T q) { return p < q; }, a, b, yi, n); return true;
    case K::le: map2([](T p, T q) { return p <= q; }, a, b, yi, n); return true;
    case K::gt: map2([](T p, T q) { return p > q; }, a, b, yi, n); return true;
    case K::ge: map2([](T p, T q) { return p >= q; }, a, b, yi, n); return true;
    case K::logical_and: map2([](T p, T q) { return p != 0 && q != 0; }, a, b, yi, n); return true;
    case K::logical_or: map2([](T p, T q) { return p != 0 || q != 0; }, a, b, yi, n); return true;
    case K::logical_xor: map2([](T p, T q) { return (p != 0) != (q != 0); }, a, b, yi, n); return true;
    case K::clamp:
        for (int i = 0; i < n; ++i)
            y[i] = minimum(maximum(a[i], b[i]), c[i]);
        return true;
    case K::fma:
        for (int i = 0; i < n; ++i)
            y[i] = add(mul(a[i], b[i]), c[i]);
        return true;
    default: return false;
    }
}

void apply_f32(Elementwise kind, const float *a, const float *b, const float *c, float *y, int32_t *yi, int n) {
    using K = Elementwise;
    if (apply_common<float>(kind, a, b, c, y, yi, n))
        return;
#define EW_MAP(name, expression) \
    case K::name: map1([](float x) -> float { return expression; }, a, y, n); return
    switch (kind) {
        EW_MAP(exp, std::exp(x));
        EW_MAP(exp2, std::exp2(x));
        EW_MAP(expm1, std::expm1(x));
        EW_MAP(log, std::log(x));
        EW_MAP(log2, std::log2(x));
        EW_MAP(log10, std::log10(x));
        EW_MAP(log1p, std::log1p(x));
        EW_MAP(sqrt, std::sqrt(x));
        EW_MAP(rsqrt, 1.0f / std::sqrt(x));
        EW_MAP(reciprocal, 1.0f / x);
        EW_MAP(sin, std::sin(x));
        EW_MAP(cos, std::cos(x));
        EW_MAP(tan, std::tan(x));
        EW_MAP(asin, std::asin(x));
        EW_MAP(acos, std::acos(x));
        EW_MAP(atan, std::atan(x));
        EW_MAP(sinh, std::sinh(x));
        EW_MAP(cosh, std::cosh(x));
        EW_MAP(tanh, std::tanh(x));
        EW_MAP(sigmoid, sigmoid(x));
        EW_MAP(erf, std::erf(x));
        EW_MAP(relu, x < 0 ? 0.0f : x);
        EW_MAP(relu2, x < 0 ? 0.0f : x * x);
        EW_MAP(silu, x / (1.0f + std::exp(-x)));
        EW_MAP(gelu, gelu(x));
        EW_MAP(gelu_tanh, gelu_tanh(x));
        EW_MAP(softplus, softplus(x));
        EW_MAP(elu, x > 0 ? x : std::expm1(x));
        EW_MAP(mish, x * std::tanh(softplus(x)));
        EW_MAP(hardswish, x * clip(x + 3.0f, 0.0f, 6.0f) / 6.0f);
        EW_MAP(hardsigmoid, clip(x + 3.0f, 0.0f, 6.0f) / 6.0f);
        EW_MAP(log_sigmoid, (x < 0 ? x : 0.0f) - std::log1p(std::exp(-std::abs(x))));
        EW_MAP(floor, std::floor(x));
        EW_MAP(ceil, std::ceil(x));
        EW_MAP(round, std::nearbyint(x));
        EW_MAP(trunc, std::trunc(x));
    case K::isnan: map1([](float x) { return x != x; }, a, yi, n); return;
    case K::isinf: map1([](float x) { return std::isinf(x); }, a, yi, n); return;
    case K::div: map2([](float p, float q) { return p / q; }, a, b, y, n); return;
    case K::pow: map2([](float p, float q) { return std::pow(p, q); }, a, b, y, n); return;
    case K::atan2: map2([](float p, float q) { return std::atan2(p, q); }, a, b, y, n); return;
    case K::lerp:
        for (int i = 0; i < n; ++i)
            y[i] = a[i] + c[i] * (b[i] - a[i]);
        return;
    default: return;
    }
#undef EW_MAP
}

void apply_i32(Elementwise kind, const int32_t *a, const int32_t *b, const int32_t *c, int32_t *y, int n) {
    using K = Elementwise;
    if (apply_common<int32_t>(kind, a, b, c, y, y, n))
        return;
    switch (kind) {
    case K::bitwise_not: map1([](int32_t x) { return ~x; }, a, y, n); return;
    case K::isnan:
    case K::isinf: map1([](int32_t) { return 0; }, a, y, n); return;
    case K::bitwise_and: map2([](int32_t p, int32_t q) { return p & q; }, a, b, y, n); return;
    case K::bitwise_or: map2([](int32_t p, int32_t q) { return p | q; }, a, b, y, n); return;
    case K::bitwise_xor: map2([](int32_t p, int32_t q) { return p ^ q; }, a, b, y, n); return;
    case K::shift_left: map2([](int32_t p, int32_t q) { return wrap(uint32_t(p) << (q & 31)); }, a, b, y, n); return;
    case K::shift_right: map2([](int32_t p, int32_t q) { return p >> (q & 31); }, a, b, y, n); return;
    default: return;
    }
}

// n elements, `stride` apart, of either type, as T.
template <class T> void load(const Pointer &source, DType dtype, int64_t offset, int64_t stride, int n, T *block) {
    auto convert = [](auto x) {
        if constexpr (std::is_same_v<decltype(x), float> && std::is_same_v<T, int32_t>)
            return to_int(x);
        else
            return T(x);
    };
    auto walk = [&](const auto *x) {
        if (stride == 1)
            for (int i = 0; i < n; ++i)
                block[i] = convert(x[i]);
        else if (stride == 0)
            std::fill_n(block, n, convert(*x));
        else
            for (int i = 0; i < n; ++i)
                block[i] = convert(x[i * stride]);
    };
    if (dtype == DType::f32)
        walk(source.f32 + offset);
    else
        walk(source.i32 + offset);
}
template <class T> void store(T *target, int64_t stride, int n, const T *block) {
    if (stride == 1)
        std::copy_n(block, n, target);
    else
        for (int i = 0; i < n; ++i)
            target[i * stride] = block[i];
}

// Walks dimensions [0, dims) of a Walk (all, but the ones in `skip`), keeping each operand's offset.
struct Odometer {
    const Walk &walk;
    int operands;
    int dims[kMaxDims];
    int count = 0;
    int64_t at[kMaxDims] = {};
    int64_t offset[kMaxOperands] = {};

    Odometer(const Walk &walk_, int operands_, uint32_t skip) : walk(walk_), operands(operands_) {
        for (int d = 0; d < walk.dims; ++d)
            if (!(skip >> d & 1))
                dims[count++] = d;
    }
    // To the next position in row-major order; false past the last, and all offsets are 0 again.
    bool next() {
        for (int i = count - 1; i >= 0; --i) {
            const int d = dims[i];
            if (++at[i] < walk.shape[size_t(d)]) {
                for (int p = 0; p < operands; ++p)
                    offset[p] += walk.strides[size_t(p)][size_t(d)];
                return true;
            }
            for (int p = 0; p < operands; ++p)
                offset[p] -= (walk.shape[size_t(d)] - 1) * walk.strides[size_t(p)][size_t(d)];
            at[i] = 0;
        }
        return false;
    }
};

// Calls body(offsets, strides, n) for every innermost run.
template <class Body> void for_runs(const Walk &walk, int operands, Body body) {
    int64_t strides[kMaxOperands] = {};
    if (walk.dims == 0) {
        int64_t offsets[kMaxOperands] = {};
        return body(offsets, strides, int64_t(1));
    }
    const int inner = walk.dims - 1;
    for (int p = 0; p < operands; ++p)
        strides[p] = walk.strides[size_t(p)][size_t(inner)];
    Odometer outer(walk, operands, 1u << inner);
    do
        body(outer.offset, strides, walk.shape[size_t(inner)]);
    while (outer.next());
}

void run_elementwise(const Instruction &code, const Pointer *operands) {
    const auto kind = Elementwise(code.kind);
    const int inputs = int(code.in.size());
    const bool integer = code.k == 1, condition = kind == Elementwise::where;
    const DType out_type = code.out[0].dtype;
    const Pointer out = operands[inputs];
    for_runs(code.walk, inputs + 1, [&](const int64_t *offsets, const int64_t *strides, int64_t n) {
        alignas(64) float real[3][kBlock], real_out[kBlock];
        alignas(64) int32_t whole[3][kBlock], whole_out[kBlock];
        for (int64_t start = 0; start < n; start += kBlock) {
            const int m = int(std::min<int64_t>(kBlock, n - start));
            for (int i = 0; i < inputs; ++i) {
                const int64_t at = offsets[i] + start * strides[i];
                if (integer || (condition && i == 0))
                    load(operands[i], code.in[size_t(i)].dtype, at, strides[i], m, whole[i]);
                else
                    load(operands[i], code.in[size_t(i)].dtype, at, strides[i], m, real[i]);
            }
            if (condition && integer)
                for (int i = 0; i < m; ++i)
                    whole_out[i] = whole[0][i] ? whole[1][i] : whole[2][i];
            else if (condition)
                for (int i = 0; i < m; ++i)
                    real_out[i] = whole[0][i] ? real[1][i] : real[2][i];
            else if (integer)
                apply_i32(kind, whole[0], whole[1], whole[2], whole_out, m);
            else
                apply_f32(kind, real[0], real[1], real[2], real_out, whole_out, m);
            const int64_t at = offsets[inputs] + start * strides[inputs];
            if (out_type == DType::f32)
                store(out.f32 + at, strides[inputs], m, real_out);
            else
                store(out.i32 + at, strides[inputs], m, whole_out);
        }
    });
}

void run_copy(const Instruction &code, const Pointer *operands) {
    const DType from = code.in[0].dtype, to = code.out[0].dtype;
    for_runs(code.walk, 2, [&](const int64_t *offsets, const int64_t *strides, int64_t n) {
        if (from == to && strides[0] == 1 && strides[1] == 1) {
            std::memmove(operands[1].f32 + offsets[1], operands[0].f32 + offsets[0], size_t(n) * 4);
            return;
        }
        alignas(64) float real[kBlock];
        alignas(64) int32_t whole[kBlock];
        for (int64_t start = 0; start < n; start += kBlock) {
            const int m = int(std::min<int64_t>(kBlock, n - start));
            const int64_t source = offsets[0] + start * strides[0], target = offsets[1] + start * strides[1];
            if (to == DType::f32) {
                load(operands[0], from, source, strides[0], m, real);
                store(operands[1].f32 + target, strides[1], m, real);
            } else {
                load(operands[0], from, source, strides[0], m, whole);
                store(operands[1].i32 + target, strides[1], m, whole);
            }
        }
    });
}

// ---- reductions -----------------------------------------------------------------------------------------------------

// The best of a sequence: NaN beats everything, the first of equals stays.
template <class T> bool better(T x, T best, bool largest) {
    if (x != x)
        return best == best;
    return best == best && (largest ? x > best : x < best);
}

double as_double(const Pointer &operand, DType dtype, int64_t at) {
    return dtype == DType::f32 ? double(operand.f32[at]) : double(operand.i32[at]);
}

template <class T>
void reduce_one(const Instruction &code, const Pointer *operands, const int64_t *outer, Odometer inner) {
    const auto kind = Reduction(code.kind);
    const int out = int(code.in.size());
    const T *x = static_cast<const T *>(operands[0].any) + outer[0];
    const int64_t target = outer[out];
    int64_t count = 0, best_at = 0;
    switch (kind) {
    case Reduction::sum:
    case Reduction::mean:
    case Reduction::prod: {
        double real = kind == Reduction::prod ? 1 : 0;
        uint64_t whole = kind == Reduction::prod ? 1 : 0;
        do {
            const T value = x[inner.offset[0]];
            if constexpr (std::is_same_v<T, int32_t>)
                whole = kind == Reduction::prod ? whole * uint64_t(int64_t(value)) : whole + uint64_t(int64_t(value));
            else
                real = kind == Reduction::prod ? real * double(value) : real + double(value);
            ++count;
        } while (inner.next());
        if (std::is_same_v<T, int32_t> && kind != Reduction::mean)
            operands[out].i32[target] = wrap64(int64_t(whole));
        else if (kind == Reduction::mean)
            operands[out].f32[target] =
                float((std::is_same_v<T, int32_t> ? double(int64_t(whole)) : real) / double(count));
        else
            operands[out].f32[target] = float(real);
        return;
    }
    case Reduction::dot: {
        double sum = 0;
        do
            sum += as_double(operands[0], code.in[0].dtype, outer[0] + inner.offset[0]) *
                   as_double(operands[1], code.in[1].dtype, outer[1] + inner.offset[1]);
        while (inner.next());
        operands[out].f32[target] = float(sum);
        return;
    }
    case Reduction::any:
    case Reduction::all: {
        bool any = false, all = true;
        do {
            const bool set = x[inner.offset[0]] != 0;
            any |= set;
            all &= set;
        } while (inner.next());
        operands[out].i32[target] = kind == Reduction::any ? any : all;
        return;
    }
    default: {
        const bool largest = kind == Reduction::max || kind == Reduction::argmax;
        T best = x[0];
        do {
            if (better(x[inner.offset[0]], best, largest)) {
                best = x[inner.offset[0]];
                best_at = count;
            }
            ++count;
        } while (inner.next());
        if (kind == Reduction::argmax || kind == Reduction::argmin)
            operands[out].i32[target] = int32_t(best_at);
        else
            static_cast<T *>(operands[out].any)[target] = best;
    }
    }
}

void run_reduce(const Instruction &code, const Pointer *operands) {
    uint32_t reduced = 0;
    for (int axis : code.axes)
        reduced |= 1u << axis;
    const int count = int(code.in.size()) + 1;
    Odometer outer(code.walk, count, reduced);
    const Odometer inner(code.walk, count - 1, ~reduced);
    do {
        if (code.in[0].dtype == DType::f32)
            reduce_one<float>(code, operands, outer.offset, inner);
        else
            reduce_one<int32_t>(code, operands, outer.offset, inner);
    } while (outer.next());
}

// ---- along one axis ---------------------------------------------------------------------------------------------------

void run_softmax(const Instruction &code, const Pointer *operands) {
    const size_t axis = size_t(code.axis);
    const int64_t n = code.walk.shape[axis], sx = code.walk.strides[0][axis], sy = code.walk.strides[1][axis];
    Odometer outer(code.walk, 2, 1u << axis);
    do {
        const float *x = operands[0].f32 + outer.offset[0];
        float *y = operands[1].f32 + outer.offset[1];
        float largest = x[0];
        for (int64_t i = 1; i < n; ++i)
            largest = maximum(largest, x[i * sx]);
        double sum = 0;
        if (code.log) {
            for (int64_t i = 0; i < n; ++i)
                sum += double(std::exp(x[i * sx] - largest));
            const float shift = largest + float(std::log(sum));
            for (int64_t i = 0; i < n; ++i)
                y[i * sy] = x[i * sx] - shift;
        } else {
            for (int64_t i = 0; i < n; ++i) {
                y[i * sy] = std::exp(x[i * sx] - largest);
                sum += double(y[i * sy]);
            }
            const float total = float(sum);
            for (int64_t i = 0; i < n; ++i)
                y[i * sy] /= total;
        }
    } while (outer.next());
}

template <class T> void run_cumulate(const Instruction &code, const Pointer *operands) {
    const size_t axis = size_t(code.axis);
    const int64_t n = code.walk.shape[axis], sx = code.walk.strides[0][axis], sy = code.walk.strides[1][axis];
    const bool product = Reduction(code.kind) == Reduction::prod;
    Odometer outer(code.walk, 2, 1u << axis);
    do {
        const T *x = static_cast<const T *>(operands[0].any) + outer.offset[0];
        T *y = static_cast<T *>(operands[1].any) + outer.offset[1];
        using Sum = std::conditional_t<std::is_same_v<T, float>, double, uint32_t>;
        Sum sum = product ? Sum(1) : Sum(0);
        for (int64_t i = 0; i < n; ++i) {
            sum = product ? sum * Sum(x[i * sx]) : sum + Sum(x[i * sx]);
            y[i * sy] = T(sum);
        }
    } while (outer.next());
}

template <class T> void run_topk(const Instruction &code, const Pointer *operands, void *scratch) {
    const size_t axis = size_t(code.axis);
    const int64_t n = code.extent, k = code.k;
    const bool indices = code.out.size() == 2 && code.out[1].present();
    auto *order = static_cast<int32_t *>(scratch);
    const int count = 1 + int(code.out.size());
    Odometer outer(code.walk, count, 1u << axis);
    do {
        const T *x = static_cast<const T *>(operands[0].any) + outer.offset[0];
        const int64_t stride = code.walk.strides[0][axis];
        for (int64_t i = 0; i < n; ++i)
            order[i] = int32_t(i);
        // A strict order without ties, so that the result does not depend on how it is found.
        std::partial_sort(order, order + k, order + n, [&](int32_t i, int32_t j) {
            const T a = x[i * stride], b = x[j * stride];
            const bool a_nan = a != a, b_nan = b != b;
            if (a_nan != b_nan)
                return a_nan == code.largest;
            if (a != b && !a_nan)
                return code.largest ? a > b : a < b;
            return i < j;
        });
        for (int64_t i = 0; i < k; ++i) {
            if (code.out[0].present())
                static_cast<T *>(operands[1].any)[outer.offset[1] + i * code.walk.strides[1][axis]] =
                    x[order[i] * stride];
            if (indices)
                operands[2].i32[outer.offset[2] + i * code.walk.strides[2][axis]] = order[i];
        }
    } while (outer.next());
}

bool run_gather(const Instruction &code, const Pointer *operands) {
    // x's own stride along the axis is multiplied by the index instead of the position.
    Walk walk = code.walk;
    const int64_t stride = walk.strides[0][size_t(code.axis)];
    walk.strides[0][size_t(code.axis)] = 0;
    Odometer at(walk, 3, 0);
    bool good = true;
    do {
        const int32_t index = operands[1].i32[at.offset[1]];
        if (index < 0 || index >= code.extent) {
            good = false;
            continue;
        }
        operands[2].i32[at.offset[2]] = operands[0].i32[at.offset[0] + index * stride]; // bits of either type
    } while (at.next());
    return good;
}

bool run_scatter(const Instruction &code, const Pointer *operands) {
    Walk walk = code.walk;
    const int64_t stride = walk.strides[2][size_t(code.axis)];
    walk.strides[2][size_t(code.axis)] = 0;
    Odometer at(walk, 3, 0);
    const bool adds = Scatter(code.kind) == Scatter::add, real = code.out[0].dtype == DType::f32;
    bool good = true;
    do {
        const int32_t index = operands[0].i32[at.offset[0]];
        if (index < 0 || index >= code.extent) {
            good = false;
            continue;
        }
        const int64_t target = at.offset[2] + index * stride, source = at.offset[1];
        if (adds && real)
            operands[2].f32[target] += operands[1].f32[source];
        else if (adds)
            operands[2].i32[target] = add(operands[2].i32[target], operands[1].i32[source]);
        else
            operands[2].i32[target] = operands[1].i32[source];
    } while (at.next());
    return good;
}

} // namespace

void simplify(Walk &walk, int operands) {
    Walk result;
    for (int d = 0; d < walk.dims; ++d) {
        const int64_t extent = walk.shape[size_t(d)];
        if (extent == 1)
            continue;
        bool merges = result.dims > 0;
        for (int p = 0; p < operands && merges; ++p)
            merges = result.strides[size_t(p)][size_t(result.dims - 1)] == walk.strides[size_t(p)][size_t(d)] * extent;
        if (!merges)
            ++result.dims;
        const size_t last = size_t(result.dims - 1);
        result.shape[last] = merges ? result.shape[last] * extent : extent;
        for (int p = 0; p < operands; ++p)
            result.strides[size_t(p)][last] = walk.strides[size_t(p)][size_t(d)];
    }
    walk = result;
}

int64_t generic_scratch_bytes(const Instruction &code) { return code.op == Op::topk ? code.extent * 4 : 0; }

bool run_generic(const Instruction &code, const Pointer *operands, void *scratch) {
    const bool real = code.in[0].dtype == DType::f32;
    switch (code.op) {
    case Op::elementwise: run_elementwise(code, operands); return true;
    case Op::copy: run_copy(code, operands); return true;
    case Op::reduce: run_reduce(code, operands); return true;
    case Op::softmax: run_softmax(code, operands); return true;
    case Op::cumulate: real ? run_cumulate<float>(code, operands) : run_cumulate<int32_t>(code, operands); return true;
    case Op::topk: real ? run_topk<float>(code, operands, scratch) : run_topk<int32_t>(code, operands, scratch); return true;
    case Op::gather: return run_gather(code, operands);
    case Op::scatter: return run_scatter(code, operands);
    default: return true;
    }
}

} // namespace ew
