// Drawing a token from a row of logits: what the options mean, and the passes over a row that each ISA variant has.
//
// draw.cpp holds the rules, draw_cuts.cpp the cuts among them, draw.inl the passes. A row gives the same token on every
// variant: weights are whole numbers, so their sums do not depend on the order, and nothing is fused. runtime/sampler.py
// tells the rules in words and repeats them in numpy. Log-probabilities alone come from a variant's own sum of exponentials.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "thread_pool.h"

namespace ew {

constexpr int64_t kDrawBlock = 64;  // values that share one entry of `maxima`

/// Blocks of a row of n values.
constexpr int64_t draw_blocks(int64_t n) { return (n + kDrawBlock - 1) / kDrawBlock; }

/// Which tokens of a row are left: those above `least`, and those equal to it up to `last_id`.
struct DrawCut {
  float least;
  int64_t last_id;
};

/// A token's place in an order of values: ties go by id.
struct DrawPlace {
  float value;
  int64_t id;
};

/// Passes over one row x of n values, or over its blocks. They allocate nothing and write only what they say.
struct DrawKernels {
  /// maxima[b] = the largest of block b, for every block. Returns the largest of all, NaN where any value is NaN.
  float (*block_maxima)(const float* x, int64_t n, float* maxima);

  /// sum(exp(x - largest)).
  float (*sum_below)(const float* x, int64_t n, float largest);

  /// x[i] = -inf where bit i % 32 of allowed[i / 32] is 0; maxima as of block_maxima, which it keeps true.
  void (*mask)(float* x, const uint32_t* allowed, int64_t n, float* maxima);

  /// weights[i] = round(2^30 * 2^((x[i] - largest) * scale)), 0 below 2^-31. Returns their sum, which is exact.
  uint64_t (*weigh)(const float* x, int64_t n, float largest, float scale, int32_t* weights);

  /// Adds up the weights of the tokens that come before `place`: larger than its logit, or equal and of lower id. `before`
  /// is that sum; returns the sum of all.
  uint64_t (*weigh_larger)(const float* x, int64_t n, const float* maxima, float largest, float scale, DrawPlace place,
                           uint64_t* before);

  /// The sum of all weights, and in `depths` that of weight * round(2^14 * (largest - x) * scale).
  uint64_t (*weigh_depths)(const float* x, int64_t n, const float* maxima, float largest, float scale, uint64_t* depths);

  /// The weights of the tokens whose |(largest - x) * scale - mean|, as fp32, is smaller than the place's, or equal and of
  /// lower id.
  uint64_t (*weigh_nearer)(const float* x, int64_t n, const float* maxima, float largest, float scale, double mean,
                           DrawPlace place);

  /// ids = those of the values in [least, most], ascending; returns how many. Room for n.
  int64_t (*within)(const float* x, int64_t n, const float* maxima, float least, float most, int32_t* ids);

  /// The id with the largest (x[id] - largest) / temperature + gumbel of those within the cut, the lowest on ties. `top`
  /// has x[top] == largest, `scale` is log2(e) / temperature.
  int64_t (*noisy_argmax)(const float* x, int64_t n, const float* maxima, int64_t top, const DrawCut& cut, float scale,
                          double temperature, uint64_t stream);
};

/// How one request's tokens are drawn, and what it remembers of them.
struct DrawOptions {
  double temperature = 0;    // at most 1e-5: greedy
  int64_t top_k = 0;         // 0: off
  double top_p = 1;          // 1: off
  double min_gap = -1;       // log(min_p); positive: off
  bool has_min_p = false;
  double typical_p = 1;      // 1: off
  uint64_t seed = 0;
  double frequency = 0, presence = 0, repetition = 1;
  std::vector<int32_t> bias_ids;
  std::vector<double> bias;
  std::vector<int32_t> end_ids;   // not drawn before min_position, unless nothing else can be
  int64_t min_position = 0;
  int best = -1;                  // log-probabilities kept beside the drawn one; -1: no list

  // Tokens that penalties concern: distinct ids in the order met, and how often each was generated.
  std::vector<int32_t> met;
  std::vector<int32_t> times;

  /// Remembers the next tokens; the first prompt_tokens of all were not generated.
  void extend(const std::vector<int32_t>& tokens, int64_t prompt_tokens);
  int64_t seen = 0;

 private:
  std::unordered_map<int32_t, size_t> places_;  // in `met`
};

struct Best {
  int32_t id;
  float logit;
};

/// One row's result. token -1: the row holds NaN or +inf, or nothing above -inf; -2: nothing that may be drawn is left.
struct Drawn {
  int64_t token = -1;
  double logprob = 0;
  double largest = 0, log_sum = 0;  // of the raw row: its largest, and log(sum(exp(x - largest)))
  std::vector<Best> best;

  double logprob_of(float x) const { return static_cast<double>(x) - largest - log_sum; }
};

struct DrawScratch;

/// Draws rows on a team of threads, which may be the engine's own. One caller at a time, of all that use the team.
class RowDrawer {
 public:
  RowDrawer(std::shared_ptr<ThreadPool> team, const DrawKernels& kernels);
  ~RowDrawer();
  RowDrawer(const RowDrawer&) = delete;

  struct Work {
    const float* x;           // [n]
    const DrawOptions* options;
    int64_t position;         // where the token will stand
    const uint32_t* allowed;  // a bit an id; null: all
  };
  /// One token from each row of n values.
  void draw(const std::vector<Work>& rows, int64_t n);

  struct Scored {
    const float* x;
    int64_t token;
  };
  /// The log-probability of each row's token, and the `best` largest.
  void score(const std::vector<Scored>& rows, int64_t n, int best);

  /// What the last call found, one entry a row.
  const std::vector<Drawn>& results() const { return results_; }

 private:
  template <class Body>
  void each(size_t count, int64_t n, Body body);

  std::shared_ptr<ThreadPool> team_;
  const DrawKernels& kernels_;
  std::vector<std::unique_ptr<DrawScratch>> scratch_;  // a thread's own each
  std::vector<Drawn> results_;
};

}  // namespace ew
