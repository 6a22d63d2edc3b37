// Attention of query heads over the slots that their tokens may see.
//
// The j-th visible slot is summed j-th, wherever it lies: a token gets the same bits in a chain and in a branch of a tree. Query
// heads that read the same keys and values go through them together, which changes no query's own order of summation.
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
};

// One query head of one token. query, out: as many floats as a head has in the store. scores: room for up16(seen->count()) floats
// and SPARE more.
struct Line {
  const float* query;
  const Visible* seen;
  float *scores, *out;
};

#if defined(__AVX512F__)
constexpr int MOST_TOGETHER = 4, KEYS = 4, WIDE = 4;  // lines, keys and vectors of a value that are in registers at once
#else
constexpr int MOST_TOGETHER = 2, KEYS = 2, WIDE = 2;
#endif
constexpr int MOST_LINES = 16;  // that go through keys and values together
constexpr int64_t CHUNK = 64;   // slots whose keys stay in the first-level cache while all lines pass over them
constexpr int64_t SPARE = LANES;  // floats behind a line's scores that are written and never read

struct SlotRun {
  int64_t first;
  int64_t operator()(int64_t j) const { return first + j; }
};
struct SlotList {
  const int32_t* slots;
  int64_t operator()(int64_t j) const { return slots[j]; }
};

// Sums of R x KEYS vectors, each by the tree of `sums4`, to KEYS floats a line.
template <int R>
SK_INLINE void reduce(const V16 (&dot)[R][KEYS], float* const (&to)[R]) {
#if defined(__AVX512F__)
  if constexpr (R > 2) {
    const V16(&last)[KEYS] = dot[R - 1];
    float sums[4][KEYS];
    sums16(dot[0], dot[1], dot[2], last, sums[0]);
    for (int r = 0; r < R; r++) std::memcpy(to[r], sums[r], sizeof sums[r]);
  } else {
    for (int r = 0; r < R; r++) sums4(dot[r][0], dot[r][1], dot[r][2], dot[r][3], to[r]);
  }
#else
  float sums[2][KEYS];
  sums4(dot[0][0], dot[0][1], dot[R - 1][0], dot[R - 1][1], sums[0]);
  for (int r = 0; r < R; r++) std::memcpy(to[r], sums[r], sizeof sums[r]);
#endif
}

// q . k of R lines and `count` slots, to `to` onwards. Up to KEYS - 1 floats more are written.
template <int R, class E, class Slots>
inline void scores_of(const Line* lines, const E* keys, int64_t size, Slots slots, int64_t count, float* (&to)[R]) {
  for (int64_t j = 0; j < count; j += KEYS) {
    const E* at[KEYS];
    for (int i = 0; i < KEYS; i++) at[i] = keys + slots(std::min(j + i, count - 1)) * size;
    V16 dot[R][KEYS];
#pragma GCC unroll 16
    for (int i = 0; i < R * KEYS; i++) dot[i / KEYS][i % KEYS] = zero();
    for (int64_t d = 0; d < size; d += LANES) {
      V16 key[KEYS];
#pragma GCC unroll 4
      for (int i = 0; i < KEYS; i++) key[i] = load_wide(at[i] + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const V16 query = load(lines[r].query + d);
#pragma GCC unroll 4
        for (int i = 0; i < KEYS; i++) dot[r][i] = fma(query, key[i], dot[r][i]);
      }
    }
    reduce<R>(dot, to);
    for (int r = 0; r < R; r++) to[r] += KEYS;
  }
}

// out += score * value of R lines and `count` slots, in their order. The scores are those from `from` on.
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
  for (; d + WIDE * LANES <= size; d += WIDE * LANES) values_at<R, WIDE>(lines, values, size, d, slots, count, from);
  for (; d < size; d += LANES) values_at<R, 1>(lines, values, size, d, slots, count, from);
}

// Scores of a line to weights that are yet to be divided by their sum, which is returned inverted.
inline float soften(float* s, int64_t count, float scale, float softcap) {
  const int64_t padded = (count + LANES - 1) / LANES * LANES;
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
  return 1.0f / sum(total);
}

// Calls part(first line, R, slots, how many, their first place j in each of the R lines) for all that the lines see, in the order
// of every line: by chunks of slots, first what a line sees before all of a tile do, then what they share, then what is left.
template <class Part>
inline void over_slots(const Line* lines, int count, Part&& part) {
  int64_t low = lines[0].seen->low, high = lines[0].seen->high;
  for (int i = 1; i < count; i++) {
    low = std::min(low, lines[i].seen->low);
    high = std::max(high, lines[i].seen->high);
  }
  for (int64_t start = low; start < high; start += CHUNK)
    for (int first = 0; first < count; first += MOST_TOGETHER) {
      const int rows = std::min(MOST_TOGETHER, count - first);
      int64_t begin[MOST_TOGETHER], end[MOST_TOGETHER], from = start, to = start + CHUNK;
      for (int r = 0; r < rows; r++) {
        const Visible& seen = *lines[first + r].seen;
        begin[r] = std::max(seen.low, start);
        end[r] = std::max(std::min(seen.high, start + CHUNK), begin[r]);
        from = std::max(from, begin[r]);
        to = std::min(to, end[r]);
      }
      const auto alone = [&](int r, int64_t a, int64_t b) {
        const int64_t place = a - lines[first + r].seen->low;
        if (a < b) part(first + r, 1, SlotRun{a}, b - a, &place);
      };
      if (from >= to) {
        for (int r = 0; r < rows; r++) alone(r, begin[r], end[r]);
        continue;
      }
      int64_t places[MOST_TOGETHER];
      for (int r = 0; r < rows; r++) places[r] = from - lines[first + r].seen->low;
      for (int r = 0; r < rows; r++) alone(r, begin[r], from);
      part(first, rows, SlotRun{from}, to - from, places);
      for (int r = 0; r < rows; r++) alone(r, to, end[r]);
    }
  for (int first = 0, rows; first < count; first += rows) {
    const Visible* seen = lines[first].seen;
    for (rows = 1; rows < MOST_TOGETHER && first + rows < count && lines[first + rows].seen == seen; rows++) {}
    int64_t places[MOST_TOGETHER];
    for (int r = 0; r < rows; r++) places[r] = seen->high - seen->low;
    if (seen->tail_count > 0) part(first, rows, SlotList{seen->tail}, seen->tail_count, places);
  }
}

// Lines that share keys and values, [slots][size] each, size a multiple of 16.
template <class E>
inline void attend(const Line* lines, int count, const E* keys, const E* values, int64_t size, float scale, float softcap) {
  const auto with_rows = [](int rows, auto&& go) {
    switch (rows) {
      case 1: go.template operator()<1>(); break;
      case 2: go.template operator()<2>(); break;
#if defined(__AVX512F__)
      case 3: go.template operator()<3>(); break;
      case 4: go.template operator()<4>(); break;
#endif
    }
  };
  over_slots(lines, count, [&](int first, int rows, auto slots, int64_t many, const int64_t* places) {
    with_rows(rows, [&]<int R>() {
      float* to[R];
      for (int r = 0; r < R; r++) to[r] = lines[first + r].scores + places[r];
      scores_of<R>(lines + first, keys, size, slots, many, to);
    });
  });
  float inverse[MOST_LINES];
  for (int i = 0; i < count; i++) {
    inverse[i] = soften(lines[i].scores, lines[i].seen->count(), scale, softcap);
    std::memset(lines[i].out, 0, sizeof(float) * size);
  }
  over_slots(lines, count, [&](int first, int rows, auto slots, int64_t many, const int64_t* places) {
    with_rows(rows, [&]<int R>() {
      const float* from[R];
      for (int r = 0; r < R; r++) from[r] = lines[first + r].scores + places[r];
      values_of<R>(lines + first, values, size, slots, many, from);
    });
  });
  for (int i = 0; i < count; i++)
    for (int64_t d = 0; d < size; d += LANES) store(lines[i].out + d, mul(load(lines[i].out + d), set1(inverse[i])));
}
}  // namespace sk
