// The cuts of drawing a token, top-k, top-p, min-p and typical: internal to draw.cpp, which has the rest of the rules.
#pragma once

#include <cfloat>
#include <cstdint>
#include <limits>
#include <vector>

#include "draw.h"

namespace ew::drawing {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kBuckets = 2048;
constexpr float kNear = 10, kWeightless = 32;  // bits below the largest

/// A token that may be drawn. `key` is what the cut at hand goes by: smaller is kept first.
struct Item {
  float x;
  float key;
  int32_t id;
  int32_t weight;
};

inline bool larger(const Item& a, const Item& b) { return a.x > b.x || (a.x == b.x && a.id < b.id); }

/// A row of logits, with the largest of every block and of all.
struct Row {
  const DrawKernels& kernels;
  const float* x;
  int64_t n;
  const float* maxima;
  float largest;
};

/// What may still be drawn: `count` items, or, where that is -1, what is within the cut.
struct Left {
  int64_t count = -1;
  DrawCut cut = {-FLT_MAX, INT64_MAX};
};

}  // namespace ew::drawing

namespace ew {

/// The working memory of one thread.
struct DrawScratch {
  std::vector<float> row, maxima, values;
  std::vector<int32_t> weights, ids;
  std::vector<drawing::Item> items;
  std::vector<float> order;
  uint64_t mass[drawing::kBuckets];

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

}  // namespace ew

namespace ew::drawing {

/// items = the k largest (fewer where fewer are above -inf), the lowest ids on ties; in no order. The k-th largest of the
/// blocks' maxima is no larger than the k-th largest value, so only few values are looked at.
int64_t gather_largest(const Row& row, int64_t k, DrawScratch& b);

/// Fills in the weights of the items; returns their sum.
uint64_t weigh_items(const Row& row, float scale, int64_t count, DrawScratch& b);

/// Whether few of the row's values lie within so many bits of the largest.
bool is_peaked(const Row& row, float scale, float bits);

/// The weight that tokens stand before which are kept.
double share_of(double share, uint64_t total);

/// The mean information of all tokens, in bits below the largest, and how far a token's is from it.
double mean_depth(uint64_t depths, uint64_t total);
float distance_from(double mean, float depth);

// Each cuts down what is left. `scale` is log2(e) / temperature, `gap` is temperature * log(min_p).
/// cut_top_p where few tokens lie near the largest and these are enough; false, and nothing is cut, where not.
bool cut_top_p_near(const Row& row, double top_p, float scale, Left& left, DrawScratch& b);
void cut_top_p(const Row& row, double top_p, float scale, Left& left, DrawScratch& b);
void cut_min_p(const Row& row, double gap, Left& left, DrawScratch& b);
void cut_typical(const Row& row, double typical_p, float scale, Left& left, DrawScratch& b);

}  // namespace ew::drawing
