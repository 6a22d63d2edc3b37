// y = x W^T for a few rows, with weights of 4 to 8 bits: weight = scale * (code - CENTRE) + minimum. Every group of 32 inputs has its own
// scale (Q6_K: 16 inputs).
//
// A panel of 16 outputs has its scales first, in units of UNIT groups, then its codes, [groups][BLOCKS][16][4]: the last dimension is
// four inputs, one byte each. Types of less than 8 bits have two codes in a byte in the first four blocks: the low halves are the first
// four of eight inputs. The other blocks have the codes' higher bits, see `higher_bits`. Inputs are padded with zeros to whole groups.
//
// INT4 and INT8 are also GGUF's Q4_1 and Q8_0. Types with a Q are GGUF's blocks. Their panels have the codes and the scales of the file.
//
// The inputs of a product are rounded to 8 bits too, by row and group of 32: q = nearest(x * (127 / largest |x|)), as in llama.cpp's
// Q8_0. Sums over a group are integers, so they are exact on every instruction set. The groups are added by fused multiply-adds in the
// order 0, 1, 2, ..., for any number of rows, tiles or threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "block_types.h"
#include "memory.h"

namespace sk {
constexpr float MIN_TOP = 1e-30f;  // a group whose largest input is smaller counts as 0, because 127 / top must be finite

// Rows of inputs, rounded to 8 bits.
class Codes {
 public:
  struct Group {
    float scale;
    float shift;     // scale * sum of the codes
    int32_t centre;  // -128 * sum of the codes
    int32_t centre_of_half;  // the same of the first 16
  };

  Codes(int8_t* codes, Group* groups, int64_t inputs) : codes_(codes), groups_(groups), inputs_(inputs), count_(groups_of(inputs)) {}
  // Quantises rows [first, last) of x, `stride` floats apart.
  void fill(const float* x, int64_t first, int64_t last, int64_t stride) {
    for (int64_t r = first; r < last; r++)
      for (int64_t g = 0; g < count_; g++) {
        const float* from = x + r * stride + g * GROUP;
        const int64_t left = inputs_ - g * GROUP;
        const V16 a = load_first(from, int(std::min<int64_t>(left, LANES)));
        const V16 b = left > LANES ? load_first(from + LANES, int(std::min<int64_t>(left - LANES, LANES))) : zero();
        const int32_t bits = top_of(a, b);
        float top;
        std::memcpy(&top, &bits, 4);
        Group& group = groups_[r * count_ + g];
        int8_t* codes = codes_ + (r * count_ + g) * INPUT_BYTES;
        if (!(top >= MIN_TOP && std::isfinite(top))) {  // scale 0, or NaN if an input is not finite
          std::memset(codes, 0, INPUT_BYTES);
          const float scale = std::isfinite(top) ? 0.0f : std::numeric_limits<float>::quiet_NaN();
          group = {scale, scale, 0, 0};
          continue;
        }
        const V16 inverse = set1(127.0f / top);
        group.scale = top / 127.0f;
        const Sums sums = round_to_bytes(mul(a, inverse), mul(b, inverse), codes);
        const int32_t sum = sums.first + sums.second;
        group.shift = group.scale * float(sum);
        group.centre = -128 * sum;
        group.centre_of_half = -128 * sums.first;
      }
  }
  int64_t count() const { return count_; }  // groups per row
  const int8_t* row(int64_t r) const { return codes_ + r * count_ * INPUT_BYTES; }
  const Group* groups(int64_t r) const { return groups_ + r * count_; }

 private:
  int8_t* codes_;
  Group* groups_;
  int64_t inputs_, count_;
};

// Elements from weights to the next ones; 0 if there are none.
template <class E>
inline int64_t distance(const E* at, const char* next) {
  return next == nullptr ? 0 : (next - reinterpret_cast<const char*>(at)) / int64_t(sizeof(E));
}

// The first value of a group's sum, which subtracts CENTRE from every code. part: of the group's scales.
template <class T>
SK_INLINE Whole first_sum(const Codes::Group& group, int part) {
  if constexpr (T::CENTRE == 0) return whole(0);
  if constexpr (T::CENTRE == 128) return centred(group.centre);
  const int32_t centre = T::PARTS == 1 ? group.centre : part == 0 ? group.centre_of_half : group.centre - group.centre_of_half;
  return whole(centre / (128 / std::max(T::CENTRE, 1)));
}

// R rows x C panels. w: the first panel. ahead: bytes from it to the next tile, which is prefetched into the second-level cache. row:
// the first row.
template <class T, int R, int C>
inline void quantized_tile(const uint8_t* w, int64_t ahead, const Codes& x, int64_t row, float* y, int64_t y_stride, int64_t capacity) {
  const int64_t count = x.count(), size = panel_bytes<T>(count), start = scales_bytes<T>(count);
  constexpr int STEPS = 8 / T::PARTS, STEPS_OF_BLOCK = T::BLOCKS == 8 ? 1 : 2;  // a step: four inputs
  using Sum = GroupSum<T::BLOCKS == 8 ? 8 : 4 + T::HIGH>;
  static_assert(STEPS % Sum::STEPS == 0);
  V16 total[R][C];
  SK_UNROLL for (int r = 0; r < R; r++) SK_UNROLL for (int c = 0; c < C; c++) total[r][c] = zero();
  const int8_t* inputs = x.row(row);
  const Codes::Group* groups = x.groups(row);
  for (int64_t g = 0; g < count; g++) {
    const uint8_t* at = w + start + g * T::BLOCKS * BLOCK;
    SK_UNROLL for (int part = 0; part < T::PARTS; part++) {
      Sum sum[R][C];
      SK_UNROLL for (int r = 0; r < R; r++) {
        const Whole first = first_sum<T>(groups[r * count + g], part);
        SK_UNROLL for (int c = 0; c < C; c++) sum[r][c].sum = first;
      }
      [[maybe_unused]] Bytes higher[C];
      if constexpr (T::HIGH > 0)
        SK_UNROLL for (int c = 0; c < C; c++) {
          const uint8_t* block = at + c * size + (4 + part) * BLOCK;
          __builtin_prefetch(block + ahead, 0, 2);
          higher[c] = load_bytes(block);
        }
      SK_UNROLL for (int j = 0; j < STEPS / STEPS_OF_BLOCK; j++) {
        Bytes codes[C];
        SK_UNROLL for (int c = 0; c < C; c++) {
          const uint8_t* block = at + c * size + (part * STEPS / STEPS_OF_BLOCK + j) * BLOCK;
          __builtin_prefetch(block + ahead, 0, 2);
          codes[c] = load_bytes(block);
        }
        SK_UNROLL for (int half = 0; half < STEPS_OF_BLOCK; half++) {
          const int step = part * STEPS + j * STEPS_OF_BLOCK + half;
          Bytes four_codes[C];
          SK_UNROLL for (int c = 0; c < C; c++) {
            four_codes[c] = STEPS_OF_BLOCK == 1 ? codes[c] : half == 0 ? low_codes(codes[c]) : high_codes(codes[c]);
            if constexpr (T::HIGH > 0) four_codes[c] = higher_bits<T>(four_codes[c], higher[c], step);
          }
          SK_UNROLL for (int r = 0; r < R; r++) {
            const Four in = four(inputs + (r * count + g) * INPUT_BYTES + step * 4);
            SK_UNROLL for (int c = 0; c < C; c++) sum[r][c].add(step, four_codes[c], in);
          }
        }
      }
      SK_UNROLL for (int c = 0; c < C; c++) {
        const uint8_t* unit = unit_of<T>(w + c * size, g);
        __builtin_prefetch(unit + g % T::UNIT * unit_bytes<T>() / T::UNIT + ahead, 0, 2);
        const V16 scale = T::scale(unit, g, part);
        SK_UNROLL for (int r = 0; r < R; r++) total[r][c] = fma(floats(sum[r][c].sum), mul(scale, set1(groups[r * count + g].scale)), total[r][c]);
        if constexpr (T::MINIMUM) {
          const V16 minimum = T::minimum(unit, g);
          SK_UNROLL for (int r = 0; r < R; r++) total[r][c] = fma(minimum, set1(groups[r * count + g].shift), total[r][c]);
        }
      }
    }
  }
  SK_UNROLL for (int r = 0; r < R; r++)
    SK_UNROLL for (int c = 0; c < C; c++)
      if (capacity > c * LANES) store_first(y + r * y_stride + c * LANES, total[r][c], int(std::min<int64_t>(capacity - c * LANES, LANES)));
}

// Panels of a tile: enough to keep the memory busy, few enough that the sums stay in registers.
#if defined(__AVX512F__)
constexpr int MAX_CODED_ROWS = 8;
template <class T> constexpr int coded_columns(int rows) {
  if (T::HIGH > 0) return rows == 1 ? 4 : rows <= 3 ? 3 : 2;
  return rows == 1 ? 6 : rows <= 3 ? 4 : rows == 4 ? 3 : T::BLOCKS == 8 ? 1 : 2;
}
#elif defined(__AVX2__)
constexpr int MAX_CODED_ROWS = 4;  // 4 x 1 sums of two registers each, codes, an input and its magnitude fit into 16
template <class T> constexpr int coded_columns(int rows) { return rows == 2 || (rows == 1 && T::HIGH == 0) ? 2 : 1; }
#else
constexpr int MAX_CODED_ROWS = 2;
template <class T> constexpr int coded_columns(int) { return 1; }
#endif

// R or fewer rows x `width` panels, as few tiles as possible.
template <class T, int R>
inline void quantized_rows(int64_t rows, const uint8_t* panels, int64_t ahead, const Codes& x, int64_t row, float* y, int64_t y_stride, int64_t capacity, int width) {
  if constexpr (R > 1) if (rows < R) return quantized_rows<T, R - 1>(rows, panels, ahead, x, row, y, y_stride, capacity, width);
  if (width == coded_columns<T>(R)) return quantized_tile<T, R, coded_columns<T>(R)>(panels, ahead, x, row, y, y_stride, capacity);
  for (int c = 0; c < width; c++)
    quantized_tile<T, R, 1>(panels + c * panel_bytes<T>(x.count()), ahead, x, row, y + c * LANES, y_stride, capacity - c * LANES);
}

// The outputs of panels [first, last) of n rows, without the bias: y[r][o], rows y_stride apart. capacity, next: as in `matmul`.
template <class T>
inline void quantized_panels(const void* panels, const Codes& x, int64_t n, float* y, int64_t y_stride, int64_t first, int64_t last, int64_t capacity, const char* next) {
  const int64_t size = panel_bytes<T>(x.count()), blocks = (n + MAX_CODED_ROWS - 1) / MAX_CODED_ROWS;
  const int max_width = coded_columns<T>(int((n + blocks - 1) / blocks));
  for (int64_t p = first; p < last; p += max_width) {
    const int width = int(std::min<int64_t>(max_width, last - p));
    const uint8_t* at = static_cast<const uint8_t*>(panels) + p * size;
    const int64_t ahead = p + width < last ? width * size : distance(at, next);
    for (int64_t block = 0, row = 0; block < blocks; block++) {
      const int64_t rows = n / blocks + (block < n % blocks);
      quantized_rows<T, MAX_CODED_ROWS>(rows, at, ahead, x, row, y + row * y_stride + p * LANES, y_stride, capacity - p * LANES, width);
      row += rows;
    }
  }
}

// Stored weights of 16 bits.
struct Bfloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };
inline float float_of(float x) { return x; }
inline float float_of(Float16 x) { return from_half(x.bits); }
inline float float_of(Bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

// w[input][output] = the 32 inputs of 16 outputs as floats. Rows of `from` are `stride` elements apart.
inline void transpose_group(const float* from, int64_t stride, float* w) {
  for (int half = 0; half < GROUP; half += LANES) transpose16(reinterpret_cast<const char*>(from + half), stride * 4, reinterpret_cast<uint32_t*>(w + half * LANES));
}
template <class E>
inline void transpose_group(const E* from, int64_t stride, float* w) {
  uint32_t pairs[LANES * LANES];  // of inputs: [16][output]
  transpose16(reinterpret_cast<const char*>(from), stride * 2, pairs);
  for (int i = 0; i < LANES; i++) {
    V16 even, odd;
    if constexpr (std::is_same_v<E, Bfloat16>) {
      load_bf16_pair(reinterpret_cast<const uint16_t*>(pairs + i * LANES), even, odd);
    } else {
      uint16_t halves[2 * LANES];
      split_pairs(pairs + i * LANES, halves);
      even = load_f16(halves);
      odd = load_f16(halves + LANES);
    }
    store(w + 2 * i * LANES, even);
    store(w + (2 * i + 1) * LANES, odd);
  }
}

// A group of 32 inputs of 16 outputs, copied from fewer and padded with zeros.
template <class E>
struct PaddedGroup {
  E weights[LANES][GROUP] = {};
  PaddedGroup(const E* from, int64_t stride, int64_t outputs, int64_t inputs) {
    for (int64_t o = 0; o < std::min<int64_t>(outputs, LANES); o++)
      std::memcpy(weights[o], from + o * stride, size_t(std::min<int64_t>(inputs, GROUP)) * sizeof(E));
  }
};

// The same for any number of outputs and inputs: the first 16 and 32 of them, or padded with zeros.
template <class E>
inline void load_group(const E* from, int64_t stride, int64_t outputs, int64_t inputs, float* w) {
  if (outputs >= LANES && inputs >= GROUP) transpose_group(from, stride, w);
  else transpose_group(PaddedGroup<E>(from, stride, outputs, inputs).weights[0], GROUP, w);
}

// Zeroes the padding of a panel: outputs that it does not have, and bytes between its scales and its codes.
template <class T>
inline void clear_padding(uint8_t* panel, int64_t outputs, int64_t count) {
  const int64_t units = (count + T::UNIT - 1) / T::UNIT;
  uint8_t* codes = panel + scales_bytes<T>(count);
  std::memset(panel + units * unit_bytes<T>(), 0, size_t(codes - panel - units * unit_bytes<T>()));
  for (int64_t lane = outputs; lane < LANES; lane++) {
    for (int64_t i = 0; i < units; i++) {
      uint8_t* row = panel + i * unit_bytes<T>();
      for (int width : T::ROWS) {
        std::memset(row + lane * width, 0, size_t(width));
        row += width * LANES;
      }
    }
    for (int64_t i = 0; i < count * T::BLOCKS; i++) std::memset(codes + i * BLOCK + lane * 4, 0, 4);
  }
}

// Quantises up to 16 outputs into a panel. from: [outputs][inputs], rows `stride` elements apart. False if a weight is not finite, or
// too large for a float16 scale.
template <class T, class E>
inline bool quantize_panel(const E* from, int64_t stride, int64_t outputs, int64_t inputs, uint8_t* panel) {
  const int64_t count = groups_of(inputs);
  uint8_t* codes = panel + scales_bytes<T>(count);
  alignas(64) float w[GROUP * LANES];
  V16 zeros = zero();  // NaN once something is not finite
  for (int64_t g = 0; g < count; g++) {
    load_group(from + g * GROUP, stride, outputs, inputs - g * GROUP, w);
    for (int k = 0; k < GROUP; k++) zeros = fma(load(w + k * LANES), zero(), zeros);
    zeros = fma(T::quantize(w, unit_of<T>(panel, g), codes + g * T::BLOCKS * BLOCK), zero(), zeros);
  }
  clear_padding<T>(panel, outputs, count);
  return sum(zeros) == 0;
}

// Copies up to 16 rows of GGUF's blocks into a panel, codes and scales unchanged. stride: bytes from a row to the next one. False if a
// code is -128, which panels of type INT8 do not have.
template <class T>
inline bool pack_blocks(const uint8_t* from, int64_t stride, int64_t outputs, int64_t inputs, uint8_t* panel) {
  const int64_t count = groups_of(inputs);
  uint8_t values[GROUP], smallest = 255;
  for (int64_t lane = 0; lane < std::min<int64_t>(outputs, LANES); lane++)
    for (int64_t g = 0; g < count; g++) {
      const uint8_t* block = from + lane * stride + g / T::UNIT * T::STORED;
      if (g % T::UNIT == 0) T::read_scales(block, unit_of<T>(panel, g), lane);
      T::read(block, g % T::UNIT, values);
      if constexpr (T::CENTRE == 128) for (uint8_t value : values) smallest = std::min(smallest, value);
      store_codes<T>(values, panel + scales_bytes<T>(count) + g * T::BLOCKS * BLOCK, lane);
    }
  clear_padding<T>(panel, outputs, count);
  return smallest > 0;
}

// The weights of a group, w[input][output].
template <class T>
inline void dequantize_group(const uint8_t* panel, int64_t count, int64_t g, float* w) {
  const uint8_t *unit = unit_of<T>(panel, g), *codes = panel + scales_bytes<T>(count) + g * T::BLOCKS * BLOCK;
  for (int k = 0; k < GROUP; k++) {
    const V16 code = code_of<T>(codes, k), scale = T::scale(unit, g, k * T::PARTS / GROUP);
    if constexpr (T::MINIMUM) store(w + k * LANES, fma(scale, code, T::minimum(unit, g)));
    else store(w + k * LANES, mul(scale, sub(code, set1(T::CENTRE))));
  }
}

// The quantised weights of one output as floats.
template <class T>
inline void dequantize_output(const void* panels, int64_t inputs, int64_t output, float* weights) {
  const int64_t count = groups_of(inputs);
  const uint8_t* panel = static_cast<const uint8_t*>(panels) + output / LANES * panel_bytes<T>(count);
  float w[GROUP * LANES];
  for (int64_t g = 0; g < count; g++) {
    dequantize_group<T>(panel, count, g, w);
    for (int64_t k = g * GROUP; k < std::min(inputs, (g + 1) * GROUP); k++) weights[k] = w[k % GROUP * LANES + output % LANES];
  }
}

// Quantises up to 16 rows of GGUF's blocks of type From into a panel. The same results and arguments as in `pack_blocks`.
template <class T, class From>
inline bool requantize_panel(const uint8_t* from, int64_t stride, int64_t outputs, int64_t inputs, uint8_t* panel) {
  const int64_t count = groups_of(inputs);
  std::vector<uint8_t, Aligned<uint8_t>> stored(size_t(panel_bytes<From>(count)));
  std::vector<float, Aligned<float>> rows(size_t(LANES * inputs));
  const bool is_packed = pack_blocks<From>(from, stride, outputs, inputs, stored.data());
  for (int64_t lane = 0; lane < std::min<int64_t>(outputs, LANES); lane++)
    dequantize_output<From>(stored.data(), inputs, lane, rows.data() + lane * inputs);
  return quantize_panel<T>(rows.data(), inputs, outputs, inputs, panel) && is_packed;
}
}  // namespace sk
