// Vectors of sixteen floats for every instruction set.
//
// A V16 is one AVX-512 register, two AVX2 registers or four NEON registers. Every operation rounds each lane once, and every
// reduction adds in one fixed order, so all instruction sets give the same bits.
#pragma once
#include <cstdint>
#include <cstring>

#define SK_INLINE inline __attribute__((always_inline))
#define SK_UNROLL _Pragma("GCC unroll 16")

namespace sk {
constexpr int LANES = 16;  // floats in a V16, outputs in a weight panel
}

#if defined(__AVX512F__)
#include <immintrin.h>
namespace sk {
struct V16 { __m512 v; };
SK_INLINE V16 zero() { return {_mm512_setzero_ps()}; }
SK_INLINE V16 set1(float x) { return {_mm512_set1_ps(x)}; }
SK_INLINE V16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
SK_INLINE void store(float* p, V16 a) { _mm512_storeu_ps(p, a.v); }
SK_INLINE V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
SK_INLINE V16 add(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
SK_INLINE V16 sub(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
SK_INLINE V16 mul(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
SK_INLINE V16 div(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
SK_INLINE V16 max(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
SK_INLINE V16 min(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }
SK_INLINE V16 nearest(V16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n for whole numbers n in [-126, 127]
SK_INLINE V16 exp2_whole(V16 n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
// 0 if x < y, else a (also if x or y is NaN)
SK_INLINE V16 drop_where_less(V16 x, V16 y, V16 a) { return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_NLT_UQ), a.v)}; }
// Splits 32 bfloat16 numbers: even[o] = w[2 o], odd[o] = w[2 o + 1]
SK_INLINE void load_bf16_pair(const uint16_t* w, V16& even, V16& odd) {
  __m512i b = _mm512_loadu_si512(w);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(b, _mm512_set1_epi32(int(0xffff0000u))));
}
SK_INLINE V16 load_f16(const uint16_t* w) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)w))}; }
SK_INLINE V16 load_bf16(const uint16_t* w) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)w)), 16))};
}
SK_INLINE V16 rounded_to_bf16(V16 a) {
  const __m512i b = _mm512_castps_si512(a.v), odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i numbers = _mm512_and_si512(sum, _mm512_set1_epi32(int(0xffff0000u)));
  return {_mm512_castsi512_ps(_mm512_mask_mov_epi32(numbers, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000)))};
}
SK_INLINE void store_upper_halves(uint16_t* p, V16 a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(a.v), 16)));
}
SK_INLINE __m256 halves(V16 a) { return _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)); }
}  // namespace sk
#elif defined(__AVX2__)
#include <immintrin.h>
namespace sk {
struct V16 { __m256 a, b; };
SK_INLINE V16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
SK_INLINE V16 set1(float x) { __m256 v = _mm256_set1_ps(x); return {v, v}; }
SK_INLINE V16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SK_INLINE void store(float* p, V16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
SK_INLINE V16 fma(V16 x, V16 y, V16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
SK_INLINE V16 add(V16 x, V16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
SK_INLINE V16 sub(V16 x, V16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
SK_INLINE V16 mul(V16 x, V16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
SK_INLINE V16 div(V16 x, V16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
SK_INLINE V16 max(V16 x, V16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
SK_INLINE V16 min(V16 x, V16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
SK_INLINE __m256 nearest8(__m256 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
SK_INLINE V16 nearest(V16 x) { return {nearest8(x.a), nearest8(x.b)}; }
SK_INLINE __m256 exp2_whole8(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
SK_INLINE V16 exp2_whole(V16 n) { return {exp2_whole8(n.a), exp2_whole8(n.b)}; }
SK_INLINE V16 drop_where_less(V16 x, V16 y, V16 a) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, y.a, _CMP_NLT_UQ), a.a), _mm256_and_ps(_mm256_cmp_ps(x.b, y.b, _CMP_NLT_UQ), a.b)};
}
SK_INLINE void load_bf16_pair(const uint16_t* w, V16& even, V16& odd) {
  const __m256i high = _mm256_set1_epi32(int(0xffff0000u));
  __m256i p = _mm256_loadu_si256((const __m256i*)w), q = _mm256_loadu_si256((const __m256i*)(w + 16));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(p, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(q, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(p, high)), _mm256_castsi256_ps(_mm256_and_si256(q, high))};
}
SK_INLINE V16 load_f16(const uint16_t* w) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)w)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(w + 8)))};
}
SK_INLINE V16 load_bf16(const uint16_t* w) {
  const __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)w)), b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(w + 8)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}
SK_INLINE __m256 rounded_to_bf16(__m256 a) {
  const __m256i b = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256 numbers = _mm256_castsi256_ps(_mm256_and_si256(sum, _mm256_set1_epi32(int(0xffff0000u))));
  return _mm256_blendv_ps(numbers, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
SK_INLINE V16 rounded_to_bf16(V16 x) { return {rounded_to_bf16(x.a), rounded_to_bf16(x.b)}; }
SK_INLINE void store_upper_halves(uint16_t* p, V16 x) {
  const __m256i a = _mm256_srli_epi32(_mm256_castps_si256(x.a), 16), b = _mm256_srli_epi32(_mm256_castps_si256(x.b), 16);
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8));
}
SK_INLINE __m256 halves(V16 x) { return _mm256_add_ps(x.a, x.b); }
}  // namespace sk
#elif defined(__ARM_NEON)
#include <arm_neon.h>
namespace sk {
struct V16 { float32x4_t v[4]; };
#define SK_EACH(expression) V16 r; for (int i = 0; i < 4; i++) r.v[i] = (expression); return r
SK_INLINE V16 zero() { SK_EACH(vdupq_n_f32(0)); }
SK_INLINE V16 set1(float x) { SK_EACH(vdupq_n_f32(x)); }
SK_INLINE V16 load(const float* p) { SK_EACH(vld1q_f32(p + 4 * i)); }
SK_INLINE void store(float* p, V16 a) { for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]); }
SK_INLINE V16 fma(V16 a, V16 b, V16 c) { SK_EACH(vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
SK_INLINE V16 add(V16 a, V16 b) { SK_EACH(vaddq_f32(a.v[i], b.v[i])); }
SK_INLINE V16 sub(V16 a, V16 b) { SK_EACH(vsubq_f32(a.v[i], b.v[i])); }
SK_INLINE V16 mul(V16 a, V16 b) { SK_EACH(vmulq_f32(a.v[i], b.v[i])); }
SK_INLINE V16 div(V16 a, V16 b) { SK_EACH(vdivq_f32(a.v[i], b.v[i])); }
SK_INLINE V16 max(V16 a, V16 b) { SK_EACH(vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
SK_INLINE V16 min(V16 a, V16 b) { SK_EACH(vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
SK_INLINE V16 nearest(V16 a) { SK_EACH(vrndnq_f32(a.v[i])); }
SK_INLINE V16 exp2_whole(V16 n) {
  SK_EACH(vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23)));
}
SK_INLINE V16 drop_where_less(V16 x, V16 y, V16 a) {
  SK_EACH(vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a.v[i]), vcltq_f32(x.v[i], y.v[i]))));
}
SK_INLINE void load_bf16_pair(const uint16_t* w, V16& even, V16& odd) {
  for (int i = 0; i < 4; i++) {
    uint32x4_t b = vreinterpretq_u32_u16(vld1q_u16(w + 8 * i));
    even.v[i] = vreinterpretq_f32_u32(vshlq_n_u32(b, 16));
    odd.v[i] = vreinterpretq_f32_u32(vandq_u32(b, vdupq_n_u32(0xffff0000u)));
  }
}
SK_INLINE V16 load_bf16(const uint16_t* w) { SK_EACH(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(w + 4 * i), 16))); }
SK_INLINE float32x4_t rounded_to_bf16(float32x4_t a) {
  const uint32x4_t b = vreinterpretq_u32_f32(a), odd = vandq_u32(vshrq_n_u32(b, 16), vdupq_n_u32(1));
  const uint32x4_t numbers = vandq_u32(vaddq_u32(b, vaddq_u32(odd, vdupq_n_u32(0x7fff))), vdupq_n_u32(0xffff0000u));
  return vreinterpretq_f32_u32(vbslq_u32(vceqq_f32(a, a), numbers, vdupq_n_u32(0x7fc00000)));
}
SK_INLINE V16 rounded_to_bf16(V16 a) { SK_EACH(rounded_to_bf16(a.v[i])); }
SK_INLINE void store_upper_halves(uint16_t* p, V16 a) {
  for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vshrn_n_u32(vreinterpretq_u32_f32(a.v[i]), 16));
}
SK_INLINE V16 load_f16(const uint16_t* w) { SK_EACH(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(w + 4 * i)))); }
#undef SK_EACH
}  // namespace sk
#else
#error "no instruction set that the native engine knows"
#endif

namespace sk {
#if defined(__AVX2__)
// The sums of four vectors, in this order: lanes 8 apart, neighbours, neighbours of those, the two remaining halves.
SK_INLINE void sums4(V16 a, V16 b, V16 c, V16 d, float* out) {
  __m256 h = _mm256_hadd_ps(_mm256_hadd_ps(halves(a), halves(b)), _mm256_hadd_ps(halves(c), halves(d)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}
#else
SK_INLINE void sums4(V16 a, V16 b, V16 c, V16 d, float* out) {
  const V16 x[4] = {a, b, c, d};
  float32x4_t low[4], high[4];
  for (int i = 0; i < 4; i++) { low[i] = vaddq_f32(x[i].v[0], x[i].v[2]); high[i] = vaddq_f32(x[i].v[1], x[i].v[3]); }
  float32x4_t l = vpaddq_f32(vpaddq_f32(low[0], low[1]), vpaddq_f32(low[2], low[3]));
  float32x4_t h = vpaddq_f32(vpaddq_f32(high[0], high[1]), vpaddq_f32(high[2], high[3]));
  vst1q_f32(out, vaddq_f32(l, h));
}
#endif
#if defined(__AVX512F__)
// The same for four times four vectors; out: [4][4].
SK_INLINE void sums16(const V16 (&a)[4], const V16 (&b)[4], const V16 (&c)[4], const V16 (&d)[4], float* out) {
  const auto halves_of_two = [](V16 x, V16 y) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(x.v, y.v, 0x44), _mm512_shuffle_f32x4(x.v, y.v, 0xee));
  };
  const auto neighbours = [](__m512 x, __m512 y) { return _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd)); };
  const auto eight = [&](const V16 (&x)[4], const V16 (&y)[4]) {
    return neighbours(neighbours(halves_of_two(x[0], y[0]), halves_of_two(x[1], y[1])), neighbours(halves_of_two(x[2], y[2]), halves_of_two(x[3], y[3])));
  };
  const __m512 x = eight(a, b), y = eight(c, d);
  _mm512_storeu_ps(out, _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd)));
}
#endif
SK_INLINE float sum(V16 a) { float out[4]; sums4(a, a, a, a, out); return out[0]; }
SK_INLINE float largest(V16 a) {
  float x[LANES]; store(x, a);
  float best = x[0];
  for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
  return best;
}
#if defined(__AVX2__)
// Transposes 8 x 8 units of 32 bits. Rows of `from` are `stride` bytes apart, rows of `to` 16 units.
SK_INLINE void transpose8(const char* from, int64_t stride, uint32_t* to) {
  __m256i r[8], t[8];
  SK_UNROLL for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_si256((const __m256i*)(from + i * stride));
  SK_UNROLL for (int i = 0; i < 8; i += 2) { t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]); t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]); }
  SK_UNROLL for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]); r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]); r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  SK_UNROLL for (int i = 0; i < 4; i++) {
    _mm256_storeu_si256((__m256i*)(to + i * LANES), _mm256_permute2x128_si256(r[i], r[i + 4], 0x20));
    _mm256_storeu_si256((__m256i*)(to + (i + 4) * LANES), _mm256_permute2x128_si256(r[i], r[i + 4], 0x31));
  }
}
// to[c][r] = from[r][c], 16 x 16 units of 32 bits. Rows of `from` are `stride` bytes apart.
SK_INLINE void transpose16(const char* from, int64_t stride, uint32_t* to) {
  for (int r = 0; r < LANES; r += 8) for (int c = 0; c < LANES; c += 8) transpose8(from + r * stride + c * 4, stride, to + c * LANES + r);
}
// Writes whole numbers from 0 to 255 as bytes [16][4]: the lanes of a, b, c and d side by side.
SK_INLINE void store_bytes(V16 a, V16 b, V16 c, V16 d, uint8_t* to) {
#if defined(__AVX512F__)
  const __m512i x = _mm512_or_si512(_mm512_cvtps_epi32(a.v), _mm512_slli_epi32(_mm512_cvtps_epi32(b.v), 8));
  const __m512i y = _mm512_or_si512(_mm512_slli_epi32(_mm512_cvtps_epi32(c.v), 16), _mm512_slli_epi32(_mm512_cvtps_epi32(d.v), 24));
  _mm512_storeu_si512(to, _mm512_or_si512(x, y));
#else
  const auto bytes = [](__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256i x = _mm256_or_si256(_mm256_cvtps_epi32(a), _mm256_slli_epi32(_mm256_cvtps_epi32(b), 8));
    return _mm256_or_si256(x, _mm256_or_si256(_mm256_slli_epi32(_mm256_cvtps_epi32(c), 16), _mm256_slli_epi32(_mm256_cvtps_epi32(d), 24)));
  };
  _mm256_storeu_si256((__m256i*)to, bytes(a.a, b.a, c.a, d.a));
  _mm256_storeu_si256((__m256i*)(to + 32), bytes(a.b, b.b, c.b, d.b));
#endif
}
SK_INLINE void store_f16(uint16_t* to, V16 x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
#else
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(to + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
#endif
}
#else
SK_INLINE void transpose16(const char* from, int64_t stride, uint32_t* to) {
  for (int r = 0; r < LANES; r += 4)
    for (int c = 0; c < LANES; c += 4) {
      uint64x2_t t[4];
      for (int i = 0; i < 4; i += 2) {
        const uint32x4_t a = vld1q_u32((const uint32_t*)(from + (r + i) * stride) + c), b = vld1q_u32((const uint32_t*)(from + (r + i + 1) * stride) + c);
        t[i] = vreinterpretq_u64_u32(vtrn1q_u32(a, b));
        t[i + 1] = vreinterpretq_u64_u32(vtrn2q_u32(a, b));
      }
      for (int i = 0; i < 2; i++) {
        vst1q_u32(to + (c + i) * LANES + r, vreinterpretq_u32_u64(vtrn1q_u64(t[i], t[i + 2])));
        vst1q_u32(to + (c + i + 2) * LANES + r, vreinterpretq_u32_u64(vtrn2q_u64(t[i], t[i + 2])));
      }
    }
}
SK_INLINE void store_bytes(V16 a, V16 b, V16 c, V16 d, uint8_t* to) {
  for (int i = 0; i < 4; i++) {
    const uint32x4_t x = vorrq_u32(vcvtq_u32_f32(a.v[i]), vshlq_n_u32(vcvtq_u32_f32(b.v[i]), 8));
    const uint32x4_t y = vorrq_u32(vshlq_n_u32(vcvtq_u32_f32(c.v[i]), 16), vshlq_n_u32(vcvtq_u32_f32(d.v[i]), 24));
    vst1q_u8(to + 16 * i, vreinterpretq_u8_u32(vorrq_u32(x, y)));
  }
}
SK_INLINE void store_f16(uint16_t* to, V16 x) {
  for (int i = 0; i < 4; i++) vst1_u16(to + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i])));
}
#endif
// Stores the nearest bfloat16 numbers; ties go to the even last bit.
SK_INLINE void store_bf16(uint16_t* p, V16 a) { store_upper_halves(p, rounded_to_bf16(a)); }
// Units of 32 bits: the low halves to [0, 16), the high halves to [16, 32).
SK_INLINE void split_pairs(const uint32_t* pairs, uint16_t* halves) {
  for (int i = 0; i < LANES; i++) { halves[i] = uint16_t(pairs[i]); halves[LANES + i] = uint16_t(pairs[i] >> 16); }
}
SK_INLINE V16 load_wide(const float* p) { return load(p); }
SK_INLINE V16 load_wide(const uint16_t* bfloat16) { return load_bf16(bfloat16); }
// Loads the first `count` lanes and reads no further memory; the other lanes are 0.
SK_INLINE V16 load_first(const float* p, int count) {
  if (count >= LANES) return load(p);
  float x[LANES] = {};
  std::memcpy(x, p, sizeof(float) * count);
  return load(x);
}
SK_INLINE void store_first(float* p, V16 a, int count) {
  if (count >= LANES) { store(p, a); return; }
  float x[LANES]; store(x, a);
  std::memcpy(p, x, sizeof(float) * count);
}
SK_INLINE void store_first_bf16(uint16_t* p, V16 a, int count) {
  if (count >= LANES) { store_bf16(p, a); return; }
  uint16_t x[LANES]; store_bf16(x, a);
  std::memcpy(p, x, sizeof(uint16_t) * count);
}
// max(a, b) and min(a, b) give b if one of them is NaN, on every instruction set. So a NaN in b passes through.
// e^x within 2 units in the last place for x <= 88; 0 below -87.3; NaN for NaN.
SK_INLINE V16 exp(V16 x) {
  const V16 lowest = set1(-87.3f);
  V16 y = max(lowest, min(set1(88.0f), x));
  V16 n = nearest(mul(y, set1(1.44269504f)));
  V16 f = fma(n, set1(-0.693359375f), y);
  f = fma(n, set1(2.12194440e-4f), f);
  V16 p = set1(1.9875691500e-4f);
  p = fma(p, f, set1(1.3981999507e-3f));
  p = fma(p, f, set1(8.3334519073e-3f));
  p = fma(p, f, set1(4.1665795894e-2f));
  p = fma(p, f, set1(1.6666665459e-1f));
  p = fma(p, f, set1(5.0000001201e-1f));
  p = add(fma(p, mul(f, f), f), set1(1.0f));
  return drop_where_less(x, lowest, mul(p, exp2_whole(n)));
}
// tanh by e^(2x), exact in sign and limits; near 0 by a polynomial, so that no digits cancel; NaN for NaN.
SK_INLINE V16 tanh(V16 x) {
  V16 y = max(set1(-10.0f), min(set1(10.0f), x));
  V16 square = mul(y, y);
  // |x| < 0.625: Cephes' tanhf polynomial
  V16 p = set1(-5.70498872745e-3f);
  p = fma(p, square, set1(2.06390887954e-2f));
  p = fma(p, square, set1(-5.37397155531e-2f));
  p = fma(p, square, set1(1.33314422036e-1f));
  p = fma(p, square, set1(-3.33332819422e-1f));
  V16 near = fma(mul(p, square), y, y);
  V16 far = sub(set1(1.0f), div(set1(2.0f), add(exp(mul(y, set1(2.0f))), set1(1.0f))));
  V16 limit = set1(0.390625f);  // 0.625 squared
  return add(drop_where_less(square, limit, far), sub(near, drop_where_less(square, limit, near)));
}
}  // namespace sk
