// The cuts of drawing a token: draw_cuts.h.
#include "draw_cuts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

namespace ew::drawing {
namespace {

bool sooner(const Item& a, const Item& b) { return a.key < b.key || (a.key == b.key && a.id < b.id); }

int bucket_of(float place) { return place < kBuckets - 1 ? static_cast<int>(place) : kBuckets - 1; }

/// The bucket where the target is reached; `before` becomes what stands before it.
int find_bucket(const uint64_t* mass, double target, uint64_t& before) {
  int cut = 0;
  while (cut < kBuckets - 1 && static_cast<double>(before + mass[cut]) < target) before += mass[cut++];
  return cut;
}

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

}  // namespace

int64_t gather_largest(const Row& row, int64_t k, DrawScratch& b) {
  const int64_t count = gather(row, k < draw_blocks(row.n) ? kth_maximum(row, k, b) : -FLT_MAX, b);
  if (count <= k) return count;
  std::nth_element(b.items.begin(), b.items.begin() + k, b.items.begin() + count, larger);
  return k;
}

uint64_t weigh_items(const Row& row, float scale, int64_t count, DrawScratch& b) {
  Item* items = b.items.data();
  for (int64_t i = 0; i < count; i++) b.values[static_cast<size_t>(i)] = items[i].x;
  const uint64_t total = row.kernels.weigh(b.values.data(), count, row.largest, scale, b.weights.data());
  for (int64_t i = 0; i < count; i++) items[i].weight = b.weights[static_cast<size_t>(i)];
  return total;
}

double share_of(double share, uint64_t total) { return std::max(share * static_cast<double>(total), 1.0); }

bool is_peaked(const Row& row, float scale, float bits) {
  const int64_t blocks = draw_blocks(row.n);
  const float near = row.largest - bits / scale;
  return std::count_if(row.maxima, row.maxima + blocks, [&](float most) { return most >= near; }) <= blocks / 4 + 16;
}

float distance_from(double mean, float depth) {
  return static_cast<float>(std::fabs(static_cast<double>(depth) - mean));
}

double mean_depth(uint64_t depths, uint64_t total) {
  return static_cast<double>(depths) / static_cast<double>(total) / 16384;
}

namespace {

constexpr float kFineness = 64;  // buckets of a 64th bit, 32 bits deep

/// Fills in the items' weights from those of the whole row, and their keys; returns the sum.
uint64_t weigh_from_row(int64_t count, DrawScratch& b) {
  uint64_t total = 0;
  for (int64_t i = 0; i < count; i++) {
    Item& item = b.items[static_cast<size_t>(i)];
    item.key = -item.x;
    item.weight = b.weights[static_cast<size_t>(item.id)];
    total += static_cast<uint64_t>(item.weight);
  }
  return total;
}

}  // namespace

bool cut_top_p_near(const Row& row, double top_p, float scale, Left& left, DrawScratch& b) {
  if (!is_peaked(row, scale, kNear)) return false;
  const double target = share_of(top_p, row.kernels.weigh(row.x, row.n, row.largest, scale, b.weights.data()));
  const int64_t count = gather(row, row.largest - kNear / scale, b);
  if (static_cast<double>(weigh_from_row(count, b)) < target) return false;
  left.count = keep_weight(b.items.data(), count, target, -row.largest, scale * kFineness, b.mass);
  return true;
}

void cut_top_p(const Row& row, double top_p, float scale, Left& left, DrawScratch& b) {
  const float fineness = scale * kFineness;
  Item* const items = b.items.data();
  if (left.count >= 0) {
    const double target = share_of(top_p, weigh_items(row, scale, left.count, b));
    for (int64_t i = 0; i < left.count; i++) items[i].key = -items[i].x;
    left.count = keep_weight(items, left.count, target, -row.largest, fineness, b.mass);
    return;
  }
  const double target = share_of(top_p, row.kernels.weigh(row.x, row.n, row.largest, scale, b.weights.data()));
  const auto bucket = [&](float x) { return bucket_of((-x + row.largest) * fineness); };
  std::memset(b.mass, 0, sizeof b.mass);
  for (int64_t i = 0; i < row.n; i++) {
    b.mass[bucket(row.x[i])] += static_cast<uint64_t>(b.weights[static_cast<size_t>(i)]);
  }
  uint64_t before = 0;
  const int cut = find_bucket(b.mass, target, before);
  int64_t count = gather(row, cut < kBuckets - 1 ? row.largest - static_cast<float>(cut + 2) / fineness : -FLT_MAX, b,
                         row.largest - static_cast<float>(cut - 1) / fineness);
  count = std::partition(items, items + count, [&](const Item& item) { return bucket(item.x) == cut; }) - items;
  weigh_from_row(count, b);
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

}  // namespace ew::drawing
