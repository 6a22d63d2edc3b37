// Structs of the C ABI and its error codes. structs.py declares the same fields in the same order.
#pragma once
#include <array>
#include <cstdint>

#include "matmul.h"

namespace sk {
enum Activation : int64_t { SILU = 0, GELU_TANH = 1 };
enum Error : int64_t {
  OK = 0, BAD_SLOT = 1, BAD_POSITION = 2, BAD_TOKEN = 3, BAD_LAYER = 4, BAD_TREE = 5, NO_MEMORY = 6, BAD_THREADS = 7,
  BAD_WEIGHT = 8, BAD_ARGUMENT = 9, BAD_FILE = 10
};
constexpr int64_t MAX_THREADS = 64;  // of a call
constexpr int64_t SKIP_ATTENTION = 1, SKIP_MLP = 2;  // bits of a layer's entry in a skip set

// One decoder layer. Missing norms are null. The layer of an EAGLE-3 head reads pairs of an embedding and a state: inputs of q, k and v
// are norm_of_embedding(embedding) and norm_before_attention(state), next to each other, and the residual stream begins with the state.
struct Layer {
  Matrix q, k, v, o, gate, up, down;
  const float *norm_before_attention, *norm_after_attention, *norm_before_mlp, *norm_after_mlp;  // [hidden]
  const float *norm_of_embedding;  // [hidden], of a layer that reads pairs of an embedding and a state; null for other layers
  const float *norm_q, *norm_k;  // [head size], or [heads x head size] if norm_whole is set
  int64_t norm_whole;
  int64_t norm_before_residual;  // of a layer that reads pairs: the residual stream begins with the normed state
  int64_t window;      // tokens that a query attends to, including itself; 0 for all
  int64_t rotary;      // index of the rotary table; -1 for none
  int64_t activation;
  float scale;         // of the scores
  float softcap;       // of the scores; 0 for none
  float residual;      // factor of sublayer outputs
  float padding;       // to a multiple of 8 bytes
  std::array<const Matrix*, 7> matrices() const { return {&q, &k, &v, &o, &gate, &up, &down}; }
};

struct Model {
  int64_t hidden, heads, kv_heads, head_size, intermediate, depth, vocabulary, embeddings;
  const Layer* layers;
  Matrix head;
  const void* embedding;  // [embeddings][hidden], row-major; null if tied to the head, whose panels are read
  int64_t embedding_type;
  const float* norm;      // the final one; null for none
  int64_t feeds_back_normed;  // the chain of a head that reads pairs feeds back states after the final norm
  float epsilon;
  float embedding_scale, embedding_multiplier;  // factors of an embedding, applied one after the other
  float logits_divisor;
  float logits_softcap;   // 0 for none
};

// Some rows of the LM head. ids [head.outputs]: their tokens, ascending.
struct Shortlist { Matrix head; const int64_t* ids; };

// cos and sin [positions][size] of one rotary table; the second half of a row repeats the first.
struct Rotary { const float *cos, *sin; int64_t positions, size; };
constexpr int ROTARY_TABLES = 4;

// The keys and values of all layers. A buffer is [rows][kv_heads][slots][padded head size].
struct Store {
  void* const* keys;
  void* const* values;
  int64_t rows, slots;
  int64_t type;  // FLOAT32 or BFLOAT16
};

// The tokens of a pass: b rows of n columns; strides count elements.
struct Pass {
  int64_t b, n;
  const int64_t *positions, *slots;
  int64_t positions_stride, slots_stride;
  const uint8_t* valid;  // null: all are
  int64_t valid_stride;
  int64_t first_row, extent;
  const int64_t* base;   // null: a chain
  const uint8_t* ancestors;  // [b][n][columns]
  int64_t ancestors_row, ancestors_column, columns;
  const int64_t* column_positions;
  int64_t column_positions_stride;
  const int64_t* seen;   // null: base
  Rotary rotary[ROTARY_TABLES];
};

inline int64_t up16(int64_t x) { return (x + LANES - 1) / LANES * LANES; }
}  // namespace sk

// Exported functions, documented in engine.cpp. Most return an error code; 0 is OK.
extern "C" {
int64_t sk_abi();
const char* sk_level();
const char* sk_source_hash();
void sk_sizes(int64_t* sizes);
int64_t sk_packed_bytes(int64_t type, int64_t outputs, int64_t inputs);
int64_t sk_pack(int64_t type, int64_t source_type, int64_t file, const void* source, int64_t stride, int64_t outputs, int64_t inputs, void* panels,
                int64_t threads);
int64_t sk_quantize(int64_t type, int64_t source_type, int64_t file, const void* source, int64_t stride, int64_t outputs, int64_t inputs, void* panels,
                    int64_t threads);
int64_t sk_take(const sk::Matrix* from, const int64_t* ids, int64_t count, void* panels);
int64_t sk_embed(const sk::Model* m, const int64_t* tokens, int64_t count, float* hidden);
int64_t sk_run(const sk::Model* m, const sk::Pass* pass, const sk::Store* store, int64_t from, int64_t to, const int64_t* skip,
               const float* hidden, int64_t hidden_stride, float* out, int64_t out_stride, int64_t threads);
int64_t sk_norm(const sk::Model* m, const float* hidden, int64_t n, float* normed);
int64_t sk_head(const sk::Model* m, const sk::Shortlist* shortlist, const float* hidden, int64_t n, int64_t norm, float* logits, int64_t* best,
                int64_t threads);
int64_t sk_test(const sk::Model* m, const sk::Shortlist* shortlist, const float* hidden, int64_t n, const sk::Matrix* transform, int64_t* best,
                float* probability, int64_t threads);
int64_t sk_largest(const float* logits, int64_t rows, int64_t n, int64_t stride, int64_t k, int64_t* tokens, int64_t threads);
int64_t sk_draw(const float* logits, int64_t rows, int64_t n, int64_t stride, const float* temperature, const int64_t* top_k,
                const float* tail, const float* min_p, const uint64_t* counters, uint64_t place, int64_t* tokens);
int64_t sk_chain(const sk::Model* m, const sk::Pass* pass, const sk::Store* store, int64_t from, int64_t to, const int64_t* skip,
                 const int64_t* roots, const float* states, const int64_t* bases, const int64_t* max_drafts, int64_t width,
                 const float* thresholds, const int64_t* ends, int64_t ends_count, int64_t keep_states, const sk::Matrix* transform,
                 const sk::Shortlist* shortlist, int64_t excludes_uncertain, const float* survival, const double* max_entropy,
                 int64_t num_ranked, int64_t distribution_size, int64_t* drafts, int64_t* counts, float* probabilities, float* entropies,
                 int64_t* ranked, float* distributions, float* hidden, int64_t hidden_stride, int64_t threads);
}
