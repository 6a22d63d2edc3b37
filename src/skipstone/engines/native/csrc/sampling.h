// One token a row, drawn from what temperature, top-k, top-p and min-p leave of its logits.
//
// decoding/sampling.py says what the warpers do, decoding/noise.py what the noise is; this is the same for a small top-k (`drawn`)
// and for none (`drawn_of_all`). Libraries round exp and log differently: a draw may differ where the race of two tokens is as close.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace sk {
constexpr int64_t MOST_KEPT = 100;  // largest top-k

// SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014).
inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// A number in the open interval (0, 1).
inline double unit(uint64_t bits) { return double(int64_t(bits)) * (0x1p-64 * (1 - 0x1p-52)) + 0.5; }

struct Kept {
  float score;
  int64_t token;
};
inline bool before(const Kept& a, const Kept& b) { return a.score > b.score || (a.score == b.score && a.token < b.token); }

// The k + 1 largest of n > k logits, the largest first, the lower token first where they are equal. False: one is no number.
inline bool largest(const float* logits, int64_t n, int64_t k, Kept* best) {
  constexpr int64_t BLOCK = 64;
  int64_t i = 0, held = 0;
  for (; held <= k; i++, held++) {
    if (std::isnan(logits[i])) return false;
    best[held] = {logits[i], i};
  }
  std::make_heap(best, best + held, before);  // the one that comes last in front
  while (i < n) {
    const int64_t stop = std::min(i + BLOCK, n);
    const float least = best[0].score;
    int any = 0;
    for (int64_t j = i; j < stop; j++) any |= !(logits[j] <= least);
    for (; any && i < stop; i++) {
      if (std::isnan(logits[i])) return false;
      if (logits[i] <= best[0].score) continue;
      std::pop_heap(best, best + held, before);
      best[held - 1] = {logits[i], i};
      std::push_heap(best, best + held, before);
    }
    i = stop;
  }
  std::sort_heap(best, best + held, before);
  return true;
}

// The k largest of each of `rows` rows of n >= k logits, the largest first, the lower token first where they are equal; -1 for a row in
// which one is no number.
struct Largest {
  const float* logits;
  int64_t rows, n, stride, k;
  int64_t* tokens;  // [rows][k]

  static void job(void* context, int thread, int threads, Pool&) noexcept { static_cast<Largest*>(context)->work(thread, threads); }

  void work(int thread, int threads) {
    Kept best[MOST_KEPT];
    for (int64_t r = thread; r < rows; r += threads) {
      const bool numbers = largest(logits + r * stride, n, k - 1, best);
      for (int64_t i = 0; i < k; i++) tokens[r * k + i] = numbers ? best[i].token : -1;
    }
  }
};

// p over the first k scores, which fall; those of -inf get 0.
inline void softmax(const Kept* best, int64_t k, float* p) {
  float sum = 0;
  for (int64_t i = 0; i < k; i++) sum += p[i] = std::exp(best[i].score - best[0].score);
  for (int64_t i = 0; i < k; i++) p[i] /= sum;
}

// The token drawn; -1 where equal scores leave it open which tokens top-k keeps, or where the logits are no distribution.
//
// tail: share of the least probable tokens that top-p leaves out, 0 for none. counter, place: where the draw's noise begins, and
// the step from a token's number to the next one's.
inline int64_t drawn(const float* logits, int64_t n, float temperature, int64_t k, float tail, float min_p, uint64_t counter, uint64_t place) {
  constexpr float NEVER = -std::numeric_limits<float>::infinity();
  Kept best[MOST_KEPT + 1];
  float p[MOST_KEPT];
  if (!largest(logits, n, k, best)) return -1;
  for (int64_t i = 0; i <= k; i++) best[i].score /= temperature;
  if (!std::isfinite(best[0].score)) return -1;
  for (int64_t i = 0; i < k; i++)
    if (best[i].score == best[i + 1].score && best[i].score > NEVER) return -1;
  softmax(best, k, p);
  if (tail > 0) {
    double rising = 0;
    for (int64_t i = k - 1; i > 0 && float(rising += p[i]) <= tail; i--) best[i].score = NEVER;
    softmax(best, k, p);
  }
  if (min_p > 0) {
    for (int64_t i = 1; i < k; i++)
      if (p[i] < min_p * p[0]) best[i].score = NEVER;
    softmax(best, k, p);
  }
  int64_t winner = -1;
  double nearest = 0;
  for (int64_t i = 0; i < k; i++) {
    if (p[i] == 0) continue;
    const double at = std::log(unit(mixed(counter + uint64_t(best[i].token) * place))) / double(p[i]);
    if (winner < 0 || at > nearest) winner = best[i].token, nearest = at;
  }
  return winner;
}

// weights[v] = e^(logit v / temperature - the highest of these), with zeros up to a whole number of lanes. Returns the place of the
// highest logit; -1 where one is no number, or the highest is not finite.
inline int64_t weighed(const float* logits, int64_t n, float temperature, std::vector<float>& weights) {
  int no_numbers = 0;
  for (int64_t i = 0; i < n; i++) no_numbers |= logits[i] != logits[i];
  if (no_numbers) return -1;
  V16 each = set1(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i + LANES <= n; i += LANES) each = max(each, load(logits + i));
  float lanes[LANES];
  store(lanes, each);
  float highest = *std::max_element(lanes, lanes + LANES);
  for (int64_t i = n / LANES * LANES; i < n; i++) highest = std::max(highest, logits[i]);
  if (!std::isfinite(highest / temperature)) return -1;
  const int64_t best = std::find(logits, logits + n, highest) - logits;
  weights.resize((n + LANES - 1) / LANES * LANES);
  const V16 by = set1(temperature), top = set1(highest / temperature);
  for (int64_t i = 0; i < n; i += LANES) {
    const int count = int(std::min<int64_t>(LANES, n - i));
    store_first(&weights[i], exp(sub(div(load_first(logits + i, count), by), top)), count);
  }
  std::fill(weights.begin() + n, weights.end(), 0.0f);
  return best;
}

// The least weight that top-p keeps; -1 where equal weights leave open which of them that is. tail: as in `drawn`.
//
// Weights lie between 0 and 1. They are first summed in buckets that share exponent and five leading bits, so that only those of the
// bucket in which the limit lies are put into order.
inline float least_kept(const std::vector<float>& weights, float tail) {
  constexpr int SHIFT = 18, BUCKETS = (0x3f800000 >> SHIFT) + 1;  // 0x3f800000: the bits of 1
  const auto bucket = [](float weight) { uint32_t bits; std::memcpy(&bits, &weight, sizeof bits); return std::min(int(bits >> SHIFT), BUCKETS - 1); };
  double sums[BUCKETS] = {}, all = 0, below = 0;
  for (float weight : weights) sums[bucket(weight)] += weight;
  for (double sum : sums) all += sum;
  int at = 0;
  while (at + 1 < BUCKETS && float((below + sums[at]) / all) <= tail) below += sums[at++];
  std::vector<float> around;
  for (float weight : weights) if (weight > 0 && bucket(weight) == at) around.push_back(weight);
  std::sort(around.begin(), around.end());
  size_t i = 0;
  while (i + 1 < around.size() && float((below + around[i]) / all) <= tail) below += around[i++];
  if (i > 0 && around[i - 1] == around[i]) return -1;
  return around.empty() ? 1.0f : around[i];
}

// `drawn` without a top-k: every token may have a chance.
//
// The token with the largest log u / weight wins. `nearest` is the largest so far, and negative. log u <= u - 1, so a token whose u is
// no larger than 1 + weight * nearest cannot win: hardly any logarithm is taken. The likeliest token runs first.
inline int64_t drawn_of_all(const float* logits, int64_t n, float temperature, float tail, float min_p, uint64_t counter, uint64_t place) {
  thread_local std::vector<float> weights;
  int64_t winner = weighed(logits, n, temperature, weights);
  if (winner < 0) return -1;
  float least = std::max(min_p, std::numeric_limits<float>::min());
  if (tail > 0) {
    const float kept = least_kept(weights, tail);
    if (kept < 0) return -1;
    least = std::max(least, kept);
  }
  double nearest = std::log(unit(mixed(counter + uint64_t(winner) * place)));
  for (int64_t i = 0; i < n; i += LANES) {
    double u[LANES], needed[LANES];
    for (int j = 0; j < LANES; j++) {
      u[j] = unit(mixed(counter + uint64_t(i + j) * place));
      needed[j] = weights[i + j] >= least ? 1 + nearest * double(weights[i + j]) : 1.0;
    }
    int any = 0;
    for (int j = 0; j < LANES; j++) any |= u[j] > needed[j];
    for (int j = 0; any && j < LANES; j++) {
      if (weights[i + j] < least) continue;
      const double at = std::log(u[j]) / double(weights[i + j]);
      if (at > nearest) winner = i + j, nearest = at;
    }
  }
  return winner;
}
}  // namespace sk
