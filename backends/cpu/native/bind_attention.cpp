// The attention, cache and rotary kernels and those of rows of logits for Python: `_native.attention`, for tests on numpy
// arrays and one named variant.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace nb = nanobind;

namespace ew {
namespace {

template <int Dims>
using Floats = nb::ndarray<const float, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
template <int Dims>
using Ints = nb::ndarray<const int32_t, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<uint8_t, Free>;

Bytes aligned_bytes(size_t bytes) {
  Bytes memory(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
  if (!memory) throw std::bad_alloc();
  std::memset(memory.get(), 0xff, bytes);  // NaN everywhere: what is read before it is written shows
  return memory;
}

template <class T>
nb::ndarray<nb::numpy, T> new_array(std::initializer_list<size_t> shape) {
  size_t count = 1;
  for (size_t dim : shape) count *= dim;
  T* data = new T[count]();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(data, shape, owner);
}

const AttentionKernels& variant(const std::string& name) {
  const Kernels* kernels = kernels_by_name(name.c_str());
  if (!kernels) throw std::invalid_argument("this machine has no kernels named '" + name + "'");
  return kernels->attention;
}

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

KvFormat parse_format(const std::string& name) {
  for (int format = 0; format < int(std::size(kKvFormatNames)); ++format) {
    if (name == kKvFormatNames[format]) return KvFormat(format);
  }
  throw std::invalid_argument("there is no cache format '" + name + "'");
}

/// One layer's pages.
class Pool {
 public:
  Pool(const std::string& format, int kv_heads, int key_dim, int value_dim, int page_size, int pages)
      : layout(make_kv_layout(parse_format(format), kv_heads, key_dim, value_dim, page_size)), pages(pages) {
    require(page_size == 16 || page_size == 32, "a page holds 16 or 32 tokens");
    require(kv_heads > 0 && key_dim > 0 && value_dim > 0 && pages > 0, "a pool's sizes must be positive");
    memory = aligned_bytes(layout.page_bytes * pages);
  }

  /// Every element of every page, padding included. Codes of int8 become the bytes of the value, its scales the value.
  void fill(float value) {
    const int64_t bytes = layout.page_bytes * pages;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (layout.format == KvFormat::bf16) bits = (bits >> 16) * 0x10001u;
    for (int64_t i = 0; i < bytes; i += 4) std::memcpy(memory.get() + i, &bits, 4);
  }

  void write(const std::string& isa, Ints<1> page_table, Ints<1> positions, Floats<3> k, Floats<3> v) {
    const size_t rows = positions.shape(0);
    require(k.shape(0) == rows && k.shape(1) == size_t(layout.kv_heads) && k.shape(2) == size_t(layout.key_dim),
            "k must be [rows, kv_heads, key_dim]");
    require(v.shape(0) == rows && v.shape(1) == size_t(layout.kv_heads) && v.shape(2) == size_t(layout.value_dim),
            "v must be [rows, kv_heads, value_dim]");
    const AttentionKernels& kernels = variant(isa);
    for (size_t row = 0; row < rows; ++row) {
      const int position = positions.data()[row];
      require(position >= 0 && size_t(position / layout.page_size) < page_table.shape(0),
              "a position lies outside the page table");
      const int page = page_table.data()[position / layout.page_size];
      require(page >= 0 && page < pages, "the page table names no page of the pool");
      kernels.kv_write(layout, memory.get() + page * layout.page_bytes, position % layout.page_size,
                       k.data() + row * layout.kv_heads * layout.key_dim,
                       v.data() + row * layout.kv_heads * layout.value_dim, 0, layout.kv_heads);
    }
  }

  KvLayout layout;
  int pages;
  Bytes memory;
};

nb::ndarray<nb::numpy, float> run_attention(const std::string& isa, const Pool& pool, Ints<1> page_table, Floats<3> q,
                                            Ints<1> positions, float scale, float softcap, int window,
                                            std::optional<Floats<1>> sinks, std::optional<Floats<1>> alibi,
                                            bool split) {
  const KvLayout& layout = pool.layout;
  const int rows = static_cast<int>(q.shape(0)), q_heads = static_cast<int>(q.shape(1));
  require(positions.shape(0) == q.shape(0), "positions must be [rows]");
  require(q_heads > 0 && q_heads % layout.kv_heads == 0, "q heads must be a multiple of the pool's kv heads");
  require(q.shape(2) == size_t(layout.key_dim), "q must be [rows, heads, key_dim]");
  require(!sinks || sinks->shape(0) == q.shape(1), "sinks must be [heads]");
  require(!alibi || alibi->shape(0) == q.shape(1), "alibi must be [heads]");
  const AttentionShape shape{q_heads,          scale, softcap, window, sinks ? sinks->data() : nullptr,
                             alibi ? alibi->data() : nullptr};
  int from = std::numeric_limits<int>::max(), to = 0;
  for (int row = 0; row < rows; ++row) {
    const int position = positions.data()[row];
    require(position >= 0 && size_t(position / layout.page_size) < page_table.shape(0),
            "a position lies outside the page table");
    from = std::min(from, first_span(shape, position));
    to = std::max(to, last_span(position));
  }

  const AttentionKernels& kernels = variant(isa);
  const int group = q_heads / layout.kv_heads;
  const int64_t ldq = int64_t(q_heads) * layout.key_dim, ldo = int64_t(q_heads) * layout.value_dim;
  const Bytes scratch = aligned_bytes(attention_scratch_bytes(layout));
  auto out = new_array<float>({size_t(rows), size_t(q_heads), size_t(layout.value_dim)});
  for (int kv_head = 0; kv_head < layout.kv_heads; ++kv_head) {
    const float* head_q = q.data() + int64_t(kv_head) * group * layout.key_dim;
    float* head_out = out.data() + int64_t(kv_head) * group * layout.value_dim;
    if (!split) {
      kernels.attention(shape, layout, pool.memory.get(), page_table.data(), kv_head, head_q, ldq, positions.data(),
                        rows, head_out, ldo, scratch.get());
      continue;
    }
    const int64_t stride = int64_t(rows) * group * attention_state_floats(layout);
    const Bytes states = aligned_bytes(stride * std::max(to - from + 1, 0) * sizeof(float));
    float* first = reinterpret_cast<float*>(states.get());
    for (int span = to; span >= from; --span) {  // any order will do
      kernels.attention_span(shape, layout, pool.memory.get(), page_table.data(), kv_head, head_q, ldq,
                             positions.data(), rows, span, first + (span - from) * stride, scratch.get());
    }
    if (rows > 0) kernels.attention_merge(shape, layout, kv_head, rows, first, stride, to - from + 1, head_out, ldo);
  }
  return out;
}

nb::ndarray<nb::numpy, float> run_rope(const std::string& isa, Floats<3> x, Floats<2> cos, Floats<2> sin,
                                       int rotary_dim, bool interleaved) {
  require(rotary_dim >= 0 && rotary_dim % 2 == 0 && size_t(rotary_dim) <= x.shape(2),
          "rotary_dim must be even and at most the head size");
  require(cos.shape(0) == x.shape(0) && cos.shape(1) * 2 == size_t(rotary_dim), "cos must be [rows, rotary_dim / 2]");
  require(sin.shape(0) == x.shape(0) && sin.shape(1) * 2 == size_t(rotary_dim), "sin must be [rows, rotary_dim / 2]");
  auto out = new_array<float>({x.shape(0), x.shape(1), x.shape(2)});
  std::memcpy(out.data(), x.data(), x.size() * sizeof(float));
  for (size_t row = 0; row < x.shape(0); ++row) {
    variant(isa).rope(out.data() + row * x.shape(1) * x.shape(2), x.shape(1), x.shape(2),
                      cos.data() + row * cos.shape(1), sin.data() + row * sin.shape(1), rotary_dim, interleaved);
  }
  return out;
}

template <class T, class Kernel>
nb::ndarray<nb::numpy, T> each_row(Floats<2> x, Kernel kernel) {
  require(x.shape(1) > 0, "a row needs at least one value");
  auto out = new_array<T>({x.shape(0)});
  for (size_t row = 0; row < x.shape(0); ++row) {
    out.data()[row] = kernel(x.data() + row * x.shape(1), x.shape(1));
  }
  return out;
}

nb::ndarray<nb::numpy, float> softmax_rows(const std::string& isa, Floats<2> x) {
  auto out = new_array<float>({x.shape(0), x.shape(1)});
  for (size_t row = 0; row < x.shape(0); ++row) {
    variant(isa).softmax(x.data() + row * x.shape(1), out.data() + row * x.shape(1), x.shape(1));
  }
  return out;
}

}  // namespace

void bind_attention(nb::module_& module) {
  nb::module_ m = module.def_submodule("attention", "Attention kernels of one named variant, for tests.");
  m.def("isas", &available_isas, "Variants that this machine runs, best first.");
  nb::class_<Pool>(m, "Pool", "One layer's pages of keys and values.")
      .def(nb::init<const std::string&, int, int, int, int, int>(), nb::arg("format"), nb::arg("kv_heads"),
           nb::arg("key_dim"), nb::arg("value_dim"), nb::arg("page_size"), nb::arg("pages"))
      .def("fill", &Pool::fill, nb::arg("value"), "Overwrites every element with one value.")
      .def("write", &Pool::write, nb::arg("isa"), nb::arg("page_table"), nb::arg("positions"), nb::arg("k"),
           nb::arg("v"), "Stores k [rows, kv_heads, key_dim] and v [rows, kv_heads, value_dim] at the positions.")
      .def_prop_ro("page_bytes", [](const Pool& pool) { return pool.layout.page_bytes; });
  m.def("attention", &run_attention, nb::arg("isa"), nb::arg("pool"), nb::arg("page_table"), nb::arg("q"),
        nb::arg("positions"), nb::arg("scale"), nb::arg("softcap") = 0.0f, nb::arg("window") = 0,
        nb::arg("sinks") = nb::none(), nb::arg("alibi") = nb::none(), nb::arg("split") = false,
        "q [rows, heads, key_dim] of one sequence -> [rows, heads, value_dim]; `split` goes span by span and merges.");
  m.def("rope", &run_rope, nb::arg("isa"), nb::arg("x"), nb::arg("cos"), nb::arg("sin"), nb::arg("rotary_dim"),
        nb::arg("interleaved"), "x [rows, heads, dim] rotated by cos, sin [rows, rotary_dim / 2].");
  m.def(
      "argmax",
      [](const std::string& isa, Floats<2> x) { return each_row<int64_t>(x, variant(isa).argmax); }, nb::arg("isa"),
      nb::arg("x"));
  m.def(
      "logsumexp",
      [](const std::string& isa, Floats<2> x) { return each_row<float>(x, variant(isa).logsumexp); }, nb::arg("isa"),
      nb::arg("x"));
  m.def("softmax", &softmax_rows, nb::arg("isa"), nb::arg("x"));
}

}  // namespace ew
