// Vectors of integers for every instruction set: products of codes with 8-bit inputs, which are exact, and float16.
#pragma once
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace sk {
constexpr int BLOCK = 64;      // bytes: four inputs of 16 outputs
constexpr int GROUP = 32;      // inputs with one scale, of weights and of a product's rows

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
constexpr int INPUT_BYTES = GROUP;  // of a group of inputs, rounded to 8 bits
// The sum of a group's products of codes of BITS bits, complete after every STEPS steps of four inputs. Codes of 8 bits count as
// code - 128, if the sum began with `centred`.
template <int BITS>
struct GroupSum {
  static constexpr int STEPS = 1;
  Whole sum;
  SK_INLINE void add(int, Bytes w, Four x) { sum.v = _mm512_dpbusd_epi32(sum.v, w, x); }
};
SK_INLINE Whole centred(int32_t centre) { return whole(centre); }
SK_INLINE Whole load_whole(const void* p) { return {_mm512_loadu_si512(p)}; }
SK_INLINE Whole load_signed_bytes(const void* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
SK_INLINE Whole shift_right(Whole x, int bits) { return {_mm512_srl_epi32(x.v, _mm_cvtsi32_si128(bits))}; }
SK_INLINE Whole shift_left(Whole x, int bits) { return {_mm512_sll_epi32(x.v, _mm_cvtsi32_si128(bits))}; }
SK_INLINE Whole bits_of(Whole x, int32_t mask) { return {_mm512_and_si512(x.v, _mm512_set1_epi32(mask))}; }
SK_INLINE Whole either(Whole x, Whole y) { return {_mm512_or_si512(x.v, y.v)}; }
SK_INLINE Bytes either(Bytes x, Bytes y) { return _mm512_or_si512(x, y); }
// Bits of `mask` of every byte, shifted by 4, 3, 2, 1, 0, -1, -2 or -3 to the left. No bit of the mask comes from another byte.
SK_INLINE Bytes shifted_bits(Bytes x, int shift, int8_t mask) {
  const __m512i bits = _mm512_set1_epi8(mask);
  switch (shift) {
    case 4: return _mm512_and_si512(_mm512_slli_epi16(x, 4), bits);
    case 3: return _mm512_and_si512(_mm512_slli_epi16(x, 3), bits);
    case 2: return _mm512_and_si512(_mm512_slli_epi16(x, 2), bits);
    case 1: return _mm512_and_si512(_mm512_slli_epi16(x, 1), bits);
    case 0: return _mm512_and_si512(x, bits);
    case -1: return _mm512_and_si512(_mm512_srli_epi16(x, 1), bits);
    case -2: return _mm512_and_si512(_mm512_srli_epi16(x, 2), bits);
    default: return _mm512_and_si512(_mm512_srli_epi16(x, 3), bits);
  }
}
// The bits of the largest |a| or |b|; NaN is larger than all numbers.
SK_INLINE int32_t top_of(V16 a, V16 b) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  return _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a.v), mask), _mm512_and_si512(_mm512_castps_si512(b.v), mask)));
}
struct Sums { int32_t first, second; };  // of 16 inputs each
// Rounds to integers, in the order of the lanes. Returns their sums.
SK_INLINE Sums round_to_bytes(V16 a, V16 b, int8_t* to) {
  const __m512i x = _mm512_cvtps_epi32(a.v), y = _mm512_cvtps_epi32(b.v);
  _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(x));
  _mm_storeu_si128((__m128i*)(to + 16), _mm512_cvtsepi32_epi8(y));
  return {_mm512_reduce_add_epi32(x), _mm512_reduce_add_epi32(y)};
}
#elif defined(__AVX2__)
struct Whole { __m256i a, b; };
struct Bytes { __m256i a, b; };
struct Four { __m256i x, magnitude; };
constexpr int INPUT_BYTES = 2 * GROUP;  // of a group of inputs, rounded to 8 bits: the inputs, then their magnitudes
SK_INLINE Whole whole(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
SK_INLINE V16 floats(Whole x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
SK_INLINE Bytes load_bytes(const uint8_t* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))}; }
SK_INLINE __m256i low8(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
SK_INLINE Bytes low_codes(Bytes x) { return {low8(x.a), low8(x.b)}; }
SK_INLINE Bytes high_codes(Bytes x) { return {low8(_mm256_srli_epi16(x.a, 4)), low8(_mm256_srli_epi16(x.b, 4))}; }
SK_INLINE __m256i four8(const int8_t* p) { int32_t bits; std::memcpy(&bits, p, 4); return _mm256_set1_epi32(bits); }
SK_INLINE Four four(const int8_t* p) { return {four8(p), four8(p + GROUP)}; }
SK_INLINE __m256i add_pairs(__m256i sum, __m256i pairs) { return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))); }
// Without this, GCC delays the sums of a group until its products do not fit into the registers.
SK_INLINE __m256i sum_now(__m256i sum) { asm volatile("" : "+x"(sum)); return sum; }
// The sum of a group's products of codes of BITS bits, complete after every STEPS steps of four inputs. Eight bits: |x| times (code - 128)
// with the sign of x, at most 127 x 127 x 2 by pairs. Fewer bits: sums of 16 bits hold the products of STEPS steps, at most 15 x 127 x 16,
// 31 x 127 x 8 or 63 x 127 x 4. All are below 2^15.
template <int BITS>
struct GroupSum {
  static constexpr int STEPS = BITS == 8 ? 1 : 128 >> BITS;
  Whole sum;
  Bytes products;

  SK_INLINE void add(int step, Bytes w, Four x) {
    if constexpr (BITS == 8) {
      const __m256i half = _mm256_set1_epi8(-128);
      sum.a = sum_now(add_pairs(sum.a, _mm256_maddubs_epi16(x.magnitude, _mm256_sign_epi8(_mm256_xor_si256(w.a, half), x.x))));
      sum.b = sum_now(add_pairs(sum.b, _mm256_maddubs_epi16(x.magnitude, _mm256_sign_epi8(_mm256_xor_si256(w.b, half), x.x))));
    } else {
      const Bytes now = {_mm256_maddubs_epi16(w.a, x.x), _mm256_maddubs_epi16(w.b, x.x)};
      if (step % STEPS == 0) products = now;
      else products = {sum_now(_mm256_add_epi16(products.a, now.a)), sum_now(_mm256_add_epi16(products.b, now.b))};
      if (step % STEPS == STEPS - 1) sum = {add_pairs(sum.a, products.a), add_pairs(sum.b, products.b)};
    }
  }
};
SK_INLINE Whole centred(int32_t) { return whole(0); }
SK_INLINE Whole load_whole(const void* p) { const Bytes x = load_bytes(static_cast<const uint8_t*>(p)); return {x.a, x.b}; }
SK_INLINE Whole load_signed_bytes(const void* p) {
  const __m128i x = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
}
SK_INLINE Whole shift_right(Whole x, int bits) {
  const __m128i n = _mm_cvtsi32_si128(bits);
  return {_mm256_srl_epi32(x.a, n), _mm256_srl_epi32(x.b, n)};
}
SK_INLINE Whole shift_left(Whole x, int bits) {
  const __m128i n = _mm_cvtsi32_si128(bits);
  return {_mm256_sll_epi32(x.a, n), _mm256_sll_epi32(x.b, n)};
}
SK_INLINE Whole bits_of(Whole x, int32_t mask) {
  const __m256i bits = _mm256_set1_epi32(mask);
  return {_mm256_and_si256(x.a, bits), _mm256_and_si256(x.b, bits)};
}
SK_INLINE Whole either(Whole x, Whole y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
SK_INLINE Bytes either(Bytes x, Bytes y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
SK_INLINE __m256i shifted8(__m256i x, int shift, int8_t mask) {
  const __m256i bits = _mm256_set1_epi8(mask);
  switch (shift) {
    case 4: return _mm256_and_si256(_mm256_slli_epi16(x, 4), bits);
    case 3: return _mm256_and_si256(_mm256_slli_epi16(x, 3), bits);
    case 2: return _mm256_and_si256(_mm256_slli_epi16(x, 2), bits);
    case 1: return _mm256_and_si256(_mm256_slli_epi16(x, 1), bits);
    case 0: return _mm256_and_si256(x, bits);
    case -1: return _mm256_and_si256(_mm256_srli_epi16(x, 1), bits);
    case -2: return _mm256_and_si256(_mm256_srli_epi16(x, 2), bits);
    default: return _mm256_and_si256(_mm256_srli_epi16(x, 3), bits);
  }
}
SK_INLINE Bytes shifted_bits(Bytes x, int shift, int8_t mask) { return {shifted8(x.a, shift, mask), shifted8(x.b, shift, mask)}; }
SK_INLINE __m256i magnitude8(__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)); }
SK_INLINE int32_t top_of(V16 a, V16 b) {
  const __m256i m = _mm256_max_epi32(_mm256_max_epi32(magnitude8(a.a), magnitude8(a.b)), _mm256_max_epi32(magnitude8(b.a), magnitude8(b.b)));
  __m128i h = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(h, _mm_shuffle_epi32(h, 0xb1)));
}
struct Sums { int32_t first, second; };
SK_INLINE int32_t sum8(__m256i x) {
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}
SK_INLINE Sums round_to_bytes(V16 a, V16 b, int8_t* to) {
  const __m256i x = _mm256_cvtps_epi32(a.a), y = _mm256_cvtps_epi32(a.b), z = _mm256_cvtps_epi32(b.a), w = _mm256_cvtps_epi32(b.b);
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(x, y), _mm256_packs_epi32(z, w));  // fours in the order 0 2 4 6 1 3 5 7
  const __m256i ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256((__m256i*)to, ordered);
  _mm256_storeu_si256((__m256i*)(to + GROUP), _mm256_abs_epi8(ordered));
  return {sum8(_mm256_add_epi32(x, y)), sum8(_mm256_add_epi32(z, w))};
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
constexpr int INPUT_BYTES = GROUP;  // of a group of inputs, rounded to 8 bits
// The sum of a group's products of codes of BITS bits, complete after every STEPS steps of four inputs. Codes of 8 bits count as
// code - 128.
template <int BITS>
struct GroupSum {
  static constexpr int STEPS = 1;
  Whole sum;
  SK_INLINE void add(int, Bytes w, Four x) {
    const uint8x16_t half = vdupq_n_u8(BITS == 8 ? 128 : 0);
    for (int i = 0; i < 4; i++) sum.v[i] = dot4(sum.v[i], vreinterpretq_s8_u8(veorq_u8(w.v[i], half)), x);
  }
};
SK_INLINE Whole centred(int32_t) { return whole(0); }
SK_INLINE Whole load_whole(const void* p) { Whole r; for (int i = 0; i < 4; i++) r.v[i] = vld1q_s32(static_cast<const int32_t*>(p) + 4 * i); return r; }
SK_INLINE Whole load_signed_bytes(const void* p) {
  const int8x16_t x = vld1q_s8(static_cast<const int8_t*>(p));
  const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_s8(vget_high_s8(x));
  return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)), vmovl_s16(vget_high_s16(high))}};
}
SK_INLINE Whole shift_left(Whole x, int bits) {
  for (auto& v : x.v) v = vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(v), vdupq_n_s32(bits)));
  return x;
}
SK_INLINE Whole shift_right(Whole x, int bits) { return shift_left(x, -bits); }
SK_INLINE Whole bits_of(Whole x, int32_t mask) { for (auto& v : x.v) v = vandq_s32(v, vdupq_n_s32(mask)); return x; }
SK_INLINE Whole either(Whole x, Whole y) { for (int i = 0; i < 4; i++) x.v[i] = vorrq_s32(x.v[i], y.v[i]); return x; }
SK_INLINE Bytes either(Bytes x, Bytes y) { for (int i = 0; i < 4; i++) x.v[i] = vorrq_u8(x.v[i], y.v[i]); return x; }
SK_INLINE Bytes shifted_bits(Bytes x, int shift, int8_t mask) {
  for (auto& v : x.v) v = vandq_u8(vshlq_u8(v, vdupq_n_s8(int8_t(shift))), vdupq_n_u8(uint8_t(mask)));
  return x;
}
SK_INLINE int32_t top_of(V16 a, V16 b) {
  int32x4_t top = vdupq_n_s32(0);
  for (int i = 0; i < 8; i++)
    top = vmaxq_s32(top, vandq_s32(vreinterpretq_s32_f32((i < 4 ? a : b).v[i % 4]), vdupq_n_s32(0x7fffffff)));
  return vmaxvq_s32(top);
}
struct Sums { int32_t first, second; };
SK_INLINE int32_t round16(const V16& from, int8_t* to) {
  int32x4_t all = vdupq_n_s32(0);
  for (int i = 0; i < 4; i += 2) {
    const int32x4_t x = vcvtnq_s32_f32(from.v[i]), y = vcvtnq_s32_f32(from.v[i + 1]);
    vst1_s8(to + 4 * i, vqmovn_s16(vcombine_s16(vqmovn_s32(x), vqmovn_s32(y))));
    all = vaddq_s32(all, vaddq_s32(x, y));
  }
  return vaddvq_s32(all);
}
SK_INLINE Sums round_to_bytes(V16 a, V16 b, int8_t* to) { return {round16(a, to), round16(b, to + LANES)}; }
#endif

#if defined(__AVX2__)
inline uint16_t to_half(float x) { return uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }
inline float from_half(uint16_t x) { return _cvtsh_ss(x); }
#else
inline uint16_t to_half(float x) { const __fp16 half = __fp16(x); uint16_t bits; std::memcpy(&bits, &half, 2); return bits; }
inline float from_half(uint16_t x) { __fp16 half; std::memcpy(&half, &x, 2); return half; }
#endif
}  // namespace sk
