// Calls a built library as Python would, over random models and passes, so that sanitizers see it.
//
//   driver LIBRARY LEVEL fuzz SEED SECONDS   cases from a seed on, on two host threads at once; prints how many
//   driver LIBRARY LEVEL case SEED           one of them
//   driver LIBRARY LEVEL hash COUNT          one hash of the results of cases 0 to COUNT without hostile values, as bits
//
// Every buffer is allocated to the byte: one read or write past it is one past an allocation. Exits with 0 where all holds.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "model.h"
#include "pool.h"

using namespace sk;

#define CHECK(condition)                                                                                              \
  do {                                                                                                                \
    if (!(condition)) {                                                                                               \
      std::fprintf(stderr, "%s:%d: case %llu: %s\n", __FILE__, __LINE__, (unsigned long long)running, #condition); \
      std::abort();                                                                                                   \
    }                                                                                                                 \
  } while (0)

constexpr int HOST_THREADS = 2;
std::atomic<uint64_t> running_cases[HOST_THREADS];  // for the handler below
thread_local uint64_t running = 0;

// Sanitizers and CHECK end in abort(): say which case to run again.
void report_abort(int) {
  for (auto& one : running_cases) {
    char line[64];
    const int size = std::snprintf(line, sizeof line, "running: case %llu\n", (unsigned long long)one.load());
    if (write(2, line, size_t(size)) != size) break;
  }
}

struct Library {
  decltype(&sk_abi) abi;
  decltype(&sk_level) level;
  decltype(&sk_source_hash) source_hash;
  decltype(&sk_sizes) sizes;
  decltype(&sk_packed_bytes) packed_bytes;
  decltype(&sk_pack) pack;
  decltype(&sk_quantize) quantize;
  decltype(&sk_take) take;
  decltype(&sk_embed) embed;
  decltype(&sk_run) run;
  decltype(&sk_norm) norm;
  decltype(&sk_head) head;
  decltype(&sk_test) test;
  decltype(&sk_largest) largest;
  decltype(&sk_draw) draw;
  decltype(&sk_chain) chain;

  explicit Library(const char* path) {
    handle_ = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) std::fprintf(stderr, "%s\n", dlerror());
    CHECK(handle_ != nullptr);
    find(abi, "sk_abi");
    find(level, "sk_level");
    find(source_hash, "sk_source_hash");
    find(sizes, "sk_sizes");
    find(packed_bytes, "sk_packed_bytes");
    find(pack, "sk_pack");
    find(quantize, "sk_quantize");
    find(take, "sk_take");
    find(embed, "sk_embed");
    find(run, "sk_run");
    find(norm, "sk_norm");
    find(head, "sk_head");
    find(test, "sk_test");
    find(largest, "sk_largest");
    find(draw, "sk_draw");
    find(chain, "sk_chain");
  }

 private:
  template <typename F>
  void find(F& function, const char* name) {
    function = reinterpret_cast<F>(dlsym(handle_, name));
    if (function == nullptr) std::fprintf(stderr, "the library does not export %s\n", name);
    CHECK(function != nullptr);
  }

  void* handle_;
};

// The same numbers on every machine: whole numbers and powers of two only.
struct Dice {
  uint64_t state;
  uint64_t next() {  // splitmix64
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t from(int64_t low, int64_t high) { return low + int64_t(next() % uint64_t(high - low + 1)); }  // both included
  bool chance(int percent) { return from(0, 99) < percent; }
  float number() { return float(from(-(1 << 23), 1 << 23)) / float(1 << 23); }  // in [-1, 1], 24 bits
  int64_t hostile(int64_t edge = 0) {  // edge: the first number that is too large, where there is one
    if (edge > 0 && chance(40)) return from(edge - 1, edge + 1);
    const int64_t some[] = {-1, INT64_MIN, INT64_MAX, INT64_MAX - 1, INT64_MIN + 1, INT64_MAX - from(0, 40), -from(1, 40), 1 << 30,
                            int64_t(1) << 31, int64_t(1) << 32, -(int64_t(1) << 31), int64_t(1) << 62, 0};
    return chance(30) ? from(-2, 60) : some[from(0, int64_t(std::size(some)) - 1)];
  }
};

// `count` elements and not a byte more.
template <typename T>
struct Block {
  int64_t count = 0;
  std::unique_ptr<T, decltype(&std::free)> held{nullptr, &std::free};
  Block() = default;
  explicit Block(int64_t size) : count(size), held(static_cast<T*>(std::malloc(size_t(size) * sizeof(T))), &std::free) {
    CHECK(held != nullptr || size == 0);
    std::memset(static_cast<void*>(held.get()), 0x55, size_t(size) * sizeof(T));
  }
  Block(const Block& other) : Block(other.count) { *this = other; }
  Block(Block&&) = default;
  Block& operator=(Block&&) = default;
  Block& operator=(const Block& other) {
    CHECK(count == other.count);
    std::memcpy(held.get(), other.held.get(), size_t(count) * sizeof(T));
    return *this;
  }
  T* data() const { return held.get(); }
  T& operator[](int64_t i) const {
    CHECK(i >= 0 && i < count);
    return held.get()[i];
  }
  bool operator==(const Block& other) const {
    return count == other.count && std::memcmp(data(), other.data(), size_t(count) * sizeof(T)) == 0;
  }
};

Block<float> numbers(Dice& dice, int64_t count, float scale = 1, float offset = 0) {
  Block<float> made(count);
  for (int64_t i = 0; i < count; i++) made[i] = dice.number() * scale + offset;
  return made;
}

Block<int64_t> filled(int64_t count, int64_t value) {
  Block<int64_t> made(count);
  std::fill(made.data(), made.data() + count, value);
  return made;
}

struct Hash {  // FNV-1a
  uint64_t value = 0xcbf29ce484222325u;
  void add(const void* bytes, size_t size) {
    for (size_t i = 0; i < size; i++) value = (value ^ static_cast<const uint8_t*>(bytes)[i]) * 0x100000001b3u;
  }
  void add(const Block<float>& found) {
    for (int64_t i = 0; i < found.count; i++) CHECK(std::isfinite(found[i]));
    add(found.data(), size_t(found.count) * sizeof(float));
  }
  void add(const Block<uint8_t>& found) { add(found.data(), size_t(found.count)); }
  void add(const Block<int64_t>& found) { add(found.data(), size_t(found.count) * sizeof(int64_t)); }
};

// Whether numbers have the same bits, or both are NaN.
bool same_numbers(const float* some, const float* others, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (std::memcmp(some + i, others + i, sizeof(float)) != 0 && !(std::isnan(some[i]) && std::isnan(others[i]))) return false;
  return true;
}

// The bits of a number as a type stores it, cut off.
uint16_t short_bits(float x, int64_t type) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (type == BFLOAT16) return uint16_t(bits >> 16);
  const int64_t exponent = int64_t((bits >> 23) & 255) - 112;
  return exponent <= 0 ? 0 : uint16_t(((bits >> 16) & 0x8000) | (uint32_t(exponent) << 10) | ((bits >> 13) & 0x3ff));
}

// GGUF's blocks of types from INT8 on. halves: places of their float16 numbers. exponent: of float16 numbers that make weights of about 1.
struct BlockType { int64_t inputs, bytes, halves[2], exponent; };
constexpr BlockType BLOCK_TYPES[] = {{32, 34, {0, 0}, 7},    {32, 20, {0, 2}, 11},  {32, 18, {0, 0}, 11},    {32, 22, {0, 0}, 10},
                                     {256, 144, {0, 2}, 5}, {256, 176, {0, 2}, 4}, {256, 210, {208, 208}, 3}};

// Whether rows of so many inputs are whole blocks, where a type has blocks.
bool has_whole_blocks(int64_t type, int64_t inputs) { return type < INT8 || inputs % BLOCK_TYPES[type - INT8].inputs == 0; }

// Bytes from a row of stored weights to the next one. Rows of blocks have no stride.
int64_t row_bytes(int64_t stored, int64_t stride, int64_t inputs) {
  if (stored < INT8) return stride * (stored == FLOAT32 ? 4 : 2);
  return inputs / BLOCK_TYPES[stored - INT8].inputs * BLOCK_TYPES[stored - INT8].bytes;
}

// The weight of an input in a block, by the definition of its format.
float weight_of(int64_t type, const uint8_t* block, int64_t i) {
  const auto half = [&](int64_t at) { return from_half(uint16_t(block[at] | block[at + 1] << 8)); };
  const auto four_bits = [&](int64_t at) { return block[at + i % 16] >> (i / 16 * 4) & 15; };
  switch (type) {
    case INT8: return half(0) * float(int8_t(block[2 + i]));
    case INT4: return std::fma(half(0), float(four_bits(4)), half(2));
    case Q4_0: return half(0) * float(four_bits(2) - 8);
    case Q5_0: return half(0) * float(four_bits(6) + 16 * (block[2 + i / 8] >> i % 8 & 1) - 16);
    case Q6_K: {
      const int low = block[i / 128 * 64 + i % 64] >> (i / 64 % 2 * 4) & 15, high = block[128 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
      return half(208) * float(int8_t(block[192 + i / 16])) * float(low + 16 * high - 32);
    }
    default: {  // Q4_K, Q5_K
      const uint8_t* bits = block + 4;
      const int64_t g = i / 32;
      const int scale = g < 4 ? bits[g] & 63 : (bits[g + 4] & 15) + 16 * (bits[g - 4] >> 6);
      const int minimum = g < 4 ? bits[g + 4] & 63 : (bits[g + 4] >> 4) + 16 * (bits[g] >> 6);
      const int low = block[(type == Q4_K ? 16 : 48) + i / 64 * 32 + i % 32] >> (g % 2 * 4) & 15;
      const int high = type == Q4_K ? 0 : block[16 + i % 32] >> g & 1;
      return std::fma(half(0) * float(scale), float(low + 16 * high), -half(2) * float(minimum));
    }
  }
}

// A random model and its store. Everything that pointers of the structs lead to is owned here.
struct Case {
  const Library& library;
  Dice dice;
  bool hostile;
  Hash hash;
  std::vector<Block<uint8_t>> kept;
  std::vector<std::pair<uint8_t*, Block<uint8_t>>> spoiled_panels;  // of matrices, and the same of blocks with any scales
  Model m{};
  std::vector<Layer> layers;
  std::vector<Block<uint8_t>> buffers;  // keys of all layers, then values
  std::vector<void*> pointers;
  Store store{};
  std::vector<Rotary> rotary;
  int64_t padded = 0;
  bool is_head = false;  // layer 0 reads pairs, as that of an EAGLE-3 head

  Case(const Library& library, uint64_t seed, bool hostile) : library(library), dice{seed}, hostile(hostile) {
    m.kv_heads = dice.from(1, 3);
    m.heads = m.kv_heads * dice.from(1, dice.chance(20) ? 9 : 3);
    m.head_size = dice.chance(20) ? GROUP : dice.from(1, 20) * (dice.chance(20) ? 1 : 2);
    if (dice.chance(10)) m.kv_heads = dice.from(1, 2), m.heads = 4, m.head_size = 64;  // a whole block of all types
    m.hidden = width();
    m.intermediate = width();
    m.depth = dice.from(1, 3);
    m.vocabulary = dice.from(1, 100);
    padded = up16(m.head_size);
    for (int64_t i = dice.from(1, ROTARY_TABLES); i > 0; i--) {
      const int64_t positions = dice.from(1, 60), size = dice.from(0, m.head_size / 2) * 2;
      rotary.push_back({keep(numbers(dice, positions * size)), keep(numbers(dice, positions * size)), positions, size});
    }
    is_head = dice.chance(30);
    for (int64_t i = 0; i < m.depth; i++) layers.push_back(layer(is_head && i == 0));
    m.feeds_back_normed = dice.chance(50);
    m.layers = layers.data();
    m.head = matrix(m.vocabulary, m.hidden, 0);
    if (dice.chance(50)) {
      m.embeddings = dice.from(1, 100);
      const Matrix own = matrix(m.embeddings, m.hidden, 0);
      m.embedding_type = own.type;
      m.embedding = own.quantized() ? own.panels : weights(own.type, m.embeddings, m.hidden, m.hidden);
    } else {
      m.embeddings = dice.from(1, m.vocabulary);
    }
    m.norm = dice.chance(80) ? keep(numbers(dice, m.hidden, 0.5f, 1)) : nullptr;
    m.epsilon = 1e-5f;
    m.embedding_scale = dice.chance(50) ? 1.0f : 3.0f;
    m.embedding_multiplier = dice.chance(50) ? 1.0f : 0.5f;
    m.logits_divisor = dice.chance(50) ? 1.0f : 0.75f;
    m.logits_softcap = dice.chance(50) ? 0.0f : 2.0f;
    store.rows = dice.from(1, 4);
    store.slots = dice.from(3, dice.chance(10) ? 300 : 40);
    store.type = dice.chance(50) ? FLOAT32 : BFLOAT16;
    for (int64_t i = 0; i < 2 * m.depth; i++) {
      const int64_t lines = store.rows * m.kv_heads * store.slots;
      const void* filled = weights(store.type, lines, padded, padded);
      buffers.emplace_back(lines * line_bytes());
      std::memcpy(buffers.back().data(), filled, size_t(buffers.back().count));
    }
    for (auto& one : buffers) pointers.push_back(one.data());
    store.keys = pointers.data();
    store.values = pointers.data() + m.depth;
  }

  int64_t width() {
    if (dice.chance(10)) return 256 * dice.from(1, 2);
    return dice.chance(30) ? GROUP * dice.from(1, 4) : dice.from(1, dice.chance(10) ? 200 : 70);
  }

  // Bytes of a key or value of one head.
  int64_t line_bytes() const { return padded * (store.type == FLOAT32 ? 4 : 2); }

  template <typename T>
  T* keep(const Block<T>& block) {
    kept.emplace_back(block.count * int64_t(sizeof(T)));
    std::memcpy(kept.back().data(), block.data(), size_t(kept.back().count));
    return reinterpret_cast<T*>(kept.back().data());
  }

  // [outputs][inputs] of a type, rows `stride` elements apart.
  void* weights(int64_t type, int64_t outputs, int64_t inputs, int64_t stride) {
    const Block<float> wide = numbers(dice, (outputs - 1) * stride + inputs, 0.5f);
    if (type == FLOAT32) return keep(wide);
    Block<uint16_t> narrow(wide.count);
    for (int64_t i = 0; i < wide.count; i++) narrow[i] = short_bits(wide[i], type);
    return keep(narrow);
  }

  // Rows of blocks with any codes. odd_percent: share of the float16 numbers that are any bits.
  Block<uint8_t> blocks(int64_t type, int64_t outputs, int64_t inputs, int odd_percent) {
    const BlockType& block = BLOCK_TYPES[type - INT8];
    Block<uint8_t> made(outputs * row_bytes(type, 0, inputs));
    for (int64_t i = 0; i < made.count; i++) {
      made[i] = uint8_t(dice.next());
      if (type == INT8 && made[i] == 128) made[i] = 127;  // the code that no panel has
    }
    for (int64_t at = 0; at < made.count; at += block.bytes)
      for (int64_t place : block.halves) {
        const uint64_t bits = dice.next(), half = dice.chance(odd_percent) ? bits : (bits & 0x83ff) | uint64_t(block.exponent) << 10;
        made[at + place] = uint8_t(half), made[at + place + 1] = uint8_t(half >> 8);
      }
    return made;
  }

  // Packs or quantises weights, in one call or two.
  int64_t packed(int64_t type, int64_t stored, int64_t file, const void* source, int64_t stride, int64_t outputs, int64_t inputs, Block<uint8_t>& panels) {
    const auto call = type <= BFLOAT16_INPUTS || type == stored ? library.pack : library.quantize;
    const int64_t first = dice.from(0, outputs / LANES) * LANES;
    const int64_t code = call(type, stored, file, source, stride, first, inputs, panels.data(), dice.from(1, 3));
    const char* rest = static_cast<const char*>(source) + first * row_bytes(stored, stride, inputs);
    uint8_t* to = panels.data() + library.packed_bytes(type, first, inputs);
    return code != OK ? code : call(type, stored, file, rest, stride, outputs - first, inputs, to, dice.from(1, 3));
  }

  // The same from a file.
  void packed_from_file(int64_t type, int64_t stored, const void* source, int64_t stride, int64_t outputs, int64_t inputs, const Block<uint8_t>& expected) {
    const int64_t size = (outputs - 1) * row_bytes(stored, stride, inputs) + row_bytes(stored, inputs, inputs), offset = dice.from(0, 99);
    const int file = memfd_create("weights", 0);
    CHECK(file >= 0 && pwrite(file, source, size_t(size), offset) == size);
    Block<uint8_t> panels(expected.count);
    const void* place = reinterpret_cast<const void*>(offset);
    CHECK(packed(type, stored, file, place, stride, outputs, inputs, panels) == OK);
    CHECK(panels == expected);
    CHECK(ftruncate(file, offset + size - 1) == 0);
    CHECK(packed(type, stored, file, place, stride, outputs, inputs, panels) == BAD_FILE);
    close(file);
    CHECK(packed(type, stored, 1 << 20, place, stride, outputs, inputs, panels) == BAD_FILE);  // no such descriptor
  }

  // Weights of up to `max_outputs` outputs, read as embeddings. Products with whole numbers, which 8 bits hold exactly, are compared with
  // those of the weights, and one row's alone with the same in all rows.
  Block<float> checked_weights(const Matrix& matrix, int64_t max_outputs) {
    Model alone{};
    alone.hidden = matrix.inputs, alone.vocabulary = alone.embeddings = matrix.outputs, alone.head = matrix;
    alone.embedding_scale = alone.embedding_multiplier = alone.logits_divisor = 1;
    const int64_t n = dice.from(1, 12), count = std::min(max_outputs, matrix.outputs), first = dice.from(0, matrix.outputs - count);
    Block<int64_t> ids(count);
    for (int64_t o = 0; o < count; o++) ids[o] = first + o;
    Block<float> weights(count * matrix.inputs), x(n * matrix.inputs), y(n * matrix.outputs), again(matrix.outputs);
    for (int64_t i = 0; i < x.count; i++) x[i] = i % matrix.inputs % GROUP == 0 ? 127 : float(dice.from(-127, 127));
    CHECK(library.embed(&alone, ids.data(), count, weights.data()) == OK);
    CHECK(library.head(&alone, nullptr, x.data(), n, 0, y.data(), nullptr, threads()) == OK);
    const int64_t row = dice.from(0, n - 1);
    const float *in = &x[row * matrix.inputs], *found = &y[row * matrix.outputs];
    CHECK(library.head(&alone, nullptr, in, 1, 0, again.data(), nullptr, 1) == OK);
    CHECK(same_numbers(found, again.data(), matrix.outputs));
    for (int64_t o = 0; o < count; o++) {
      double expected = 0, top = 0;
      for (int64_t k = 0; k < matrix.inputs; k++) {
        const double weight = weights[o * matrix.inputs + k];
        expected += weight * double(in[k]);
        top = std::max(top, std::abs(weight));
      }
      CHECK(std::isfinite(found[first + o]) == std::isfinite(expected));
      if (std::isfinite(expected)) CHECK(std::abs(double(found[first + o]) - expected) <= 1e-5 * 127 * double(matrix.inputs) * top);
    }
    return weights;
  }

  // Blocks with any scales have panels of the same weights. Only finite weights can be quantised once more. Returns the panels.
  Block<uint8_t> check_spoiled_blocks(int64_t type, int64_t outputs, int64_t inputs) {
    const Block<uint8_t> source = blocks(type, outputs, inputs, dice.chance(50) ? 2 : 60);
    const int64_t copy_type = type <= INT4 ? INT8 + INT4 - type : dice.from(INT8, INT4);  // another one
    Block<uint8_t> panels(library.packed_bytes(type, outputs, inputs)), refused(panels), copy(library.packed_bytes(copy_type, outputs, inputs));
    const auto pack_all = [&](int64_t to, Block<uint8_t>& made) { return packed(to, type, -1, source.data(), dice.hostile(), outputs, inputs, made); };
    CHECK(pack_all(type, panels) == OK);
    const Block<float> weights = checked_weights({panels.data(), nullptr, outputs, inputs, type}, outputs);
    const int64_t copied = pack_all(copy_type, copy);
    const float *first = weights.data(), *last = first + weights.count;
    const bool finite = std::all_of(first, last, [](float x) { return std::isfinite(x); });
    if (!finite) CHECK(copied == BAD_WEIGHT);
    else if (std::all_of(first, last, [](float x) { return std::abs(x) < 6e4f; })) CHECK(copied == OK);
    const BlockType& block = BLOCK_TYPES[type - INT8];
    for (int64_t i = 0; i < weights.count; i++) {
      const float expected = weight_of(type, &source[i / block.inputs * block.bytes], i % block.inputs);
      CHECK(weights[i] == expected || (std::isnan(weights[i]) && std::isnan(expected)));
    }
    if (type == INT8) {
      source[dice.from(0, source.count / 34 - 1) * 34 + dice.from(2, 33)] = 128;
      CHECK(pack_all(type, refused) == BAD_WEIGHT && pack_all(copy_type, copy) == BAD_WEIGHT);
    }
    return panels;
  }

  // One weight that cannot be quantised is refused. Another may be of any size.
  template <class Pack>
  void check_spoiled_weight(int64_t stored, void* source, int64_t place, const Pack& pack_all) {
    if (stored == FLOAT32) {
      float* at = static_cast<float*>(source) + place;
      const float own = *at, odd[] = {NAN, -NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 1e9f, -1e9f};
      if (hostile) {
        *at = odd[dice.from(0, 7)];
        CHECK(pack_all() == BAD_WEIGHT);
      }
      *at = dice.chance(20) ? own * std::ldexp(1.0f, int(dice.from(-140, 16))) : own;
    } else if (hostile) {
      uint16_t* at = static_cast<uint16_t*>(source) + place;
      const uint16_t own = *at, infinite = stored == BFLOAT16 ? 0x7f80 : 0x7c00;
      *at = uint16_t(infinite | (dice.chance(50) ? 0x8000 : 0) | (dice.chance(50) ? 1 << dice.from(0, 6) : 0));
      CHECK(pack_all() == BAD_WEIGHT);
      *at = own;
    }
  }

  // A type up to `last` that stored rows of so many inputs can have.
  int64_t stored_type(int64_t inputs, int64_t last) {
    const int64_t type = dice.from(FLOAT32, last);
    return type != BFLOAT16_INPUTS && has_whole_blocks(type, inputs) ? type : stored_type(inputs, last);
  }

  Matrix matrix(int64_t outputs, int64_t inputs, int bias_percent) {
    const int64_t stride = inputs + (dice.chance(20) ? dice.from(1, 5) : 0);
    const bool quantizes = dice.chance(30);
    const int64_t type = quantizes ? dice.from(INT8, INT4) : dice.chance(10) ? int64_t(BFLOAT16_INPUTS) : stored_type(inputs, TYPES - 1);
    const int64_t stored = type == BFLOAT16_INPUTS ? int64_t(BFLOAT16) : quantizes ? stored_type(inputs, TYPES - 1) : type == FLOAT32 ? stored_type(inputs, FLOAT16) : type;
    Block<uint8_t> panels(library.packed_bytes(type, outputs, inputs));
    void* source = stored < INT8 ? weights(stored, outputs, inputs, stride) : keep(blocks(stored, outputs, inputs, 0));
    const auto pack_all = [&] { return packed(type, stored, -1, source, stride, outputs, inputs, panels); };
    if (type >= INT8 && stored < INT8)
      check_spoiled_weight(stored, source, dice.from(0, outputs - 1) * stride + dice.from(0, inputs - 1), pack_all);
    CHECK(pack_all() == OK);
    hash.add(panels);
    packed_from_file(type, stored, source, stride, outputs, inputs, panels);
    const float* bias = dice.chance(bias_percent) ? keep(numbers(dice, outputs)) : nullptr;
    uint8_t* own = keep(panels);
    checked_weights({own, nullptr, outputs, inputs, type}, 4);
    if (hostile && stored >= INT8 && dice.chance(30)) {
      Block<uint8_t> spoiled = check_spoiled_blocks(stored, outputs, inputs);
      if (type == stored) spoiled_panels.emplace_back(own, std::move(spoiled));
    }
    return {own, bias, outputs, inputs, type};
  }

  Layer layer(bool reads_pairs) {
    const auto norm = [&](int percent, int64_t size) { return dice.chance(percent) ? keep(numbers(dice, size, 0.5f, 1)) : nullptr; };
    const int64_t q = m.heads * m.head_size, k = m.kv_heads * m.head_size, entering = m.hidden * (reads_pairs ? 2 : 1);
    Layer made{};
    made.q = matrix(q, entering, 30), made.k = matrix(k, entering, 30), made.v = matrix(k, entering, 30);
    if (reads_pairs) made.norm_of_embedding = norm(100, m.hidden), made.norm_before_residual = dice.chance(50);
    made.o = matrix(m.hidden, q, 30);
    made.gate = matrix(m.intermediate, m.hidden, 30), made.up = matrix(m.intermediate, m.hidden, 30);
    made.down = matrix(m.hidden, m.intermediate, 30);
    const int before = is_head ? 100 : 80;  // without norms, states that are fed back become infinite
    made.norm_before_attention = norm(before, m.hidden), made.norm_after_attention = norm(30, m.hidden);
    made.norm_before_mlp = norm(before, m.hidden), made.norm_after_mlp = norm(30, m.hidden);
    made.norm_whole = dice.chance(50);
    if (dice.chance(30)) {
      made.norm_q = norm(100, made.norm_whole ? q : m.head_size);
      made.norm_k = norm(100, made.norm_whole ? k : m.head_size);
    }
    made.window = dice.chance(50) ? 0 : dice.from(1, 8);
    made.rotary = dice.from(-1, int64_t(rotary.size()) - 1);
    made.activation = dice.from(SILU, GELU_TANH);
    made.scale = 0.25f;
    made.softcap = dice.chance(70) ? 0.0f : 3.0f;
    made.residual = dice.chance(70) ? 1.0f : 0.5f;
    return made;
  }

  // Number of floats of a token that enter a layer.
  int64_t entering(int64_t index) const { return m.hidden * (index < m.depth && layers[size_t(index)].norm_of_embedding != nullptr ? 2 : 1); }

  // Numbers of threads that are not there, but none that would start dozens.
  int64_t hostile_threads() {
    const int64_t many = dice.hostile(MAX_THREADS + 2);
    return many > 3 && many <= MAX_THREADS ? 3 : many;
  }

  int64_t threads() { return dice.chance(40) ? 1 : dice.from(2, 3); }

  // Positions that every layer of a range has a rotary phase for.
  int64_t positions_known() const {
    int64_t known = store.slots;
    for (const Layer& one : layers)
      if (one.rotary >= 0) known = std::min(known, rotary[size_t(one.rotary)].positions);
    return known;
  }

  void tables(Pass& pass) const { std::copy(rotary.begin(), rotary.end(), pass.rotary); }

  const int64_t* skip_set() {
    if (dice.chance(60)) return nullptr;
    Block<int64_t> bits(m.depth);
    for (int64_t i = 0; i < m.depth; i++) bits[i] = dice.from(0, 3);
    return keep(bits);
  }

  void embed() {
    const int64_t count = dice.from(0, 5);
    Block<int64_t> tokens(count);
    for (int64_t i = 0; i < count; i++) tokens[i] = dice.from(0, m.embeddings - 1);
    Block<float> hidden(count * m.hidden);
    CHECK(library.embed(&m, tokens.data(), count, hidden.data()) == OK);
    hash.add(hidden);
    if (!hostile || count == 0) return;
    tokens[dice.from(0, count - 1)] = dice.hostile(m.embeddings);
    const bool known = std::all_of(tokens.data(), tokens.data() + count, [&](int64_t one) { return one >= 0 && one < m.embeddings; });
    CHECK(library.embed(&m, tokens.data(), count, hidden.data()) == (known ? OK : BAD_TOKEN));
  }

  void head() {
    const int64_t n = dice.from(0, 12);
    const Block<float> hidden = numbers(dice, n * m.hidden, 4);
    Block<float> normed(n * m.hidden), logits(n * m.vocabulary), again(n * m.vocabulary);
    Block<int64_t> best(n);
    CHECK(library.norm(&m, hidden.data(), n, normed.data()) == OK);
    hash.add(normed);
    const bool norm = dice.chance(50);
    CHECK(library.head(&m, nullptr, hidden.data(), n, norm, logits.data(), nullptr, 1) == OK);
    CHECK(library.head(&m, nullptr, hidden.data(), n, norm, again.data(), best.data(), threads()) == OK);
    CHECK(logits == again);
    const Block<int64_t> with_logits = best;
    CHECK(library.head(&m, nullptr, hidden.data(), n, norm, nullptr, best.data(), threads()) == OK);
    CHECK(best == with_logits);
    hash.add(logits);
    hash.add(best);
    for (int64_t r = 0; r < n; r++) {
      const float* row = logits.data() + r * m.vocabulary;
      CHECK(best[r] == std::max_element(row, row + m.vocabulary) - row);
    }
    if (!hostile) return;
    const int64_t many = hostile_threads();
    const int64_t expected = many >= 1 && many <= MAX_THREADS ? OK : BAD_THREADS;
    CHECK(library.head(&m, nullptr, hidden.data(), n, norm, again.data(), best.data(), many) == expected);
    CHECK(logits == again);
    CHECK(library.head(&m, nullptr, hidden.data(), -n, norm, again.data(), best.data(), 1) == (n > 0 ? BAD_ARGUMENT : OK));
    if (n > 0) {
      Block<float> broken(hidden);
      const float odd[] = {NAN, INFINITY, -INFINITY, 3e38f};
      const int64_t place = dice.from(0, broken.count - 1), which = dice.from(0, 3), broken_row = place / m.hidden;
      broken[place] = odd[which];
      CHECK(library.head(&m, nullptr, broken.data(), n, norm, again.data(), best.data(), threads()) == OK);
      for (int64_t r = 0; r < n; r++) {
        const float* row = again.data() + r * m.vocabulary;
        const bool known = std::none_of(row, row + m.vocabulary, [](float x) { return std::isnan(x); });
        const int64_t expected = std::max_element(row, row + m.vocabulary) - row;
        CHECK(best[r] == (known && row[expected] > -INFINITY ? expected : -1));
      }
      Block<int64_t> tested(n);
      Block<float> likely(n);
      CHECK(library.test(&m, nullptr, broken.data(), n, nullptr, tested.data(), likely.data(), threads()) == OK);
      for (int64_t r = 0; r < n; r++) CHECK(likely[r] >= 0 && likely[r] <= 1 && (tested[r] >= 0 || likely[r] == 0));
      for (int64_t i = 0; i < again.count; i++) {
        if (i / m.vocabulary != broken_row) CHECK(std::memcmp(&again[i], &logits[i], sizeof(float)) == 0);
        else if (which == 0) CHECK(std::isnan(again[i]));
      }
    }
  }

  // A pass that fits: a chain (any distinct slots, any positions below the extent) or a tree.
  struct Passing {
    Pass pass{};
    Block<int64_t> positions, slots, base, seen, column_positions;
    Block<uint8_t> valid, ancestors;
  };

  Passing passing(bool tree) {
    Passing made;
    Pass& pass = made.pass;
    tables(pass);
    const int64_t known = positions_known(), most = store.slots - 1;
    pass.first_row = dice.from(0, store.rows - 1);
    pass.b = dice.from(1, store.rows - pass.first_row);
    pass.n = dice.from(1, std::min<int64_t>(most, dice.chance(10) ? 64 : 9));
    pass.positions_stride = pass.n + (dice.chance(30) ? dice.from(0, 3) : 0);
    pass.slots_stride = pass.n + (dice.chance(30) ? dice.from(0, 3) : 0);
    pass.valid_stride = pass.n + (dice.chance(30) ? dice.from(0, 3) : 0);
    made.positions = filled((pass.b - 1) * pass.positions_stride + pass.n, -7);
    made.slots = filled((pass.b - 1) * pass.slots_stride + pass.n, -7);
    pass.positions = made.positions.data(), pass.slots = made.slots.data();
    pass.extent = dice.from(1, most);
    for (int64_t row = 0; row < pass.b; row++) {
      std::vector<int64_t> order(static_cast<size_t>(most));
      for (int64_t i = 0; i < most; i++) order[size_t(i)] = i;
      for (int64_t i = 0; i < most; i++) std::swap(order[size_t(i)], order[size_t(dice.from(i, most - 1))]);
      for (int64_t c = 0; c < pass.n; c++) {
        made.slots[row * pass.slots_stride + c] = order[size_t(c)];
        made.positions[row * pass.positions_stride + c] = dice.from(0, (tree ? known : std::min(known, pass.extent)) - 1);
      }
    }
    if (dice.chance(60)) {
      made.valid = Block<uint8_t>((pass.b - 1) * pass.valid_stride + pass.n);
      for (int64_t i = 0; i < made.valid.count; i++) made.valid[i] = dice.chance(70);
      pass.valid = made.valid.data();
    }
    if (!tree) return made;
    made.base = Block<int64_t>(pass.b), made.seen = Block<int64_t>(pass.b);
    const int64_t first = dice.from(0, std::min<int64_t>(2, most - pass.n));  // column of the tree that the pass starts with
    const int64_t columns = first + pass.n + dice.from(0, 2);
    pass.extent = dice.from(first + pass.n, most);
    pass.columns = columns;
    pass.ancestors_column = columns + (dice.chance(30) ? 1 : 0);
    pass.ancestors_row = pass.n * pass.ancestors_column + (dice.chance(30) ? 2 : 0);
    pass.column_positions_stride = columns + (dice.chance(30) ? 1 : 0);
    made.ancestors = Block<uint8_t>((pass.b - 1) * pass.ancestors_row + (pass.n - 1) * pass.ancestors_column + columns);
    for (int64_t i = 0; i < made.ancestors.count; i++) made.ancestors[i] = dice.chance(40);
    made.column_positions = Block<int64_t>((pass.b - 1) * pass.column_positions_stride + columns);
    for (int64_t i = 0; i < made.column_positions.count; i++) made.column_positions[i] = dice.from(0, known - 1);
    for (int64_t row = 0; row < pass.b; row++) {
      const int64_t base = made.base[row] = dice.from(0, pass.extent - first - pass.n);
      made.seen[row] = dice.chance(70) ? base : dice.from(0, pass.extent);
      for (int64_t c = 0; c < pass.n; c++) {
        made.slots[row * pass.slots_stride + c] = base + first + c;
        made.ancestors[row * pass.ancestors_row + c * pass.ancestors_column + first + c] = 1;  // it sees itself
        made.column_positions[row * pass.column_positions_stride + first + c] = made.positions[row * pass.positions_stride + c];
      }
    }
    pass.base = made.base.data();
    pass.seen = dice.chance(50) ? nullptr : made.seen.data();
    pass.ancestors = made.ancestors.data();
    pass.column_positions = made.column_positions.data();
    return made;
  }

  void spoil(const Block<int64_t>& block, int64_t edge = 0) {
    if (block.count > 0) block[dice.from(0, block.count - 1)] = dice.hostile(edge);
  }

  // Rows or columns that are fewer than there are.
  int64_t fewer(int64_t count) {
    const int64_t some[] = {0, -1, INT64_MIN, std::max<int64_t>(count, 1) - 1};
    return some[dice.from(0, 3)];
  }

  struct Asked { int64_t from, to, threads; };

  void spoil(Passing& made, Asked& asked) {
    Pass& pass = made.pass;
    switch (std::max<int64_t>(0, dice.from(-3, 15))) {  // positions more often than the others
      case 0: spoil(made.positions, dice.chance(50) ? positions_known() : pass.extent); break;
      case 1: spoil(made.slots, store.slots - 1); break;
      case 2: pass.first_row = dice.hostile(store.rows - pass.b + 1); break;
      case 3: pass.extent = dice.hostile(store.slots); break;
      case 4: asked.from = dice.hostile(); break;
      case 5: asked.to = dice.hostile(m.depth + 1); break;
      case 6: asked.threads = hostile_threads(); break;
      case 7: spoil(made.base, pass.extent); break;
      case 8: spoil(made.seen); break;
      case 9: spoil(made.column_positions); break;
      case 10: pass.columns = fewer(pass.columns); break;
      case 11: pass.n = fewer(pass.n); break;
      case 12: pass.b = fewer(pass.b); break;
      case 13: pass.b = dice.chance(50) ? INT64_MAX - dice.from(0, 5) : store.rows + dice.from(1, 3); break;  // more than rows
      case 14: made.slots[dice.from(0, made.slots.count - 1)] = made.slots[dice.from(0, made.slots.count - 1)]; break;
      default: pass.rotary[dice.from(0, ROTARY_TABLES - 1)].positions = fewer(2); break;
    }
    if (pass.b > store.rows && pass.first_row < 0) pass.first_row = 0;
  }

  // Two tokens of one row were asked to be written to one slot.
  bool doubled(const Passing& made) const {
    const Pass& pass = made.pass;
    for (int64_t row = 0; row < pass.b; row++)
      for (int64_t c = 0; c < pass.n; c++)
        for (int64_t other = 0; other < c; other++) {
          const bool count = pass.valid == nullptr || (made.valid[row * pass.valid_stride + c] && made.valid[row * pass.valid_stride + other]);
          if (count && made.slots[row * pass.slots_stride + c] == made.slots[row * pass.slots_stride + other]) return true;
        }
    return false;
  }

  // A slot of the store, by buffer index, row and slot, was asked to be written.
  bool written(const Passing& made, int64_t row, int64_t slot) const {
    const Pass& pass = made.pass;
    row -= pass.first_row;
    if (row < 0 || row >= pass.b) return false;
    for (int64_t c = 0; c < pass.n; c++) {
      const bool counts = pass.valid == nullptr || made.valid[row * pass.valid_stride + c];
      if (counts && made.slots[row * pass.slots_stride + c] == slot) return true;
    }
    return false;
  }

  void run() {
    Passing made = passing(dice.chance(50));
    const Pass fitting = made.pass;
    Asked asked{dice.from(0, m.depth), 0, threads()};
    asked.to = dice.from(asked.from, m.depth);
    const bool spoiled = hostile && dice.chance(50);
    if (spoiled) spoil(made, asked);
    const int64_t size = fitting.n * m.hidden, out_stride = size + (dice.chance(30) ? 5 : 0);
    const int64_t in_size = fitting.n * entering(spoiled ? 0 : asked.from), in_stride = in_size + (dice.chance(30) ? 3 : 0);
    const Block<float> hidden = numbers(dice, (fitting.b - 1) * in_stride + in_size, 2);
    Block<float> out((fitting.b - 1) * out_stride + size), again(out);
    const int64_t* skip = skip_set();
    const std::vector<Block<uint8_t>> before = buffers;
    auto call = [&](Block<float>& to, int64_t count) {
      return library.run(&m, &made.pass, &store, asked.from, asked.to, skip, hidden.data(), in_stride, to.data(), out_stride, count);
    };
    const int64_t error = call(out, asked.threads);
    if (!spoiled) CHECK(error == OK);
    if (error != OK) {
      CHECK(error != NO_MEMORY);
      CHECK(buffers == before);
      CHECK(out == again);
      return;
    }
    CHECK(!doubled(made));
    CHECK(made.pass.extent < store.slots);  // the last slot belongs to nobody
    for (int64_t row = 0; row < store.rows; row++) CHECK(!written(made, row, store.slots - 1));
    for (int64_t i = 0; i < 2 * m.depth; i++) {
      const int64_t index = i % m.depth, left_out = skip == nullptr ? 0 : skip[index];
      const bool runs = index >= asked.from && index < asked.to && !(left_out & SKIP_ATTENTION);
      for (int64_t place = 0; place < store.rows * m.kv_heads * store.slots; place++) {
        const int64_t row = place / (m.kv_heads * store.slots), slot = place % store.slots;
        if (runs && written(made, row, slot)) continue;
        const int64_t bytes = line_bytes();
        CHECK(std::memcmp(&buffers[size_t(i)][place * bytes], &before[size_t(i)][place * bytes], size_t(bytes)) == 0);
      }
    }
    for (int64_t i = 0; i < out.count; i++)  // what lies between rows, and rows that were not asked for
      if (i / out_stride >= made.pass.b || i % out_stride / m.hidden >= made.pass.n) CHECK(out[i] == again[i]);
    const std::vector<Block<uint8_t>> after = buffers;
    restore(before);
    CHECK(call(again, 1) == OK);
    CHECK(out == again && buffers == after);
    if (!hostile) hash_store(), hash_states(out, fitting, out_stride);
  }

  void restore(const std::vector<Block<uint8_t>>& from) {
    for (size_t i = 0; i < buffers.size(); i++) buffers[i] = from[i];
  }
  void hash_store() {
    for (const auto& one : buffers) hash.add(one);
  }
  void hash_states(const Block<float>& states, const Pass& pass, int64_t stride) {
    for (int64_t row = 0; row < pass.b; row++) hash.add(&states[row * stride], size_t(pass.n * m.hidden) * sizeof(float));
  }

  double probability_of(const float* logits, int64_t id, int64_t count) const {
    double total = 0;
    for (int64_t i = 0; i < count; i++) total += std::exp(double(logits[i]) - double(logits[id]));
    return 1 / total;
  }

  // The final norm, then a matrix [hidden][hidden], by the engine's own order of summation.
  Block<float> transformed(const Block<float>& states, const Block<float>& weights, int64_t rows) const {
    Block<float> normed(states.count), made(states.count);
    CHECK(library.norm(&m, states.data(), rows, normed.data()) == OK);
    for (int64_t i = 0; i < states.count; i++) {
      float sum = 0;
      const int64_t row = i / m.hidden, output = i % m.hidden;
      for (int64_t k = 0; k < m.hidden; k++) sum = std::fma(normed[row * m.hidden + k], weights[output * m.hidden + k], sum);
      made[i] = sum;
    }
    return made;
  }

  void chain() {
    Pass pass{};
    tables(pass);
    pass.first_row = dice.from(0, store.rows - 1);
    pass.b = dice.from(1, store.rows - pass.first_row);
    const int64_t b = pass.b, known = std::min(positions_known(), store.slots - 1), ends_count = dice.from(0, 3);
    pass.extent = known;
    Block<int64_t> roots(b), bases(b), most(b), ends(b * ends_count), counts(b);
    int64_t width = 0;
    for (int64_t row = 0; row < b; row++) {
      roots[row] = dice.from(0, m.embeddings - 1);
      bases[row] = dice.from(0, known - 1);
      most[row] = dice.chance(20) ? -1 : dice.from(0, std::min<int64_t>(known - 1 - bases[row], 6));
      width = std::max(width, most[row]);
    }
    for (int64_t i = 0; i < ends.count; i++) ends[i] = dice.from(-1, m.vocabulary - 1);
    const bool asks = dice.chance(60), keep_states = dice.chance(50), sure = asks && dice.chance(40);
    const Matrix* transform = nullptr;
    Matrix square{};
    Block<float> weights = numbers(dice, m.hidden * m.hidden, 0.3f);
    if (dice.chance(40)) {
      Block<uint8_t> panels(library.packed_bytes(FLOAT32, m.hidden, m.hidden));
      CHECK(library.pack(FLOAT32, FLOAT32, -1, weights.data(), m.hidden, m.hidden, m.hidden, panels.data(), 2) == OK);
      square = {keep(panels), nullptr, m.hidden, m.hidden, FLOAT32};
      transform = &square;
    }
    // some of the head's rows, at least one
    const Shortlist* shortlist = nullptr;
    Shortlist few{m.head, nullptr};
    std::vector<int64_t> ids;
    if (dice.chance(40)) {
      const int64_t share = dice.from(1, 100), sure_one = dice.from(0, m.vocabulary - 1);
      for (int64_t id = 0; id < m.vocabulary; id++) if (id == sure_one || dice.chance(int(share))) ids.push_back(id);
      few.head.outputs = int64_t(ids.size());
      if (m.head.bias != nullptr) {
        Block<float> biases(few.head.outputs);
        for (int64_t i = 0; i < few.head.outputs; i++) biases[i] = m.head.bias[ids[i]];
        few.head.bias = keep(biases);
      }
      Block<uint8_t> panels(library.packed_bytes(m.head.type, few.head.outputs, m.hidden));
      std::memset(panels.data(), 0, size_t(panels.count));
      if (hostile) {
        const int64_t odd[] = {dice.chance(50) ? m.vocabulary : -1};
        CHECK(library.take(&m.head, odd, 1, panels.data()) == BAD_TOKEN);
      }
      CHECK(library.take(&m.head, ids.data(), few.head.outputs, panels.data()) == OK);
      few.head.panels = keep(panels);
      few.ids = ids.data();
      shortlist = &few;
    }
    const int64_t listed = few.head.outputs;
    Block<float> thresholds = numbers(dice, b, 0.1f, 0.1f), probabilities(b * width);
    Block<int64_t> drafts(b * width);
    // a rule of survival that stops no row; what it stops is compared in tests/methods/test_one_call_chain.py
    Block<float> survival(2 + 2 * width);
    for (int64_t i = 0; i < survival.count; i++) survival[i] = i < 2 ? 1.0f : -1.0f;
    const bool survives = asks && dice.chance(40);
    Block<double> max_entropy(b);
    for (int64_t row = 0; row < b; row++) max_entropy[row] = dice.chance(30) ? INFINITY : dice.from(0, 800) / 100.0;
    const bool limits = dice.chance(50), distributes = limits && dice.chance(60);
    int64_t num_ranked = dice.chance(50) ? 0 : dice.from(1, std::min<int64_t>(listed, 100));
    int64_t size = m.vocabulary + (dice.chance(30) ? 3 : 0);
    Block<float> entropies(b * width), distributions(b * width * size);
    Block<int64_t> ranked(b * width * num_ranked);
    const int64_t stride = (width + 1) * m.hidden + (dice.chance(30) ? 3 : 0);
    Block<float> hidden((b - 1) * stride + (width + 1) * m.hidden);
    const int64_t* skip = skip_set();
    Asked asked{dice.from(0, m.depth), 0, threads()};
    const bool reads_pairs = entering(asked.from) > m.hidden;
    asked.to = dice.from(asked.from + reads_pairs, m.depth);
    Block<float> fed_back = numbers(dice, b * m.hidden, 2);  // first the states next to the roots
    const bool spoiled = hostile && dice.chance(50);
    if (spoiled)
      for (int64_t i = dice.from(1, 2); i > 0; i--) switch (dice.from(0, 17)) {
        case 17: size = fewer(m.vocabulary); break;
        case 16: num_ranked = dice.chance(50) ? fewer(0) : dice.chance(50) ? listed + 1 : INT64_MAX; break;
        case 15: max_entropy[dice.from(0, b - 1)] = dice.chance(50) ? NAN : -INFINITY; break;
        case 14: survival[dice.from(0, survival.count - 1)] = dice.chance(50) ? NAN : INFINITY; break;
        case 0: spoil(roots, m.embeddings); break;
        case 1: spoil(bases, known); break;
        case 2: spoil(most, width + 1); break;
        case 3: spoil(ends); break;
        case 4: width = fewer(width); break;
        case 5: pass.first_row = dice.hostile(store.rows - b + 1); break;
        case 6: pass.b = fewer(b); break;
        case 7: pass.b = dice.chance(50) ? INT64_MAX - dice.from(0, 5) : store.rows + dice.from(1, 3); break;
        case 8: pass.extent = dice.hostile(store.slots); break;
        case 9: asked.from = dice.hostile(); break;
        case 10: asked.to = dice.hostile(m.depth + 1); break;
        case 11: asked.threads = hostile_threads(); break;
        case 12: thresholds[dice.from(0, b - 1)] = dice.chance(50) ? NAN : -INFINITY; break;
        default: pass.rotary[dice.from(0, ROTARY_TABLES - 1)].positions = fewer(2); break;
      }
    if (pass.b > store.rows && pass.first_row < 0) pass.first_row = 0;
    const std::vector<Block<uint8_t>> before = buffers;
    const int64_t error = library.chain(&m, &pass, &store, asked.from, asked.to, skip, roots.data(), reads_pairs ? fed_back.data() : nullptr, bases.data(), most.data(), width,
                                        asks ? thresholds.data() : nullptr, ends.data(), ends_count, keep_states, transform, shortlist, sure,
                                        survives ? survival.data() : nullptr, limits ? max_entropy.data() : nullptr, num_ranked, size, drafts.data(), counts.data(),
                                        asks ? probabilities.data() : nullptr, limits ? entropies.data() : nullptr, ranked.data(),
                                        distributes ? distributions.data() : nullptr, hidden.data(), stride, asked.threads);
    CHECK(error != NO_MEMORY);
    if (spoiled) {
      for (int64_t row = 0; error == OK && row < pass.b; row++) CHECK(counts[row] >= 0 && counts[row] <= std::max<int64_t>(0, most[row]));
      return;
    }
    hash.add(&error, sizeof error);
    CHECK(error == OK || (error == BAD_TOKEN && m.embeddings < m.vocabulary));
    if (error != OK) return;  // it drafted an id without an embedding
    const std::vector<Block<uint8_t>> after = buffers;
    restore(before);
    // the same, token by token
    Block<int64_t> slots = bases;
    Block<uint8_t> takes(b), drafting(b);  // a row's token goes through the layers; it is to be followed by another draft
    Block<float> state(b * m.hidden), logits(b * m.vocabulary);
    Block<int64_t> best(b);
    for (int64_t row = 0; row < b; row++) drafting[row] = most[row] > 0, takes[row] = drafting[row] || (keep_states && most[row] == 0);
    CHECK(library.embed(&m, roots.data(), b, state.data()) == OK);
    Pass one = pass;
    one.n = one.positions_stride = one.slots_stride = one.valid_stride = 1;
    one.positions = one.slots = slots.data();
    one.valid = takes.data();
    const size_t bytes = size_t(m.hidden) * sizeof(float);
    for (int64_t place = 0; place <= width; place++) {
      const Block<float> embedded = state;
      if (reads_pairs) {
        Block<float> pairs(2 * state.count);
        for (int64_t row = 0; row < b; row++) {
          std::memcpy(&pairs[2 * row * m.hidden], &state[row * m.hidden], bytes);
          std::memcpy(&pairs[(2 * row + 1) * m.hidden], &fed_back[row * m.hidden], bytes);
        }
        CHECK(library.run(&m, &one, &store, asked.from, asked.to, skip, pairs.data(), 2 * m.hidden, state.data(), m.hidden, 1) == OK);
        fed_back = state;
        if (m.feeds_back_normed) CHECK(library.norm(&m, state.data(), b, fed_back.data()) == OK);
        for (int64_t row = 0; row < b; row++)
          if (!takes[row]) std::memcpy(&state[row * m.hidden], &embedded[row * m.hidden], bytes);
      } else {
        CHECK(library.run(&m, &one, &store, asked.from, asked.to, skip, state.data(), m.hidden, state.data(), m.hidden, 1) == OK);
      }
      const Block<float> read = transform == nullptr ? state : transformed(state, weights, b);
      CHECK(library.head(&m, nullptr, read.data(), b, transform == nullptr, logits.data(), best.data(), 1) == OK);
      Block<int64_t> place_of = best;  // where its logit is
      if (shortlist != nullptr) {
        Block<float> all(logits), short_logits(b * listed);
        CHECK(library.head(&m, shortlist, read.data(), b, transform == nullptr, short_logits.data(), best.data(), threads()) == OK);
        for (int64_t row = 0; row < b; row++) {
          const float* own = &short_logits[row * listed];
          for (int64_t i = 0; i < listed; i++) CHECK(std::memcmp(own + i, &all[row * m.vocabulary + ids[i]], sizeof(float)) == 0);
          place_of[row] = std::max_element(own, own + listed) - own;
          CHECK(best[row] == ids[place_of[row]]);
          std::copy(own, own + listed, &logits[row * m.vocabulary]);
        }
      }
      Block<int64_t> tested(b);
      Block<float> likely(b);
      CHECK(library.test(&m, shortlist, state.data(), b, transform, tested.data(), likely.data(), threads()) == OK);
      CHECK(tested == best);
      for (int64_t row = 0; row < b; row++) CHECK(std::abs(likely[row] / probability_of(&logits[row * m.vocabulary], place_of[row], listed) - 1) < 1e-5);
      for (int64_t row = 0; row < b; row++) {
        if (sure && drafting[row] && place == counts[row]) {  // it was not sure enough
          CHECK(probability_of(&logits[row * m.vocabulary], place_of[row], listed) < thresholds[row] + 1e-5);
          if (keep_states) CHECK(std::memcmp(&hidden[row * stride + place * m.hidden], &state[row * m.hidden], bytes) == 0);
          drafting[row] = takes[row] = 0;
          continue;
        }
        CHECK((place < counts[row]) == bool(drafting[row]));
        if (place <= counts[row]) {
          const Block<float>& kept_state = keep_states ? state : embedded;
          CHECK(std::memcmp(&hidden[row * stride + place * m.hidden], &kept_state[row * m.hidden], bytes) == 0);
        }
        if (!drafting[row]) {
          takes[row] = 0;
          continue;
        }
        CHECK(drafts[row * width + place] == best[row]);
        bool on = place + 1 < most[row];
        for (int64_t e = 0; e < ends_count; e++) on = on && ends[row * ends_count + e] != best[row];
        if (asks) {
          const float found = probabilities[row * width + place];
          CHECK(std::abs(double(found) / probability_of(&logits[row * m.vocabulary], place_of[row], listed) - 1) < 1e-5);
          on = on && (sure ? found > thresholds[row] : found >= thresholds[row]);
          CHECK(!sure || found > thresholds[row]);
        }
        const float* own = &logits[row * m.vocabulary];
        const int64_t at = row * width + place;
        if (num_ranked > 0) {
          std::vector<int64_t> order(static_cast<size_t>(listed));
          for (int64_t i = 0; i < listed; i++) order[size_t(i)] = i;
          std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t c) { return own[a] > own[c]; });
          for (int64_t k = 0; k < num_ranked; k++)
            CHECK(ranked[at * num_ranked + k] == (shortlist == nullptr ? order[size_t(k)] : ids[size_t(order[size_t(k)])]));
        }
        if (limits) {
          double expected = 0;
          std::vector<float> all(size_t(distributes ? size : 0));
          for (int64_t i = 0; i < listed; i++) {
            const double p = probability_of(own, i, listed);
            if (p > 0) expected -= p * std::log2(p);
            if (distributes) all[size_t(shortlist == nullptr ? i : ids[size_t(i)])] = float(p);
          }
          CHECK(std::abs(double(entropies[at]) - expected) < 1e-4);
          for (size_t id = 0; id < all.size(); id++) CHECK(std::abs(distributions[at * size + int64_t(id)] - all[id]) < 1e-5);
          on = on && double(entropies[at]) <= max_entropy[row];
        }
        drafting[row] = on;
        takes[row] = on || keep_states;
        slots[row]++;
        CHECK(library.embed(&m, &best[row], 1, &state[row * m.hidden]) == OK);
      }
    }
    CHECK(buffers == after);
    if (hostile) return;
    hash_store();
    hash.add(counts);
    for (int64_t row = 0; row < b; row++)
      if (asks && counts[row] > 0) hash.add(&probabilities[row * width], size_t(counts[row]) * sizeof(float));
  }

  void draw() {
    const int64_t rows = dice.from(1, 4), n = dice.from(1, dice.chance(30) ? 300 : 130), stride = n + (dice.chance(30) ? 3 : 0);
    Block<float> logits = numbers(dice, (rows - 1) * stride + n, 8), temperature = numbers(dice, rows, 0.5f, 1.0f);
    Block<float> tail = numbers(dice, rows, 0.5f, 0.4f), min_p = numbers(dice, rows, 0.25f, 0.1f);
    Block<int64_t> top_k(rows), tokens(rows);
    Block<uint64_t> counters(rows);
    for (int64_t r = 0; r < rows; r++) {
      top_k[r] = dice.chance(20) ? dice.from(-1, 120) : dice.from(1, std::min<int64_t>(n, 100));
      counters[r] = dice.next();
      if (dice.chance(30)) logits[r * stride + dice.from(0, n - 1)] = -INFINITY;
      if (dice.chance(30)) logits[r * stride + dice.from(0, n - 1)] = logits[r * stride + dice.from(0, n - 1)];
    }
    const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 1e-40f, 0.0f};
    const bool spoiled = hostile && dice.chance(60);
    if (spoiled)
      for (int64_t i = dice.from(1, 5); i > 0; i--) {
        const Block<float>& one = dice.chance(40) ? logits : dice.chance(40) ? temperature : dice.chance(50) ? tail : min_p;
        one[dice.from(0, one.count - 1)] = odd[dice.from(0, 7)];
        if (dice.chance(20)) top_k[dice.from(0, rows - 1)] = dice.hostile(101);
        if (dice.chance(10)) std::fill(logits.data(), logits.data() + logits.count, odd[dice.from(0, 7)]);
      }
    const uint64_t place = 0x9e3779b97f4a7c15u;
    const int64_t error = library.draw(logits.data(), rows, n, stride, temperature.data(), top_k.data(), tail.data(), min_p.data(),
                                       counters.data(), place, tokens.data());
    CHECK(error == OK);
    for (int64_t r = 0; r < rows; r++) {
      CHECK(tokens[r] >= -1 && tokens[r] < n);
      if (top_k[r] == 0) CHECK(tokens[r] == 0);
      if (top_k[r] <= 0 || tokens[r] < 0 || spoiled) continue;
      const float *own = &logits[r * stride], drawn = own[tokens[r]];
      CHECK(std::count_if(own, own + n, [&](float x) { return x > drawn; }) < top_k[r]);
      Block<int64_t> again(1);  // alone: the same
      CHECK(library.draw(own, 1, n, n, &temperature[r], &top_k[r], &tail[r], &min_p[r], &counters[r], place, again.data()) == 0);
      CHECK(again[0] == tokens[r]);
    }
    if (!hostile) hash.add(tokens);
  }

  void largest() {
    const int64_t rows = dice.from(0, 3), n = dice.from(1, 200), k = dice.from(1, std::min<int64_t>(n, 100)), stride = n + dice.from(0, 2);
    Block<float> logits = numbers(dice, rows * stride, 8);
    Block<int64_t> tokens(rows * k);
    const int64_t broken = hostile && rows > 0 && dice.chance(40) ? dice.from(0, rows - 1) : -1;
    if (broken >= 0) logits[broken * stride + dice.from(0, n - 1)] = NAN;
    CHECK(library.largest(logits.data(), rows, n, stride, k, tokens.data(), threads()) == OK);
    for (int64_t r = 0; r < rows; r++) {
      std::vector<int64_t> order(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; i++) order[size_t(i)] = i;
      const float* row = &logits[r * stride];
      if (r != broken) std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return row[a] > row[b]; });
      for (int64_t i = 0; i < k; i++) CHECK(tokens[r * k + i] == (r == broken ? -1 : order[size_t(i)]));
    }
    if (!hostile) return hash.add(tokens);
    const int64_t wrong[] = {0, -1, n + 1, 101, INT64_MIN, INT64_MAX};
    for (int64_t one : wrong) {
      if (one >= 1 && one <= std::min<int64_t>(n, 100)) continue;
      CHECK(library.largest(logits.data(), rows, n, stride, one, tokens.data(), 1) == BAD_ARGUMENT);
    }
  }

  // What no caller may ask for: nothing is read or written, and the answer is an error. Empty matrices are no error.
  void refused() {
    float number[1] = {0};
    int64_t whole[1] = {0};
    for (int64_t size : {int64_t(-1), INT64_MIN, INT64_MAX, int64_t(1) << 62}) {
      const int64_t type = dice.from(FLOAT32, TYPES - 1), width = 256 * dice.from(1, 2);  // one that all types can have
      CHECK(library.packed_bytes(type, size, width) == -1);
      CHECK(library.packed_bytes(type, width, size) == -1);
      CHECK(library.pack(type, type, -1, number, width, size, width, number, 1) == BAD_ARGUMENT);
      CHECK(library.pack(type, type, -1, number, width, width, size, number, 1) == BAD_ARGUMENT);
      CHECK(library.quantize(INT8, type, -1, number, width, size, width, number, 1) == BAD_ARGUMENT);
      CHECK(library.quantize(INT8, type, -1, number, width, width, size, number, 1) == BAD_ARGUMENT);
      CHECK(library.take(&m.head, whole, size, number) == BAD_ARGUMENT);
      CHECK(library.embed(&m, whole, size, number) == BAD_ARGUMENT);
      CHECK(library.norm(&m, number, size, number) == BAD_ARGUMENT);
      CHECK(library.head(&m, nullptr, number, size, 1, nullptr, whole, 1) == BAD_ARGUMENT);
      CHECK(library.test(&m, nullptr, number, size, nullptr, whole, number, 1) == BAD_ARGUMENT);
      CHECK(library.largest(number, size, 1, 1, 1, whole, 1) == BAD_ARGUMENT);
      CHECK(library.draw(number, size, 1, 1, number, whole, number, number, nullptr, 1, whole) == BAD_ARGUMENT);
    }
    for (int64_t type : {int64_t(-1), int64_t(TYPES), INT64_MAX}) {
      CHECK(library.packed_bytes(type, 1, 256) == -1);
      for (int64_t other = FLOAT32; other < TYPES; other++) {
        CHECK(library.pack(type, other, -1, number, 256, 1, 256, number, 1) == BAD_ARGUMENT);
        CHECK(library.quantize(type, other, -1, number, 256, 1, 256, number, 1) == BAD_ARGUMENT);
      }
    }
    for (int64_t type = FLOAT32; type < TYPES; type++) {
      const int64_t source = type == BFLOAT16_INPUTS ? int64_t(BFLOAT16) : type;
      for (int64_t other = FLOAT32; other < TYPES; other++) {
        if (other != source && (type != FLOAT32 || other > FLOAT16))
          CHECK(library.pack(type, other, -1, number, 256, 1, 256, number, 1) == BAD_ARGUMENT);
        if (type != INT8 && type != INT4) CHECK(library.quantize(type, other, -1, number, 256, 1, 256, number, 1) == BAD_ARGUMENT);
      }
      CHECK(library.pack(type, source, -1, nullptr, 256, 1, 256, number, 1) == BAD_ARGUMENT);
      CHECK(library.pack(type, source, -1, number, 256, 1, 256, nullptr, 1) == BAD_ARGUMENT);
      CHECK(library.pack(type, source, -1, number, 256, 1, 256, number, 0) == BAD_THREADS);
      CHECK(library.pack(type, source, -1, nullptr, 256, 0, 256, nullptr, 1) == OK);  // no outputs, then no inputs
      CHECK(library.pack(type, source, -1, nullptr, 0, 20, 0, nullptr, 1) == OK);
      CHECK(library.quantize(INT8, source, -1, nullptr, 256, 0, 256, nullptr, 1) == OK);
      CHECK(library.quantize(INT4, source, -1, nullptr, 0, 20, 0, nullptr, 1) == OK);
      if (type < INT8) continue;
      const int64_t broken = BLOCK_TYPES[type - INT8].inputs - dice.from(1, GROUP - 1);  // no whole block
      CHECK((library.packed_bytes(type, 1, broken) == -1) == (type >= Q4_K));
      CHECK(library.pack(type, type, -1, number, 0, 1, broken, number, 1) == BAD_ARGUMENT);
      CHECK(library.quantize(dice.from(INT8, INT4), type, -1, number, 0, 1, broken, number, 1) == BAD_ARGUMENT);
    }
    CHECK(library.take(nullptr, whole, 1, number) == BAD_ARGUMENT);
    CHECK(library.embed(nullptr, whole, 1, number) == BAD_ARGUMENT);
    CHECK(library.norm(&m, nullptr, 1, number) == BAD_ARGUMENT);
    CHECK(library.head(&m, nullptr, nullptr, 1, 1, nullptr, whole, 1) == BAD_ARGUMENT);
    CHECK(library.run(nullptr, nullptr, nullptr, 0, 0, nullptr, number, 0, number, 0, 1) == BAD_ARGUMENT);
    const Block<float> state = numbers(dice, m.hidden);
    const Matrix small{m.head.panels, nullptr, m.head.outputs, m.hidden + 1, m.head.type};
    CHECK(library.test(&m, nullptr, state.data(), 1, &small, whole, number, 1) == BAD_ARGUMENT);
    Shortlist few{m.head, nullptr};  // without ids, then of more rows than there are logits
    CHECK(library.head(&m, &few, state.data(), 1, 1, nullptr, whole, 1) == BAD_ARGUMENT);
    few.ids = whole, few.head.outputs = m.vocabulary + 1;
    CHECK(library.head(&m, &few, state.data(), 1, 1, nullptr, whole, 1) == BAD_ARGUMENT);
  }

  // Blocks have any scales, also infinite ones. Every call still ends, and the logits do not depend on the threads.
  void spoiled_weights() {
    for (const auto& [panels, spoiled] : spoiled_panels) std::memcpy(panels, spoiled.data(), size_t(spoiled.count));
    const Passing made = passing(dice.chance(50));
    const int64_t count = made.pass.n * m.hidden, rows = made.pass.b * made.pass.n, in_count = made.pass.n * entering(0);
    const std::vector<Block<uint8_t>> before = buffers;
    const Block<float> hidden = numbers(dice, made.pass.b * in_count, 2);
    Block<float> logits[2];
    for (Block<float>& one : logits) {
      Block<float> out(rows * m.hidden);
      one = Block<float>(rows * m.vocabulary);
      restore(before);
      CHECK(library.run(&m, &made.pass, &store, 0, m.depth, nullptr, hidden.data(), in_count, out.data(), count, threads()) == OK);
      CHECK(library.head(&m, nullptr, out.data(), rows, 1, one.data(), nullptr, threads()) == OK);
    }
    CHECK(same_numbers(logits[0].data(), logits[1].data(), logits[0].count));
  }

  void all() {
    embed();
    head();
    largest();
    if (hostile) refused();
    draw();
    for (int64_t i = dice.from(1, 3); i > 0; i--) run();
    chain();
    if (hostile) spoiled_weights();
  }
};

uint64_t run_case(const Library& library, uint64_t seed, bool hostile, int host_thread = 0) {
  running = seed;
  running_cases[host_thread].store(seed);
  Case one(library, seed, hostile);
  one.all();
  return one.hash.value;
}

// A job on one thread leaves the workers to others.
void check_one_thread() {
  std::atomic<int> found{0};
  Pool::shared().run(1, [](void* outer, int, int, Pool&) noexcept {
    Pool::shared().run(2, [](void* inner, int, int threads, Pool&) noexcept { *static_cast<std::atomic<int>*>(inner) = threads; }, outer);
  }, &found);
  CHECK(found == 2);
}

// Jobs that wait for half of their time leave out threads; shorter waits, and a wait of a time slice, do not.
void check_thread_limit() {
  constexpr int64_t MILLISECOND = 1'000'000, JOBS = ThreadLimit::WINDOW / MILLISECOND, PAUSE = ThreadLimit::PAUSE;
  int64_t now = 7 * PAUSE;
  ThreadLimit limit;
  const auto run_window = [&](int64_t waited) {
    for (int64_t job = 0; job < JOBS; job++, now += MILLISECOND) limit.add_job(now, now + MILLISECOND, waited);
  };
  limit.add_job(now, now + MILLISECOND, 3 * MILLISECOND);
  run_window(0);
  for (int i = 0; i < 10; i++) run_window(MILLISECOND / 3);
  CHECK(limit.limited(8, now) == 8);
  run_window(MILLISECOND / 2);
  CHECK(limit.limited(8, now) == 7 && limit.limited(64, now) == 63 && limit.limited(1, now) == 1);
  run_window(0);
  CHECK(limit.limited(8, now) == 7);
  CHECK(limit.limited(8, now + PAUSE) == 8);
  run_window(MILLISECOND / 2);
  run_window(MILLISECOND / 2);
  CHECK(limit.limited(8, now + PAUSE / 2) == 6 && limit.limited(2, now) == 1);
  CHECK(limit.limited(8, now + PAUSE) == 7);
  CHECK(limit.limited(8, now + PAUSE + PAUSE / 2) == 8);
  for (int i = 0; i < 63; i++) run_window(MILLISECOND / 2);
  CHECK(limit.limited(64, now) == 1);
  CHECK(limit.limited(64, now + 2 * PAUSE) == 64);
}

// Jobs have fewer threads soon if any one is late each time, the caller included, and all again after the pauses.
void check_late_thread(int late) {
  struct Job { int late, milliseconds, threads; };
  const auto threads_of_job = [&](int milliseconds) {
    Job made{late, milliseconds, 0};
    Pool::shared().run(3, [](void* context, int thread, int threads, Pool&) noexcept {
      Job& job = *static_cast<Job*>(context);
      if (thread == 0) job.threads = threads;
      if (thread == job.late) std::this_thread::sleep_for(std::chrono::milliseconds(job.milliseconds));
    }, &made);
    return made.threads;
  };
  std::this_thread::sleep_for(std::chrono::nanoseconds(2 * ThreadLimit::PAUSE));
  CHECK(threads_of_job(0) == 3);
  int jobs = 1;
  while (threads_of_job(2 * ThreadLimit::WINDOW / 1'000'000) == 3) CHECK(jobs++ < 10);
}

int main(int count, char** arguments) {
  std::signal(SIGABRT, report_abort);
  CHECK(count >= 5);
  const Library library(arguments[1]);
  check_one_thread();
  check_thread_limit();
  for (int late = 0; late < 3; late++) check_late_thread(late);
  CHECK(library.abi() > 0);
  CHECK(std::strcmp(library.level(), arguments[2]) == 0);
  CHECK(std::strlen(library.source_hash()) == 16);
  int64_t sizes[6];
  library.sizes(sizes);
  CHECK(sizes[0] == sizeof(Matrix) && sizes[1] == sizeof(Layer) && sizes[2] == sizeof(Model));
  CHECK(sizes[3] == sizeof(Store) && sizes[4] == sizeof(Pass) && sizes[5] == sizeof(Shortlist));
  const std::string mode = arguments[3];
  const uint64_t number = std::strtoull(arguments[4], nullptr, 10);
  if (mode == "case") {
    run_case(library, number, true);
    return 0;
  }
  if (mode == "hash") {
    Hash all;
    for (uint64_t seed = 0; seed < number; seed++) {
      const uint64_t one = run_case(library, seed, false);
      all.add(&one, sizeof one);
    }
    std::printf("%016llx\n", (unsigned long long)all.value);
    return 0;
  }
  CHECK(mode == "fuzz" && count == 6);
  const auto stop = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(arguments[5]));
  std::atomic<uint64_t> next{number};
  std::vector<std::thread> callers;
  for (int one = 0; one < HOST_THREADS; ++one)
    callers.emplace_back([&, one] {
      while (std::chrono::steady_clock::now() < stop) run_case(library, next++, true, one);
    });
  for (auto& one : callers) one.join();
  std::printf("%llu cases from seed %llu on\n", (unsigned long long)(next - number), (unsigned long long)number);
  return 0;
}
