// A few tokens through a range of decoder layers in one call. Families are flags and pointers of a Layer, not copies of code.
//
// What is computed for a token depends on its own text only: not on the tokens of the same call, not on the number of threads,
// not on the instruction set. The C ABI at the end checks every position, slot and id against the buffers that it is given.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <new>
#include <vector>

#include "attention.h"
#include "memory.h"
#include "model.h"
#include "pool.h"
#include "sampling.h"

#ifndef SK_LEVEL
#define SK_LEVEL "unknown"
#endif
#ifndef SK_SOURCE_HASH
#define SK_SOURCE_HASH ""
#endif

namespace sk {
// One token of a pass.
struct Entry {
  int64_t place;  // row * n + column
  int64_t row, position, slot;
};

// What the tokens see under one window: Visible per entry, the slots of their tails, and the work for all entries before each.
struct Sight {
  int64_t window = -1;
  std::vector<Visible> visible;
  std::vector<int32_t> tails;
  std::vector<int64_t> work_before;  // of one query head, in slots; the last is the work for all entries
};
constexpr int64_t WORK_OF_A_LINE = 16;  // a line's fixed cost, in slots

using Floats = Buffer<float>;

// The scratch memory of a host thread. Every CALLS_BEFORE_TRIM calls, buffers shrink that were more than twice as large as any of
// these calls needed. A step makes fewer than a hundred calls, and prompts are run in chunks at least every second step. So no
// buffer shrinks between two chunks, and the memory of a long prompt is freed soon after it.
struct Room {
  static constexpr int CALLS_BEFORE_TRIM = 256;
  int calls = 0;
  Floats x, projected, queries, attended, inner, added, logits, probability, transformed;
  std::vector<int64_t> positions, picks;
  std::vector<uint8_t> going;
  std::vector<float> survival;  // of a chain's rows, up to their newest drafts
  std::vector<Floats> normed, scores;  // per thread
  std::vector<Codes> codes;  // per thread: of the inputs of a product
  std::vector<Entry> entries;
  std::vector<int64_t> lines;  // of the entries, as numbers of the store's rows and slots
  std::vector<Sight> sights;
  Buffer<int64_t> best;  // [threads][rows]

  void trim() {
    for (Floats* one : {&x, &projected, &queries, &attended, &inner, &added, &logits, &probability, &transformed}) one->trim();
    for (auto* each : {&normed, &scores}) for (Floats& one : *each) one.trim();
    for (Codes& one : codes) one.trim();
    best.trim();
    for (auto* one : {&positions, &picks, &lines}) one->shrink_to_fit();  // to the size of the latest call
    entries.shrink_to_fit();
    sights.clear();
    sights.shrink_to_fit();
  }
};

// The scratch memory of the calling thread, at the begin of a call.
inline Room& room() {
  static thread_local Room own;
  if (++own.calls >= Room::CALLS_BEFORE_TRIM) {
    own.calls = 0;
    own.trim();
  }
  return own;
}

inline void share(int64_t count, int thread, int threads, int64_t& first, int64_t& last) {
  first = count * thread / threads;
  last = count * (thread + 1) / threads;
}

// The first weights of a thread's share of a matrix.
inline const char* share_of(const Matrix& matrix, int thread, int threads) {
  int64_t first, last;
  share(matrix.count(), thread, threads, first, last);
  return matrix.panel(first);
}

// The same of a layer, whose query, key and value weights are shared out as one matrix.
inline const char* share_of(const Layer& layer, int thread, int threads) {
  int64_t first, last;
  share(layer.q.count() + layer.k.count() + layer.v.count(), thread, threads, first, last);
  for (const Matrix* part : {&layer.q, &layer.k, &layer.v}) {
    if (first < part->count()) return part->panel(first);
    first -= part->count();
  }
  return nullptr;
}

inline float inverse_rms(const float* x, int64_t size, float epsilon) {
  V16 total = zero();
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) { V16 v = load(x + i); total = fma(v, v, total); }
  if (i < size) { V16 v = load_first(x + i, int(size - i)); total = fma(v, v, total); }
  return 1.0f / std::sqrt(sum(total) / float(size) + epsilon);
}

inline void scaled(const float* x, float factor, const float* weight, int64_t size, float* y) {
  const V16 f = set1(factor);
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(y + i, mul(load(weight + i), mul(load(x + i), f)));
  for (; i < size; i++) y[i] = weight[i] * (x[i] * factor);
}

// RMSNorm of n rows, or a copy where there is no norm.
inline void norm_rows(const float* x, int64_t x_stride, const float* weight, int64_t n, int64_t size, float epsilon, float* y, int64_t y_stride) {
  for (int64_t r = 0; r < n; r++) {
    const float* from = x + r * x_stride;
    float* to = y + r * y_stride;
    if (weight == nullptr) std::memcpy(to, from, sizeof(float) * size);
    else scaled(from, inverse_rms(from, size, epsilon), weight, size, to);
  }
}

inline float widened(const void* from, int64_t type, int64_t index) {
  if (type == FLOAT32) return static_cast<const float*>(from)[index];
  const uint16_t bits = static_cast<const uint16_t*>(from)[index];
  if (type == BFLOAT16) {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
  }
  uint16_t lanes[LANES] = {bits};
  float x[LANES];
  store(x, load_f16(lanes));
  return x[0];
}

// The nearest bfloat16; ties go to the even last bit.
inline uint16_t narrowed(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void embed_token(const Model& m, int64_t token, float* to) {
  if (m.embedding == nullptr && m.head.type == INT8) {
    dequantize_output<Int8>(m.head.panels, m.hidden, token, to);
  } else if (m.embedding == nullptr && m.head.type == INT4) {
    dequantize_output<Int4>(m.head.panels, m.hidden, token, to);
  } else if (m.embedding != nullptr) {
    for (int64_t k = 0; k < m.hidden; k++) to[k] = widened(m.embedding, m.embedding_type, token * m.hidden + k);
  } else {
    const bool pairs = m.head.type == BFLOAT16;
    const int64_t size = (pairs ? (m.hidden + 1) / 2 * 2 : m.hidden) * LANES, start = token / LANES * size, lane = token % LANES;
    for (int64_t k = 0; k < m.hidden; k++)
      to[k] = widened(m.head.panels, m.head.type, start + (pairs ? (k / 2 * LANES + lane) * 2 + k % 2 : k * LANES + lane));
  }
  for (int64_t k = 0; k < m.hidden; k++) to[k] = to[k] * m.embedding_scale * m.embedding_multiplier;
}

// y = activation(gate) * up, in the gate's place
inline void activate(int64_t activation, float* gate, const float* up, int64_t size) {
  for (int64_t i = 0; i < size; i += LANES) {
    const int count = int(std::min<int64_t>(LANES, size - i));
    const V16 g = load_first(gate + i, count), u = load_first(up + i, count);
    V16 y;
    if (activation == SILU) {
      y = div(g, add(set1(1.0f), exp(sub(zero(), g))));
    } else {  // GELU by tanh: 0.5 g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3)))
      V16 inner = mul(set1(0.7978845608028654f), fma(mul(mul(g, g), g), set1(0.044715f), g));
      y = mul(mul(set1(0.5f), g), add(set1(1.0f), tanh(inner)));
    }
    store_first(gate + i, mul(y, u), count);
  }
}

inline void rotate(float* head, const Rotary& table, int64_t position) {
  const int64_t half = table.size / 2;
  const float *cos = table.cos + position * table.size, *sin = table.sin + position * table.size;
  for (int64_t i = 0; i < half; i += LANES) {
    const int count = int(std::min<int64_t>(LANES, half - i));
    const V16 a = load_first(head + i, count), b = load_first(head + half + i, count);
    const V16 c = load_first(cos + i, count), s = load_first(sin + i, count);
    store_first(head + i, sub(mul(a, c), mul(b, s)), count);
    store_first(head + half + i, add(mul(b, c), mul(a, s)), count);
  }
}

constexpr int64_t SHARED_NORMS = 64;  // entries from which threads share the norms

// A run of layers over the entries of `room().x`, on all threads of the pool.
struct Run {
  const Model& m;
  const Pass& pass;
  const Store& store;
  int64_t from, to;
  const int64_t* skip;
  Room& own;
  int64_t n;  // entries
  float *x, *projected, *attended, *inner, *added;
  int64_t x_stride, projected_stride, attended_stride, inner_stride, padded;
  int64_t most_seen;

  static void job(void* context, int thread, int threads, Pool& pool) noexcept { static_cast<Run*>(context)->work(thread, threads, pool); }

  void work(int thread, int threads, Pool& pool) {
    float* normed = own.normed[thread].data();
    for (int64_t index = from; index < to; index++) {
      const Layer& layer = m.layers[index];
      const int64_t left_out = skip == nullptr ? 0 : skip[index];
      if (!(left_out & SKIP_ATTENTION)) attention(layer, index, thread, threads, pool, normed);
      if (!(left_out & SKIP_MLP)) mlp(layer, index, thread, threads, pool, normed);
    }
  }

  // The norm of all entries. Every thread computes few entries for itself; many are shared out, which costs a barrier.
  float* norms(const float* weight, int thread, int threads, Pool& pool, float* of_thread) {
    int64_t first = 0, last = n;
    const bool shared = threads > 1 && n >= SHARED_NORMS;
    if (shared) share(n, thread, threads, first, last);
    float* to = shared ? own.normed[0].data() : of_thread;
    norm_rows(x + first * x_stride, x_stride, weight, last - first, m.hidden, m.epsilon, to + first * x_stride, x_stride);
    if (shared) pool.barrier(thread == 0);
    return to;
  }

  void attention(const Layer& layer, int64_t index, int thread, int threads, Pool& pool, float* normed) {
    int64_t first, last;
    normed = norms(layer.norm_before_attention, thread, threads, pool, normed);
    const Matrix* parts[3] = {&layer.q, &layer.k, &layer.v};
    Rows rows{normed, n, x_stride, own.codes[thread]};
    share(layer.q.count() + layer.k.count() + layer.v.count(), thread, threads, first, last);
    int64_t start = 0;  // of this part among the panels of all three
    for (const Matrix* part : parts) {
      const int64_t count = part->count();
      const int64_t a = std::clamp<int64_t>(first - start, 0, count), b = std::clamp<int64_t>(last - start, 0, count);
      const Matrix* after = start + count >= last ? nullptr : part == &layer.q ? &layer.k : &layer.v;
      const char* next = after == nullptr ? share_of(layer.o, thread, threads) : after->panel(0);
      matmul(*part, rows, projected + start * LANES, projected_stride, a, b, count * LANES, next);
      start += count;
    }
    pool.barrier(thread == 0);
    // norms, rotary phases, and keys and values to their slots
    const int64_t heads = m.heads + 2 * m.kv_heads, size = m.head_size;
    const int64_t k_start = layer.q.count() * LANES, v_start = k_start + layer.k.count() * LANES;
    share(n * heads, thread, threads, first, last);
    Floats& spare = own.scores[thread];
    for (int64_t unit = first; unit < last; unit++) {
      const Entry& entry = own.entries[unit / heads];
      const int64_t row = unit / heads, h = unit % heads;
      const float* token = projected + row * projected_stride;
      float* head = spare.data();
      std::fill(head + size, head + padded, 0.0f);
      if (h >= m.heads + m.kv_heads) {
        std::memcpy(head, token + v_start + (h - m.heads - m.kv_heads) * size, sizeof(float) * size);
        put(store.values[index], entry, h - m.heads - m.kv_heads, head);
        continue;
      }
      const bool query = h < m.heads;
      const int64_t own_head = query ? h : h - m.heads, width = (query ? m.heads : m.kv_heads) * size;
      const float* all = token + (query ? 0 : k_start);
      const float* weight = query ? layer.norm_q : layer.norm_k;
      if (weight == nullptr) std::memcpy(head, all + own_head * size, sizeof(float) * size);
      else if (layer.norm_whole) scaled(all + own_head * size, inverse_rms(all, width, m.epsilon), weight + own_head * size, size, head);
      else scaled(all + own_head * size, inverse_rms(all + own_head * size, size, m.epsilon), weight, size, head);
      if (layer.rotary >= 0) rotate(head, pass.rotary[layer.rotary], entry.position);
      if (query) std::memcpy(own.queries.data() + (row * m.heads + h) * padded, head, sizeof(float) * padded);
      else put(store.keys[index], entry, own_head, head);
    }
    pool.barrier(thread == 0);
    // scores and values
    if (store.type == BFLOAT16) look_back<uint16_t>(layer, index, thread, threads, spare.data());
    else look_back<float>(layer, index, thread, threads, spare.data());
    pool.barrier(thread == 0);
    const char* next = share_of(layer.gate, thread, threads);
    close(layer, layer.o, attended, attended_stride, layer.norm_after_attention, next, thread, threads, pool);
  }

  // Attention of this thread's share of the query heads of all entries. They are numbered by kv head, entry and place in the
  // group, so neighbours read the same keys and values.
  template <class E>
  void look_back(const Layer& layer, int64_t index, int thread, int threads, float* spare) {
    const Sight* sight = nullptr;
    for (const Sight& one : own.sights) if (one.window == layer.window) sight = &one;
    const int64_t group = m.heads / m.kv_heads, score_room = most_seen + SPARE;
    float* outs = spare + MOST_LINES * score_room;  // [lines][padded]
    const int64_t first = line_at(*sight, thread, threads, group), last = line_at(*sight, thread + 1, threads, group);
    Line lines[MOST_LINES];
    for (int64_t line = first; line < last;) {
      const int64_t h = line / (n * group), row = own.entries[line / group % n].row;
      int count = 0;
      for (; count < MOST_LINES && line + count < last; count++) {
        const int64_t entry = (line + count) / group % n;
        if ((line + count) / (n * group) != h || own.entries[entry].row != row) break;
        const float* query = own.queries.data() + (entry * m.heads + h * group + (line + count) % group) * padded;
        lines[count] = {query, &sight->visible[entry], spare + count * score_room, outs + count * padded};
      }
      const int64_t at = (row * m.kv_heads + h) * store.slots * padded;
      attend(lines, count, static_cast<const E*>(store.keys[index]) + at, static_cast<const E*>(store.values[index]) + at, padded, layer.scale, layer.softcap);
      for (int i = 0; i < count; i++) {
        const int64_t entry = (line + i) / group % n, head = h * group + (line + i) % group;
        std::memcpy(attended + entry * attended_stride + head * m.head_size, lines[i].out, sizeof(float) * m.head_size);
      }
      line += count;
    }
  }

  // The first line of a thread, chosen so that all threads have about the same work.
  int64_t line_at(const Sight& sight, int64_t thread, int64_t threads, int64_t group) const {
    const int64_t of_head = sight.work_before.back() * group, work = of_head * m.kv_heads * thread / threads;
    const int64_t h = work / of_head, rest = work % of_head;
    const int64_t entry = std::upper_bound(sight.work_before.begin(), sight.work_before.end(), rest / group) - sight.work_before.begin() - 1;
    const int64_t before = sight.work_before[entry], each = sight.work_before[entry + 1] - before;
    return (h * n + entry) * group + (rest - before * group) / each;
  }

  void mlp(const Layer& layer, int64_t index, int thread, int threads, Pool& pool, float* normed) {
    int64_t first, last;
    normed = norms(layer.norm_before_mlp, thread, threads, pool, normed);
    share(layer.gate.count(), thread, threads, first, last);
    float* up = inner + n * inner_stride;
    Rows rows{normed, n, x_stride, own.codes[thread]};
    matmul(layer.gate, rows, inner, inner_stride, first, last, inner_stride, layer.up.panel(first));
    matmul(layer.up, rows, up, inner_stride, first, last, inner_stride, share_of(layer.down, thread, threads));
    const int64_t start = first * LANES, stop = std::min(last * LANES, m.intermediate);
    if (start < stop)
      for (int64_t r = 0; r < n; r++)
        activate(layer.activation, inner + r * inner_stride + start, up + r * inner_stride + start, stop - start);
    pool.barrier(thread == 0);
    const char* next = index + 1 < to ? share_of(m.layers[index + 1], thread, threads) : share_of(m.head, thread, threads);
    close(layer, layer.down, inner, inner_stride, layer.norm_after_mlp, next, thread, threads, pool);
  }

  // The projection at the end of a sublayer, its norm, and the residual sum.
  void close(const Layer& layer, const Matrix& matrix, const float* from_rows, int64_t stride, const float* norm, const char* next, int thread, int threads, Pool& pool) {
    int64_t first, last;
    share(matrix.count(), thread, threads, first, last);
    Rows rows{from_rows, n, stride, own.codes[thread]};
    matmul(matrix, rows, added, x_stride, first, last, x_stride, next);
    if (norm != nullptr) pool.barrier(thread == 0);
    const int64_t start = first * LANES, stop = std::min(last * LANES, m.hidden);
    for (int64_t r = 0; r < n; r++) {
      float *to = x + r * x_stride, *more = added + r * x_stride;
      const float factor = norm == nullptr ? 1.0f : inverse_rms(more, m.hidden, m.epsilon);
      for (int64_t i = start; i < stop; i++) {
        const float y = norm == nullptr ? more[i] : norm[i] * (more[i] * factor);
        to[i] = to[i] + y * layer.residual;
      }
    }
    pool.barrier(thread == 0);
  }

  void put(void* buffer, const Entry& entry, int64_t head, const float* from_head) {
    const int64_t at = ((entry.row * m.kv_heads + head) * store.slots + entry.slot) * padded;
    if (store.type == FLOAT32) std::memcpy(static_cast<float*>(buffer) + at, from_head, sizeof(float) * padded);
    else for (int64_t i = 0; i < padded; i++) static_cast<uint16_t*>(buffer)[at + i] = narrowed(from_head[i]);
  }
};

// Whether the store has the rows of a pass.
bool has_rows(const Pass& pass, const Store& store) {
  return pass.b >= 0 && pass.first_row >= 0 && pass.first_row <= store.rows && pass.b <= store.rows - pass.first_row;
}

// The tokens of a pass that count. Error if one names a missing slot or position, or a slot of another token.
int64_t collect(const Model& m, const Pass& pass, const Store& store, int64_t from, int64_t to, Room& own) {
  own.entries.clear();
  if (!has_rows(pass, store) || pass.n < 0 || pass.extent > store.slots - 1) return BAD_SLOT;
  if (store.keys == nullptr || store.values == nullptr || (store.type != FLOAT32 && store.type != BFLOAT16)) return BAD_ARGUMENT;
  if (pass.b > 0 && pass.n > 0 && (pass.positions == nullptr || pass.slots == nullptr)) return BAD_ARGUMENT;
  bool rising = true;  // every row's slots rise, which only odd callers break
  for (int64_t row = 0; row < pass.b; row++) {
    int64_t before = -1;
    for (int64_t column = 0; column < pass.n; column++) {
      if (pass.valid != nullptr && !pass.valid[row * pass.valid_stride + column]) continue;
      const int64_t position = pass.positions[row * pass.positions_stride + column], slot = pass.slots[row * pass.slots_stride + column];
      if (slot < 0 || slot >= store.slots - 1) return BAD_SLOT;  // the last slot takes what does not count
      if (position < 0) return BAD_POSITION;
      if (pass.base == nullptr && position >= pass.extent) return BAD_POSITION;
      own.entries.push_back({row * pass.n + column, pass.first_row + row, position, slot});
      rising = rising && slot > before;
      before = slot;
    }
  }
  if (!rising) {
    own.lines.clear();
    for (const Entry& entry : own.entries) own.lines.push_back(entry.row * store.slots + entry.slot);
    std::sort(own.lines.begin(), own.lines.end());
    if (std::adjacent_find(own.lines.begin(), own.lines.end()) != own.lines.end()) return BAD_SLOT;
  }
  for (int64_t index = from; index < to; index++) {
    if (store.keys[index] == nullptr || store.values[index] == nullptr) return BAD_ARGUMENT;
    const int64_t table = m.layers[index].rotary;
    if (table < 0) continue;
    if (table >= ROTARY_TABLES || pass.rotary[table].size > m.head_size) return BAD_LAYER;
    for (const Entry& entry : own.entries)
      if (entry.position >= pass.rotary[table].positions) return BAD_POSITION;
  }
  return OK;
}

// What every entry sees under a window.
int64_t look(const Pass& pass, int64_t window, Room& own, Sight& sight) {
  sight.window = window;
  sight.visible.clear();
  sight.tails.clear();
  sight.work_before.assign(1, 0);
  if (pass.base != nullptr && pass.columns < 0) return BAD_TREE;
  if (pass.base != nullptr) sight.tails.reserve(own.entries.size() * pass.columns);  // pointers into it must last
  for (const Entry& entry : own.entries) {
    const int64_t low = window > 0 ? std::max<int64_t>(0, entry.position - window + 1) : 0;
    if (pass.base == nullptr) {
      sight.visible.push_back({low, entry.position + 1, nullptr, 0});
      continue;
    }
    const int64_t row = entry.place / pass.n, column = entry.place % pass.n, base = pass.base[row];
    const int64_t seen = pass.seen == nullptr ? base : pass.seen[row];
    if (base < 0 || base > pass.extent || seen < 0) return BAD_TREE;
    const int64_t high = std::min(std::min(base, seen), pass.extent);
    const int64_t start = int64_t(sight.tails.size());
    for (int64_t c = 0; c < pass.columns; c++) {
      const int64_t slot = base + c;
      const bool ancestor = pass.ancestors[row * pass.ancestors_row + column * pass.ancestors_column + c] != 0 || slot < seen;
      if (!ancestor || slot >= pass.extent) continue;
      if (window > 0 && pass.column_positions[row * pass.column_positions_stride + c] <= entry.position - window) continue;
      sight.tails.push_back(int32_t(slot));
    }
    sight.visible.push_back({std::min(low, high), high, sight.tails.data() + start, int64_t(sight.tails.size()) - start});
    if (sight.visible.back().count() < 1) return BAD_TREE;
  }
  for (const Visible& one : sight.visible) sight.work_before.push_back(sight.work_before.back() + one.count() + WORK_OF_A_LINE);
  return OK;
}

int64_t prepare(const Model& m, const Pass& pass, const Store& store, int64_t from, int64_t to, Room& own) {
  if (from < 0 || to > m.depth || from > to) return BAD_LAYER;
  if (int64_t error = collect(m, pass, store, from, to, own)) return error;
  size_t used = 0;
  for (int64_t index = from; index < to; index++) {
    const int64_t window = m.layers[index].window;
    bool known = false;
    for (size_t i = 0; i < used; i++) known = known || own.sights[i].window == window;
    if (known) continue;
    if (own.sights.size() == used) own.sights.emplace_back();
    if (int64_t error = look(pass, window, own, own.sights[used])) return error;
    used++;
  }
  for (size_t i = used; i < own.sights.size(); i++) own.sights[i].window = -1;
  return OK;
}

void run_layers(const Model& m, const Pass& pass, const Store& store, int64_t from, int64_t to, const int64_t* skip, int threads, Room& own) {
  if (from == to) return;
  const int64_t n = int64_t(own.entries.size()), wide = up16(m.hidden), padded = up16(m.head_size);
  int64_t most = LANES;
  for (const Sight& sight : own.sights)
    if (sight.window >= 0) for (const Visible& one : sight.visible) most = std::max(most, up16(one.count()));
  Run run{m, pass, store, from, to, skip, own, n, own.x.data(), nullptr, nullptr, nullptr, nullptr, wide, 0, 0, 0, padded, most};
  const Layer& any = m.layers[from];
  run.projected_stride = (any.q.count() + any.k.count() + any.v.count()) * LANES;
  run.attended_stride = up16(m.heads * m.head_size);
  run.inner_stride = up16(m.intermediate);
  run.projected = own.projected.reserve(n * run.projected_stride);
  run.attended = own.attended.reserve(n * run.attended_stride);
  run.inner = own.inner.reserve(2 * n * run.inner_stride);
  run.added = own.added.reserve(n * wide);
  own.queries.reserve(n * m.heads * padded);
  own.normed.resize(std::max<size_t>(own.normed.size(), threads));
  own.codes.resize(std::max<size_t>(own.codes.size(), threads));
  own.scores.resize(std::max<size_t>(own.scores.size(), threads));
  const bool quantized = std::any_of(m.layers + from, m.layers + to, [](const Layer& layer) { return layer.quantized(); });
  for (int t = 0; t < threads; t++) {
    own.normed[t].reserve(n * wide);
    own.scores[t].reserve(MOST_LINES * (most + SPARE + padded));
    if (quantized) own.codes[t].reserve(n, std::max({any.q.inputs, any.o.inputs, any.down.inputs}));
  }
  Pool::shared().run(threads, Run::job, &run);
}

inline bool has_nan(const float* row, int64_t start, int64_t stop) {
  int any = 0;
  for (int64_t i = start; i < stop; i++) any |= row[i] != row[i];
  return any != 0;
}

// Final norm and LM head over n rows of `x`. If `best` is given, the likeliest id of every row.
struct Head {
  static constexpr int64_t NONE = -1, NO_NUMBER = -2;  // of a thread's logits: there are none, one is NaN
  const Model& m;
  const Matrix& head;   // the model's own, or that of a shortlist
  const int64_t* ids;   // of its outputs; null where they are 0, 1, 2, ...
  const float* x;
  int64_t n, x_stride;
  bool norm;
  float* logits;  // [n][outputs of the head]
  int64_t* best;  // [n] or null; -1 where a logit is NaN or all are -inf
  float* probability;  // [n] or null: of the likeliest id, at temperature 1; 0 where there is none
  const Matrix* transform;  // applied to the states before the head, or null
  float* transformed;       // room for n rows of them
  Room& own;

  static void job(void* context, int thread, int threads, Pool& pool) noexcept { static_cast<Head*>(context)->work(thread, threads, pool); }

  void work(int thread, int threads, Pool& pool) {
    float* normed = own.normed[thread].data();
    norm_rows(x, x_stride, norm ? m.norm : nullptr, n, head.inputs, m.epsilon, normed, x_stride);
    int64_t first, last;
    if (transform != nullptr) {
      share(transform->count(), thread, threads, first, last);
      Rows rows{normed, n, x_stride, own.codes[thread]};
      matmul(*transform, rows, transformed, x_stride, first, last, x_stride, share_of(head, thread, threads));
      pool.barrier(thread == 0);
      normed = transformed;
    }
    const int64_t outputs = head.outputs;
    share(head.count(), thread, threads, first, last);
    Rows rows{normed, n, x_stride, own.codes[thread]};
    matmul(head, rows, logits, outputs, first, last, outputs, m.depth > 0 ? share_of(m.layers[0], thread, threads) : nullptr);
    const int64_t start = first * LANES, stop = std::min(last * LANES, outputs);
    for (int64_t r = 0; r < n; r++) {
      float* row = logits + r * outputs;
      if (m.logits_divisor != 1.0f) for (int64_t i = start; i < stop; i++) row[i] = row[i] / m.logits_divisor;
      if (m.logits_softcap > 0)
        for (int64_t i = start; i < stop; i += LANES) {
          const int count = int(std::min<int64_t>(LANES, stop - i));
          store_first(row + i, mul(tanh(div(load_first(row + i, count), set1(m.logits_softcap))), set1(m.logits_softcap)), count);
        }
      if (best != nullptr) {
        int64_t found = start < stop ? start : NONE;
        if (has_nan(row, start, stop)) {
          found = NO_NUMBER;
        } else if (start < stop) {
          V16 top = set1(row[start]);
          int64_t i = start;
          for (; i + LANES <= stop; i += LANES) top = max(top, load(row + i));
          float most = largest(top);
          for (; i < stop; i++) most = row[i] > most ? row[i] : most;
          for (found = start; found < stop - 1 && row[found] != most;) found++;
        }
        own.best.data()[thread * n + r] = found;
      }
    }
    if (best == nullptr) return;
    pool.barrier(thread == 0);
    for (int64_t r = thread; r < n; r += threads) {
      const float* row = logits + r * outputs;
      int64_t winner = NONE;
      for (int t = 0; t < threads && winner != NO_NUMBER; t++) {
        const int64_t other = own.best.data()[t * n + r];
        if (other == NO_NUMBER || (other >= 0 && (winner < 0 || row[other] > row[winner]))) winner = other;
      }
      if (winner < 0 || row[winner] == -INFINITY) {
        best[r] = -1;
        if (probability != nullptr) probability[r] = 0;
        continue;
      }
      best[r] = ids == nullptr ? winner : ids[winner];
      if (probability == nullptr) continue;
      V16 total = zero();
      for (int64_t i = 0; i < outputs; i += LANES) {
        const int count = int(std::min<int64_t>(LANES, outputs - i));
        V16 e = exp(sub(load_first(row + i, count), set1(row[winner])));
        if (count < LANES) {
          float lanes[LANES] = {};
          store_first(lanes, e, count);
          e = load(lanes);
        }
        total = add(total, e);
      }
      const float all = sum(total);
      probability[r] = all >= 1 ? 1.0f / all : 0.0f;  // NaN where the highest logit is infinite
    }
  }
};

void run_head(const Model& m, const Shortlist* shortlist, const float* x, int64_t n, int64_t x_stride, bool norm, float* logits, int64_t* best, float* probability, const Matrix* transform, int threads, Room& own) {
  const Matrix& head = shortlist == nullptr ? m.head : shortlist->head;
  own.normed.resize(std::max<size_t>(own.normed.size(), threads));
  own.codes.resize(std::max<size_t>(own.codes.size(), threads));
  for (int t = 0; t < threads; t++) {
    own.normed[t].reserve(n * x_stride);
    if (head.quantized()) own.codes[t].reserve(n, head.inputs);
  }
  own.best.reserve(threads * n);
  if (transform != nullptr && transform->quantized())
    for (int t = 0; t < threads; t++) own.codes[t].reserve(n, transform->inputs);
  float* transformed = transform == nullptr ? nullptr : own.transformed.reserve(n * x_stride);
  Head job{m, head, shortlist == nullptr ? nullptr : shortlist->ids, x, n, x_stride, norm, logits, best, probability, transform, transformed, own};
  Pool::shared().run(threads, Head::job, &job);
}
}  // namespace sk

using namespace sk;
#define SK_EXPORT extern "C" __attribute__((visibility("default")))

// The body of every exported function that can fail. No exception leaves the library, and the caller's floating-point state is kept.
template <class Body>
static int64_t guarded(Body&& body) noexcept {
  const PlainFloats plain;
  try {
    return body();
  } catch (...) {  // only requests for memory or threads throw
    return NO_MEMORY;
  }
}

// Whether rows x columns is a size that a buffer can have. In bytes such sizes do not overflow.
static bool fits(int64_t rows, int64_t columns) {
  constexpr int64_t MOST_ELEMENTS = int64_t(1) << 44;
  return rows >= 0 && columns >= 0 && (columns == 0 || rows <= MOST_ELEMENTS / columns);
}

static bool any_null(std::initializer_list<const void*> pointers) { return std::count(pointers.begin(), pointers.end(), nullptr) > 0; }

static bool is_matrix(const Matrix& one) {
  return one.panels != nullptr && one.type >= FLOAT32 && one.type <= INT4 && one.outputs >= 1 && one.inputs >= 1 && fits(one.outputs, one.inputs);
}

// Whether states of a model can go through a transform and a shortlist; both may be null.
static bool suits_head(const Model& m, const Matrix* transform, const Shortlist* shortlist) {
  const int64_t size = m.head.inputs;
  if (transform != nullptr && !(is_matrix(*transform) && transform->outputs == size && transform->inputs == size)) return false;
  if (shortlist == nullptr) return true;
  const Matrix& head = shortlist->head;
  return is_matrix(head) && head.inputs == size && head.outputs <= m.vocabulary && shortlist->ids != nullptr;
}

static int64_t check_threads(int64_t threads) { return threads < 1 || threads > MOST_THREADS ? BAD_THREADS : OK; }

SK_EXPORT int64_t sk_abi() { return 3; }
SK_EXPORT const char* sk_level() { return SK_LEVEL; }
SK_EXPORT const char* sk_source_hash() { return SK_SOURCE_HASH; }
// Sizes in bytes of Matrix, Layer, Model, Store, Pass and Shortlist. A caller compares them with its own declarations.
SK_EXPORT void sk_sizes(int64_t* sizes) {
  sizes[0] = sizeof(Matrix); sizes[1] = sizeof(Layer); sizes[2] = sizeof(Model); sizes[3] = sizeof(Store); sizes[4] = sizeof(Pass); sizes[5] = sizeof(Shortlist);
}

// Bytes of a matrix in panels; -1 where there is no such type or size.
SK_EXPORT int64_t sk_packed_bytes(int64_t type, int64_t outputs, int64_t inputs) {
  if (outputs < 0 || inputs < 0 || !fits(std::max<int64_t>(outputs, LANES), std::max<int64_t>(inputs, GROUP))) return -1;
  const int64_t count = (outputs + LANES - 1) / LANES;
  switch (type) {
    case FLOAT32: return count * F32::panel(inputs) * 4;
    case BFLOAT16: return count * BF16::panel(inputs) * 2;
    case FLOAT16: return count * F16::panel(inputs) * 2;
    case INT8: return count * panel_bytes<Int8>(groups_of(inputs));
    case INT4: return count * panel_bytes<Int4>(groups_of(inputs));
    default: return -1;
  }
}

// Whether weights [outputs][inputs], rows `stride` elements apart, can be read, and panels of a type written.
static bool packable(int64_t type, const void* source, int64_t stride, int64_t outputs, int64_t inputs, const void* panels) {
  if (sk_packed_bytes(type, outputs, inputs) < 0 || stride < 0 || !fits(outputs, stride)) return false;
  return outputs == 0 || inputs == 0 || !any_null({source, panels});
}

// source: [outputs][inputs], rows `stride` elements apart, of the same type. The type is not quantised.
SK_EXPORT int64_t sk_pack(int64_t type, const void* source, int64_t stride, int64_t outputs, int64_t inputs, void* panels) {
  return guarded([&]() -> int64_t {
      if (type > FLOAT16 || !packable(type, source, stride, outputs, inputs, panels)) return BAD_ARGUMENT;
    if (type == FLOAT32) pack(static_cast<const float*>(source), stride, outputs, inputs, static_cast<float*>(panels), false);
    else pack(static_cast<const uint16_t*>(source), stride, outputs, inputs, static_cast<uint16_t*>(panels), type == BFLOAT16);
    return OK;
  });
}

// Weights into panels of type INT8 or INT4. source: [outputs][inputs] of another type, rows `stride` elements apart. panels: all 0.
// BAD_WEIGHT where a weight is not finite, or too large for a float16 scale.
SK_EXPORT int64_t sk_quantize(int64_t type, int64_t source_type, const void* source, int64_t stride, int64_t outputs, int64_t inputs, void* panels) {
  return guarded([&]() -> int64_t {
      if (type < INT8 || source_type < FLOAT32 || source_type > FLOAT16 || !packable(type, source, stride, outputs, inputs, panels)) return BAD_ARGUMENT;
    std::vector<float> weights(static_cast<size_t>(inputs));
    uint8_t* to = static_cast<uint8_t*>(panels);
    for (int64_t o = 0; o < outputs; o++) {
      for (int64_t k = 0; k < inputs; k++) weights[size_t(k)] = widened(source, source_type, o * stride + k);
      const bool good = type == INT8 ? quantize_output<Int8>(weights.data(), inputs, o, to) : quantize_output<Int4>(weights.data(), inputs, o, to);
      if (!good) return BAD_WEIGHT;
    }
    return OK;
  });
}

// Some outputs of a matrix as panels of their own, bit for bit. ids [count]. panels: all 0.
SK_EXPORT int64_t sk_take(const Matrix* from, const int64_t* ids, int64_t count, void* panels) {
  return guarded([&]() -> int64_t {
      if (from == nullptr || !is_matrix(*from) || !fits(count, from->inputs) || (count > 0 && any_null({ids, panels}))) return BAD_ARGUMENT;
    for (int64_t i = 0; i < count; i++) if (ids[i] < 0 || ids[i] >= from->outputs) return BAD_TOKEN;
    take(*from, ids, count, static_cast<char*>(panels));
    return OK;
  });
}

// Embeddings of `count` ids. hidden: [count][m->hidden].
SK_EXPORT int64_t sk_embed(const Model* m, const int64_t* tokens, int64_t count, float* hidden) {
  return guarded([&]() -> int64_t {
      if (m == nullptr || !fits(count, m->hidden) || (count > 0 && any_null({tokens, hidden}))) return BAD_ARGUMENT;
    for (int64_t i = 0; i < count; i++) {
      if (tokens[i] < 0 || tokens[i] >= m->embeddings) return BAD_TOKEN;
      embed_token(*m, tokens[i], hidden + i * m->hidden);
    }
    return OK;
  });
}

// Layers [from, to) over the tokens of a pass. hidden, out: [b][n][hidden], rows `stride` apart in hidden; they may be the same.
// Entries that do not count are copied. skip: bits per layer of the model, or null.
SK_EXPORT int64_t sk_run(const Model* m, const Pass* pass, const Store* store, int64_t from, int64_t to, const int64_t* skip,
                         const float* hidden, int64_t hidden_stride, float* out, int64_t out_stride, int64_t threads) {
  return guarded([&]() -> int64_t {
    if (int64_t error = check_threads(threads)) return error;
    if (any_null({m, pass, store}) || hidden_stride < 0 || out_stride < 0) return BAD_ARGUMENT;
    Room& own = room();
    if (int64_t error = prepare(*m, *pass, *store, from, to, own)) return error;
    if (!fits(pass->n, m->hidden)) return BAD_ARGUMENT;
    if (pass->b > 0 && pass->n > 0 && any_null({hidden, out})) return BAD_ARGUMENT;
    if (pass->b > 1 && (!fits(pass->b, hidden_stride) || !fits(pass->b, out_stride) || out_stride < pass->n * m->hidden)) return BAD_ARGUMENT;
    const int64_t wide = up16(m->hidden), n = int64_t(own.entries.size());
    if (hidden != out)
      for (int64_t row = 0; row < pass->b; row++)
        std::memcpy(out + row * out_stride, hidden + row * hidden_stride, sizeof(float) * pass->n * m->hidden);
    if (n == 0 || from == to) return OK;
    float* x = own.x.reserve(n * wide);
    for (int64_t i = 0; i < n; i++) {
      const int64_t row = own.entries[i].place / pass->n, column = own.entries[i].place % pass->n;
      std::memcpy(x + i * wide, hidden + row * hidden_stride + column * m->hidden, sizeof(float) * m->hidden);
    }
    run_layers(*m, *pass, *store, from, to, skip, int(threads), own);
    for (int64_t i = 0; i < n; i++) {
      const int64_t row = own.entries[i].place / pass->n, column = own.entries[i].place % pass->n;
      std::memcpy(out + row * out_stride + column * m->hidden, x + i * wide, sizeof(float) * m->hidden);
    }
    return OK;
  });
}

// The final norm of n rows. hidden, normed: [n][hidden].
SK_EXPORT int64_t sk_norm(const Model* m, const float* hidden, int64_t n, float* normed) {
  return guarded([&]() -> int64_t {
      if (m == nullptr || !fits(n, m->hidden) || (n > 0 && any_null({hidden, normed}))) return BAD_ARGUMENT;
    norm_rows(hidden, m->hidden, m->norm, n, m->hidden, m->epsilon, normed, m->hidden);
    return OK;
  });
}

// Logits of n states [n][hidden], behind the final norm if `norm` is set: [n][vocabulary], or [n][outputs of the shortlist]. logits
// may be null. shortlist: null for all tokens.
// best [n]: the likeliest ids, the lowest of equal ones, -1 where a logit is NaN or all are -inf; may be null.
SK_EXPORT int64_t sk_head(const Model* m, const Shortlist* shortlist, const float* hidden, int64_t n, int64_t norm, float* logits, int64_t* best,
                          int64_t threads) {
  return guarded([&]() -> int64_t {
    if (int64_t error = check_threads(threads)) return error;
    if (m == nullptr || !fits(n, std::max(m->vocabulary, up16(m->hidden))) || !suits_head(*m, nullptr, shortlist)) return BAD_ARGUMENT;
    if (n == 0) return OK;
    if (hidden == nullptr) return BAD_ARGUMENT;
    Room& own = room();
    if (logits == nullptr) logits = own.logits.reserve(n * m->vocabulary);
    run_head(*m, shortlist, hidden, n, m->head.inputs, norm != 0, logits, best, nullptr, nullptr, int(threads), own);
    return OK;
  });
}

// The prediction of an exit's head for n states [n][hidden]: final norm, `transform` as in sk_chain, LM head. best [n]: the likeliest
// ids, among the shortlist's tokens if there is one, -1 as in sk_head. probability [n]: of these ids, 0 where best is -1.
SK_EXPORT int64_t sk_test(const Model* m, const Shortlist* shortlist, const float* hidden, int64_t n, const Matrix* transform, int64_t* best,
                          float* probability, int64_t threads) {
  return guarded([&]() -> int64_t {
    if (int64_t error = check_threads(threads)) return error;
    if (m == nullptr || !fits(n, std::max(m->vocabulary, up16(m->hidden))) || !suits_head(*m, transform, shortlist)) return BAD_ARGUMENT;
    if (n == 0) return OK;
    if (any_null({hidden, best, probability})) return BAD_ARGUMENT;
    Room& own = room();
    float* logits = own.logits.reserve(n * m->vocabulary);
    run_head(*m, shortlist, hidden, n, m->head.inputs, true, logits, best, probability, transform, int(threads), own);
    return OK;
  });
}

// The k largest of each of `rows` rows of n logits, `stride` apart, as `Largest` has them. k: from 1 to n and MOST_KEPT. tokens:
// [rows][k].
SK_EXPORT int64_t sk_largest(const float* logits, int64_t rows, int64_t n, int64_t stride, int64_t k, int64_t* tokens, int64_t threads) {
  return guarded([&]() -> int64_t {
    if (int64_t error = check_threads(threads)) return error;
    if (n < 1 || k < 1 || k > std::min(n, MOST_KEPT) || stride < 0 || !fits(rows, std::max(n, stride))) return BAD_ARGUMENT;
    if (rows > 0 && any_null({logits, tokens})) return BAD_ARGUMENT;
    Largest all{logits, rows, n, stride, k, tokens};
    Pool::shared().run(int(threads), Largest::job, &all);
    return OK;
  });
}

// Draws a token for each of `rows` rows of n logits, `stride` apart, as `drawn` and `drawn_of_all` do. temperature (positive), top_k,
// tail, min_p and counters have one entry a row. top_k: n or more for all tokens. A row with top_k 0 takes no part and gets token 0. A
// row with a negative top_k is left to the caller. tokens: -1 for a row that is left to the caller.
SK_EXPORT int64_t sk_draw(const float* logits, int64_t rows, int64_t n, int64_t stride, const float* temperature, const int64_t* top_k,
                          const float* tail, const float* min_p, const uint64_t* counters, uint64_t place, int64_t* tokens) {
  return guarded([&]() -> int64_t {
    if (n < 1 || stride < 0 || !fits(rows, std::max(n, stride))) return BAD_ARGUMENT;
    if (rows > 0 && any_null({logits, temperature, top_k, tail, min_p, counters, tokens})) return BAD_ARGUMENT;
    for (int64_t r = 0; r < rows; r++) {
      const float* row = logits + r * stride;
      tokens[r] = top_k[r] == 0 ? 0 : -1;
      if (top_k[r] >= n) tokens[r] = drawn_of_all(row, n, temperature[r], tail[r], min_p[r], counters[r], place);
      else if (top_k[r] > 0 && top_k[r] <= MOST_KEPT) tokens[r] = drawn(row, n, temperature[r], top_k[r], tail[r], min_p[r], counters[r], place);
    }
    return 0;
  });
}

// The probability that a draft is accepted, by its own probability p: sigmoid(slope logit(p) + offset).
static float acceptance(float p, float slope, float offset) {
  constexpr float SURE = 3e-4f;  // probabilities nearer to 0 or 1 count as this near
  const float kept = std::min(std::max(p, SURE), 1 - SURE);
  return 1 / (1 + std::exp(-(slope * std::log(kept / (1 - kept)) + offset)));
}

// A greedy chain of drafts on every row: layers [from, to), LM head, likeliest id. A row ends when it has `most` drafts, when a draft
// ends its text, or when a draft is less probable than its threshold. A drafted token counts, whatever ends the row. Logits with a NaN,
// or with -inf alone, draft no token and end the row.
//
// roots [b]: the last committed ids, at the positions bases [b]. width: room for drafts of a row. most [b]: drafts of a row, -1 for one
// that takes no part. thresholds [b], or null without a threshold. ends [b][ends_count]: ids that end a row, -1 for none. keep: hidden
// [b][width + 1][m->hidden] keeps the states behind layer `to`, also those of the last draft; otherwise it keeps embeddings. transform:
// float32 [head inputs][head inputs], applied to normed states before the head, or null. shortlist: drafts and their probabilities are
// taken among its tokens; null for all. sure: a draft that is not more probable than its threshold does not count and ends its row.
// survival or null: slope, offset, least [width], beside [width]. The survival of a draft is the product of sigmoid(slope logit(p) +
// offset) over the row's drafts up to it; p is a draft's probability. A row drafts on behind a place if its survival is at least
// `beside` there. It also needs the others: the sum of survival - beside over such rows must be at least (least - beside) x rows.
// drafts [b][width], counts [b], probabilities [b][width]: what was drafted. rotary: the tables of a pass.
SK_EXPORT int64_t sk_chain(const Model* m, const Pass* pass, const Store* store, int64_t from, int64_t to, const int64_t* skip,
                           const int64_t* roots, const int64_t* bases, const int64_t* most, int64_t width, const float* thresholds,
                           const int64_t* ends, int64_t ends_count, int64_t keep, const Matrix* transform,
                           const Shortlist* shortlist, int64_t sure, const float* survival, int64_t* drafts, int64_t* counts,
                           float* probabilities, float* hidden, int64_t hidden_stride, int64_t threads) {
  return guarded([&]() -> int64_t {
    constexpr uint8_t DONE = 0, LAST = 1, DRAFTS = 2;  // LAST: goes through the layers once more and drafts nothing
    if (int64_t error = check_threads(threads)) return error;
    if (any_null({m, pass, store})) return BAD_ARGUMENT;
    if (!has_rows(*pass, *store)) return BAD_SLOT;
    if (pass->b == 0) return OK;
    if (any_null({roots, bases, most, counts, hidden}) || !suits_head(*m, transform, shortlist)) return BAD_ARGUMENT;
    if (width < 0 || !fits(pass->b, width) || (width > 0 && drafts == nullptr) || !fits(width + 1, m->hidden)) return BAD_ARGUMENT;
    if (hidden_stride < 0 || !fits(pass->b, hidden_stride) || (pass->b > 1 && hidden_stride < (width + 1) * m->hidden)) return BAD_ARGUMENT;
    if (!fits(pass->b, ends_count) || (ends_count > 0 && ends == nullptr)) return BAD_ARGUMENT;
    if (width > 0 && thresholds != nullptr && probabilities == nullptr) return BAD_ARGUMENT;
    Room& own = room();
    const int64_t b = pass->b, wide = up16(m->hidden);
    const uint8_t after_drafting = keep ? LAST : DONE;
    own.positions.assign(bases, bases + b);
    own.going.assign(b, DONE);
    own.survival.assign(b, 1.0f);
    const int64_t taking = b - std::count(most, most + b, int64_t(-1));
    Pass one = *pass;
    one.n = 1;
    one.positions = one.slots = own.positions.data();
    one.positions_stride = one.slots_stride = one.valid_stride = 1;
    one.valid = own.going.data();
    one.base = nullptr;
    for (int64_t row = 0; row < b; row++) {
      counts[row] = 0;
      if (most[row] > width) return BAD_SLOT;
      own.going[row] = most[row] > 0 ? DRAFTS : most[row] == 0 ? after_drafting : DONE;
      if (roots[row] < 0 || roots[row] >= m->embeddings) return BAD_TOKEN;
      embed_token(*m, roots[row], hidden + row * hidden_stride);
    }
    for (int64_t place = 0; place <= width; place++) {
      if (int64_t error = prepare(*m, one, *store, from, to, own)) return error;
      const int64_t n = int64_t(own.entries.size());
      if (n == 0) break;
      float* x = own.x.reserve(n * wide);
      for (int64_t i = 0; i < n; i++)
        std::memcpy(x + i * wide, hidden + own.entries[i].place * hidden_stride + place * m->hidden, sizeof(float) * m->hidden);
      run_layers(*m, one, *store, from, to, skip, int(threads), own);
      if (keep)
        for (int64_t i = 0; i < n; i++)
          std::memcpy(hidden + own.entries[i].place * hidden_stride + place * m->hidden, x + i * wide, sizeof(float) * m->hidden);
      if (std::find(own.going.begin(), own.going.end(), DRAFTS) == own.going.end()) break;
      float* logits = own.logits.reserve(n * m->vocabulary);
      float* probability = thresholds == nullptr ? nullptr : own.probability.reserve(n);
      own.picks.resize(n);
      run_head(*m, shortlist, x, n, wide, true, logits, own.picks.data(), probability, transform, int(threads), own);
      for (int64_t i = 0; i < n; i++) {
        const int64_t row = own.entries[i].place, token = own.picks[i];
        if (own.going[row] == LAST) {
          own.going[row] = DONE;
          continue;
        }
        if (token < 0 || (sure && probability != nullptr && !(probability[i] > thresholds[row]))) {
          own.going[row] = DONE;
          continue;
        }
        if (token >= m->embeddings) return BAD_TOKEN;
        embed_token(*m, token, hidden + row * hidden_stride + (place + 1) * m->hidden);
        drafts[row * width + place] = token;
        counts[row] = place + 1;
        own.positions[row] += 1;
        bool on = counts[row] < most[row];
        for (int64_t e = 0; e < ends_count; e++) on = on && ends[row * ends_count + e] != token;
        if (probability != nullptr) {
          probabilities[row * width + place] = probability[i];
          on = on && probability[i] >= thresholds[row];
          if (survival != nullptr) {
            own.survival[row] *= acceptance(probability[i], survival[0], survival[1]);
            on = on && own.survival[row] >= survival[2 + width + place];
          }
        }
        own.going[row] = on ? DRAFTS : after_drafting;
      }
      if (survival != nullptr && place < width) {
        const float least = survival[2 + place], beside = survival[2 + width + place];
        float above = 0;
        for (int64_t row = 0; row < b; row++)
          if (own.going[row] == DRAFTS) above += own.survival[row] - beside;
        if (!(above >= float(taking) * (least - beside)))
          std::replace(own.going.begin(), own.going.end(), DRAFTS, after_drafting);
      }
    }
    return OK;
  });
}
