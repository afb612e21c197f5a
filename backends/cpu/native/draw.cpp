// The rules of drawing a token: adjust the row, cut it down to the tokens that may be drawn, draw one. See draw.h.
#include "draw.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "noise.h"

namespace ew {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kGreedyBelow = 1e-5;
constexpr int kBuckets = 2048;
constexpr float kNear = 10, kWeightless = 32;  // bits below the largest

/// A token that may be drawn. `key` is what the cut at hand goes by: smaller is kept first.
struct Item {
  float x;
  float key;
  int32_t id;
  int32_t weight;
};

bool larger(const Item& a, const Item& b) { return a.x > b.x || (a.x == b.x && a.id < b.id); }
bool sooner(const Item& a, const Item& b) { return a.key < b.key || (a.key == b.key && a.id < b.id); }

}  // namespace

struct DrawScratch {
  std::vector<float> row, maxima, values;
  std::vector<int32_t> weights, ids;
  std::vector<Item> items;
  std::vector<float> order;
  uint64_t mass[kBuckets];

  void fit(int64_t n) {
    const size_t size = static_cast<size_t>(n), blocks = static_cast<size_t>(draw_blocks(n));
    if (row.size() >= size) return;
    row.resize(size);
    values.resize(size);
    weights.resize(size);
    ids.resize(size);
    items.resize(size);
    maxima.resize(2 * blocks);  // of the raw row, then of the adjusted one
    order.resize(blocks);
  }
};

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

int bucket_of(float place) { return place < kBuckets - 1 ? static_cast<int>(place) : kBuckets - 1; }

/// The bucket where the target is reached; `before` becomes what stands before it.
int find_bucket(const uint64_t* mass, double target, uint64_t& before) {
  int cut = 0;
  while (cut < kBuckets - 1 && static_cast<double>(before + mass[cut]) < target) before += mass[cut++];
  return cut;
}

struct Row {
  const DrawKernels& kernels;
  const float* x;
  int64_t n;
  const float* maxima;
  float largest;
};

/// items = the values in [least, most], ascending by id.
int64_t gather(const Row& row, float least, DrawScratch& b, float most = kInfinity) {
  const int64_t count =
      row.kernels.within(row.x, row.n, row.maxima, std::max(least, -FLT_MAX), most, b.ids.data());
  for (int64_t i = 0; i < count; i++) {
    const int32_t id = b.ids[static_cast<size_t>(i)];
    b.items[static_cast<size_t>(i)] = {row.x[id], 0.0f, id, 0};
  }
  return count;
}

/// The k-th largest of the blocks' maxima.
float kth_maximum(const Row& row, int64_t k, DrawScratch& b) {
  const int64_t blocks = draw_blocks(row.n);
  float* const order = b.order.data();
  if (k > 64) {
    std::copy(row.maxima, row.maxima + blocks, order);
    std::nth_element(order, order + (k - 1), order + blocks, std::greater<float>());
    return order[k - 1];
  }
  int64_t held = 0;  // order[0, held): the largest so far, descending
  for (int64_t i = 0; i < blocks; i++) {
    const float most = row.maxima[i];
    if (held == k && !(most > order[k - 1])) continue;
    int64_t at = held < k ? held++ : k - 1;
    for (; at > 0 && order[at - 1] < most; at--) order[at] = order[at - 1];
    order[at] = most;
  }
  return order[k - 1];
}

/// items = the k largest (fewer where fewer are above -inf), the lowest ids on ties; in no order. The k-th largest of the
/// blocks' maxima is no larger than the k-th largest value, so only few values are looked at.
int64_t gather_largest(const Row& row, int64_t k, DrawScratch& b) {
  const int64_t count = gather(row, k < draw_blocks(row.n) ? kth_maximum(row, k, b) : -FLT_MAX, b);
  if (count <= k) return count;
  std::nth_element(b.items.begin(), b.items.begin() + k, b.items.begin() + count, larger);
  return k;
}

/// Fills in the weights of the items; returns their sum.
uint64_t weigh_items(const Row& row, float scale, int64_t count, DrawScratch& b) {
  Item* items = b.items.data();
  for (int64_t i = 0; i < count; i++) b.values[static_cast<size_t>(i)] = items[i].x;
  const uint64_t total = row.kernels.weigh(b.values.data(), count, row.largest, scale, b.weights.data());
  for (int64_t i = 0; i < count; i++) items[i].weight = b.weights[static_cast<size_t>(i)];
  return total;
}

/// Keeps, in the order of (key, id), the items before which less weight than `target` stands, counting `before` that stands
/// before them all. They become the first items; returns how many. Whole weights: the same set whatever way is taken.
int64_t keep_in_order(Item* items, int64_t count, uint64_t before, double target) {
  int64_t from = 0, to = count;  // the cut lies here: items[0, from) are kept, items[to, count) are not
  while (to - from > 16) {
    const int64_t middle = from + (to - from) / 2;
    std::nth_element(items + from, items + middle, items + to, sooner);
    uint64_t half = 0;
    for (int64_t i = from; i < middle; i++) half += static_cast<uint64_t>(items[i].weight);
    if (static_cast<double>(before + half) < target) {
      before += half;
      from = middle;
    } else {
      to = middle;
    }
  }
  std::sort(items + from, items + to, sooner);
  while (from < to && static_cast<double>(before) < target) before += static_cast<uint64_t>(items[from++].weight);
  return from;
}

/// The same for many items: by buckets of their keys first, of width 1 / `fineness` from `offset`, which is no key's
/// successor.
int64_t keep_weight(Item* items, int64_t count, double target, float offset, float fineness, uint64_t* mass) {
  if (count <= 256) return keep_in_order(items, count, 0, target);
  const auto bucket = [&](const Item& item) { return bucket_of((item.key - offset) * fineness); };
  std::memset(mass, 0, kBuckets * sizeof(uint64_t));
  for (int64_t i = 0; i < count; i++) mass[bucket(items[i])] += static_cast<uint64_t>(items[i].weight);
  uint64_t before = 0;
  const int cut = find_bucket(mass, target, before);
  Item* const first = std::partition(items, items + count, [&](const Item& item) { return bucket(item) < cut; });
  Item* const last = std::partition(first, items + count, [&](const Item& item) { return bucket(item) == cut; });
  return first - items + keep_in_order(first, last - first, before, target);
}

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

/// What may still be drawn: `count` items, or, where that is -1, what is within the cut.
struct Left {
  int64_t count = -1;
  DrawCut cut = {-FLT_MAX, INT64_MAX};
};

double share_of(double share, uint64_t total) { return std::max(share * static_cast<double>(total), 1.0); }

/// Whether few of the row's values lie within so many bits of the largest.
bool is_peaked(const Row& row, float scale, float bits) {
  const int64_t blocks = draw_blocks(row.n);
  const float near = row.largest - bits / scale;
  return std::count_if(row.maxima, row.maxima + blocks, [&](float most) { return most >= near; }) <= blocks / 4 + 16;
}

/// How far a token's information is from the mean of all, in bits.
float distance_from(double mean, float depth) {
  return static_cast<float>(std::fabs(static_cast<double>(depth) - mean));
}

double mean_depth(uint64_t depths, uint64_t total) {
  return static_cast<double>(depths) / static_cast<double>(total) / 16384;
}

void cut_top_p(const Row& row, double top_p, float scale, Left& left, DrawScratch& b) {
  const float fineness = scale * 64.0f;  // buckets of a 64th bit, 32 bits deep
  Item* const items = b.items.data();
  if (left.count >= 0) {
    const double target = share_of(top_p, weigh_items(row, scale, left.count, b));
    for (int64_t i = 0; i < left.count; i++) items[i].key = -items[i].x;
    left.count = keep_weight(items, left.count, target, -row.largest, fineness, b.mass);
    return;
  }
  const double target = share_of(top_p, row.kernels.weigh(row.x, row.n, row.largest, scale, b.weights.data()));
  const auto weigh_them = [&](int64_t count) {
    uint64_t total = 0;
    for (int64_t i = 0; i < count; i++) {
      items[i].key = -items[i].x;
      items[i].weight = b.weights[static_cast<size_t>(items[i].id)];
      total += static_cast<uint64_t>(items[i].weight);
    }
    return total;
  };
  int64_t count;
  if (is_peaked(row, scale, kNear)) {  // then these are mostly all that is needed
    count = gather(row, row.largest - kNear / scale, b);
    if (static_cast<double>(weigh_them(count)) >= target) {
      left.count = keep_weight(items, count, target, -row.largest, fineness, b.mass);
      return;
    }
  }
  const auto bucket = [&](float x) { return bucket_of((-x + row.largest) * fineness); };
  std::memset(b.mass, 0, sizeof b.mass);
  for (int64_t i = 0; i < row.n; i++) {
    b.mass[bucket(row.x[i])] += static_cast<uint64_t>(b.weights[static_cast<size_t>(i)]);
  }
  uint64_t before = 0;
  const int cut = find_bucket(b.mass, target, before);
  count = gather(row, cut < kBuckets - 1 ? row.largest - static_cast<float>(cut + 2) / fineness : -FLT_MAX, b,
                 row.largest - static_cast<float>(cut - 1) / fineness);
  count = std::partition(items, items + count, [&](const Item& item) { return bucket(item.x) == cut; }) - items;
  weigh_them(count);
  const int64_t kept = keep_in_order(items, count, before, target);
  const Item& last = *std::max_element(items, items + kept, sooner);
  left.cut = {last.x, last.id};
}

void cut_min_p(const Row& row, double gap, Left& left, DrawScratch& b) {
  const auto stays = [&](float x) { return static_cast<double>(x) - static_cast<double>(row.largest) >= gap; };
  if (left.count >= 0) {
    Item* const items = b.items.data();
    left.count = std::partition(items, items + left.count, [&](const Item& item) { return stays(item.x); }) - items;
    return;
  }
  float least = std::max(static_cast<float>(row.largest + gap), -FLT_MAX);  // made exact by a step or two
  while (!stays(least)) least = std::nextafter(least, kInfinity);
  for (float next = least; next > -FLT_MAX && stays(next); next = std::nextafter(next, -kInfinity)) least = next;
  if (least > left.cut.least) left.cut = {least, INT64_MAX};
}

void cut_typical(const Row& row, double typical_p, float scale, Left& left, DrawScratch& b) {
  Item* const items = b.items.data();
  if (left.count < 0) {
    left.count = gather(row, std::max(left.cut.least, row.largest - kWeightless / scale), b);
    left.count = std::partition(items, items + left.count, [&](const Item& item) {
                   return item.x > left.cut.least || item.id <= left.cut.last_id;
                 }) - items;
  }
  const uint64_t total = weigh_items(row, scale, left.count, b);
  left.count = std::partition(items, items + left.count, [](const Item& item) { return item.weight > 0; }) - items;
  uint64_t depths = 0;  // sum of weight * (bits below the largest), in 2^-14
  const auto depth = [&](const Item& item) { return (row.largest - item.x) * scale; };
  for (int64_t i = 0; i < left.count; i++) {
    depths += static_cast<uint64_t>(items[i].weight) * static_cast<uint64_t>(std::lrint(depth(items[i]) * 16384.0f));
  }
  const double mean = mean_depth(depths, total);
  for (int64_t i = 0; i < left.count; i++) {
    items[i].key = distance_from(mean, depth(items[i]));
  }
  left.count = keep_weight(items, left.count, share_of(typical_p, total), 0.0f, 64.0f, b.mass);
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
  if (o.top_k > 0 && o.top_k < row.n) {
    left.count = gather_largest(row, o.top_k, b);
  } else if ((o.top_p < 1) != (o.typical_p < 1) && !(o.typical_p < 1 && o.has_min_p) &&
             !is_peaked(row, scale, o.top_p < 1 ? kNear : kWeightless)) {
    const int64_t id = draw_uncut(row, o, scale, stream);
    if (id >= 0) return id;
  }
  if (o.top_p < 1) cut_top_p(row, o.top_p, scale, left, b);
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
