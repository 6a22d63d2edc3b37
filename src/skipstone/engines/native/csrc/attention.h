// Attention of query heads over the visible slots of their tokens.
//
// The j-th visible slot is summed j-th, wherever it lies. So a token gets the same bits in a chain and in a branch of a tree. Query
// heads with the same keys and values are computed together, which does not change the order of any sum.
#pragma once
#include <cmath>

#include "simd.h"

namespace sk {
// The slots [low, high), then the slots of a list.
struct VisibleSlots {
  int64_t low, high;
  const int32_t* tail;
  int64_t tail_count;
  int64_t count() const { return high - low + tail_count; }
};

// One query head of one token. query, out: [padded head size]. scores: memory for up16(visible->count()) + SPARE floats.
struct Line {
  const float* query;
  const VisibleSlots* visible;
  float *scores, *out;
};

#if defined(__AVX512F__)
constexpr int TILE_LINES = 4, TILE_KEYS = 4, TILE_VECTORS = 4;  // lines, keys and vectors of a value in registers at once
#else
constexpr int TILE_LINES = 2, TILE_KEYS = 2, TILE_VECTORS = 2;
#endif
constexpr int MAX_LINES = 16;  // largest number of lines that read keys and values together
constexpr int64_t CHUNK = 64;   // slots per step: their keys stay in the first-level cache for all lines
constexpr int64_t SPARE = LANES;  // floats after a line's scores that are written and never read

struct SlotRun {
  int64_t first;
  int64_t operator()(int64_t j) const { return first + j; }
};
struct SlotList {
  const int32_t* slots;
  int64_t operator()(int64_t j) const { return slots[j]; }
};

// Sums of R x TILE_KEYS vectors, each by the tree of `sums4`: TILE_KEYS floats per line.
template <int R>
SK_INLINE void reduce(const V16 (&dot)[R][TILE_KEYS], float* const (&to)[R]) {
#if defined(__AVX512F__)
  if constexpr (R > 2) {
    const V16(&last)[TILE_KEYS] = dot[R - 1];
    float sums[4][TILE_KEYS];
    sums16(dot[0], dot[1], dot[2], last, sums[0]);
    for (int r = 0; r < R; r++) std::memcpy(to[r], sums[r], sizeof sums[r]);
  } else {
    for (int r = 0; r < R; r++) sums4(dot[r][0], dot[r][1], dot[r][2], dot[r][3], to[r]);
  }
#else
  float sums[2][TILE_KEYS];
  sums4(dot[0][0], dot[0][1], dot[R - 1][0], dot[R - 1][1], sums[0]);
  for (int r = 0; r < R; r++) std::memcpy(to[r], sums[r], sizeof sums[r]);
#endif
}

// q . k of R lines and `count` slots, written from `to` on. Up to TILE_KEYS - 1 further floats are written.
template <int R, class E, class Slots>
inline void scores_of(const Line* lines, const E* keys, int64_t size, Slots slots, int64_t count, float* (&to)[R]) {
  for (int64_t j = 0; j < count; j += TILE_KEYS) {
    const E* at[TILE_KEYS];
    for (int i = 0; i < TILE_KEYS; i++) at[i] = keys + slots(std::min(j + i, count - 1)) * size;
    V16 dot[R][TILE_KEYS];
#pragma GCC unroll 16
    for (int i = 0; i < R * TILE_KEYS; i++) dot[i / TILE_KEYS][i % TILE_KEYS] = zero();
    for (int64_t d = 0; d < size; d += LANES) {
      V16 key[TILE_KEYS];
#pragma GCC unroll 4
      for (int i = 0; i < TILE_KEYS; i++) key[i] = load_wide(at[i] + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const V16 query = load(lines[r].query + d);
#pragma GCC unroll 4
        for (int i = 0; i < TILE_KEYS; i++) dot[r][i] = fma(query, key[i], dot[r][i]);
      }
    }
    reduce<R>(dot, to);
    for (int r = 0; r < R; r++) to[r] += TILE_KEYS;
  }
}

// out += score * value of R lines and `count` slots, in their order. from: the first score of every line.
template <int R, int W, class E, class Slots>
inline void values_at(const Line* lines, const E* values, int64_t size, int64_t d, Slots slots, int64_t count, const float* const (&from)[R]) {
  V16 acc[R][W];
#pragma GCC unroll 16
  for (int i = 0; i < R * W; i++) acc[i / W][i % W] = load(lines[i / W].out + d + i % W * LANES);
  for (int64_t j = 0; j < count; j++) {
    const E* at = values + slots(j) * size + d;
    V16 value[W];
#pragma GCC unroll 4
    for (int i = 0; i < W; i++) value[i] = load_wide(at + i * LANES);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const V16 score = set1(from[r][j]);
#pragma GCC unroll 4
      for (int i = 0; i < W; i++) acc[r][i] = fma(score, value[i], acc[r][i]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R * W; i++) store(lines[i / W].out + d + i % W * LANES, acc[i / W][i % W]);
}

template <int R, class E, class Slots>
inline void values_of(const Line* lines, const E* values, int64_t size, Slots slots, int64_t count, const float* const (&from)[R]) {
  int64_t d = 0;
  for (; d + TILE_VECTORS * LANES <= size; d += TILE_VECTORS * LANES) values_at<R, TILE_VECTORS>(lines, values, size, d, slots, count, from);
  for (; d < size; d += LANES) values_at<R, 1>(lines, values, size, d, slots, count, from);
}

// Replaces the scores s of a line by exp(score - largest). Returns the inverse of their sum.
inline float exp_scores(float* s, int64_t count, float scale, float softcap) {
  const int64_t padded = (count + LANES - 1) / LANES * LANES;
  for (int64_t j = count; j < padded; j++) s[j] = -INFINITY;
  V16 best = set1(-INFINITY);
  for (int64_t j = 0; j < padded; j += LANES) {
    V16 x = mul(load(s + j), set1(scale));
    if (softcap > 0) {
      x = mul(tanh(div(x, set1(softcap))), set1(softcap));
      if (j + LANES > count) {  // padding stays invisible
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
  return 1.0f / sum(total);
}

// Calls part(first line, R, slots, number of slots, index j of the first slot in each of the R lines) for all visible slots, in the
// order of every line. In each chunk of slots it calls part for single lines before the slots that all R lines see, for all R lines,
// then for single lines after them.
template <class Part>
inline void over_slots(const Line* lines, int count, Part&& part) {
  int64_t low = lines[0].visible->low, high = lines[0].visible->high;
  for (int i = 1; i < count; i++) {
    low = std::min(low, lines[i].visible->low);
    high = std::max(high, lines[i].visible->high);
  }
  for (int64_t start = low; start < high; start += CHUNK)
    for (int first = 0; first < count; first += TILE_LINES) {
      const int rows = std::min(TILE_LINES, count - first);
      int64_t begin[TILE_LINES], end[TILE_LINES], from = start, to = start + CHUNK;
      for (int r = 0; r < rows; r++) {
        const VisibleSlots& visible = *lines[first + r].visible;
        begin[r] = std::max(visible.low, start);
        end[r] = std::max(std::min(visible.high, start + CHUNK), begin[r]);
        from = std::max(from, begin[r]);
        to = std::min(to, end[r]);
      }
      const auto one_line = [&](int r, int64_t a, int64_t b) {
        const int64_t place = a - lines[first + r].visible->low;
        if (a < b) part(first + r, 1, SlotRun{a}, b - a, &place);
      };
      if (from >= to) {
        for (int r = 0; r < rows; r++) one_line(r, begin[r], end[r]);
        continue;
      }
      int64_t places[TILE_LINES];
      for (int r = 0; r < rows; r++) places[r] = from - lines[first + r].visible->low;
      for (int r = 0; r < rows; r++) one_line(r, begin[r], from);
      part(first, rows, SlotRun{from}, to - from, places);
      for (int r = 0; r < rows; r++) one_line(r, to, end[r]);
    }
  for (int first = 0, rows; first < count; first += rows) {
    const VisibleSlots* visible = lines[first].visible;
    for (rows = 1; rows < TILE_LINES && first + rows < count && lines[first + rows].visible == visible; rows++) {}
    int64_t places[TILE_LINES];
    for (int r = 0; r < rows; r++) places[r] = visible->high - visible->low;
    if (visible->tail_count > 0) part(first, rows, SlotList{visible->tail}, visible->tail_count, places);
  }
}

// Attention of lines with the same keys and values, [slots][size] each; size is a multiple of 16.
template <class E>
inline void attend(const Line* lines, int count, const E* keys, const E* values, int64_t size, float scale, float softcap) {
  const auto with_rows = [](int rows, auto&& body) {
    switch (rows) {
      case 1: body.template operator()<1>(); break;
      case 2: body.template operator()<2>(); break;
#if defined(__AVX512F__)
      case 3: body.template operator()<3>(); break;
      case 4: body.template operator()<4>(); break;
#endif
    }
  };
  over_slots(lines, count, [&](int first, int rows, auto slots, int64_t num_slots, const int64_t* places) {
    with_rows(rows, [&]<int R>() {
      float* to[R];
      for (int r = 0; r < R; r++) to[r] = lines[first + r].scores + places[r];
      scores_of<R>(lines + first, keys, size, slots, num_slots, to);
    });
  });
  float inverse[MAX_LINES];
  for (int i = 0; i < count; i++) {
    inverse[i] = exp_scores(lines[i].scores, lines[i].visible->count(), scale, softcap);
    std::memset(lines[i].out, 0, sizeof(float) * size);
  }
  over_slots(lines, count, [&](int first, int rows, auto slots, int64_t num_slots, const int64_t* places) {
    with_rows(rows, [&]<int R>() {
      const float* from[R];
      for (int r = 0; r < R; r++) from[r] = lines[first + r].scores + places[r];
      values_of<R>(lines + first, values, size, slots, num_slots, from);
    });
  });
  for (int i = 0; i < count; i++)
    for (int64_t d = 0; d < size; d += LANES) store(lines[i].out + d, mul(load(lines[i].out + d), set1(inverse[i])));
}
}  // namespace sk
