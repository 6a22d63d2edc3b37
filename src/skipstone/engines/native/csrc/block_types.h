// Types of quantised weights: the layout of their panels, and GGUF's blocks of the same type.
//
// UNIT: groups that share a unit of scales. ROWS: bytes of one output in each row of a unit; a row has 16 outputs. PARTS: scales of a
// group. BLOCKS: blocks of codes of a group. HIGH: bits of a code beyond four. MINIMUM: whether weights have one. STORED: bytes of GGUF's
// block of UNIT groups.
#pragma once
#include <algorithm>
#include <array>
#include <limits>

#include "integers.h"

namespace sk {
// BFLOAT16_INPUTS: weights in bfloat16. Their products round the inputs to bfloat16. Products with other floats have float32 inputs.
enum Type : int32_t {
  FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, BFLOAT16_INPUTS = 3, INT8 = 4, INT4 = 5, Q4_0 = 6, Q5_0 = 7, Q4_K = 8, Q5_K = 9, Q6_K = 10, TYPES = 11
};
inline bool has_bfloat16_pairs(int64_t type) { return type == BFLOAT16 || type == BFLOAT16_INPUTS; }

inline int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

SK_INLINE V16 magnitude(V16 x) { return max(x, sub(zero(), x)); }
// 1 / x, and 0 where x is not positive
SK_INLINE V16 inverse_of(V16 x) { return drop_where_less(x, set1(std::numeric_limits<float>::denorm_min()), div(set1(1.0f), x)); }

// Stores a value of one output in a row of a unit. at: begin of the row.
template <class E>
inline void store_lane(uint8_t* at, int64_t lane, E value) { std::memcpy(at + lane * int64_t(sizeof(E)), &value, sizeof(E)); }
inline uint16_t half_at(const uint8_t* block, int offset) { uint16_t bits; std::memcpy(&bits, block + offset, 2); return bits; }
SK_INLINE V16 halves_at(const uint8_t* at) { return load_f16(reinterpret_cast<const uint16_t*>(at)); }

struct Int8 {
  static constexpr std::array ROWS{2};
  static constexpr int UNIT = 1, PARTS = 1, BLOCKS = 8, HIGH = 0, CENTRE = 128, STORED = 34;
  static constexpr bool MINIMUM = false;

  static V16 scale(const uint8_t* unit, int64_t, int) { return halves_at(unit); }

  // Quantises a group of 32 inputs of 16 outputs, w[input][output]. Returns what is finite if no weight is too large for a scale.
  static V16 quantize(const float* w, uint8_t* unit, uint8_t* codes) {
    const auto scales = reinterpret_cast<uint16_t*>(unit);
    V16 top = zero();
    for (int k = 0; k < GROUP; k++) top = max(magnitude(load(w + k * LANES)), top);
    store_f16(scales, div(top, set1(127.0f)));
    const V16 rounded = load_f16(scales), inverse = inverse_of(rounded);
    const auto code = [&](int k) {
      return add(set1(128.0f), nearest(min(max(mul(load(w + k * LANES), inverse), set1(-127.0f)), set1(127.0f))));
    };
    for (int k = 0; k < GROUP; k += 4) store_bytes(code(k), code(k + 1), code(k + 2), code(k + 3), codes + k / 4 * BLOCK);
    return rounded;
  }

  // Q8_0. Code -128 becomes 0, which no panel may have.
  static void read(const uint8_t* block, int64_t, uint8_t* codes) { for (int i = 0; i < GROUP; i++) codes[i] = uint8_t(block[2 + i] ^ 128); }
  static void read_scales(const uint8_t* block, uint8_t* unit, int64_t lane) { store_lane(unit, lane, half_at(block, 0)); }
};

// Codes of 4 bits of 32 inputs. The low halves are the first 16 inputs, the high halves the others.
inline void read_halves(const uint8_t* from, uint8_t* codes) {
  for (int i = 0; i < GROUP / 2; i++) {
    codes[i] = from[i] & 15;
    codes[GROUP / 2 + i] = from[i] >> 4;
  }
}

struct Int4 {
  static constexpr std::array ROWS{2, 2};
  static constexpr int UNIT = 1, PARTS = 1, BLOCKS = 4, HIGH = 0, CENTRE = 0, STORED = 20;
  static constexpr bool MINIMUM = true;

  static V16 scale(const uint8_t* unit, int64_t, int) { return halves_at(unit); }
  static V16 minimum(const uint8_t* unit, int64_t) { return halves_at(unit + 2 * LANES); }

  static V16 quantize(const float* w, uint8_t* unit, uint8_t* codes) {
    const auto scales = reinterpret_cast<uint16_t*>(unit);
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

  // Q4_1
  static void read(const uint8_t* block, int64_t, uint8_t* codes) { read_halves(block + 4, codes); }
  static void read_scales(const uint8_t* block, uint8_t* unit, int64_t lane) {
    store_lane(unit, lane, half_at(block, 0));
    store_lane(unit + 2 * LANES, lane, half_at(block, 2));
  }
};

struct FourBits {  // Q4_0
  static constexpr std::array ROWS{2};
  static constexpr int UNIT = 1, PARTS = 1, BLOCKS = 4, HIGH = 0, CENTRE = 8, STORED = 18;
  static constexpr bool MINIMUM = false;

  static V16 scale(const uint8_t* unit, int64_t, int) { return halves_at(unit); }
  static void read(const uint8_t* block, int64_t, uint8_t* codes) { read_halves(block + 2, codes); }
  static void read_scales(const uint8_t* block, uint8_t* unit, int64_t lane) { store_lane(unit, lane, half_at(block, 0)); }
};

struct FiveBits : FourBits {  // Q5_0
  static constexpr int BLOCKS = 5, HIGH = 1, CENTRE = 16, STORED = 22;

  static void read(const uint8_t* block, int64_t, uint8_t* codes) {
    uint32_t high;
    std::memcpy(&high, block + 2, 4);
    read_halves(block + 6, codes);
    for (int i = 0; i < GROUP; i++) codes[i] |= uint8_t((high >> i & 1) << 4);
  }
};

// Q4_K. A unit has scales and minima of 8 groups as products of a float16 and 6 bits: the float16 of scales, that of minima, the low
// halves of the scales' bits, those of the minima's, and the two higher bits of both. A group has 4 bits of each word.
struct FourBitsK {
  static constexpr std::array ROWS{2, 2, 4, 4, 4};
  static constexpr int UNIT = 8, PARTS = 1, BLOCKS = 4, HIGH = 0, CENTRE = 0, STORED = 144, CODES = 16;  // CODES: offset in a block
  static constexpr bool MINIMUM = true;

  static V16 six_bits(const uint8_t* unit, int64_t g, int low, int shift) {
    const int at = int(g % UNIT) * 4;
    const Whole high = bits_of(shift_right(load_whole(unit + 3 * BLOCK), at + shift), 3);
    return floats(either(bits_of(shift_right(load_whole(unit + low * BLOCK), at), 15), shift_left(high, 4)));
  }
  static V16 scale(const uint8_t* unit, int64_t g, int) { return mul(halves_at(unit), six_bits(unit, g, 1, 0)); }
  static V16 minimum(const uint8_t* unit, int64_t g) { return mul(sub(zero(), halves_at(unit + 2 * LANES)), six_bits(unit, g, 2, 2)); }

  static void read(const uint8_t* block, int64_t g, uint8_t* codes) {
    const uint8_t* from = block + CODES + g / 2 * GROUP;
    for (int i = 0; i < GROUP; i++) codes[i] = from[i] >> g % 2 * 4 & 15;
  }
  static void read_scales(const uint8_t* block, uint8_t* unit, int64_t lane) {
    const uint8_t* bits = block + 4;
    uint32_t scales = 0, minima = 0, high = 0;
    for (int g = 0; g < UNIT; g++) {
      const uint32_t scale = g < 4 ? bits[g] & 63u : (bits[g + 4] & 15u) | (bits[g - 4] >> 6 << 4);
      const uint32_t minimum = g < 4 ? bits[g + 4] & 63u : bits[g + 4] >> 4u | (bits[g] >> 6 << 4);
      scales |= (scale & 15) << 4 * g;
      minima |= (minimum & 15) << 4 * g;
      high |= (scale >> 4 | minimum >> 4 << 2) << 4 * g;
    }
    store_lane(unit, lane, half_at(block, 0));
    store_lane(unit + 2 * LANES, lane, half_at(block, 2));
    store_lane(unit + BLOCK, lane, scales);
    store_lane(unit + 2 * BLOCK, lane, minima);
    store_lane(unit + 3 * BLOCK, lane, high);
  }
};

struct FiveBitsK : FourBitsK {  // Q5_K
  static constexpr int BLOCKS = 5, HIGH = 1, STORED = 176;

  static void read(const uint8_t* block, int64_t g, uint8_t* codes) {
    FourBitsK::read(block + GROUP, g, codes);
    for (int i = 0; i < GROUP; i++) codes[i] |= uint8_t((block[CODES + i] >> g & 1) << 4);
  }
};

// Q6_K. 16 inputs share a scale, the product of an integer of 8 bits and the unit's float16.
struct SixBitsK {
  static constexpr std::array ROWS{2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  static constexpr int UNIT = 8, PARTS = 2, BLOCKS = 6, HIGH = 2, CENTRE = 32, STORED = 210;
  static constexpr bool MINIMUM = false;

  static V16 scale(const uint8_t* unit, int64_t g, int part) {
    return mul(halves_at(unit), floats(load_signed_bytes(unit + 2 * LANES + (g % UNIT * 2 + part) * LANES)));
  }
  static void read(const uint8_t* block, int64_t g, uint8_t* codes) {
    const uint8_t *low = block + g / 4 * 64 + g % 2 * GROUP, *high = block + 128 + g / 4 * GROUP;
    for (int i = 0; i < GROUP; i++) codes[i] = uint8_t((low[i] >> g % 4 / 2 * 4 & 15) | (high[i] >> g % 4 * 2 & 3) << 4);
  }
  static void read_scales(const uint8_t* block, uint8_t* unit, int64_t lane) {
    store_lane(unit, lane, half_at(block, 208));
    for (int i = 0; i < 2 * UNIT; i++) store_lane(unit + 2 * LANES + i * LANES, lane, block[192 + i]);
  }
};

// Calls use<T>() for a quantised type.
template <class Use>
inline auto with_quantized(int64_t type, const Use& use) {
  switch (type) {
    case INT8: return use.template operator()<Int8>();
    case INT4: return use.template operator()<Int4>();
    case Q4_0: return use.template operator()<FourBits>();
    case Q5_0: return use.template operator()<FiveBits>();
    case Q4_K: return use.template operator()<FourBitsK>();
    case Q5_K: return use.template operator()<FiveBitsK>();
    default: return use.template operator()<SixBitsK>();
  }
}

// Bytes of a unit of scales, of a panel's scales, padded to align the codes, and of a panel.
template <class T> constexpr int64_t unit_bytes() {
  int64_t bytes = 0;
  for (int row : T::ROWS) bytes += row * LANES;
  return bytes;
}
template <class T> inline int64_t scales_bytes(int64_t groups) {
  return ((groups + T::UNIT - 1) / T::UNIT * unit_bytes<T>() + BLOCK - 1) / BLOCK * BLOCK;
}
template <class T> inline int64_t panel_bytes(int64_t groups) { return scales_bytes<T>(groups) + groups * T::BLOCKS * BLOCK; }
// The unit with the scales of a group.
template <class T, class Byte> inline Byte* unit_of(Byte* panel, int64_t group) { return panel + group / T::UNIT * unit_bytes<T>(); }

// Adds the higher bits of the codes of four inputs. step: number of the four inputs in their group. higher: the block of their bits.
template <class T>
SK_INLINE Bytes higher_bits(Bytes codes, Bytes higher, int step) {
  return either(codes, shifted_bits(higher, 4 - step * T::HIGH % 8, int8_t(((1 << T::HIGH) - 1) << 4)));
}

// The code of an input of 16 outputs, 0 to 31 of a group.
template <class T>
SK_INLINE V16 code_of(const uint8_t* codes, int input) {
  const int byte = input % 4 * 8, step = input / 4;
  if constexpr (T::BLOCKS == 8) return floats(bits_of(shift_right(load_whole(codes + step * BLOCK), byte), 255));
  Whole code = bits_of(shift_right(load_whole(codes + step / 2 * BLOCK), byte + step % 2 * 4), 15);
  if constexpr (T::HIGH > 0) {
    const Whole bits = shift_right(load_whole(codes + (4 + step * T::HIGH / 8) * BLOCK), byte + step * T::HIGH % 8);
    code = either(code, shift_left(bits_of(bits, (1 << T::HIGH) - 1), 4));
  }
  return floats(code);
}

// Stores the codes of 32 inputs of one output. values: a byte each.
template <class T>
inline void store_codes(const uint8_t* values, uint8_t* codes, int64_t lane) {
  uint32_t steps[8];  // of four inputs
  std::memcpy(steps, values, GROUP);
  if constexpr (T::BLOCKS == 8) {
    for (int s = 0; s < 8; s++) store_lane(codes + s * BLOCK, lane, steps[s]);
  } else {
    for (int j = 0; j < 4; j++) store_lane(codes + j * BLOCK, lane, (steps[2 * j] & 0x0f0f0f0fu) | (steps[2 * j + 1] & 0x0f0f0f0fu) << 4);
    for (int block = 0; block < T::HIGH; block++) {
      constexpr int COUNT = 8 / std::max(T::HIGH, 1);
      uint32_t bits = 0;
      for (int i = 0; i < COUNT; i++) bits |= (steps[block * COUNT + i] >> 4 & 0x01010101u * ((1 << T::HIGH) - 1)) << i * T::HIGH;
      store_lane(codes + (4 + block) * BLOCK, lane, bits);
    }
  }
}
}  // namespace sk
