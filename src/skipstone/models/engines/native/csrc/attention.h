// Attention of single queries over the slots that they may see.
//
// The j-th visible slot is summed j-th, wherever it lies: a token gets the same bits in a chain and in a branch of a tree.
#pragma once
#include <cmath>

#include "simd.h"

namespace sk {
// Slots [low, high), then those of a list.
struct Visible {
  int64_t low, high;
  const int32_t* tail;
  int64_t tail_count;
  int64_t count() const { return high - low + tail_count; }
  int64_t slot(int64_t j) const { return j < high - low ? low + j : tail[j - (high - low)]; }
};

// One group of Q query heads that share keys and values. q, out: Q heads of `size` floats (a multiple of 16), `stride` apart.
// scores: room for Q x (count rounded up to 16) floats.
template <int Q>
inline void attend(const float* q, int64_t stride, const float* keys, const float* values, int64_t size, const Visible& seen, float scale,
                   float softcap, float* scores, float* out) {
  const int64_t count = seen.count(), padded = (count + LANES - 1) / LANES * LANES;
  for (int64_t j = 0; j < count; j += 4) {
    const float* at[4];
    for (int i = 0; i < 4; i++) at[i] = keys + seen.slot(std::min(j + i, count - 1)) * size;
    V16 dot[Q][4];
#pragma GCC unroll 16
    for (int i = 0; i < Q * 4; i++) dot[i / 4][i % 4] = zero();
    for (int64_t d = 0; d < size; d += LANES) {
      V16 key[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) key[i] = load(at[i] + d);
#pragma GCC unroll 4
      for (int h = 0; h < Q; h++) {
        const V16 query = load(q + h * stride + d);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) dot[h][i] = fma(query, key[i], dot[h][i]);
      }
    }
    for (int h = 0; h < Q; h++) sums4(dot[h][0], dot[h][1], dot[h][2], dot[h][3], scores + h * padded + j);
  }
  float inverse[Q];
  for (int h = 0; h < Q; h++) {
    float* s = scores + h * padded;
    for (int64_t j = count; j < padded; j++) s[j] = -INFINITY;
    V16 best = set1(-INFINITY);
    for (int64_t j = 0; j < padded; j += LANES) {
      V16 x = mul(load(s + j), set1(scale));
      if (softcap > 0) {
        x = mul(tanh(div(x, set1(softcap))), set1(softcap));
        if (j + LANES > count) {  // what pads stays out of sight
          float lanes[LANES];
          store(lanes, x);
          for (int64_t i = count - j; i < LANES; i++) lanes[i] = -INFINITY;
          x = load(lanes);
        }
      }
      store(s + j, x);
      best = max(best, x);
    }
    const V16 top = set1(largest(best));
    V16 total = zero();
    for (int64_t j = 0; j < padded; j += LANES) {
      V16 e = exp(sub(load(s + j), top));
      store(s + j, e);
      total = add(total, e);
    }
    inverse[h] = 1.0f / sum(total);
  }
  constexpr int WIDE = 4;  // vectors of a value that are summed at once
  for (int64_t d = 0; d < size; d += WIDE * LANES) {
    const int width = int(std::min<int64_t>(WIDE, (size - d) / LANES));
    V16 acc[Q][WIDE];
#pragma GCC unroll 16
    for (int i = 0; i < Q * WIDE; i++) acc[i / WIDE][i % WIDE] = zero();
    auto add_slot = [&](int64_t j, auto full) {
      const float* v = values + seen.slot(j) * size + d;
      V16 value[WIDE] = {};
#pragma GCC unroll 4
      for (int i = 0; i < WIDE; i++) if (full || i < width) value[i] = load(v + i * LANES);
#pragma GCC unroll 4
      for (int h = 0; h < Q; h++) {
        const V16 e = set1(scores[h * padded + j]);
#pragma GCC unroll 4
        for (int i = 0; i < WIDE; i++) if (full || i < width) acc[h][i] = fma(e, value[i], acc[h][i]);
      }
    };
    if (width == WIDE) for (int64_t j = 0; j < count; j++) add_slot(j, std::true_type{});
    else for (int64_t j = 0; j < count; j++) add_slot(j, std::false_type{});
    for (int h = 0; h < Q; h++)
      for (int i = 0; i < width; i++) store(out + h * stride + d + i * LANES, mul(acc[h][i], set1(inverse[h])));
  }
}

inline void attend_group(const float* q, int64_t heads, int64_t stride, const float* keys, const float* values, int64_t size, const Visible& seen,
                         float scale, float softcap, float* scores, float* out) {
  for (int64_t h = 0; h < heads;) {
    const float* qh = q + h * stride;
    float* oh = out + h * stride;
    switch (std::min<int64_t>(heads - h, 4)) {
      case 1: attend<1>(qh, stride, keys, values, size, seen, scale, softcap, scores, oh); h += 1; break;
      case 2: attend<2>(qh, stride, keys, values, size, seen, scale, softcap, scores, oh); h += 2; break;
      case 3: attend<3>(qh, stride, keys, values, size, seen, scale, softcap, scores, oh); h += 3; break;
      default: attend<4>(qh, stride, keys, values, size, seen, scale, softcap, scores, oh); h += 4; break;
    }
  }
}
}  // namespace sk
