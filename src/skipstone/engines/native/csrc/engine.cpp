// Runs a few tokens through a range of decoder layers in one call. Flags and pointers of a Layer describe the families.
//
// A token's results depend on its own text only, not on other tokens of the call, the number of threads or the instruction set.
// The C ABI at the end checks every position, slot and id against the caller's buffers.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <exception>
#include <new>
#include <utility>
#include <vector>

#include "attention.h"
#include "memory.h"
#include "model.h"
#include "packing.h"
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

// The slots that every entry attends to under one window.
struct WindowView {
  int64_t window = -1;
  std::vector<VisibleSlots> visible;
  std::vector<int32_t> tails;
  std::vector<int64_t> work_before;  // work for one query head of all earlier entries, in slots; the last: of all entries
};
constexpr int64_t WORK_OF_A_LINE = 16;  // a line's fixed cost, in slots

using Floats = Buffer<float>;

// The scratch memory of a host thread. Every CALLS_BEFORE_TRIM calls it frees buffers more than twice as large as these calls needed.
// A step makes fewer than a hundred calls, and a prompt's chunks run at least every second step. So no buffer is freed between two
// chunks, and the memory of a long prompt is freed soon after it.
struct Scratch {
  static constexpr int CALLS_BEFORE_TRIM = 256;
  int calls = 0;
  Floats x, pairs, states, projected, queries, attended, inner, added, logits, probability, transformed;
  std::vector<int64_t> positions, picks;
  std::vector<uint8_t> row_states;
  std::vector<float> survival;  // of a chain's rows, up to their newest drafts
  std::vector<float> distribution;  // of a chain's newest draft
  std::vector<Floats> normed, scores;  // per thread; shared norms are the first thread's
  std::vector<ConvertedRows> converted;  // inputs of a product, likewise
  std::vector<Entry> entries;
  std::vector<int64_t> lines;  // of the entries, as numbers of the store's rows and slots
  std::vector<WindowView> views;
  Buffer<int64_t> best;  // [threads][rows]

  void trim() {
    for (Floats* one : {&x, &pairs, &states, &projected, &queries, &attended, &inner, &added, &logits, &probability, &transformed}) one->trim();
    for (auto* each : {&normed, &scores}) for (Floats& one : *each) one.trim();
    for (ConvertedRows& one : converted) one.trim();
    best.trim();
    for (auto* one : {&positions, &picks, &lines}) one->shrink_to_fit();  // to the size of the latest call
    entries.shrink_to_fit();
    views.clear();
    views.shrink_to_fit();
  }
};

// The scratch memory of the calling thread. Call it once per exported call: it counts them.
inline Scratch& thread_scratch() {
  static thread_local Scratch scratch;
  if (++scratch.calls >= Scratch::CALLS_BEFORE_TRIM) {
    scratch.calls = 0;
    scratch.trim();
  }
  return scratch;
}

inline void share(int64_t count, int thread, int threads, int64_t& first, int64_t& last) {
  first = count * thread / threads;
  last = count * (thread + 1) / threads;
}

// The first weights of a thread's share of a matrix.
inline const char* first_weights(const Matrix& matrix, int thread, int threads) {
  int64_t first, last;
  share(matrix.count(), thread, threads, first, last);
  return matrix.panel(first);
}

// The same for a layer. Its query, key and value weights are divided as if they were one matrix.
inline const char* first_weights(const Layer& layer, int thread, int threads) {
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

// RMSNorm of n rows; a copy if `weight` is null.
inline void norm_rows(const float* x, int64_t x_stride, const float* weight, int64_t n, int64_t size, float epsilon, float* y, int64_t y_stride) {
  for (int64_t r = 0; r < n; r++) {
    const float* from = x + r * x_stride;
    float* to = y + r * y_stride;
    if (weight == nullptr) std::memcpy(to, from, sizeof(float) * size);
    else scaled(from, inverse_rms(from, size, epsilon), weight, size, to);
  }
}

inline float to_float32(const void* from, int64_t type, int64_t index) {
  if (type == FLOAT32) return static_cast<const float*>(from)[index];
  return has_bfloat16_pairs(type) ? float_of(static_cast<const Bfloat16*>(from)[index]) : float_of(static_cast<const Float16*>(from)[index]);
}

inline void embed_token(const Model& m, int64_t token, float* to) {
  const int64_t type = m.embedding == nullptr ? m.head.type : m.embedding_type;
  if (type >= INT8) {
    const void* panels = m.embedding == nullptr ? m.head.panels : m.embedding;
    with_quantized(type, [&]<class T>() { dequantize_output<T>(panels, m.hidden, token, to); });
  } else if (m.embedding != nullptr) {
    for (int64_t k = 0; k < m.hidden; k++) to[k] = to_float32(m.embedding, m.embedding_type, token * m.hidden + k);
  } else {
    const bool pairs = has_bfloat16_pairs(m.head.type);
    const int64_t size = (pairs ? (m.hidden + 1) / 2 * 2 : m.hidden) * LANES, start = token / LANES * size, lane = token % LANES;
    for (int64_t k = 0; k < m.hidden; k++)
      to[k] = to_float32(m.head.panels, m.head.type, start + (pairs ? (k / 2 * LANES + lane) * 2 + k % 2 : k * LANES + lane));
  }
  for (int64_t k = 0; k < m.hidden; k++) to[k] = to[k] * m.embedding_scale * m.embedding_multiplier;
}

// gate = activation(gate) * up
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

// From this number of rows on, threads divide norms and conversions of inputs. With 8 rather than 64, int8 passes of 16 to 48 rows take
// 2 to 7 % less time on two threads, other passes the same.
constexpr int64_t SHARED_ROWS = 8;

// The rows of inputs that a thread prepares, and the number of the buffer. Each thread prepares all of a few rows in its own buffer.
// Threads divide many rows, which costs a barrier.
struct PreparedRows {
  int64_t first = 0, last;
  int buffer;
  bool is_shared;
  PreparedRows(int64_t n, int thread, int threads) : last(n), buffer(thread), is_shared(threads > 1 && n >= SHARED_ROWS) {
    if (!is_shared) return;
    share(n, thread, threads, first, last);
    buffer = 0;
  }
};

// n rows x that all threads have written, as inputs of a matrix.
inline Rows input_rows(const Matrix& matrix, const float* x, int64_t n, int64_t stride, Scratch& scratch, int thread, int threads, Pool& pool) {
  const PreparedRows prepared(n, thread, threads);
  Rows rows(x, n, stride, matrix.inputs, scratch.converted[prepared.buffer]);
  rows.convert({&matrix}, prepared.first, prepared.last);
  if (prepared.is_shared && matrix.needs_conversion()) pool.barrier(thread);
  return rows;
}

// Their norm as inputs of some matrices; a copy if `weight` is null.
inline Rows normed_rows(const float* weight, float epsilon, std::initializer_list<const Matrix*> matrices, const float* x, int64_t n, int64_t stride, int64_t size,
                        Scratch& scratch, int thread, int threads, Pool& pool) {
  const PreparedRows prepared(n, thread, threads);
  const auto [first, last] = std::pair(prepared.first, prepared.last);
  float* normed = scratch.normed[prepared.buffer].data();
  norm_rows(x + first * stride, stride, weight, last - first, size, epsilon, normed + first * stride, stride);
  Rows rows(normed, n, stride, size, scratch.converted[prepared.buffer]);
  rows.convert(matrices, first, last);
  if (prepared.is_shared) pool.barrier(thread);
  return rows;
}

// Memory for n rows of inputs of some matrices.
template <class Matrices>
inline void reserve_rows(const Matrices& matrices, int64_t n, int64_t stride, int threads, Scratch& scratch) {
  scratch.normed.resize(std::max<size_t>(scratch.normed.size(), threads));
  scratch.converted.resize(std::max<size_t>(scratch.converted.size(), threads));
  for (int t = 0; t < threads; t++) {
    const int buffer = PreparedRows(n, t, threads).buffer;
    scratch.normed[buffer].reserve(n * stride);
    for (const Matrix* one : matrices) scratch.converted[buffer].reserve(*one, n);
  }
}

// Number of floats of a token that enter a layer: a state, or an embedding and a state.
inline int64_t entering_size(const Model& m, int64_t index) {
  return index < m.depth && m.layers[index].norm_of_embedding != nullptr ? 2 * m.hidden : m.hidden;
}

// Memory for n entries that enter a layer. Returns that of their states.
inline float* reserve_entries(const Model& m, int64_t index, int64_t n, Scratch& scratch) {
  if (entering_size(m, index) > m.hidden) scratch.pairs.reserve(n * up16(2 * m.hidden));
  return scratch.x.reserve(n * up16(m.hidden));
}

// Entry i, which enters a layer. embedding: of a layer that reads pairs.
inline void enter(const Model& m, int64_t index, int64_t i, const float* embedding, const float* state, Scratch& scratch) {
  float* x = scratch.x.data() + i * up16(m.hidden);
  std::memcpy(x, state, sizeof(float) * m.hidden);
  if (entering_size(m, index) == m.hidden) return;
  const Layer& layer = m.layers[index];
  float* pair = scratch.pairs.data() + i * up16(2 * m.hidden);
  norm_rows(embedding, 0, layer.norm_of_embedding, 1, m.hidden, m.epsilon, pair, 0);
  norm_rows(state, 0, layer.norm_before_attention, 1, m.hidden, m.epsilon, pair + m.hidden, 0);
  if (layer.norm_before_residual) std::memcpy(x, pair + m.hidden, sizeof(float) * m.hidden);
}

// Runs layers over the entries in `scratch.x`, on all threads of the pool. Every layer is a job: a long pass soon has more or fewer threads.
struct Run {
  const Model& m;
  const Pass& pass;
  const Store& store;
  int64_t index, to;  // the layer of the next job, and the end of the layers
  const int64_t* skip;
  Scratch& scratch;
  int64_t n;  // entries
  float *x, *projected, *attended, *inner, *added;
  int64_t x_stride, projected_stride, attended_stride, inner_stride, padded;
  int64_t max_visible;

  static void job(void* context, int thread, int threads, Pool& pool) noexcept { static_cast<Run*>(context)->work(thread, threads, pool); }

  void work(int thread, int threads, Pool& pool) {
    const Layer& layer = m.layers[index];
    const int64_t skipped = skip == nullptr ? 0 : skip[index];
    if (!(skipped & SKIP_ATTENTION)) attention(layer, index, thread, threads, pool);
    if (!(skipped & SKIP_MLP)) mlp(layer, index, thread, threads, pool);
  }

  Rows norm_entries(const float* weight, std::initializer_list<const Matrix*> matrices, int thread, int threads, Pool& pool) {
    return normed_rows(weight, m.epsilon, matrices, x, n, x_stride, m.hidden, scratch, thread, threads, pool);
  }

  void attention(const Layer& layer, int64_t index, int thread, int threads, Pool& pool) {
    int64_t first, last;
    const std::initializer_list<const Matrix*> parts = {&layer.q, &layer.k, &layer.v};
    const Rows rows = layer.norm_of_embedding == nullptr
        ? norm_entries(layer.norm_before_attention, parts, thread, threads, pool)
        : normed_rows(nullptr, m.epsilon, parts, scratch.pairs.data(), n, up16(2 * m.hidden), 2 * m.hidden, scratch, thread, threads, pool);
    share(layer.q.count() + layer.k.count() + layer.v.count(), thread, threads, first, last);
    int64_t start = 0;  // number of panels of the earlier parts
    for (const Matrix* part : parts) {
      const int64_t count = part->count();
      const int64_t a = std::clamp<int64_t>(first - start, 0, count), b = std::clamp<int64_t>(last - start, 0, count);
      const Matrix* after = start + count >= last ? nullptr : part == &layer.q ? &layer.k : &layer.v;
      const char* next = after == nullptr ? first_weights(layer.o, thread, threads) : after->panel(0);
      matmul(*part, rows, projected + start * LANES, projected_stride, a, b, count * LANES, next);
      start += count;
    }
    pool.barrier(thread);
    // norms and rotary phases; write keys and values to their slots
    const int64_t heads = m.heads + 2 * m.kv_heads, size = m.head_size;
    const int64_t k_start = layer.q.count() * LANES, v_start = k_start + layer.k.count() * LANES;
    share(n * heads, thread, threads, first, last);
    Floats& spare = scratch.scores[thread];
    for (int64_t unit = first; unit < last; unit++) {
      const Entry& entry = scratch.entries[unit / heads];
      const int64_t row = unit / heads, h = unit % heads;
      const float* token = projected + row * projected_stride;
      float* head = spare.data();
      std::fill(head + size, head + padded, 0.0f);
      if (h >= m.heads + m.kv_heads) {
        std::memcpy(head, token + v_start + (h - m.heads - m.kv_heads) * size, sizeof(float) * size);
        write_head(store.values[index], entry, h - m.heads - m.kv_heads, head);
        continue;
      }
      const bool is_query = h < m.heads;
      const int64_t head_index = is_query ? h : h - m.heads, width = (is_query ? m.heads : m.kv_heads) * size;
      const float* all_heads = token + (is_query ? 0 : k_start);
      const float* weight = is_query ? layer.norm_q : layer.norm_k;
      if (weight == nullptr) std::memcpy(head, all_heads + head_index * size, sizeof(float) * size);
      else if (layer.norm_whole) scaled(all_heads + head_index * size, inverse_rms(all_heads, width, m.epsilon), weight + head_index * size, size, head);
      else scaled(all_heads + head_index * size, inverse_rms(all_heads + head_index * size, size, m.epsilon), weight, size, head);
      if (layer.rotary >= 0) rotate(head, pass.rotary[layer.rotary], entry.position);
      if (is_query) std::memcpy(scratch.queries.data() + (row * m.heads + h) * padded, head, sizeof(float) * padded);
      else write_head(store.keys[index], entry, head_index, head);
    }
    pool.barrier(thread);
    // attention
    if (store.type == BFLOAT16) attend_lines<uint16_t>(layer, index, thread, threads, spare.data());
    else attend_lines<float>(layer, index, thread, threads, spare.data());
    pool.barrier(thread);
    const char* next = first_weights(layer.gate, thread, threads);
    add_to_stream(layer, layer.o, attended, attended_stride, layer.norm_after_attention, next, thread, threads, pool);
  }

  // Attention of this thread's share of all lines (query heads of entries). Lines are numbered by kv head, entry and place in the
  // group, so neighbours read the same keys and values.
  template <class E>
  void attend_lines(const Layer& layer, int64_t index, int thread, int threads, float* spare) {
    const WindowView* view = nullptr;
    for (const WindowView& one : scratch.views) if (one.window == layer.window) view = &one;
    const int64_t group = m.heads / m.kv_heads, score_stride = max_visible + SPARE;
    float* outputs = spare + MAX_LINES * score_stride;  // [lines][padded]
    const int64_t first = line_at(*view, thread, threads, group), last = line_at(*view, thread + 1, threads, group);
    Line lines[MAX_LINES];
    for (int64_t line = first; line < last;) {
      const int64_t h = line / (n * group), row = scratch.entries[line / group % n].row;
      int count = 0;
      for (; count < MAX_LINES && line + count < last; count++) {
        const int64_t entry = (line + count) / group % n;
        if ((line + count) / (n * group) != h || scratch.entries[entry].row != row) break;
        const float* query = scratch.queries.data() + (entry * m.heads + h * group + (line + count) % group) * padded;
        lines[count] = {query, &view->visible[entry], spare + count * score_stride, outputs + count * padded};
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
  int64_t line_at(const WindowView& view, int64_t thread, int64_t threads, int64_t group) const {
    const int64_t of_head = view.work_before.back() * group, work = of_head * m.kv_heads * thread / threads;
    const int64_t h = work / of_head, rest = work % of_head;
    const int64_t entry = std::upper_bound(view.work_before.begin(), view.work_before.end(), rest / group) - view.work_before.begin() - 1;
    const int64_t before = view.work_before[entry], each = view.work_before[entry + 1] - before;
    return (h * n + entry) * group + (rest - before * group) / each;
  }

  void mlp(const Layer& layer, int64_t index, int thread, int threads, Pool& pool) {
    int64_t first, last;
    const Rows rows = norm_entries(layer.norm_before_mlp, {&layer.gate, &layer.up}, thread, threads, pool);
    share(layer.gate.count(), thread, threads, first, last);
    float* up = inner + n * inner_stride;
    matmul(layer.gate, rows, inner, inner_stride, first, last, inner_stride, layer.up.panel(first));
    matmul(layer.up, rows, up, inner_stride, first, last, inner_stride, first_weights(layer.down, thread, threads));
    const int64_t start = first * LANES, stop = std::min(last * LANES, m.intermediate);
    if (start < stop)
      for (int64_t r = 0; r < n; r++)
        activate(layer.activation, inner + r * inner_stride + start, up + r * inner_stride + start, stop - start);
    pool.barrier(thread);
    const char* next = index + 1 < to ? first_weights(m.layers[index + 1], thread, threads) : first_weights(m.head, thread, threads);
    add_to_stream(layer, layer.down, inner, inner_stride, layer.norm_after_mlp, next, thread, threads, pool);
  }

  // The last projection of a sublayer, its norm, and the residual sum.
  void add_to_stream(const Layer& layer, const Matrix& matrix, const float* from_rows, int64_t stride, const float* norm, const char* next, int thread, int threads, Pool& pool) {
    int64_t first, last;
    share(matrix.count(), thread, threads, first, last);
    const Rows rows = input_rows(matrix, from_rows, n, stride, scratch, thread, threads, pool);
    matmul(matrix, rows, added, x_stride, first, last, x_stride, next);
    if (norm != nullptr) pool.barrier(thread);
    const int64_t start = first * LANES, stop = std::min(last * LANES, m.hidden);
    for (int64_t r = 0; r < n; r++) {
      float *to = x + r * x_stride, *more = added + r * x_stride;
      const float factor = norm == nullptr ? 1.0f : inverse_rms(more, m.hidden, m.epsilon);
      for (int64_t i = start; i < stop; i++) {
        const float y = norm == nullptr ? more[i] : norm[i] * (more[i] * factor);
        to[i] = to[i] + y * layer.residual;
      }
    }
    pool.barrier(thread);
  }

  void write_head(void* buffer, const Entry& entry, int64_t head, const float* from_head) {
    const int64_t at = ((entry.row * m.kv_heads + head) * store.slots + entry.slot) * padded;
    if (store.type == FLOAT32) std::memcpy(static_cast<float*>(buffer) + at, from_head, sizeof(float) * padded);
    else for (int64_t i = 0; i < padded; i += LANES) store_bf16(static_cast<uint16_t*>(buffer) + at + i, load(from_head + i));
  }
};

// Whether the store has all rows of a pass.
bool has_rows(const Pass& pass, const Store& store) {
  return pass.b >= 0 && pass.first_row >= 0 && pass.first_row <= store.rows && pass.b <= store.rows - pass.first_row;
}

// Collects the valid tokens of a pass. Error if a slot or position does not exist, or if two tokens have one slot.
int64_t collect_entries(const Model& m, const Pass& pass, const Store& store, int64_t from, int64_t to, Scratch& scratch) {
  scratch.entries.clear();
  if (!has_rows(pass, store) || pass.n < 0 || pass.extent > store.slots - 1) return BAD_SLOT;
  if (store.keys == nullptr || store.values == nullptr || (store.type != FLOAT32 && store.type != BFLOAT16)) return BAD_ARGUMENT;
  if (pass.b > 0 && pass.n > 0 && (pass.positions == nullptr || pass.slots == nullptr)) return BAD_ARGUMENT;
  bool slots_rise = true;  // in every row; if not, slots are searched for duplicates
  for (int64_t row = 0; row < pass.b; row++) {
    int64_t before = -1;
    for (int64_t column = 0; column < pass.n; column++) {
      if (pass.valid != nullptr && !pass.valid[row * pass.valid_stride + column]) continue;
      const int64_t position = pass.positions[row * pass.positions_stride + column], slot = pass.slots[row * pass.slots_stride + column];
      if (slot < 0 || slot >= store.slots - 1) return BAD_SLOT;  // the last slot is trash
      if (position < 0) return BAD_POSITION;
      if (pass.base == nullptr && position >= pass.extent) return BAD_POSITION;
      scratch.entries.push_back({row * pass.n + column, pass.first_row + row, position, slot});
      slots_rise = slots_rise && slot > before;
      before = slot;
    }
  }
  if (!slots_rise) {
    scratch.lines.clear();
    for (const Entry& entry : scratch.entries) scratch.lines.push_back(entry.row * store.slots + entry.slot);
    std::sort(scratch.lines.begin(), scratch.lines.end());
    if (std::adjacent_find(scratch.lines.begin(), scratch.lines.end()) != scratch.lines.end()) return BAD_SLOT;
  }
  for (int64_t index = from; index < to; index++) {
    if (store.keys[index] == nullptr || store.values[index] == nullptr) return BAD_ARGUMENT;
    const int64_t table = m.layers[index].rotary;
    if (table < 0) continue;
    if (table >= ROTARY_TABLES || pass.rotary[table].size > m.head_size) return BAD_LAYER;
    for (const Entry& entry : scratch.entries)
      if (entry.position >= pass.rotary[table].positions) return BAD_POSITION;
  }
  return OK;
}

// Finds the slots that every entry attends to under a window.
int64_t find_visible(const Pass& pass, int64_t window, Scratch& scratch, WindowView& view) {
  view.window = window;
  view.visible.clear();
  view.tails.clear();
  view.work_before.assign(1, 0);
  if (pass.base != nullptr && pass.columns < 0) return BAD_TREE;
  if (pass.base != nullptr) view.tails.reserve(scratch.entries.size() * pass.columns);  // no growth: `visible` points into it
  for (const Entry& entry : scratch.entries) {
    const int64_t low = window > 0 ? std::max<int64_t>(0, entry.position - window + 1) : 0;
    if (pass.base == nullptr) {
      view.visible.push_back({low, entry.position + 1, nullptr, 0});
      continue;
    }
    const int64_t row = entry.place / pass.n, column = entry.place % pass.n, base = pass.base[row];
    const int64_t seen = pass.seen == nullptr ? base : pass.seen[row];
    if (base < 0 || base > pass.extent || seen < 0) return BAD_TREE;
    const int64_t high = std::min(std::min(base, seen), pass.extent);
    const int64_t start = int64_t(view.tails.size());
    for (int64_t c = 0; c < pass.columns; c++) {
      const int64_t slot = base + c;
      const bool ancestor = pass.ancestors[row * pass.ancestors_row + column * pass.ancestors_column + c] != 0 || slot < seen;
      if (!ancestor || slot >= pass.extent) continue;
      if (window > 0 && pass.column_positions[row * pass.column_positions_stride + c] <= entry.position - window) continue;
      view.tails.push_back(int32_t(slot));
    }
    view.visible.push_back({std::min(low, high), high, view.tails.data() + start, int64_t(view.tails.size()) - start});
    if (view.visible.back().count() < 1) return BAD_TREE;
  }
  for (const VisibleSlots& one : view.visible) view.work_before.push_back(view.work_before.back() + one.count() + WORK_OF_A_LINE);
  return OK;
}

int64_t prepare_pass(const Model& m, const Pass& pass, const Store& store, int64_t from, int64_t to, Scratch& scratch) {
  if (from < 0 || to > m.depth || from > to) return BAD_LAYER;
  for (int64_t index = from + 1; index < to; index++) if (entering_size(m, index) > m.hidden) return BAD_LAYER;
  if (int64_t error = collect_entries(m, pass, store, from, to, scratch)) return error;
  size_t used = 0;
  for (int64_t index = from; index < to; index++) {
    const int64_t window = m.layers[index].window;
    bool known = false;
    for (size_t i = 0; i < used; i++) known = known || scratch.views[i].window == window;
    if (known) continue;
    if (scratch.views.size() == used) scratch.views.emplace_back();
    if (int64_t error = find_visible(pass, window, scratch, scratch.views[used])) return error;
    used++;
  }
  for (size_t i = used; i < scratch.views.size(); i++) scratch.views[i].window = -1;
  return OK;
}

void run_layers(const Model& m, const Pass& pass, const Store& store, int64_t from, int64_t to, const int64_t* skip, int threads, Scratch& scratch) {
  if (from == to) return;
  const int64_t n = int64_t(scratch.entries.size()), padded_hidden = up16(m.hidden), padded = up16(m.head_size);
  int64_t max_visible = LANES;
  for (const WindowView& view : scratch.views)
    if (view.window >= 0) for (const VisibleSlots& one : view.visible) max_visible = std::max(max_visible, up16(one.count()));
  Run run{m, pass, store, from, to, skip, scratch, n, scratch.x.data(), nullptr, nullptr, nullptr, nullptr, padded_hidden, 0, 0, 0, padded, max_visible};
  const Layer& any = m.layers[from];
  run.projected_stride = (any.q.count() + any.k.count() + any.v.count()) * LANES;
  run.attended_stride = up16(m.heads * m.head_size);
  run.inner_stride = up16(m.intermediate);
  run.projected = scratch.projected.reserve(n * run.projected_stride);
  run.attended = scratch.attended.reserve(n * run.attended_stride);
  run.inner = scratch.inner.reserve(2 * n * run.inner_stride);
  run.added = scratch.added.reserve(n * padded_hidden);
  scratch.queries.reserve(n * m.heads * padded);
  for (int64_t index = from; index < to; index++) reserve_rows(m.layers[index].matrices(), n, up16(entering_size(m, index)), threads, scratch);
  scratch.scores.resize(std::max<size_t>(scratch.scores.size(), threads));
  for (int t = 0; t < threads; t++) scratch.scores[t].reserve(MAX_LINES * (max_visible + SPARE + padded));
  for (; run.index < to; run.index++) Pool::shared().run(threads, Run::job, &run);
}

inline bool has_nan(const float* row, int64_t start, int64_t stop) {
  int any = 0;
  for (int64_t i = start; i < stop; i++) any |= row[i] != row[i];
  return any != 0;
}

// Final norm and LM head over n rows of `x`, and the likeliest id of every row if `best` is not null.
struct Head {
  static constexpr int64_t NONE = -1, IS_NAN = -2;  // in place of a thread's best output: it has no outputs, a logit is NaN
  const Model& m;
  const Matrix& head;   // the model's or a shortlist's
  const int64_t* ids;   // of its outputs; null: 0, 1, 2, ...
  const float* x;
  int64_t n, x_stride;
  bool norm;
  float* logits;  // [n][outputs of the head]
  int64_t* best;  // [n] or null; -1 if a logit is NaN or all are -inf
  float* probability;  // [n] or null: of the likeliest id, at temperature 1; 0 if there is none
  const Matrix* transform;  // applied to the states before the head, or null
  float* transformed;       // memory for n rows of transformed states
  Scratch& scratch;

  static void job(void* context, int thread, int threads, Pool& pool) noexcept { static_cast<Head*>(context)->work(thread, threads, pool); }

  void work(int thread, int threads, Pool& pool) {
    const Matrix& first_matrix = transform == nullptr ? head : *transform;
    Rows rows = normed_rows(norm ? m.norm : nullptr, m.epsilon, {&first_matrix}, x, n, x_stride, head.inputs, scratch, thread, threads, pool);
    int64_t first, last;
    if (transform != nullptr) {
      share(transform->count(), thread, threads, first, last);
      matmul(*transform, rows, transformed, x_stride, first, last, x_stride, first_weights(head, thread, threads));
      pool.barrier(thread);
      rows = input_rows(head, transformed, n, x_stride, scratch, thread, threads, pool);
    }
    const int64_t outputs = head.outputs;
    share(head.count(), thread, threads, first, last);
    matmul(head, rows, logits, outputs, first, last, outputs, m.depth > 0 ? first_weights(m.layers[0], thread, threads) : nullptr);
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
        int64_t best_output = start < stop ? start : NONE;
        if (has_nan(row, start, stop)) {
          best_output = IS_NAN;
        } else if (start < stop) {
          V16 top = set1(row[start]);
          int64_t i = start;
          for (; i + LANES <= stop; i += LANES) top = max(top, load(row + i));
          float largest_logit = largest(top);
          for (; i < stop; i++) largest_logit = row[i] > largest_logit ? row[i] : largest_logit;
          for (best_output = start; best_output < stop - 1 && row[best_output] != largest_logit;) best_output++;
        }
        scratch.best.data()[thread * n + r] = best_output;
      }
    }
    if (best == nullptr) return;
    pool.barrier(thread);
    for (int64_t r = thread; r < n; r += threads) {
      const float* row = logits + r * outputs;
      int64_t winner = NONE;
      for (int t = 0; t < threads && winner != IS_NAN; t++) {
        const int64_t other = scratch.best.data()[t * n + r];
        if (other == IS_NAN || (other >= 0 && (winner < 0 || row[other] > row[winner]))) winner = other;
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
      const float denominator = sum(total);
      probability[r] = denominator >= 1 ? 1.0f / denominator : 0.0f;  // NaN if the highest logit is infinite
    }
  }
};

void run_head(const Model& m, const Shortlist* shortlist, const float* x, int64_t n, int64_t x_stride, bool norm, float* logits, int64_t* best, float* probability, const Matrix* transform, int threads, Scratch& scratch) {
  const Matrix& head = shortlist == nullptr ? m.head : shortlist->head;
  reserve_rows(std::array{&head, transform == nullptr ? &head : transform}, n, x_stride, threads, scratch);
  scratch.best.reserve(threads * n);
  float* transformed = transform == nullptr ? nullptr : scratch.transformed.reserve(n * x_stride);
  Head job{m, head, shortlist == nullptr ? nullptr : shortlist->ids, x, n, x_stride, norm, logits, best, probability, transform, transformed, scratch};
  Pool::shared().run(threads, Head::job, &job);
}
}  // namespace sk

using namespace sk;
#define SK_EXPORT extern "C" __attribute__((visibility("default")))

// Runs the body of an exported function. No exception leaves the library, and the caller's floating-point state is restored.
template <class Body>
static int64_t guarded(Body&& body) noexcept {
  const PlainFloats plain;
  try {
    return body();
  } catch (...) {  // only memory and threads can be missing
    return NO_MEMORY;
  }
}

// Whether a buffer can have rows x columns elements. Sizes of such buffers in bytes do not overflow.
static bool fits(int64_t rows, int64_t columns) {
  constexpr int64_t MAX_ELEMENTS = int64_t(1) << 44;
  return rows >= 0 && columns >= 0 && (columns == 0 || rows <= MAX_ELEMENTS / columns);
}

static bool any_null(std::initializer_list<const void*> pointers) { return std::count(pointers.begin(), pointers.end(), nullptr) > 0; }

static bool is_matrix(const Matrix& one) {
  return one.panels != nullptr && one.type >= FLOAT32 && one.type < TYPES && one.outputs >= 1 && one.inputs >= 1 && fits(one.outputs, one.inputs);
}

// Whether a transform and a shortlist fit a model; both may be null.
static bool suits_head(const Model& m, const Matrix* transform, const Shortlist* shortlist) {
  const int64_t size = m.head.inputs;
  if (transform != nullptr && !(is_matrix(*transform) && transform->outputs == size && transform->inputs == size)) return false;
  if (shortlist == nullptr) return true;
  const Matrix& head = shortlist->head;
  return is_matrix(head) && head.inputs == size && head.outputs <= m.vocabulary && shortlist->ids != nullptr;
}

static int64_t check_threads(int64_t threads) { return threads < 1 || threads > MAX_THREADS ? BAD_THREADS : OK; }

SK_EXPORT int64_t sk_abi() { return 9; }
SK_EXPORT const char* sk_level() { return SK_LEVEL; }
SK_EXPORT const char* sk_source_hash() { return SK_SOURCE_HASH; }
// Sizes in bytes of Matrix, Layer, Model, Store, Pass and Shortlist. A caller compares them with its own declarations.
SK_EXPORT void sk_sizes(int64_t* sizes) {
  sizes[0] = sizeof(Matrix); sizes[1] = sizeof(Layer); sizes[2] = sizeof(Model); sizes[3] = sizeof(Store); sizes[4] = sizeof(Pass); sizes[5] = sizeof(Shortlist);
}

// Bytes of a matrix in panels; -1 for an unknown type or an impossible size.
SK_EXPORT int64_t sk_packed_bytes(int64_t type, int64_t outputs, int64_t inputs) {
  if (outputs < 0 || inputs < 0 || !fits(std::max<int64_t>(outputs, LANES), std::max<int64_t>(inputs, GROUP))) return -1;
  const int64_t count = (outputs + LANES - 1) / LANES;
  switch (type) {
    case FLOAT32: return count * F32::panel(inputs) * 4;
    case BFLOAT16: case BFLOAT16_INPUTS: return count * BF16::panel(inputs) * 2;
    case FLOAT16: return count * F16::panel(inputs) * 2;
    default:
      if (type < INT8 || type >= TYPES) return -1;
      return with_quantized(type, [&]<class T>() { return inputs % (T::UNIT == 1 ? 1 : T::UNIT * GROUP) ? -1 : count * panel_bytes<T>(groups_of(inputs)); });
  }
}

// Calls run(E()) for the element type E of stored weights.
template <class Run>
static int64_t with_element(int64_t type, const Run& run) {
  if (type == FLOAT32) return run(float());
  return type == BFLOAT16 ? run(Bfloat16()) : run(Float16());
}

// `fill_panels` after a check of its arguments. E, P: element types of make's rows and panel. length: elements of a row.
template <class E, class P, class Make>
static int64_t fill_checked(int64_t type, int64_t file, const void* source, int64_t stride, int64_t outputs, int64_t length, void* panels, int64_t threads,
                            int64_t inputs, const Make& make) {
  const int64_t size = sk_packed_bytes(type, LANES, inputs), width = sizeof(E);
  if (size < 0 || outputs < 0 || stride < 0 || !fits(outputs, stride) || !fits(outputs, inputs)) return BAD_ARGUMENT;
  if (check_threads(threads) != OK) return BAD_THREADS;
  if (outputs == 0 || inputs == 0) return OK;
  if (panels == nullptr || (file < 0 && source == nullptr)) return BAD_ARGUMENT;
  const Source rows{file, reinterpret_cast<uintptr_t>(source), stride * width, length * width};
  return fill_panels(rows, outputs, threads, panels, size, [&](const char* from, int64_t count, char* panel) {
    return make(reinterpret_cast<const E*>(from), count, reinterpret_cast<P*>(panel));
  });
}

// The same for rows of GGUF's blocks, which lie next to each other. make: false for weights that the panel cannot have.
template <class Make>
static int64_t fill_from_blocks(int64_t type, int64_t file, const void* source, int64_t outputs, int64_t inputs, void* panels, int64_t threads,
                                int64_t source_type, const Make& make) {
  if (source_type >= TYPES) return BAD_ARGUMENT;
  return with_quantized(source_type, [&]<class T>() -> int64_t {
    if (inputs < 0 || inputs % (T::UNIT * GROUP)) return BAD_ARGUMENT;
    const int64_t stride = inputs / (T::UNIT * GROUP) * T::STORED;
    return fill_checked<uint8_t, uint8_t>(type, file, source, stride, outputs, stride, panels, threads, inputs, [&](const uint8_t* from, int64_t count, uint8_t* panel) {
      return make.template operator()<T>(from, stride, count, panel) ? OK : BAD_WEIGHT;
    });
  });
}

// Packs weights into panels of their own type or of float32; panels of BFLOAT16 and BFLOAT16_INPUTS are the same. Blocks of GGUF (INT8:
// Q8_0, INT4: Q4_1) have panels of their own type only, and no stride. BAD_WEIGHT if a code of INT8 is -128. source: the address of
// [outputs][inputs] of source_type, rows `stride` elements apart; if `file` is a descriptor and not -1, their offset in that file.
// BAD_FILE if the file cannot be read or is too short. Panels do not depend on one another, so calls may pack ranges of outputs that begin at multiples of 16. A call on one thread
// leaves the other threads to other calls.
SK_EXPORT int64_t sk_pack(int64_t type, int64_t source_type, int64_t file, const void* source, int64_t stride, int64_t outputs, int64_t inputs,
                          void* panels, int64_t threads) {
  return guarded([&]() -> int64_t {
    if (type == BFLOAT16_INPUTS) type = BFLOAT16;
    if (type < FLOAT32 || source_type < FLOAT32 || (type != source_type && (type != FLOAT32 || source_type > FLOAT16))) return BAD_ARGUMENT;
    if (type >= INT8)
      return fill_from_blocks(type, file, source, outputs, inputs, panels, threads, type, [&]<class T>(const uint8_t* from, int64_t stride, int64_t count, uint8_t* panel) {
        return pack_blocks<T>(from, stride, count, inputs, panel);
      });
    if (type != FLOAT32)
      return fill_checked<uint16_t, uint16_t>(type, file, source, stride, outputs, inputs, panels, threads, inputs, [&](const uint16_t* from, int64_t count, uint16_t* panel) {
        pack_panel(from, stride, count, inputs, type == BFLOAT16, panel);
        return OK;
      });
    return with_element(source_type, [&](auto element) {
      using E = decltype(element);
      return fill_checked<E, float>(type, file, source, stride, outputs, inputs, panels, threads, inputs, [&](const E* from, int64_t count, float* panel) {
        widen_panel(from, stride, count, inputs, panel);
        return OK;
      });
    });
  });
}

// The same for panels of type INT8 or INT4. BAD_WEIGHT if a weight is not finite, or too large for a float16 scale, and for blocks as in
// sk_pack.
SK_EXPORT int64_t sk_quantize(int64_t type, int64_t source_type, int64_t file, const void* source, int64_t stride, int64_t outputs, int64_t inputs,
                              void* panels, int64_t threads) {
  return guarded([&]() -> int64_t {
    if (type < INT8 || type > INT4 || source_type < FLOAT32 || source_type == BFLOAT16_INPUTS) return BAD_ARGUMENT;
    if (source_type >= INT8)
      return fill_from_blocks(type, file, source, outputs, inputs, panels, threads, source_type, [&]<class T>(const uint8_t* from, int64_t stride, int64_t count, uint8_t* panel) {
        return type == INT8 ? requantize_panel<Int8, T>(from, stride, count, inputs, panel) : requantize_panel<Int4, T>(from, stride, count, inputs, panel);
      });
    return with_element(source_type, [&](auto element) {
      using E = decltype(element);
      return fill_checked<E, uint8_t>(type, file, source, stride, outputs, inputs, panels, threads, inputs, [&](const E* from, int64_t count, uint8_t* panel) {
        const auto quantize = type == INT8 ? quantize_panel<Int8, E> : quantize_panel<Int4, E>;
        return quantize(from, stride, count, inputs, panel) ? OK : BAD_WEIGHT;
      });
    });
  });
}

// Copies some outputs of a matrix into new panels, bit for bit. ids [count]. panels: all 0.
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

// Runs layers [from, to) over the tokens of a pass. hidden, out: [b][n][hidden], which may be one buffer; rows are `stride` apart.
// If layer `from` reads pairs, hidden is [b][n][2][hidden] in another buffer. States of invalid tokens are copied. skip: bits per layer of
// the model, or null.
SK_EXPORT int64_t sk_run(const Model* m, const Pass* pass, const Store* store, int64_t from, int64_t to, const int64_t* skip,
                         const float* hidden, int64_t hidden_stride, float* out, int64_t out_stride, int64_t threads) {
  return guarded([&]() -> int64_t {
    if (int64_t error = check_threads(threads)) return error;
    if (any_null({m, pass, store}) || hidden_stride < 0 || out_stride < 0) return BAD_ARGUMENT;
    Scratch& scratch = thread_scratch();
    if (int64_t error = prepare_pass(*m, *pass, *store, from, to, scratch)) return error;
    if (!fits(pass->n, 2 * m->hidden)) return BAD_ARGUMENT;
    if (pass->b > 0 && pass->n > 0 && any_null({hidden, out})) return BAD_ARGUMENT;
    if (pass->b > 1 && (!fits(pass->b, hidden_stride) || !fits(pass->b, out_stride) || out_stride < pass->n * m->hidden)) return BAD_ARGUMENT;
    const int64_t padded_hidden = up16(m->hidden), n = int64_t(scratch.entries.size()), size = entering_size(*m, from);
    const int64_t state = size - m->hidden;  // its place in a column
    if (hidden != out)
      for (int64_t row = 0; row < pass->b; row++)
        for (int64_t column = 0; column < pass->n; column++)
          std::memcpy(out + row * out_stride + column * m->hidden, hidden + row * hidden_stride + column * size + state, sizeof(float) * m->hidden);
    if (n == 0 || from == to) return OK;
    float* x = reserve_entries(*m, from, n, scratch);
    for (int64_t i = 0; i < n; i++) {
      const int64_t at = scratch.entries[i].place / pass->n * hidden_stride + scratch.entries[i].place % pass->n * size;
      enter(*m, from, i, hidden + at, hidden + at + state, scratch);
    }
    run_layers(*m, *pass, *store, from, to, skip, int(threads), scratch);
    for (int64_t i = 0; i < n; i++) {
      const int64_t row = scratch.entries[i].place / pass->n, column = scratch.entries[i].place % pass->n;
      std::memcpy(out + row * out_stride + column * m->hidden, x + i * padded_hidden, sizeof(float) * m->hidden);
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

// Logits of n states [n][hidden]: [n][vocabulary], or [n][outputs of the shortlist]; may be null. norm: apply the final norm first.
// shortlist: null for all tokens. best [n], or null: the likeliest ids, the lowest of equal ones, -1 if a logit is NaN or all are -inf.
SK_EXPORT int64_t sk_head(const Model* m, const Shortlist* shortlist, const float* hidden, int64_t n, int64_t norm, float* logits, int64_t* best,
                          int64_t threads) {
  return guarded([&]() -> int64_t {
    if (int64_t error = check_threads(threads)) return error;
    if (m == nullptr || !fits(n, std::max(m->vocabulary, up16(m->hidden))) || !suits_head(*m, nullptr, shortlist)) return BAD_ARGUMENT;
    if (n == 0) return OK;
    if (hidden == nullptr) return BAD_ARGUMENT;
    Scratch& scratch = thread_scratch();
    if (logits == nullptr) logits = scratch.logits.reserve(n * m->vocabulary);
    run_head(*m, shortlist, hidden, n, m->head.inputs, norm != 0, logits, best, nullptr, nullptr, int(threads), scratch);
    return OK;
  });
}

// Scores n states [n][hidden] of an exit: final norm, `transform` as in sk_chain, LM head. best [n]: the likeliest ids (of the
// shortlist, if not null), -1 as in sk_head. probability [n]: of these ids, 0 if best is -1.
SK_EXPORT int64_t sk_test(const Model* m, const Shortlist* shortlist, const float* hidden, int64_t n, const Matrix* transform, int64_t* best,
                          float* probability, int64_t threads) {
  return guarded([&]() -> int64_t {
    if (int64_t error = check_threads(threads)) return error;
    if (m == nullptr || !fits(n, std::max(m->vocabulary, up16(m->hidden))) || !suits_head(*m, transform, shortlist)) return BAD_ARGUMENT;
    if (n == 0) return OK;
    if (any_null({hidden, best, probability})) return BAD_ARGUMENT;
    Scratch& scratch = thread_scratch();
    float* logits = scratch.logits.reserve(n * m->vocabulary);
    run_head(*m, shortlist, hidden, n, m->head.inputs, true, logits, best, probability, transform, int(threads), scratch);
    return OK;
  });
}

// The k largest of n logits in each of `rows` rows, `stride` apart (`Largest`). k: from 1 to n and MAX_TOP_K. tokens: [rows][k].
SK_EXPORT int64_t sk_largest(const float* logits, int64_t rows, int64_t n, int64_t stride, int64_t k, int64_t* tokens, int64_t threads) {
  return guarded([&]() -> int64_t {
    if (int64_t error = check_threads(threads)) return error;
    if (n < 1 || k < 1 || k > std::min(n, MAX_TOP_K) || stride < 0 || !fits(rows, std::max(n, stride))) return BAD_ARGUMENT;
    if (rows > 0 && any_null({logits, tokens})) return BAD_ARGUMENT;
    Largest all{logits, rows, n, stride, k, tokens};
    Pool::shared().run(int(threads), Largest::job, &all);
    return OK;
  });
}

// Draws a token for each of `rows` rows of n logits, `stride` apart (`draw_top_k`, `draw_from_all`). temperature (positive), top_k,
// tail, min_p and counters have one entry per row. top_k: n or more for all tokens, 0 for an inactive row, which gets token 0, negative
// for a row that the caller draws. tokens: -1 for a row that the caller has to draw.
SK_EXPORT int64_t sk_draw(const float* logits, int64_t rows, int64_t n, int64_t stride, const float* temperature, const int64_t* top_k,
                          const float* tail, const float* min_p, const uint64_t* counters, uint64_t place, int64_t* tokens) {
  return guarded([&]() -> int64_t {
    if (n < 1 || stride < 0 || !fits(rows, std::max(n, stride))) return BAD_ARGUMENT;
    if (rows > 0 && any_null({logits, temperature, top_k, tail, min_p, counters, tokens})) return BAD_ARGUMENT;
    for (int64_t r = 0; r < rows; r++) {
      const float* row = logits + r * stride;
      tokens[r] = top_k[r] == 0 ? 0 : -1;
      if (top_k[r] >= n) tokens[r] = draw_from_all(row, n, temperature[r], tail[r], min_p[r], counters[r], place);
      else if (top_k[r] > 0 && top_k[r] <= MAX_TOP_K) tokens[r] = draw_top_k(row, n, temperature[r], top_k[r], tail[r], min_p[r], counters[r], place);
    }
    return 0;
  });
}

// The probability that a draft is accepted, by its own probability p: sigmoid(slope logit(p) + offset).
static float acceptance(float p, float slope, float offset) {
  constexpr float MARGIN = 3e-4f;  // probabilities are clamped to [MARGIN, 1 - MARGIN]
  const float clamped = std::min(std::max(p, MARGIN), 1 - MARGIN);
  return 1 / (1 + std::exp(-(slope * std::log(clamped / (1 - clamped)) + offset)));
}

// Drafts a greedy chain on every row: layers [from, to), LM head, likeliest id. A row ends when it has `max_drafts` drafts, when a draft
// is one of its `ends`, or when a draft is less probable than its threshold. The draft that ends a row counts. If a logit is NaN or all
// are -inf, the row ends without a further draft.
//
// roots [b]: the last committed ids. states [b][m->hidden]: the states next to them, if layer `from` reads pairs; else null. The state
// next to a draft is the one that left layer `to` before it. bases [b]: the roots' positions. max_drafts [b]: at most width, -1 for a row
// that does not draft. thresholds [b], or null. ends [b][ends_count]: ids that end a row, -1 for none. keep_states: hidden [b][width +
// 1][m->hidden] gets the states after layer `to`, also of the last draft; otherwise it gets embeddings. transform: float32 [head
// inputs][head inputs], applied to normed states before the head, or null. shortlist: the tokens that drafts and probabilities are
// limited to; null for all.
// excludes_uncertain: a draft at or below its threshold is dropped, and its row ends.
// survival: slope, offset, min_survival [width], min_survival_shared [width]; or null. The survival of a row is the product of
// sigmoid(slope logit(p) + offset) over its drafts, with their probabilities p. At every place a row goes on if its survival S is at
// least min_survival_shared. All rows stop if the sum of S - min_survival_shared over the rows that go on is less than
// (min_survival - min_survival_shared) x (number of rows with max_drafts >= 0).
// max_entropy [b], or null: a row ends after a draft with more bits of entropy. num_ranked: number of tokens of every place to return, 0 for none.
// Results: drafts [b][width], counts [b], probabilities [b][width] with thresholds, entropies [b][width] with max_entropy, ranked
// [b][width][num_ranked]: the likeliest tokens, the draft first, -1 for those of logit -inf. distributions [b][width][distribution_size]: at
// temperature 1, 0 for ids that the head lacks; null without max_entropy, or for none.
SK_EXPORT int64_t sk_chain(const Model* m, const Pass* pass, const Store* store, int64_t from, int64_t to, const int64_t* skip,
                           const int64_t* roots, const float* states, const int64_t* bases, const int64_t* max_drafts, int64_t width,
                           const float* thresholds, const int64_t* ends, int64_t ends_count, int64_t keep_states, const Matrix* transform,
                           const Shortlist* shortlist, int64_t excludes_uncertain, const float* survival, const double* max_entropy,
                           int64_t num_ranked, int64_t distribution_size, int64_t* drafts, int64_t* counts, float* probabilities,
                           float* entropies, int64_t* ranked, float* distributions, float* hidden, int64_t hidden_stride, int64_t threads) {
  return guarded([&]() -> int64_t {
    constexpr uint8_t DONE = 0, LAST = 1, DRAFTS = 2;  // LAST: runs the layers once more and drafts nothing
    if (int64_t error = check_threads(threads)) return error;
    if (any_null({m, pass, store})) return BAD_ARGUMENT;
    if (!has_rows(*pass, *store)) return BAD_SLOT;
    if (pass->b == 0) return OK;
    if (any_null({roots, bases, max_drafts, counts, hidden}) || !suits_head(*m, transform, shortlist)) return BAD_ARGUMENT;
    if (width < 0 || !fits(pass->b, width) || (width > 0 && drafts == nullptr) || !fits(width + 1, m->hidden)) return BAD_ARGUMENT;
    if (from < 0) return BAD_LAYER;
    const bool reads_pairs = entering_size(*m, from) > m->hidden;
    if ((states != nullptr) != reads_pairs || (reads_pairs && from == to)) return BAD_ARGUMENT;
    if (hidden_stride < 0 || !fits(pass->b, hidden_stride) || (pass->b > 1 && hidden_stride < (width + 1) * m->hidden)) return BAD_ARGUMENT;
    if (!fits(pass->b, ends_count) || (ends_count > 0 && ends == nullptr)) return BAD_ARGUMENT;
    const int64_t outputs = shortlist == nullptr ? m->vocabulary : shortlist->head.outputs;
    const int64_t* ids = shortlist == nullptr ? nullptr : shortlist->ids;
    if (num_ranked < 0 || num_ranked > std::min(outputs, MAX_TOP_K)) return BAD_ARGUMENT;
    const int64_t ids_end = std::max(m->vocabulary, ids == nullptr ? 0 : ids[outputs - 1] + 1);
    if (distributions != nullptr && (max_entropy == nullptr || distribution_size < ids_end)) return BAD_ARGUMENT;
    if (!fits(pass->b * width, std::max(num_ranked, distributions == nullptr ? 0 : distribution_size))) return BAD_ARGUMENT;
    if (width > 0 && thresholds != nullptr && probabilities == nullptr) return BAD_ARGUMENT;
    if (width > 0 && ((max_entropy != nullptr && entropies == nullptr) || (num_ranked > 0 && ranked == nullptr))) return BAD_ARGUMENT;
    Scratch& scratch = thread_scratch();
    const int64_t b = pass->b, padded_hidden = up16(m->hidden);
    const uint8_t after_drafting = keep_states ? LAST : DONE;
    scratch.positions.assign(bases, bases + b);
    scratch.row_states.assign(b, DONE);
    scratch.survival.assign(b, 1.0f);
    const int64_t num_drafting = b - std::count(max_drafts, max_drafts + b, int64_t(-1));
    Pass step = *pass;
    step.n = 1;
    step.positions = step.slots = scratch.positions.data();
    step.positions_stride = step.slots_stride = step.valid_stride = 1;
    step.valid = scratch.row_states.data();
    step.base = nullptr;
    for (int64_t row = 0; row < b; row++) {
      counts[row] = 0;
      if (max_drafts[row] > width) return BAD_SLOT;
      scratch.row_states[row] = max_drafts[row] > 0 ? DRAFTS : max_drafts[row] == 0 ? after_drafting : DONE;
      if (roots[row] < 0 || roots[row] >= m->embeddings) return BAD_TOKEN;
      embed_token(*m, roots[row], hidden + row * hidden_stride);
    }
    for (int64_t place = 0; place <= width; place++) {
      if (int64_t error = prepare_pass(*m, step, *store, from, to, scratch)) return error;
      const int64_t n = int64_t(scratch.entries.size());
      if (n == 0) break;
      float* x = reserve_entries(*m, from, n, scratch);
      for (int64_t i = 0; i < n; i++) {
        const int64_t row = scratch.entries[i].place;
        const float* embedding = hidden + row * hidden_stride + place * m->hidden;
        enter(*m, from, i, embedding, states == nullptr ? embedding : states + row * m->hidden, scratch);
      }
      run_layers(*m, step, *store, from, to, skip, int(threads), scratch);
      if (states != nullptr) {
        float* fed_back = scratch.states.reserve(b * m->hidden);
        const float* norm = m->feeds_back_normed ? m->norm : nullptr;
        for (int64_t i = 0; i < n; i++)
          norm_rows(x + i * padded_hidden, 0, norm, 1, m->hidden, m->epsilon, fed_back + scratch.entries[i].place * m->hidden, 0);
        states = fed_back;
      }
      if (keep_states)
        for (int64_t i = 0; i < n; i++)
          std::memcpy(hidden + scratch.entries[i].place * hidden_stride + place * m->hidden, x + i * padded_hidden, sizeof(float) * m->hidden);
      if (std::find(scratch.row_states.begin(), scratch.row_states.end(), DRAFTS) == scratch.row_states.end()) break;
      float* logits = scratch.logits.reserve(n * m->vocabulary);
      float* probability = thresholds == nullptr ? nullptr : scratch.probability.reserve(n);
      scratch.picks.resize(n);
      run_head(*m, shortlist, x, n, padded_hidden, true, logits, scratch.picks.data(), probability, transform, int(threads), scratch);
      for (int64_t i = 0; i < n; i++) {
        const int64_t row = scratch.entries[i].place, token = scratch.picks[i];
        if (scratch.row_states[row] == LAST) {
          scratch.row_states[row] = DONE;
          continue;
        }
        if (token < 0 || (excludes_uncertain && probability != nullptr && !(probability[i] > thresholds[row]))) {
          scratch.row_states[row] = DONE;
          continue;
        }
        if (token >= m->embeddings) return BAD_TOKEN;
        embed_token(*m, token, hidden + row * hidden_stride + (place + 1) * m->hidden);
        drafts[row * width + place] = token;
        counts[row] = place + 1;
        scratch.positions[row] += 1;
        bool goes_on = counts[row] < max_drafts[row];
        for (int64_t e = 0; e < ends_count; e++) goes_on = goes_on && ends[row * ends_count + e] != token;
        if (probability != nullptr) {
          probabilities[row * width + place] = probability[i];
          goes_on = goes_on && probability[i] >= thresholds[row];
          if (survival != nullptr) {
            scratch.survival[row] *= acceptance(probability[i], survival[0], survival[1]);
            goes_on = goes_on && scratch.survival[row] >= survival[2 + width + place];
          }
        }
        const float* row_logits = logits + i * outputs;
        const int64_t at = row * width + place;
        if (num_ranked > 0) {
          ScoredToken best[MAX_TOP_K];
          largest(row_logits, outputs, num_ranked - 1, best);
          for (int64_t k = 0; k < num_ranked; k++)
            ranked[at * num_ranked + k] = best[k].score == -INFINITY ? -1 : ids == nullptr ? best[k].token : ids[best[k].token];
        }
        if (max_entropy != nullptr) {
          entropies[at] = softmax_and_entropy(row_logits, outputs, scratch.distribution);
          goes_on = goes_on && double(entropies[at]) <= max_entropy[row];
        }
        if (distributions != nullptr) {
          float* distribution = distributions + at * distribution_size;
          std::fill(distribution, distribution + distribution_size, 0.0f);
          for (int64_t k = 0; k < outputs; k++) distribution[ids == nullptr ? k : ids[k]] = scratch.distribution[k];
        }
        scratch.row_states[row] = goes_on ? DRAFTS : after_drafting;
      }
      if (survival != nullptr && place < width) {
        const float min_survival = survival[2 + place], min_survival_shared = survival[2 + width + place];
        float surplus = 0;
        for (int64_t row = 0; row < b; row++)
          if (scratch.row_states[row] == DRAFTS) surplus += scratch.survival[row] - min_survival_shared;
        if (!(surplus >= float(num_drafting) * (min_survival - min_survival_shared)))
          std::replace(scratch.row_states.begin(), scratch.row_states.end(), DRAFTS, after_drafting);
      }
    }
    return OK;
  });
}
