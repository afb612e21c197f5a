// Drawing tokens for Python: `_native.DrawRow`, one request's options and memory, and `_native.RowDrawer`, which draws for
// the rows of a step on a team of threads. runtime/sampler.py has the same two classes in numpy.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "engine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ew {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Masks = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

struct DrawRow {
  DrawOptions options;
  int32_t highest = -1;  // of all ids that it names

  void name(const std::vector<int32_t>& ids) {
    for (const int32_t id : ids) {
      require(id >= 0, "a token id is negative");
      highest = std::max(highest, id);
    }
  }
};

void init_row(DrawRow* self, double temperature, int64_t top_k, double top_p, double min_gap, double typical_p,
              uint64_t seed, double frequency, double presence, double repetition, std::vector<int32_t> bias_ids,
              std::vector<double> bias, std::vector<int32_t> end_ids, int64_t min_position, int best) {
  require(bias_ids.size() == bias.size(), "bias_ids and bias differ in number");
  DrawRow row;
  row.name(bias_ids);
  row.name(end_ids);
  DrawOptions& o = row.options;
  o.temperature = temperature;
  o.top_k = top_k;
  o.top_p = top_p;
  o.min_gap = min_gap;
  o.has_min_p = min_gap <= 0;
  o.typical_p = typical_p;
  o.seed = seed;
  o.frequency = frequency;
  o.presence = presence;
  o.repetition = repetition;
  o.bias_ids = std::move(bias_ids);
  o.bias = std::move(bias);
  o.end_ids = std::move(end_ids);
  o.min_position = min_position;
  o.best = best;
  new (self) DrawRow(std::move(row));
}

int64_t width(const Logits& logits) {
  require(0 < logits.shape(1) && logits.shape(1) < (size_t{1} << 24), "a row has 1 to 2^24 values");
  return static_cast<int64_t>(logits.shape(1));
}

const float* row_of(const Logits& logits, int64_t row) {
  require(0 <= row && row < static_cast<int64_t>(logits.shape(0)), "row out of range");
  return logits.data() + row * width(logits);
}

nb::list list_of(const Drawn& drawn) {
  nb::list list;
  for (const Best& best : drawn.best) {
    list.append(nb::make_tuple(best.id, drawn.logprob_of(best.logit)));
  }
  return list;
}

nb::tuple draw(RowDrawer& drawer, const Logits& logits, const std::vector<int64_t>& rows,
               const std::vector<DrawRow*>& states, const std::vector<int64_t>& positions, const nb::object& masks,
               const std::vector<int64_t>& mask_rows) {
  const int64_t n = width(logits);
  const size_t count = rows.size();
  require(states.size() == count && positions.size() == count, "rows, states and positions differ in number");
  require(mask_rows.empty() || mask_rows.size() == count, "mask_rows must be empty or one a row");
  Masks words;
  if (!mask_rows.empty()) {
    words = nb::cast<Masks>(masks);
    require(static_cast<int64_t>(words.shape(1)) * 32 >= n, "a mask is shorter than a row");
  }
  std::vector<RowDrawer::Work> work;
  work.reserve(count);
  for (size_t i = 0; i < count; i++) {
    require(states[i] != nullptr && states[i]->highest < n, "a token id is outside the row");
    const uint32_t* allowed = nullptr;
    if (!mask_rows.empty() && mask_rows[i] != -1) {
      require(0 <= mask_rows[i] && mask_rows[i] < static_cast<int64_t>(words.shape(0)), "mask row out of range");
      allowed = words.data() + mask_rows[i] * static_cast<int64_t>(words.shape(1));
    }
    work.push_back({row_of(logits, rows[i]), &states[i]->options, positions[i], allowed});
  }
  {
    nb::gil_scoped_release unlocked;
    drawer.draw(work, n);
  }
  nb::list tokens, logprobs, best;
  for (size_t i = 0; i < count; i++) {
    const Drawn& drawn = drawer.results()[i];
    tokens.append(drawn.token);
    logprobs.append(drawn.logprob);
    best.append(states[i]->options.best < 0 ? nb::object(nb::none()) : nb::object(list_of(drawn)));
  }
  return nb::make_tuple(tokens, logprobs, best);
}

nb::list score(RowDrawer& drawer, const Logits& logits, const std::vector<int64_t>& rows,
               const std::vector<int64_t>& tokens, int best) {
  const int64_t n = width(logits);
  require(tokens.size() == rows.size(), "rows and tokens differ in number");
  std::vector<RowDrawer::Scored> work;
  for (size_t i = 0; i < rows.size(); i++) {
    require(0 <= tokens[i] && tokens[i] < n, "token out of range");
    work.push_back({row_of(logits, rows[i]), tokens[i]});
  }
  {
    nb::gil_scoped_release unlocked;
    drawer.score(work, n, best);
  }
  nb::list scored;
  for (size_t i = 0; i < rows.size(); i++) {
    scored.append(nb::make_tuple(drawer.results()[i].logprob, list_of(drawer.results()[i])));
  }
  return scored;
}

}  // namespace

void bind_draw(nb::module_& m) {
  nb::class_<DrawRow>(m, "DrawRow", "One request's sampling options, and the tokens that penalties concern.")
      .def("__init__", &init_row, "temperature"_a, "top_k"_a, "top_p"_a, "min_gap"_a, "typical_p"_a, "seed"_a,
           "frequency"_a, "presence"_a, "repetition"_a, "bias_ids"_a, "bias"_a, "end_ids"_a, "min_position"_a, "best"_a,
           "min_gap is log(min_p), positive where it is off; best -1 keeps no list.")
      .def(
          "extend",
          [](DrawRow& row, const std::vector<int32_t>& tokens, int64_t prompt_tokens) {
            row.name(tokens);
            row.options.extend(tokens, prompt_tokens);
          },
          "tokens"_a, "prompt_tokens"_a, "Remember the next tokens; the first prompt_tokens of all were not generated.")
      .def_prop_ro("seen", [](const DrawRow& row) { return row.options.seen; }, "How many tokens it remembers.");
  nb::class_<RowDrawer>(m, "RowDrawer", "Draws tokens from rows of logits. One caller at a time.")
      .def(
          "__init__",
          [](RowDrawer* self, int threads, const std::string& isa) {
            const Kernels* table = isa.empty() ? &kernels() : kernels_by_name(isa.c_str());
            require(table != nullptr, "this machine has no kernels of that name");
            require(1 <= threads && threads <= 1024, "threads must be 1 to 1024");
            new (self) RowDrawer(std::make_shared<ThreadPool>(threads), table->draw);
          },
          "threads"_a = 1, "isa"_a = "")
      .def_static(
          "beside",
          [](const Engine& engine) {
            require(engine.team() != nullptr, "the engine is closed");
            return new RowDrawer(engine.team(), engine.kernels().draw);
          },
          "engine"_a, "One that works with the engine's threads and kernels, between its steps.")
      .def("draw", &draw, "logits"_a, "rows"_a, "states"_a, "positions"_a, "masks"_a.none() = nb::none(),
           "mask_rows"_a = std::vector<int64_t>(),
           "Returns (token ids, log-probabilities, lists of the best (id, log-probability) or None), one of each a row.\n"
           "-1: NaN or +inf in the row, or nothing above -inf; -2: nothing is left that may be drawn. masks: uint32\n"
           "[M, words], a bit an id; mask_rows: which one each row obeys, -1 for none.")
      .def("score", &score, "logits"_a, "rows"_a, "tokens"_a, "best"_a,
           "Returns (log-probability of the token, list of the best) for each row.");
}

}  // namespace ew
