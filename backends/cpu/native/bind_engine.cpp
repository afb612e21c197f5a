// Engine and usable_cpus for Python. `backends/cpu/executor.py` is the only caller outside tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "engine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ew {
namespace {

template <size_t N> using Ints = nb::ndarray<const int32_t, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void step(Engine &engine, const Ints<1> &tokens, const Ints<1> &positions, const Ints<1> &seq_starts,
          const Ints<1> &context_lens, const Ints<3> &page_tables, const Ints<1> &logit_rows, const Logits &logits) {
    auto expect = [](bool good, const char *what) {
        if (!good)
            throw std::invalid_argument(std::string("malformed step: ") + what);
    };
    expect(positions.shape(0) == tokens.shape(0), "tokens and positions differ in length");
    expect(seq_starts.shape(0) == context_lens.shape(0) + 1, "seq_starts has one entry more than context_lens");
    expect(page_tables.shape(1) == context_lens.shape(0), "page_tables has another number of sequences");
    expect(logits.shape(0) == logit_rows.shape(0), "logits has another number of rows than logit_rows");
    expect(int64_t(logits.shape(1)) == engine.program().vocab_size, "logits has another width than the vocabulary");
    const StepInput input{int64_t(tokens.shape(0)),
                          int64_t(context_lens.shape(0)),
                          int64_t(page_tables.shape(0)),
                          int64_t(page_tables.shape(2)),
                          int64_t(logit_rows.shape(0)),
                          tokens.data(),
                          positions.data(),
                          seq_starts.data(),
                          context_lens.data(),
                          page_tables.data(),
                          logit_rows.data(),
                          logits.data()};
    nb::gil_scoped_release unlocked;
    engine.step(input);
}

} // namespace

void bind_engine(nb::module_ &m) {
    m.def("available_isas", &available_isas, "Kernel variants that this machine runs, best first.");
    m.def("isa", [] { return kernels().name; }, "The variant in use unless an engine asks for another.");
    m.def("usable_cpus", &usable_cpus, "Cores this process may use: affinity cut down to the cgroup's quota.");
    nb::class_<Engine>(m, "Engine", "A loaded program: see backends/cpu/instructions.md.")
        .def("__init__",
             [](Engine *self, const std::string &program, const std::string &weights, const std::string &mode,
                int64_t max_tokens, int64_t max_rows, int threads, const std::string &isa) {
                 if (mode != "mmap" && mode != "copy")
                     throw std::invalid_argument("weights mode '" + mode + "'; known: mmap, copy");
                 const Kernels *table = isa.empty() ? &kernels() : kernels_by_name(isa.c_str());
                 if (!table)
                     throw std::invalid_argument("this machine has no kernels for '" + isa + "'");
                 nb::gil_scoped_release unlocked;
                 new (self) Engine(program, {weights, mode == "copy", max_tokens, max_rows, threads}, *table);
             },
             "program"_a, "weights"_a, "mode"_a = "mmap", "max_tokens"_a, "max_rows"_a, "threads"_a = 0,
             "isa"_a = "")
        .def_static(
            "beside",
            [](const Engine &other, const std::string &program, int64_t max_tokens, int64_t max_rows) {
                nb::gil_scoped_release unlocked;
                return new Engine(program, other, max_tokens, max_rows);
            },
            "other"_a, "program"_a, "max_tokens"_a, "max_rows"_a,
            "Another program over the other's weights file, with its weights, threads and pools; one of them runs at a time.")
        .def("step", &step, "tokens"_a.noconvert(), "positions"_a.noconvert(), "seq_starts"_a.noconvert(),
             "context_lens"_a.noconvert(), "page_tables"_a.noconvert(), "logit_rows"_a.noconvert(),
             "logits"_a.noconvert(), "Runs one step; logits [R, vocab] is written. The GIL is released.")
        .def("create_pool", &Engine::create_pool, "pages_per_group"_a)
        .def(
            "copy_pages",
            [](Engine &engine, int64_t group, const Ints<1> &sources, const Ints<1> &destinations) {
                if (sources.shape(0) != destinations.shape(0))
                    throw std::invalid_argument("sources and destinations differ in length");
                engine.copy_pages(group, sources.data(), destinations.data(), int64_t(sources.shape(0)));
            },
            "group"_a, "sources"_a.noconvert(), "destinations"_a.noconvert())
        .def("fill_pool", &Engine::fill_pool, "value"_a)
        .def("set_profiling", &Engine::set_profiling, "on"_a)
        .def("profile",
             [](const Engine &engine) { // (op, module, nanoseconds of work, of waiting) an instruction
                 nb::list result;
                 for (size_t i = 0; i < engine.profile().size(); ++i) {
                     const Instruction &code = engine.program().instructions[i];
                     result.append(nb::make_tuple(code.name, code.module, engine.profile()[i].work,
                                                  engine.profile()[i].waiting));
                 }
                 return result;
             })
        .def("memory",
             [](const Engine &engine) {
                 const MemoryUse use = engine.memory();
                 nb::dict result;
                 result["weights"] = use.weights;
                 result["pool"] = use.pool;
                 result["arena"] = use.arena;
                 result["scratch"] = use.scratch;
                 return result;
             })
        .def("close", &Engine::close, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("threads", &Engine::threads)
        .def_prop_ro("isa", &Engine::isa)
        .def_prop_ro("vocab_size", [](const Engine &engine) { return engine.program().vocab_size; })
        .def_prop_ro("token_limit", [](const Engine &engine) { return engine.program().token_limit; })
        .def_prop_ro("position_limit", [](const Engine &engine) { return engine.program().position_limit; })
        .def_prop_ro("kv_groups", [](const Engine &engine) {
            nb::list groups;
            for (const KvGroup &group : engine.program().groups) {
                nb::dict entry;
                entry["window"] = group.window;
                entry["format"] = kKvFormatNames[int(group.format)];
                entry["page_size"] = group.page_size;
                int64_t bytes = 0;
                nb::list layers;
                for (const KvLayer &layer : group.layers) {
                    layers.append(nb::make_tuple(layer.kv_heads, layer.key_dim, layer.value_dim,
                                                 kKvFormatNames[int(layer.layout.format)]));
                    bytes += layer.layout.page_bytes;
                }
                entry["layers"] = layers;
                entry["page_bytes"] = bytes;
                groups.append(entry);
            }
            return groups;
        });
}

} // namespace ew
