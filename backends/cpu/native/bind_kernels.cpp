// Python bindings of the linear and row kernels, for tests and benchmarks: `_native.kernels`. Every function takes the name
// of an ISA variant first; shapes are checked here because the kernels trust their caller.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

#include "kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ew {
namespace {

template <class T, int Dimensions>
using Array = nb::ndarray<T, nb::numpy, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;
template <int Dimensions>
using Floats = Array<float, Dimensions>;
template <int Dimensions>
using ConstFloats = Array<const float, Dimensions>;
using Bytes = Array<const uint8_t, 1>;
using Ids = Array<const int32_t, 1>;

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

const Kernels& table(const std::string& isa) {
  const Kernels* found = kernels_by_name(isa.c_str());
  if (found == nullptr) throw std::invalid_argument("this machine has no kernels named " + isa);
  return *found;
}

/// The weight of these names: `activation` empty for the format's default.
LinearWeight parse_weight(const std::string& format, const std::string& activation, float scale, int64_t n, int64_t k,
                          const uint8_t* data) {
  WeightFormat weight;
  if (!parse_weight_format(format.c_str(), weight)) throw std::invalid_argument("no weight format named " + format);
  ActivationFormat rounding = default_activation(weight);
  if (!activation.empty() && !parse_activation_format(activation.c_str(), rounding)) {
    throw std::invalid_argument("no activation format named " + activation);
  }
  require(activation_fits(weight, rounding), "the weight does not take this activation format");
  rounding.scale = scale;
  return make_linear_weight(weight, rounding, n, k, data);
}

/// Bytes at a cache line's start, as the kernels require of weights and prepared rows.
class AlignedBytes {
 public:
  explicit AlignedBytes(size_t size) : data_(static_cast<uint8_t*>(::operator new(size, std::align_val_t{64}))) {}
  uint8_t* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(uint8_t* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<uint8_t, Free> data_;
};

/// A packed weight that owns a copy of its bytes.
struct Weight {
  AlignedBytes bytes;
  std::vector<int32_t> columns, keep;
  LinearWeight view;

  Weight(const std::string& format, int64_t n, int64_t k, const Bytes& data, const std::string& activation,
         float activation_scale, std::vector<int32_t> outliers)
      : bytes(data.size()),
        columns(std::move(outliers)),
        view(parse_weight(format, activation, activation_scale, n, k, bytes.get())) {
    if (!columns.empty()) {
      require(takes_outliers(view.format), "only int8 weights keep columns apart");
      keep.assign(static_cast<size_t>(k), -1);
      for (size_t i = 0; i < columns.size(); i++) {
        require(0 <= columns[i] && columns[i] < k && (i == 0 || columns[i - 1] < columns[i]), "columns must ascend");
        keep[static_cast<size_t>(columns[i])] = 0;
      }
      set_outliers(view, columns.data(), static_cast<int64_t>(columns.size()), keep.data());
    }
    require(static_cast<int64_t>(data.size()) == linear_weight_bytes(view), "data has the wrong number of bytes");
    std::memcpy(bytes.get(), data.data(), data.size());
  }
  Weight(const Weight&) = delete;  // the view points into the vectors
};

/// Rows that `prepare` wrote.
struct Prepared {
  AlignedBytes bytes;
  int64_t rows, row_bytes;
};

Prepared prepare(const std::string& isa, const Weight& weight, const ConstFloats<2>& x) {
  const Kernels& kernels = table(isa);
  require(static_cast<int64_t>(x.shape(1)) >= weight.view.k, "x has fewer columns than the weight");
  const int64_t rows = static_cast<int64_t>(x.shape(0)), row_bytes = kernels.prepared_row_bytes(weight.view);
  Prepared prepared{AlignedBytes(rows * row_bytes), rows, row_bytes};
  std::memset(prepared.bytes.get(), 0xff, rows * row_bytes);  // NaN wherever prepare leaves something unwritten
  kernels.prepare(weight.view, x.data(), static_cast<int64_t>(x.shape(1)), rows, prepared.bytes.get());
  return prepared;
}

void linear(const std::string& isa, const Weight& weight, const Prepared& prepared, Floats<2> y,
            const std::optional<ConstFloats<1>>& bias, int64_t row0, int64_t row1, int64_t tile0, int64_t tile1) {
  require(0 <= row0 && row0 <= row1 && row1 <= prepared.rows && row1 <= static_cast<int64_t>(y.shape(0)), "bad rows");
  require(0 <= tile0 && tile0 <= tile1 && tile1 <= weight.view.tiles, "bad tiles");
  require(static_cast<int64_t>(y.shape(1)) >= weight.view.n, "y has fewer columns than the weight has outputs");
  require(!bias || static_cast<int64_t>(bias->size()) >= weight.view.n, "bias is shorter than the outputs");
  const int64_t ldy = static_cast<int64_t>(y.shape(1));
  table(isa).linear(weight.view, prepared.bytes.get() + row0 * prepared.row_bytes, row1 - row0, tile0, tile1,
                    bias ? bias->data() : nullptr, y.data() + row0 * ldy, ldy);
}

void embedding(const std::string& isa, const Weight& weight, const Ids& ids, float scale, Floats<2> out) {
  require(out.shape(0) == ids.size() && static_cast<int64_t>(out.shape(1)) >= weight.view.k, "out has the wrong shape");
  for (size_t i = 0; i < ids.size(); i++) require(0 <= ids(i) && ids(i) < weight.view.n, "id out of range");
  table(isa).embedding(weight.view, ids.data(), static_cast<int64_t>(ids.size()), scale, out.data(),
                       static_cast<int64_t>(out.shape(1)));
}

const float* data_or_null(const std::optional<ConstFloats<1>>& array, size_t size) {
  if (!array) return nullptr;
  require(array->size() == size, "an array has the wrong size");
  return array->data();
}
float* data_or_null(const std::optional<Floats<1>>& array, size_t size) {
  if (!array) return nullptr;
  require(array->size() == size, "an array has the wrong size");
  return array->data();
}

void rms_norm(const std::string& isa, const ConstFloats<1>& x, const std::optional<ConstFloats<1>>& residual,
              const std::optional<Floats<1>>& sum_out, const std::optional<ConstFloats<1>>& weight, float weight_offset,
              float eps, Floats<1> y) {
  const size_t dim = x.size();
  require(y.size() == dim, "y has the wrong size");
  table(isa).rms_norm(x.data(), data_or_null(residual, dim), data_or_null(sum_out, dim), data_or_null(weight, dim),
                      weight_offset, eps, static_cast<int64_t>(dim), y.data());
}

void layer_norm(const std::string& isa, const ConstFloats<1>& x, const std::optional<ConstFloats<1>>& residual,
                const std::optional<Floats<1>>& sum_out, const std::optional<ConstFloats<1>>& weight,
                const std::optional<ConstFloats<1>>& bias, float eps, Floats<1> y) {
  const size_t dim = x.size();
  require(y.size() == dim, "y has the wrong size");
  table(isa).layer_norm(x.data(), data_or_null(residual, dim), data_or_null(sum_out, dim), data_or_null(weight, dim),
                        data_or_null(bias, dim), eps, static_cast<int64_t>(dim), y.data());
}

void activation(const std::string& isa, int kind, const ConstFloats<1>& x, Floats<1> y) {
  require(y.size() == x.size(), "y has the wrong size");
  require(0 <= kind && kind < kActivationCount, "no such activation");
  table(isa).activation(kind, x.data(), y.data(), static_cast<int64_t>(x.size()));
}

void gated(const std::string& isa, int kind, const ConstFloats<1>& gate, const ConstFloats<1>& up, Floats<1> y) {
  require(y.size() == gate.size() && up.size() == gate.size(), "gate, up and y differ in size");
  require(0 <= kind && kind < kActivationCount, "no such activation");
  table(isa).gated(kind, gate.data(), up.data(), y.data(), static_cast<int64_t>(gate.size()));
}

}  // namespace

void bind_kernels(nb::module_& native) {
  nb::module_ m = native.def_submodule("kernels", "Linear and row kernels, one call each, by ISA variant.");
  nb::enum_<Activation>(m, "Activation", nb::is_arithmetic())
      .value("identity", Activation::identity)
      .value("silu", Activation::silu)
      .value("gelu", Activation::gelu)
      .value("gelu_tanh", Activation::gelu_tanh)
      .value("relu", Activation::relu)
      .value("relu2", Activation::relu2)
      .value("sigmoid", Activation::sigmoid)
      .value("tanh", Activation::tanh)
      .value("quick_gelu", Activation::quick_gelu)
      .value("exp", Activation::exp)
      .value("softplus", Activation::softplus);
  nb::class_<Weight>(m, "Weight", "A packed weight [n, k]; formats.h describes the bytes.")
      .def(nb::init<const std::string&, int64_t, int64_t, const Bytes&, const std::string&, float, std::vector<int32_t>>(),
           "format"_a, "n"_a, "k"_a, "data"_a, "activation"_a = "", "activation_scale"_a = 0.0f,
           "columns"_a = std::vector<int32_t>())
      .def_prop_ro("tiles", [](const Weight& w) { return w.view.tiles; })
      .def_prop_ro("tile_bytes", [](const Weight& w) { return w.view.tile_bytes; })
      .def_prop_ro("k_padded", [](const Weight& w) { return w.view.k_padded; })
      .def_prop_ro("group", [](const Weight& w) { return w.view.group; });
  nb::class_<Prepared>(m, "Prepared", "Activations as a linear reads them.")
      .def("rows", [](const Prepared& p) {
        return nb::ndarray<const uint8_t, nb::numpy, nb::ndim<2>>(
            p.bytes.get(), {static_cast<size_t>(p.rows), static_cast<size_t>(p.row_bytes)}, nb::find(p));
      });
  m.def("isas", &available_isas, "Variants that this machine runs, best first.");
  m.def("weight_bytes", [](const std::string& format, int64_t n, int64_t k) {
    return linear_weight_bytes(parse_weight(format, "", 0.0f, n, k, nullptr));
  });
  m.def("prepare", &prepare, "isa"_a, "weight"_a, "x"_a);
  m.def("linear", &linear, "isa"_a, "weight"_a, "prepared"_a, "y"_a, "bias"_a.none(), "row0"_a, "row1"_a, "tile0"_a,
        "tile1"_a, "Writes rows [row0, row1) and tiles [tile0, tile1) of y, and nothing else.");
  m.def("embedding", &embedding, "isa"_a, "weight"_a, "ids"_a, "scale"_a, "out"_a);
  m.def("rms_norm", &rms_norm, "isa"_a, "x"_a, "residual"_a.none(), "sum_out"_a.none(), "weight"_a.none(),
        "weight_offset"_a, "eps"_a, "y"_a);
  m.def("layer_norm", &layer_norm, "isa"_a, "x"_a, "residual"_a.none(), "sum_out"_a.none(), "weight"_a.none(),
        "bias"_a.none(), "eps"_a, "y"_a);
  m.def("activation", &activation, "isa"_a, "kind"_a, "x"_a, "y"_a);
  m.def("gated", &gated, "isa"_a, "kind"_a, "gate"_a, "up"_a, "y"_a);
}

}  // namespace ew
