// Draws one token per row after temperature, top-k, top-p and min-p.
//
// The same as decoding/sampling.py (warpers) and decoding/noise.py (noise), for a small top-k (`draw_top_k`) and for none
// (`draw_from_all`). Libraries round exp and log differently, so a draw may differ if the race of two tokens is that close.
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
constexpr int64_t MAX_TOP_K = 100;  // largest top-k

// SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014).
inline uint64_t splitmix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// A number in the open interval (0, 1).
inline double unit(uint64_t bits) { return double(int64_t(bits)) * (0x1p-64 * (1 - 0x1p-52)) + 0.5; }

struct ScoredToken {
  float score;
  int64_t token;
};
inline bool ranks_before(const ScoredToken& a, const ScoredToken& b) { return a.score > b.score || (a.score == b.score && a.token < b.token); }

// The k + 1 largest of n > k logits, the largest first, the lower token first of equal ones. False if a logit is NaN.
inline bool largest(const float* logits, int64_t n, int64_t k, ScoredToken* best) {
  constexpr int64_t BLOCK = 64;
  int64_t i = 0, filled = 0;
  for (; filled <= k; i++, filled++) {
    if (std::isnan(logits[i])) return false;
    best[filled] = {logits[i], i};
  }
  std::make_heap(best, best + filled, ranks_before);  // the last one in front
  while (i < n) {
    const int64_t stop = std::min(i + BLOCK, n);
    const float lowest = best[0].score;
    int any = 0;
    for (int64_t j = i; j < stop; j++) any |= !(logits[j] <= lowest);
    for (; any && i < stop; i++) {
      if (std::isnan(logits[i])) return false;
      if (logits[i] <= best[0].score) continue;
      std::pop_heap(best, best + filled, ranks_before);
      best[filled - 1] = {logits[i], i};
      std::push_heap(best, best + filled, ranks_before);
    }
    i = stop;
  }
  std::sort_heap(best, best + filled, ranks_before);
  return true;
}

// The k largest of n >= k logits in each of `rows` rows, the largest first, the lower token first of equal ones; -1 in a row with a NaN.
struct Largest {
  const float* logits;
  int64_t rows, n, stride, k;
  int64_t* tokens;  // [rows][k]

  static void job(void* context, int thread, int threads, Pool&) noexcept { static_cast<Largest*>(context)->work(thread, threads); }

  void work(int thread, int threads) {
    ScoredToken best[MAX_TOP_K];
    for (int64_t r = thread; r < rows; r += threads) {
      const bool is_valid = largest(logits + r * stride, n, k - 1, best);
      for (int64_t i = 0; i < k; i++) tokens[r * k + i] = is_valid ? best[i].token : -1;
    }
  }
};

// Softmax of the first k scores, which are in descending order; -inf gets 0.
inline void softmax(const ScoredToken* best, int64_t k, float* p) {
  float sum = 0;
  for (int64_t i = 0; i < k; i++) sum += p[i] = std::exp(best[i].score - best[0].score);
  for (int64_t i = 0; i < k; i++) p[i] /= sum;
}

// Draws a token from the k largest logits. -1 if equal scores leave open which tokens top-k keeps, or if the logits are no distribution.
//
// tail: total probability of the least probable tokens that top-p removes, 0 for none. counter: where the draw's noise begins.
// token_step: step of the counter from one token to the next.
inline int64_t draw_top_k(const float* logits, int64_t n, float temperature, int64_t k, float tail, float min_p, uint64_t counter, uint64_t token_step) {
  constexpr float NO_SCORE = -std::numeric_limits<float>::infinity();
  ScoredToken best[MAX_TOP_K + 1];
  float p[MAX_TOP_K];
  if (!largest(logits, n, k, best)) return -1;
  for (int64_t i = 0; i <= k; i++) best[i].score /= temperature;
  if (!std::isfinite(best[0].score)) return -1;
  for (int64_t i = 0; i < k; i++)
    if (best[i].score == best[i + 1].score && best[i].score > NO_SCORE) return -1;
  softmax(best, k, p);
  if (tail > 0) {
    double tail_sum = 0;
    for (int64_t i = k - 1; i > 0 && float(tail_sum += p[i]) <= tail; i--) best[i].score = NO_SCORE;
    softmax(best, k, p);
  }
  if (min_p > 0) {
    for (int64_t i = 1; i < k; i++)
      if (p[i] < min_p * p[0]) best[i].score = NO_SCORE;
    softmax(best, k, p);
  }
  int64_t winner = -1;
  double best_race = 0;
  for (int64_t i = 0; i < k; i++) {
    if (p[i] == 0) continue;
    const double at = std::log(unit(splitmix(counter + uint64_t(best[i].token) * token_step))) / double(p[i]);
    if (winner < 0 || at > best_race) winner = best[i].token, best_race = at;
  }
  return winner;
}

// weights[v] = e^((logit v - highest) / temperature), padded with zeros to whole vectors. Returns the index of the highest logit; -1 if
// a logit is NaN or the highest is not finite.
inline int64_t exp_weights(const float* logits, int64_t n, float temperature, std::vector<float>& weights) {
  int any_nan = 0;
  for (int64_t i = 0; i < n; i++) any_nan |= logits[i] != logits[i];
  if (any_nan) return -1;
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

// Softmax of n logits, padded with zeros to whole vectors. Returns its entropy in bits. All are NaN if the highest logit is not finite.
inline float softmax_and_entropy(const float* logits, int64_t n, std::vector<float>& p) {
  const int64_t best = exp_weights(logits, n, 1.0f, p);
  if (best < 0) {
    p.assign(n, std::numeric_limits<float>::quiet_NaN());
    return p[0];
  }
  const V16 highest = set1(logits[best]), lowest = set1(-128.0f);  // e^-128 is 0, and 0 times it too
  V16 totals = zero(), moments = zero();
  for (int64_t i = 0; i < n; i += LANES) {
    const V16 weight = load(&p[i]), below = max(sub(load_first(logits + i, int(std::min<int64_t>(LANES, n - i))), highest), lowest);
    totals = add(totals, weight);
    moments = fma(weight, below, moments);
  }
  const float total = sum(totals);
  for (float& one : p) one /= total;
  return std::max(0.0f, (std::log(total) - sum(moments) / total) / 0.69314718f);
}

// The smallest weight that top-p keeps; -1 if equal weights leave open which tokens it keeps. tail: as in `draw_top_k`.
//
// Weights lie between 0 and 1. They are first summed in buckets by exponent and five leading bits. Only the weights of the bucket that
// contains the limit are sorted.
inline float min_kept_weight(const std::vector<float>& weights, float tail) {
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

// `draw_top_k` over all tokens.
//
// The token with the largest log u / weight wins. `best_race` is the largest so far, a negative number. Since log u <= u - 1, a token
// with u <= 1 + weight * best_race cannot win. So few logarithms are taken. The likeliest token runs first.
inline int64_t draw_from_all(const float* logits, int64_t n, float temperature, float tail, float min_p, uint64_t counter, uint64_t token_step) {
  thread_local std::vector<float> weights;
  int64_t winner = exp_weights(logits, n, temperature, weights);
  if (winner < 0) return -1;
  float min_weight = std::max(min_p, std::numeric_limits<float>::min());
  if (tail > 0) {
    const float kept_weight = min_kept_weight(weights, tail);
    if (kept_weight < 0) return -1;
    min_weight = std::max(min_weight, kept_weight);
  }
  double best_race = std::log(unit(splitmix(counter + uint64_t(winner) * token_step)));
  for (int64_t i = 0; i < n; i += LANES) {
    double u[LANES], min_u[LANES];
    for (int j = 0; j < LANES; j++) {
      u[j] = unit(splitmix(counter + uint64_t(i + j) * token_step));
      min_u[j] = weights[i + j] >= min_weight ? 1 + best_race * double(weights[i + j]) : 1.0;
    }
    int any = 0;
    for (int j = 0; j < LANES; j++) any |= u[j] > min_u[j];
    for (int j = 0; any && j < LANES; j++) {
      if (weights[i + j] < min_weight) continue;
      const double at = std::log(u[j]) / double(weights[i + j]);
      if (at > best_race) winner = i + j, best_race = at;
    }
  }
  return winner;
}
}  // namespace sk
