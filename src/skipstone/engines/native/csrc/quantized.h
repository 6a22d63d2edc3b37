// y = x W^T for a few rows, with weights of 8 or 4 bits. Every group of 32 inputs has its own scale.
//
// INT8: weight = scale * (byte - 128), bytes 1 to 255. INT4: weight = scale * code + minimum, codes 0 to 15. Scales and minima are
// float16. A panel of 16 outputs has its scales first, [groups][16] (INT4: scales and minima, [groups][2][16]), then its codes,
// [groups][8][16][4]: the last dimension is four inputs, one byte each. INT4 has two codes in a byte, [groups][4][16][4]: the low halves
// are the first four of eight inputs. Inputs are padded with zeros to whole groups.
//
// The inputs of a product are rounded to 8 bits too, by row and group of 32: q = nearest(x * (127 / largest |x|)), as in llama.cpp's
// Q8_0. Sums over a group are integers, so they are exact on every instruction set. The groups are added by fused multiply-adds in the
// order 0, 1, 2, ..., for any number of rows, tiles or threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "memory.h"
#include "simd.h"

namespace sk {
constexpr int GROUP = 32;      // inputs with one scale
constexpr int BLOCK = 64;      // bytes: four inputs of 16 outputs
constexpr float MIN_TOP = 1e-30f;  // a group whose largest input is smaller counts as 0, because 127 / top must be finite

inline int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

// Whole: 16 integers of 32 bits. Bytes: four unsigned codes of 16 outputs. Four: four signed inputs, repeated for every output.
#if defined(__AVX512F__)
struct Whole { __m512i v; };
using Bytes = __m512i;
using Four = __m512i;
SK_INLINE Whole whole(int32_t x) { return {_mm512_set1_epi32(x)}; }
SK_INLINE V16 floats(Whole x) { return {_mm512_cvtepi32_ps(x.v)}; }
SK_INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
SK_INLINE Bytes low_codes(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
SK_INLINE Bytes high_codes(Bytes x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
SK_INLINE Four four(const int8_t* x) { int32_t bits; std::memcpy(&bits, x, 4); return _mm512_set1_epi32(bits); }
SK_INLINE Whole dot(Whole sum, Bytes w, Four x) { return {_mm512_dpbusd_epi32(sum.v, w, x)}; }
// The same for bytes - 128, if the sum began with `centred`.
SK_INLINE Whole dot_centred(Whole sum, Bytes w, Four x) { return dot(sum, w, x); }
SK_INLINE Whole centred(int32_t centre) { return whole(centre); }
// The bits of the largest |a| or |b|; NaN is larger than all numbers.
SK_INLINE int32_t top_of(V16 a, V16 b) {
  const __m512i size = _mm512_set1_epi32(0x7fffffff);
  return _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a.v), size), _mm512_and_si512(_mm512_castps_si512(b.v), size)));
}
// Rounds to integers, in the order of the lanes. Returns their sum.
SK_INLINE int32_t round_to_bytes(V16 a, V16 b, int8_t* to) {
  const __m512i x = _mm512_cvtps_epi32(a.v), y = _mm512_cvtps_epi32(b.v);
  _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(x));
  _mm_storeu_si128((__m128i*)(to + 16), _mm512_cvtsepi32_epi8(y));
  return _mm512_reduce_add_epi32(_mm512_add_epi32(x, y));
}
#elif defined(__AVX2__)
struct Whole { __m256i a, b; };
struct Bytes { __m256i a, b; };
struct Four { __m256i x, size; };
SK_INLINE Whole whole(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
SK_INLINE V16 floats(Whole x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
SK_INLINE Bytes load_bytes(const uint8_t* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))}; }
SK_INLINE __m256i low8(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
SK_INLINE Bytes low_codes(Bytes x) { return {low8(x.a), low8(x.b)}; }
SK_INLINE Bytes high_codes(Bytes x) { return {low8(_mm256_srli_epi16(x.a, 4)), low8(_mm256_srli_epi16(x.b, 4))}; }
SK_INLINE Four four(const int8_t* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  const __m256i x = _mm256_set1_epi32(bits);
  return {x, _mm256_abs_epi8(x)};
}
SK_INLINE __m256i add_pairs(__m256i sum, __m256i pairs) { return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))); }
// Codes are at most 15, so two products stay below 2^15, at which maddubs saturates.
SK_INLINE Whole dot(Whole sum, Bytes w, Four x) {
  return {add_pairs(sum.a, _mm256_maddubs_epi16(w.a, x.x)), add_pairs(sum.b, _mm256_maddubs_epi16(w.b, x.x))};
}
// |x| times (byte - 128) with the sign of x. Both factors are at most 127, so two products stay below 2^15.
SK_INLINE Whole dot_centred(Whole sum, Bytes w, Four x) {
  const __m256i half = _mm256_set1_epi8(-128);
  return {add_pairs(sum.a, _mm256_maddubs_epi16(x.size, _mm256_sign_epi8(_mm256_xor_si256(w.a, half), x.x))),
          add_pairs(sum.b, _mm256_maddubs_epi16(x.size, _mm256_sign_epi8(_mm256_xor_si256(w.b, half), x.x)))};
}
SK_INLINE Whole centred(int32_t) { return whole(0); }
SK_INLINE __m256i size8(__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)); }
SK_INLINE int32_t top_of(V16 a, V16 b) {
  const __m256i m = _mm256_max_epi32(_mm256_max_epi32(size8(a.a), size8(a.b)), _mm256_max_epi32(size8(b.a), size8(b.b)));
  __m128i h = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(h, _mm_shuffle_epi32(h, 0xb1)));
}
SK_INLINE int32_t round_to_bytes(V16 a, V16 b, int8_t* to) {
  const __m256i x = _mm256_cvtps_epi32(a.a), y = _mm256_cvtps_epi32(a.b), z = _mm256_cvtps_epi32(b.a), w = _mm256_cvtps_epi32(b.b);
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(x, y), _mm256_packs_epi32(z, w));  // fours in the order 0 2 4 6 1 3 5 7
  _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  const __m256i all = _mm256_add_epi32(_mm256_add_epi32(x, y), _mm256_add_epi32(z, w));
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}
#else
struct Whole { int32x4_t v[4]; };
struct Bytes { uint8x16_t v[4]; };
using Four = int8x16_t;
SK_INLINE Whole whole(int32_t x) { const int32x4_t v = vdupq_n_s32(x); return {{v, v, v, v}}; }
SK_INLINE V16 floats(Whole x) { V16 r; for (int i = 0; i < 4; i++) r.v[i] = vcvtq_f32_s32(x.v[i]); return r; }
SK_INLINE Bytes load_bytes(const uint8_t* p) { Bytes r; for (int i = 0; i < 4; i++) r.v[i] = vld1q_u8(p + 16 * i); return r; }
SK_INLINE Bytes low_codes(Bytes x) { for (auto& v : x.v) v = vandq_u8(v, vdupq_n_u8(15)); return x; }
SK_INLINE Bytes high_codes(Bytes x) { for (auto& v : x.v) v = vshrq_n_u8(v, 4); return x; }
SK_INLINE Four four(const int8_t* p) { int32_t bits; std::memcpy(&bits, p, 4); return vreinterpretq_s8_s32(vdupq_n_s32(bits)); }
SK_INLINE int32x4_t dot4(int32x4_t sum, int8x16_t w, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, w, x);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_s8(vget_high_s8(w), vget_high_s8(x));
  return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}
SK_INLINE Whole dot(Whole sum, Bytes w, Four x) {
  for (int i = 0; i < 4; i++) sum.v[i] = dot4(sum.v[i], vreinterpretq_s8_u8(w.v[i]), x);
  return sum;
}
SK_INLINE Whole dot_centred(Whole sum, Bytes w, Four x) {
  for (int i = 0; i < 4; i++) sum.v[i] = dot4(sum.v[i], vreinterpretq_s8_u8(veorq_u8(w.v[i], vdupq_n_u8(128))), x);
  return sum;
}
SK_INLINE Whole centred(int32_t) { return whole(0); }
SK_INLINE int32_t top_of(V16 a, V16 b) {
  int32x4_t top = vdupq_n_s32(0);
  for (int i = 0; i < 8; i++)
    top = vmaxq_s32(top, vandq_s32(vreinterpretq_s32_f32((i < 4 ? a : b).v[i % 4]), vdupq_n_s32(0x7fffffff)));
  return vmaxvq_s32(top);
}
SK_INLINE int32_t round_to_bytes(V16 a, V16 b, int8_t* to) {
  int32x4_t all = vdupq_n_s32(0);
  for (int i = 0; i < 8; i += 2) {
    const V16& from = i < 4 ? a : b;
    const int32x4_t x = vcvtnq_s32_f32(from.v[i % 4]), y = vcvtnq_s32_f32(from.v[i % 4 + 1]);
    vst1_s8(to + 4 * i, vqmovn_s16(vcombine_s16(vqmovn_s32(x), vqmovn_s32(y))));
    all = vaddq_s32(all, vaddq_s32(x, y));
  }
  return vaddvq_s32(all);
}
#endif

#if defined(__AVX2__)
inline uint16_t to_half(float x) { return uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }
inline float from_half(uint16_t x) { return _cvtsh_ss(x); }
#else
inline uint16_t to_half(float x) { const __fp16 half = __fp16(x); uint16_t bits; std::memcpy(&bits, &half, 2); return bits; }
inline float from_half(uint16_t x) { __fp16 half; std::memcpy(&half, &x, 2); return half; }
#endif

// Rows of inputs, rounded to 8 bits.
class Codes {
 public:
  struct Group {
    float scale;
    float shift;     // scale * sum of the codes
    int32_t centre;  // -128 * sum of the codes
  };

  void reserve(int64_t n, int64_t inputs) {
    const int64_t needed = n * groups_of(inputs);
    groups_.reserve(needed);
    codes_.reserve(needed * GROUP);
  }
  void trim() {
    groups_.trim();
    codes_.trim();
  }
  // Quantises x: n rows of `inputs` floats, `stride` apart. Reserve first.
  void fill(const float* x, int64_t n, int64_t stride, int64_t inputs) {
    count_ = groups_of(inputs);
    for (int64_t r = 0; r < n; r++)
      for (int64_t g = 0; g < count_; g++) {
        const float* from = x + r * stride + g * GROUP;
        const int64_t left = inputs - g * GROUP;
        const V16 a = load_first(from, int(std::min<int64_t>(left, LANES)));
        const V16 b = left > LANES ? load_first(from + LANES, int(std::min<int64_t>(left - LANES, LANES))) : zero();
        const int32_t bits = top_of(a, b);
        float top;
        std::memcpy(&top, &bits, 4);
        Group& group = groups_.data()[r * count_ + g];
        int8_t* codes = codes_.data() + (r * count_ + g) * GROUP;
        if (!(top >= MIN_TOP && std::isfinite(top))) {  // scale 0, or NaN if an input is not finite
          std::memset(codes, 0, GROUP);
          const float scale = std::isfinite(top) ? 0.0f : std::numeric_limits<float>::quiet_NaN();
          group = {scale, scale, 0};
          continue;
        }
        const V16 inverse = set1(127.0f / top);
        group.scale = top / 127.0f;
        const int32_t sum = round_to_bytes(mul(a, inverse), mul(b, inverse), codes);
        group.shift = group.scale * float(sum);
        group.centre = -128 * sum;
      }
  }
  int64_t count() const { return count_; }  // groups per row
  const int8_t* row(int64_t r) const { return codes_.data() + r * count_ * GROUP; }
  const Group* groups(int64_t r) const { return groups_.data() + r * count_; }

 private:
  int64_t count_ = 0;
  Buffer<int8_t> codes_;
  Buffer<Group> groups_;
};

SK_INLINE V16 size(V16 x) { return max(x, sub(zero(), x)); }
// 1 / x, and 0 where x is not positive
SK_INLINE V16 inverse_of(V16 x) { return drop_where_less(x, set1(std::numeric_limits<float>::denorm_min()), div(set1(1.0f), x)); }

struct Int8 {
  static constexpr int BLOCKS = 8;       // blocks of codes per group
  static constexpr int SCALES = LANES;  // float16 numbers per group

  // Quantises a group of 32 inputs of 16 outputs, w[input][output]. Returns what is finite if no weight is too large for a scale.
  static V16 quantize(const float* w, uint16_t* scales, uint8_t* codes) {
    V16 top = zero();
    for (int k = 0; k < GROUP; k++) top = max(size(load(w + k * LANES)), top);
    store_f16(scales, div(top, set1(127.0f)));
    const V16 rounded = load_f16(scales), inverse = inverse_of(rounded);
    const auto code = [&](int k) {
      return add(set1(128.0f), nearest(min(max(mul(load(w + k * LANES), inverse), set1(-127.0f)), set1(127.0f))));
    };
    for (int k = 0; k < GROUP; k += 4) store_bytes(code(k), code(k + 1), code(k + 2), code(k + 3), codes + k / 4 * BLOCK);
    return rounded;
  }
  static float weight(const uint16_t* scale, const uint8_t* codes, int i) {
    return from_half(*scale) * float(int(codes[(i / 4) * BLOCK + i % 4]) - 128);
  }
};

struct Int4 {
  static constexpr int BLOCKS = 4;
  static constexpr int SCALES = 2 * LANES;

  static V16 quantize(const float* w, uint16_t* scales, uint8_t* codes) {
    V16 low = load(w), high = low;
    for (int k = 1; k < GROUP; k++) {
      const V16 x = load(w + k * LANES);
      low = min(x, low);
      high = max(x, high);
    }
    store_f16(scales + LANES, low);
    const V16 minimum = load_f16(scales + LANES);
    store_f16(scales, div(sub(high, minimum), set1(15.0f)));
    const V16 rounded = load_f16(scales), inverse = inverse_of(rounded);
    const auto code = [&](int k) { return nearest(min(max(mul(sub(load(w + k * LANES), minimum), inverse), zero()), set1(15.0f))); };
    const auto both = [&](int k) { return fma(code(k + 4), set1(16.0f), code(k)); };
    for (int k = 0; k < GROUP; k += 8) store_bytes(both(k), both(k + 1), both(k + 2), both(k + 3), codes + k / 8 * BLOCK);
    return add(rounded, minimum);
  }
  static float weight(const uint16_t* scale, const uint8_t* codes, int i) {
    const uint8_t both = codes[(i / 8) * BLOCK + i % 4];
    return std::fma(from_half(*scale), float(i % 8 < 4 ? both & 15 : both >> 4), from_half(scale[LANES]));
  }
};

// Bytes of a panel's scales, padded to align the codes, and of the whole panel.
template <class T> inline int64_t scales_bytes(int64_t groups) { return (groups * T::SCALES * 2 + BLOCK - 1) / BLOCK * BLOCK; }
template <class T> inline int64_t panel_bytes(int64_t groups) { return scales_bytes<T>(groups) + groups * T::BLOCKS * BLOCK; }

// Elements from weights to the next ones; 0 if there are none.
template <class E>
inline int64_t distance(const E* at, const char* next) {
  return next == nullptr ? 0 : (next - reinterpret_cast<const char*>(at)) / int64_t(sizeof(E));
}

// R rows x C panels. w: the first panel. ahead: bytes from it to the next tile, which is prefetched into the second-level cache. row:
// the first row.
template <class T, int R, int C>
inline void quantized_tile(const uint8_t* w, int64_t ahead, const Codes& x, int64_t row, float* y, int64_t y_stride, int64_t capacity) {
  const int64_t count = x.count(), size = panel_bytes<T>(count), start = scales_bytes<T>(count);
  constexpr bool IS_INT8 = std::is_same_v<T, Int8>;
  V16 total[R][C];
  SK_UNROLL for (int r = 0; r < R; r++) SK_UNROLL for (int c = 0; c < C; c++) total[r][c] = zero();
  const int8_t* inputs = x.row(row);
  const Codes::Group* groups = x.groups(row);
  for (int64_t g = 0; g < count; g++) {
    Whole sum[R][C];
    SK_UNROLL for (int r = 0; r < R; r++) {
      const Whole first = IS_INT8 ? centred(groups[r * count + g].centre) : whole(0);
      SK_UNROLL for (int c = 0; c < C; c++) sum[r][c] = first;
    }
    SK_UNROLL for (int j = 0; j < T::BLOCKS; j++) {
      Bytes codes[C];
      SK_UNROLL for (int c = 0; c < C; c++) {
        const uint8_t* at = w + c * size + start + (g * T::BLOCKS + j) * BLOCK;
        __builtin_prefetch(at + ahead, 0, 2);
        codes[c] = load_bytes(at);
      }
      if constexpr (IS_INT8) {
        SK_UNROLL for (int r = 0; r < R; r++) {
          const Four in = four(inputs + (r * count + g) * GROUP + j * 4);
          SK_UNROLL for (int c = 0; c < C; c++) sum[r][c] = dot_centred(sum[r][c], codes[c], in);
        }
      } else {
        SK_UNROLL for (int r = 0; r < R; r++) {
          const Four in = four(inputs + (r * count + g) * GROUP + j * 8);
          SK_UNROLL for (int c = 0; c < C; c++) sum[r][c] = dot(sum[r][c], low_codes(codes[c]), in);
        }
        SK_UNROLL for (int r = 0; r < R; r++) {
          const Four in = four(inputs + (r * count + g) * GROUP + j * 8 + 4);
          SK_UNROLL for (int c = 0; c < C; c++) sum[r][c] = dot(sum[r][c], high_codes(codes[c]), in);
        }
      }
    }
    SK_UNROLL for (int c = 0; c < C; c++) {
      const uint16_t* scales = reinterpret_cast<const uint16_t*>(w + c * size) + g * T::SCALES;
      __builtin_prefetch(reinterpret_cast<const char*>(scales) + ahead, 0, 2);
      const V16 scale = load_f16(scales);
      SK_UNROLL for (int r = 0; r < R; r++) total[r][c] = fma(floats(sum[r][c]), mul(scale, set1(groups[r * count + g].scale)), total[r][c]);
      if constexpr (!IS_INT8) {
        const V16 minimum = load_f16(scales + LANES);
        SK_UNROLL for (int r = 0; r < R; r++) total[r][c] = fma(minimum, set1(groups[r * count + g].shift), total[r][c]);
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
  return rows == 1 ? 6 : rows <= 3 ? 4 : rows == 4 ? 3 : std::is_same_v<T, Int8> ? 1 : 2;
}
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

// Quantises up to 16 outputs into a panel. from: [outputs][inputs], rows `stride` elements apart. False if a weight is not finite, or
// too large for a float16 scale.
template <class T, class E>
inline bool quantize_panel(const E* from, int64_t stride, int64_t outputs, int64_t inputs, uint8_t* panel) {
  const int64_t count = groups_of(inputs), scales = count * T::SCALES * 2;  // bytes
  uint8_t* codes = panel + scales_bytes<T>(count);
  std::memset(panel + scales, 0, size_t(codes - panel - scales));
  alignas(64) float w[GROUP * LANES];
  V16 zeros = zero();  // NaN once something is not finite
  for (int64_t g = 0; g < count; g++) {
    load_group(from + g * GROUP, stride, outputs, inputs - g * GROUP, w);
    for (int k = 0; k < GROUP; k++) zeros = fma(load(w + k * LANES), zero(), zeros);
    zeros = fma(T::quantize(w, reinterpret_cast<uint16_t*>(panel) + g * T::SCALES, codes + g * T::BLOCKS * BLOCK), zero(), zeros);
  }
  for (int64_t lane = outputs; lane < LANES; lane++) {  // unused lanes are 0
    for (int64_t i = lane; i < count * T::SCALES; i += LANES) reinterpret_cast<uint16_t*>(panel)[i] = 0;
    for (int64_t i = 0; i < count * T::BLOCKS; i++) std::memset(codes + i * BLOCK + lane * 4, 0, 4);
  }
  return sum(zeros) == 0;
}

// The quantised weights of one output as floats.
template <class T>
inline void dequantize_output(const void* panels, int64_t inputs, int64_t output, float* weights) {
  const int64_t count = groups_of(inputs), lane = output % LANES;
  const uint8_t* panel = static_cast<const uint8_t*>(panels) + output / LANES * panel_bytes<T>(count);
  for (int64_t k = 0; k < inputs; k++) {
    const int64_t g = k / GROUP;
    const uint8_t* codes = panel + scales_bytes<T>(count) + g * T::BLOCKS * BLOCK + lane * 4;
    weights[k] = T::weight(reinterpret_cast<const uint16_t*>(panel) + g * T::SCALES + lane, codes, int(k % GROUP));
  }
}
}  // namespace sk
