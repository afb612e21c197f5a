// The rules of drawing a token: adjust the row, cut it down to the tokens that may be drawn, draw one. See draw.h.
#include "draw.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "draw_cuts.h"
#include "noise.h"

namespace ew {

using namespace drawing;

void DrawOptions::extend(const std::vector<int32_t>& tokens, int64_t prompt_tokens) {
  for (const int32_t token : tokens) {
    const bool generated = seen++ >= prompt_tokens;
    const auto [place, is_new] = places_.try_emplace(token, met.size());
    if (is_new) {
      met.push_back(token);
      times.push_back(0);
    }
    times[place->second] += generated;
  }
}

namespace {

constexpr double kGreedyBelow = 1e-5;

void apply_penalties(const DrawOptions& o, float* row) {
  for (size_t i = 0; i < o.met.size(); i++) {
    double x = row[o.met[i]];
    if (x == -kInfinity) continue;
    x = x > 0 ? x / o.repetition : x * o.repetition;
    if (o.times[i] > 0) x = x - o.frequency * o.times[i] - o.presence;
    row[o.met[i]] = static_cast<float>(std::min(std::max(x, double{-FLT_MAX}), double{FLT_MAX}));
  }
  for (size_t i = 0; i < o.bias_ids.size(); i++) {
    const double x = row[o.bias_ids[i]] + o.bias[i];
    if (x == -kInfinity) continue;
    row[o.bias_ids[i]] = static_cast<float>(std::min(std::max(x, double{-FLT_MAX}), double{FLT_MAX}));
  }
}

bool has_penalties(const DrawOptions& o) {
  return !o.bias_ids.empty() || (!o.met.empty() && (o.frequency != 0 || o.presence != 0 || o.repetition != 1));
}

/// Copies the row into b.row with penalties, bias and the mask applied; without the end tokens where `ban`.
Row adjusted(const Row& raw, const DrawOptions& o, bool ban, const uint32_t* allowed, DrawScratch& b) {
  float* const x = b.row.data();
  float* const maxima = b.maxima.data() + draw_blocks(raw.n);
  std::memcpy(x, raw.x, static_cast<size_t>(raw.n) * sizeof(float));
  if (has_penalties(o)) apply_penalties(o, x);
  if (ban) {
    for (const int32_t id : o.end_ids) x[id] = -kInfinity;
  }
  float largest;
  if (allowed != nullptr) {
    raw.kernels.mask(x, allowed, raw.n, maxima);
    largest = *std::max_element(maxima, maxima + draw_blocks(raw.n));
  } else {
    largest = raw.kernels.block_maxima(x, raw.n, maxima);
  }
  return {raw.kernels, x, raw.n, maxima, largest};
}

/// The lowest id of the largest value.
int64_t argmax(const Row& row) {
  int64_t i = (std::find(row.maxima, row.maxima + draw_blocks(row.n), row.largest) - row.maxima) * kDrawBlock;
  while (row.x[i] != row.largest) i++;
  return i;
}

/// The item with the largest (x - largest) / temperature + noise. An id whose noise cannot reach the best so far, by the test
/// of draw.inl on whole weights, is passed over.
int64_t draw_item(const Row& row, const DrawOptions& o, float scale, uint64_t stream, int64_t count, DrawScratch& b) {
  const Item* const items = b.items.data();
  if (count > 1) weigh_items(row, scale, count, b);
  double best = -std::numeric_limits<double>::infinity(), reach = std::numeric_limits<double>::infinity();
  int64_t best_id = -1;
  for (int64_t i = 0; i < count; i++) {
    const uint64_t bits = noise_bits(stream, items[i].id);
    if (static_cast<double>(~bits >> 12) * 0x1p-52 > reach * (items[i].weight + 1.0)) continue;
    const double score =
        (static_cast<double>(items[i].x) - static_cast<double>(row.largest)) / o.temperature + gumbel(bits);
    if (score > best || (score == best && items[i].id < best_id) || best_id < 0) {
      best = score;
      best_id = items[i].id;
      reach = 1.001 * 0x1p-30 * std::exp(-best);
    }
  }
  return best_id;
}

/// Where cuts would leave many tokens: the best of the whole row, if they leave it, or -1. For the best of all is the best of
/// those left wherever it is among them, and whether it is takes a sum, not a search.
int64_t draw_uncut(const Row& row, const DrawOptions& o, float scale, uint64_t stream) {
  const DrawCut all = {-FLT_MAX, INT64_MAX};
  const int64_t id = row.kernels.noisy_argmax(row.x, row.n, row.maxima, argmax(row), all, scale, o.temperature, stream);
  const float x = row.x[id];
  if (o.has_min_p && static_cast<double>(x) - static_cast<double>(row.largest) < o.temperature * o.min_gap) return -1;
  if (o.top_p < 1) {
    uint64_t before;
    const uint64_t total =
        row.kernels.weigh_larger(row.x, row.n, row.maxima, row.largest, scale, {x, id}, &before);
    if (static_cast<double>(before) >= share_of(o.top_p, total)) return -1;
  }
  if (o.typical_p < 1) {
    const float depth = (row.largest - x) * scale;
    if (depth > 30.0f) return -1;  // it may have no weight
    uint64_t depths;
    const uint64_t total = row.kernels.weigh_depths(row.x, row.n, row.maxima, row.largest, scale, &depths);
    const double mean = mean_depth(depths, total);
    const uint64_t nearer = row.kernels.weigh_nearer(row.x, row.n, row.maxima, row.largest, scale, mean,
                                                     {distance_from(mean, depth), id});
    if (static_cast<double>(nearer) >= share_of(o.typical_p, total)) return -1;
  }
  return id;
}

int64_t draw_token(const Row& row, const DrawOptions& o, int64_t position, DrawScratch& b) {
  if (o.temperature <= kGreedyBelow) return argmax(row);
  const float scale = static_cast<float>(1.4426950408889634 / o.temperature);
  const uint64_t stream = noise_stream(o.seed, position);
  Left left;
  bool top_p = o.top_p < 1;  // still to be cut by
  if (o.top_k > 0 && o.top_k < row.n) {
    left.count = gather_largest(row, o.top_k, b);
  } else if (top_p && cut_top_p_near(row, o.top_p, scale, left, b)) {
    top_p = false;
  } else if (o.typical_p < 1 ? !top_p && !o.has_min_p && !is_peaked(row, scale, kWeightless) : top_p) {
    const int64_t id = draw_uncut(row, o, scale, stream);
    if (id >= 0) return id;
  }
  if (top_p) cut_top_p(row, o.top_p, scale, left, b);
  if (o.has_min_p) cut_min_p(row, o.temperature * o.min_gap, left, b);
  if (o.typical_p < 1) cut_typical(row, o.typical_p, scale, left, b);
  if (left.count >= 0) return draw_item(row, o, scale, stream, left.count, b);
  return row.kernels.noisy_argmax(row.x, row.n, row.maxima, argmax(row), left.cut, scale, o.temperature, stream);
}

/// The raw row's maxima and total; false where no token can be drawn from it.
bool read_row(Row& row, int64_t best, DrawScratch& b, Drawn& out) {
  row.largest = row.kernels.block_maxima(row.x, row.n, b.maxima.data());
  out.token = -1;
  out.logprob = std::numeric_limits<double>::quiet_NaN();
  out.best.clear();
  if (!std::isfinite(row.largest)) return false;
  out.largest = row.largest;
  out.log_sum = std::log(static_cast<double>(row.kernels.sum_below(row.x, row.n, row.largest)));
  if (best > 0) {
    const int64_t count = gather_largest(row, best, b);
    std::sort(b.items.begin(), b.items.begin() + count, larger);
    for (int64_t i = 0; i < count; i++) {
      out.best.push_back({b.items[static_cast<size_t>(i)].id, b.items[static_cast<size_t>(i)].x});
    }
  }
  return true;
}

void draw_row(Row raw, const DrawOptions& o, int64_t position, const uint32_t* allowed, DrawScratch& b, Drawn& out) {
  if (!read_row(raw, o.best, b, out)) return;
  const bool ban = position < o.min_position && !o.end_ids.empty();
  if (!ban && allowed == nullptr && !has_penalties(o)) {
    out.token = draw_token(raw, o, position, b);
  } else {
    Row row = adjusted(raw, o, ban, allowed, b);
    if (row.largest == -kInfinity && ban) row.largest = adjusted(raw, o, false, allowed, b).largest;
    if (row.largest == -kInfinity) {
      out.token = -2;
      return;
    }
    out.token = draw_token(row, o, position, b);
  }
  out.logprob = out.logprob_of(raw.x[out.token]);
}

}  // namespace

RowDrawer::RowDrawer(std::shared_ptr<ThreadPool> team, const DrawKernels& kernels)
    : team_(std::move(team)), kernels_(kernels) {
  for (int i = 0; i < team_->threads(); i++) scratch_.push_back(std::make_unique<DrawScratch>());
}

RowDrawer::~RowDrawer() = default;

/// Calls body(row, scratch) for every row. Waking threads takes longer than few rows do.
template <class Body>
void RowDrawer::each(size_t count, int64_t n, Body body) {
  if (results_.size() < count) results_.resize(count);
  const bool alone = team_->threads() == 1 || count < 2 || static_cast<int64_t>(count) * n < 200'000;
  for (const auto& scratch : scratch_) {
    scratch->fit(n);
    if (alone) break;
  }
  if (alone) {
    for (size_t i = 0; i < count; i++) body(i, *scratch_[0]);
    return;
  }
  std::atomic<size_t> next{0};
  auto work = [&](int thread) {
    for (size_t i = next++; i < count; i = next++) body(i, *scratch_[static_cast<size_t>(thread)]);
  };
  team_->run(work);
}

void RowDrawer::draw(const std::vector<Work>& rows, int64_t n) {
  each(rows.size(), n, [&](size_t i, DrawScratch& b) {
    draw_row({kernels_, rows[i].x, n, b.maxima.data(), 0}, *rows[i].options, rows[i].position, rows[i].allowed, b,
             results_[i]);
  });
}

void RowDrawer::score(const std::vector<Scored>& rows, int64_t n, int best) {
  each(rows.size(), n, [&](size_t i, DrawScratch& b) {
    Row raw{kernels_, rows[i].x, n, b.maxima.data(), 0};
    if (!read_row(raw, best, b, results_[i])) return;
    results_[i].token = rows[i].token;
    results_[i].logprob = results_[i].logprob_of(raw.x[rows[i].token]);
  });
}

}  // namespace ew
