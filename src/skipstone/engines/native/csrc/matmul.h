// y = x W^T for a few rows.
//
// Weights lie in panels of 16 outputs, [out / 16][in][16] (bfloat16: pairs of inputs, [out / 16][in / 2][16][2]). Every output
// is one chain of fused multiply-adds over the inputs 0, 1, 2, ..., for any number of rows, tiles or threads. So a row's result
// never depends on other rows.
//
// Products of type BFLOAT16_INPUTS are the processor's bfloat16 products: two fused multiply-adds for a pair of inputs, the second input
// first, with denormal numbers as zero. x86 processors without the instruction compute the same bits.
#pragma once
#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "quantized.h"
#include "simd.h"

namespace sk {
struct Matrix {
  const void* panels;  // null: no such matrix
  const float* bias;   // [outputs] or null
  int64_t outputs, inputs;
  int64_t type;
  int64_t count() const { return (outputs + LANES - 1) / LANES; }  // panels
  bool quantized() const { return type >= INT8; }
  bool needs_conversion() const { return type >= BFLOAT16_INPUTS; }  // whether its inputs are not float32
  const char* panel(int64_t index) const;  // address of a panel
};

// Rows of inputs, rounded to bfloat16 and padded with 0 to whole pairs. Without the processor's products they are floats, which a tile
// need not convert.
class RoundedRows {
 public:
#if defined(__AVX512BF16__)
  using Element = uint16_t;
  static void round(V16 x, Element* to, int count) { store_first_bf16(to, x, count); }
#else
  using Element = float;
  static void round(V16 x, Element* to, int count) { store_first(to, rounded_to_bf16(x), count); }
#endif
  static int64_t padded(int64_t inputs) { return (inputs + 1) / 2 * 2; }

  RoundedRows(Element* elements, int64_t inputs) : elements_(elements), inputs_(inputs) {}
  // Rounds rows [first, last) of x, `stride` apart.
  void fill(const float* x, int64_t first, int64_t last, int64_t x_stride) {
    for (int64_t r = first; r < last; r++) {
      const float* from = x + r * x_stride;
      Element* to = elements_ + r * stride();
      for (int64_t k = 0; k < inputs_; k += LANES) {
        const int count = int(std::min<int64_t>(inputs_ - k, LANES));
        round(load_first(from + k, count), to + k, count);
      }
      if (inputs_ < stride()) to[inputs_] = 0;
    }
  }
  const Element* data() const { return elements_; }
  int64_t stride() const { return padded(inputs_); }

 private:
  Element* elements_;
  int64_t inputs_;
};

// Memory for inputs, converted for the types of weights.
struct ConvertedRows {
  Buffer<int8_t> codes;
  Buffer<Codes::Group> groups;
  Buffer<RoundedRows::Element> rounded;

  void reserve(const Matrix& m, int64_t n) {
    if (m.quantized()) {
      groups.reserve(n * groups_of(m.inputs));
      codes.reserve(n * groups_of(m.inputs) * INPUT_BYTES);
    }
    if (m.type == BFLOAT16_INPUTS) rounded.reserve(n * RoundedRows::padded(m.inputs));
  }
  void trim() {
    codes.trim();
    groups.trim();
    rounded.trim();
  }
};

// n rows x of floats, `stride` apart, as inputs of products, with their conversions.
struct Rows {
  const float* x;
  int64_t n, stride;
  Codes codes;
  RoundedRows rounded;

  Rows(const float* x, int64_t n, int64_t stride, int64_t inputs, ConvertedRows& memory)
      : x(x), n(n), stride(stride), codes(memory.codes.data(), memory.groups.data(), inputs), rounded(memory.rounded.data(), inputs) {}

  // Converts rows [first, last) for products with some matrices.
  void convert(std::initializer_list<const Matrix*> matrices, int64_t first, int64_t last) {
    bool has_codes = false, has_rounded = false;
    for (const Matrix* m : matrices) {
      has_codes = has_codes || m->quantized();
      has_rounded = has_rounded || m->type == BFLOAT16_INPUTS;
    }
    if (has_codes) codes.fill(x, first, last, stride);
    if (has_rounded) rounded.fill(x, first, last, stride);
  }
};

// Types of float products. Element: of the weights. Input: of the rows.
struct F32 {
  using Element = float;
  using Input = float;
  static int64_t panel(int64_t inputs) { return inputs * LANES; }  // elements of a panel
};
struct BF16 {
  using Element = uint16_t;
  using Input = float;
  static int64_t panel(int64_t inputs) { return (inputs + 1) / 2 * 2 * LANES; }
};
struct BF16Inputs : BF16 {
  using Input = RoundedRows::Element;
};
struct F16 {
  using Element = uint16_t;
  using Input = float;
  static int64_t panel(int64_t inputs) { return inputs * LANES; }
};

inline const char* Matrix::panel(int64_t index) const {
  const int64_t bytes = type == FLOAT32    ? F32::panel(inputs) * 4
                        : has_bfloat16_pairs(type) ? BF16::panel(inputs) * 2
                        : type == FLOAT16  ? F16::panel(inputs) * 2
                                           : with_quantized(type, [&]<class T>() { return panel_bytes<T>(groups_of(inputs)); });
  return static_cast<const char*>(panels) + index * bytes;
}

#if defined(__AVX512F__)
constexpr int MAX_TILE_ROWS = 8;  // of a tile: 8 x 2 sums, 2 weights and a broadcast fit into 32 registers
constexpr int columns(int rows) { return rows <= 4 ? 4 : 2; }
#elif defined(__AVX2__)
constexpr int MAX_TILE_ROWS = 6;  // 6 x 1 sums of two registers each, and three more, fit into 16
constexpr int columns(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#else
constexpr int MAX_TILE_ROWS = 6;
constexpr int columns(int rows) { return rows == 1 ? 4 : 1; }
#endif

// Pairs of bfloat16 weights for 16 outputs, and sums += weights x the pair of inputs at x.
#if defined(__AVX512BF16__)
using Pairs = __m512bh;
SK_INLINE Pairs load_pairs(const uint16_t* w) { return (__m512bh)_mm512_loadu_si512(w); }
template <int C>
SK_INLINE void add_products(V16 (&sums)[C], const Pairs (&weights)[C], const uint16_t* x) {
  int32_t pair;
  std::memcpy(&pair, x, 4);
  const Pairs inputs = (__m512bh)_mm512_set1_epi32(pair);
  SK_UNROLL for (int c = 0; c < C; c++) sums[c].v = _mm512_dpbf16_ps(sums[c].v, weights[c], inputs);
}
#else
struct Pairs { V16 first, second; };
SK_INLINE Pairs load_pairs(const uint16_t* w) { Pairs p; load_bf16_pair(w, p.first, p.second); return p; }
template <int C>
SK_INLINE void add_products(V16 (&sums)[C], const Pairs (&weights)[C], const float* x) {
  const V16 first = set1(x[0]), second = set1(x[1]);
  SK_UNROLL for (int c = 0; c < C; c++) sums[c] = fma(second, weights[c].second, sums[c]);
  SK_UNROLL for (int c = 0; c < C; c++) sums[c] = fma(first, weights[c].first, sums[c]);
}
#endif

// R rows x C panels. The sums must stay in registers: plain loops over constants, which the compiler unrolls, and no lambda.
//
// ahead: elements from a weight to the one of the next tile, which is prefetched into the second-level cache. Nothing waits for so
// early a fetch: 8 rows of float32 take 2/3 of the time of a prefetch 2 KiB ahead.
template <class T, int R, int C>
inline void tile(const typename T::Element* w, int64_t inputs, int64_t ahead, const typename T::Input* x, int64_t x_stride, float* y, int64_t y_stride, int64_t capacity) {
  V16 acc[R][C];
  const int64_t size = T::panel(inputs);
  SK_UNROLL for (int r = 0; r < R; r++) SK_UNROLL for (int c = 0; c < C; c++) acc[r][c] = zero();
  if constexpr (std::is_same_v<T, BF16Inputs>) {
    for (int64_t k = 0; k < inputs; k += 2) {
      Pairs weight[C];
      SK_UNROLL for (int c = 0; c < C; c++) {
        const uint16_t* at = w + c * size + k * LANES;
        __builtin_prefetch(at + ahead, 0, 2);
        weight[c] = load_pairs(at);
      }
      SK_UNROLL for (int r = 0; r < R; r++) add_products<C>(acc[r], weight, x + r * x_stride + k);
    }
  } else if constexpr (std::is_same_v<T, BF16>) {
    const int64_t pairs = inputs / 2 * 2;
    for (int64_t k = 0; k < pairs; k += 2) {
      V16 even[C], odd[C];
      SK_UNROLL for (int c = 0; c < C; c++) {
        const uint16_t* at = w + c * size + k * LANES;
        __builtin_prefetch(at + ahead, 0, 2);
        load_bf16_pair(at, even[c], odd[c]);
      }
      SK_UNROLL for (int r = 0; r < R; r++) {
        const V16 one = set1(x[r * x_stride + k]);
        SK_UNROLL for (int c = 0; c < C; c++) acc[r][c] = fma(one, even[c], acc[r][c]);
      }
      SK_UNROLL for (int r = 0; r < R; r++) {
        const V16 one = set1(x[r * x_stride + k + 1]);
        SK_UNROLL for (int c = 0; c < C; c++) acc[r][c] = fma(one, odd[c], acc[r][c]);
      }
    }
    if (pairs < inputs) {
      SK_UNROLL for (int c = 0; c < C; c++) {
        V16 even, odd;
        load_bf16_pair(w + c * size + pairs * LANES, even, odd);
        SK_UNROLL for (int r = 0; r < R; r++) acc[r][c] = fma(set1(x[r * x_stride + pairs]), even, acc[r][c]);
      }
    }
  } else {
    for (int64_t k = 0; k < inputs; k++) {
      V16 weight[C];
      SK_UNROLL for (int c = 0; c < C; c++) {
        const auto* at = w + c * size + k * LANES;
        __builtin_prefetch(at + ahead, 0, 2);
        if constexpr (std::is_same_v<T, F32>) weight[c] = load(at); else weight[c] = load_f16(at);
      }
      SK_UNROLL for (int r = 0; r < R; r++) {
        const V16 one = set1(x[r * x_stride + k]);
        SK_UNROLL for (int c = 0; c < C; c++) acc[r][c] = fma(one, weight[c], acc[r][c]);
      }
    }
  }
  if (capacity >= C * LANES) {
    SK_UNROLL for (int r = 0; r < R; r++) SK_UNROLL for (int c = 0; c < C; c++) store(y + r * y_stride + c * LANES, acc[r][c]);
    return;
  }
  float sums[R][C][LANES];
  SK_UNROLL for (int r = 0; r < R; r++) SK_UNROLL for (int c = 0; c < C; c++) store(sums[r][c], acc[r][c]);
  for (int r = 0; r < R; r++) std::memcpy(y + r * y_stride, sums[r], sizeof(float) * std::min<int64_t>(capacity, C * LANES));
}

template <class T, int R>
inline void rows_tile(const typename T::Element* w, int64_t inputs, int64_t ahead, int width, const typename T::Input* x, int64_t xs, float* y, int64_t ys, int64_t capacity) {
  if (width == columns(R)) return tile<T, R, columns(R)>(w, inputs, ahead, x, xs, y, ys, capacity);
  for (int c = 0; c < width; c++) tile<T, R, 1>(w + c * T::panel(inputs), inputs, ahead, x, xs, y + c * LANES, ys, capacity - c * LANES);
}

template <class T>
inline void panels(const Matrix& m, const typename T::Input* x, int64_t n, int64_t xs, float* y, int64_t ys, int64_t first, int64_t last, int64_t capacity, const char* next) {
  const auto* w = static_cast<const typename T::Element*>(m.panels);
  const int64_t blocks = (n + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
  const int64_t most_rows = n / blocks + (n % blocks != 0);
  const int max_width = columns(int(most_rows));
  for (int64_t p = first; p < last;) {
    const int width = int(std::min<int64_t>(max_width, last - p));
    const auto* at = w + p * T::panel(m.inputs);
    const int64_t ahead = p + width < last ? width * T::panel(m.inputs) : distance(at, next);
    for (int64_t block = 0, r = 0; block < blocks; block++) {
      const int rows = int(n / blocks + (block < n % blocks));
      const auto* xr = x + r * xs;
      float* yr = y + r * ys + p * LANES;
      const int64_t left = capacity - p * LANES;
      auto run_tile = [&]<int R>() { rows_tile<T, R>(at, m.inputs, ahead, width, xr, xs, yr, ys, left); };
      switch (rows) {
        case 1: run_tile.template operator()<1>(); break;
        case 2: run_tile.template operator()<2>(); break;
        case 3: run_tile.template operator()<3>(); break;
        case 4: run_tile.template operator()<4>(); break;
        case 5: run_tile.template operator()<5>(); break;
        case 6: run_tile.template operator()<6>(); break;
#if defined(__AVX512F__)
        case 7: run_tile.template operator()<7>(); break;
        case 8: run_tile.template operator()<8>(); break;
#endif
      }
      r += rows;
    }
    p += width;
  }
}

// y[r][o] = bias[o] + x[r] . w[o] for the outputs o of panels [first, last) and all rows r. The bias is added last, with one rounding.
// rows: converted for this matrix. ys: floats from one row of y to the next. capacity: floats that may be written per row. next: the
// weights that this thread reads afterwards, or null. They are prefetched while activations are computed and threads wait for each other.
inline void matmul(const Matrix& m, const Rows& rows, float* y, int64_t ys, int64_t first, int64_t last, int64_t capacity, const char* next) {
  if (first >= last) return;
  const float* x = rows.x;
  const int64_t n = rows.n, xs = rows.stride;
  switch (m.type) {
    case FLOAT32: panels<F32>(m, x, n, xs, y, ys, first, last, capacity, next); break;
    case BFLOAT16: panels<BF16>(m, x, n, xs, y, ys, first, last, capacity, next); break;
    case FLOAT16: panels<F16>(m, x, n, xs, y, ys, first, last, capacity, next); break;
    case BFLOAT16_INPUTS: {
      const FlushedDenormals flushed;
      panels<BF16Inputs>(m, rows.rounded.data(), n, rows.rounded.stride(), y, ys, first, last, capacity, next);
      break;
    }
    default: with_quantized(m.type, [&]<class T>() { quantized_panels<T>(m.panels, rows.codes, n, y, ys, first, last, capacity, next); });
  }
  if (m.bias == nullptr) return;
  const int64_t stop = std::min(last * LANES, m.outputs);
  for (int64_t r = 0; r < n; r++)
    for (int64_t o = first * LANES; o < stop; o++) y[r * ys + o] += m.bias[o];
}

// Copies one lane of a panel to a lane of another. A panel is rows of 16 units, one unit per output.
inline void copy_lane(const char* from, int64_t from_lane, char* to, int64_t to_lane, int64_t rows, int64_t unit) {
  for (int64_t i = 0; i < rows; i++) std::memcpy(to + (i * LANES + to_lane) * unit, from + (i * LANES + from_lane) * unit, unit);
}

// Copies some outputs of a matrix into new panels, bit for bit. ids [count]: of the outputs. panels: all 0.
inline void take(const Matrix& m, const int64_t* ids, int64_t count, char* panels) {
  const Matrix target{panels, nullptr, count, m.inputs, m.type};
  const int64_t groups = groups_of(m.inputs);
  for (int64_t i = 0; i < count; i++) {
    const char* from = m.panel(ids[i] / LANES);
    char* to = const_cast<char*>(target.panel(i / LANES));
    const auto copy_rows = [&](int64_t begin, int64_t rows, int64_t unit) { copy_lane(from + begin, ids[i] % LANES, to + begin, i % LANES, rows, unit); };
    if (m.type == FLOAT16) copy_rows(0, m.inputs, 2);
    else if (!m.quantized()) copy_rows(0, has_bfloat16_pairs(m.type) ? (m.inputs + 1) / 2 : m.inputs, 4);  // bfloat16: pairs of inputs
    else with_quantized(m.type, [&]<class T>() {
      int64_t begin = 0;
      for (int64_t unit = 0; unit < (groups + T::UNIT - 1) / T::UNIT; unit++)
        for (int width : T::ROWS) {
          copy_rows(begin, 1, width);
          begin += width * LANES;
        }
      copy_rows(scales_bytes<T>(groups), groups * T::BLOCKS, 4);
    });
  }
}
}  // namespace sk
