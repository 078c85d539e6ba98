// The forward pass of a decoder without gradients, in bf16 with sums in fp32 (AVX512-BF16).
//
// A matrix W [out, in] is stored in panels of 32 outputs: panel p contains, for each pair of inputs, the pairs of its 32
// outputs. A row of the result is a sum over the inputs in ascending order, so it does not depend on the other rows.

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PANEL 32
#define MAX_ROWS 12  // of a block of the result that stays in registers: 24 of 32 registers
#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;

typedef struct {  // y = Wx + bias
  const bf16 *weight;  // packed
  const float *bias;   // or NULL
  int64_t in, out;
} Linear;

typedef struct {  // what an adapter adds: B(Ax)
  const bf16 *down, *up;  // packed A and B
  int64_t rank;           // 0: nothing
} LowRank;

typedef struct {
  LowRank qkv, o, gate_up, down;
} LayerAdapter;

typedef struct {  // consecutive rows with the same adapter
  int64_t rows;
  const LayerAdapter *layers;
} Part;

typedef struct {  // RMSNorm
  const float *gain;  // NULL: no norm
  float eps;
} Norm;

typedef struct {
  Linear qkv, o, gate_up, down;
  Norm before_attention, after_attention, before_mlp, after_mlp, of_queries, of_keys;
  int64_t kind;    // of the angles
  int64_t window;  // keys that a query sees, or 0: all
  float scale;
} Layer;

typedef struct {  // new tokens of one conversation. They have consecutive rows and positions
  int64_t slot, row, count, position;
} Segment;

typedef struct {
  int64_t layers, hidden, inner, query_heads, key_heads, head_dim, gelu;
  Norm last;
} Shape;

typedef struct {  // [layers, 2, slots, heads, length, head_dim]
  bf16 *kv;
  int64_t slots, length;
} Cache;

// Numbers

ALWAYS_INLINE __m512 load(const bf16 *x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16));
}

ALWAYS_INLINE void store(bf16 *x, __m512 v) { _mm256_storeu_si256((__m256i *)x, (__m256i)_mm512_cvtneps_pbh(v)); }

ALWAYS_INLINE __m512 rounded(__m512 v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v)), 16));
}

ALWAYS_INLINE __m512 exp16(__m512 x) {  // 2^n p(r) with x = n log 2 + r
  x = _mm512_max_ps(x, _mm512_set1_ps(-104.f));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.f / 720);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, n);
}

// Products

ALWAYS_INLINE void accumulate(int rows, const bf16 *x, int64_t ldx, const bf16 *w, int64_t pairs, __m512 sums[][2]) {
  for (int64_t k = 0; k < pairs; k++, w += 2 * PANEL) {
    __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + PANEL);
    for (int r = 0; r < rows; r++) {
      __m512bh pair = (__m512bh)_mm512_set1_epi32(*(const int32_t *)(x + r * ldx + 2 * k));
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], pair, w0);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], pair, w1);
    }
  }
}

typedef struct {  // rows of a factor
  const bf16 *x;
  int64_t ld, pairs;
  const bf16 *w;  // the panel
} Factor;

// Writes `rows` rows of a panel of x W' + t B' + bias, in fp32 to `y32` or in bf16 to `y16`.
ALWAYS_INLINE void block(int rows, Factor first, Factor second, const float *bias, float *y32, bf16 *y16, int64_t ldy) {
  __m512 sums[MAX_ROWS][2];
  for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  accumulate(rows, first.x, first.ld, first.w, first.pairs, sums);
  accumulate(rows, second.x, second.ld, second.w, second.pairs, sums);
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < 2; j++) {
      if (y32) {
        _mm512_storeu_ps(y32 + r * ldy + 16 * j, sums[r][j]);
      } else {
        __m512 y = sums[r][j];
        if (bias) y = _mm512_add_ps(rounded(y), _mm512_loadu_ps(bias + 16 * j));
        store(y16 + r * ldy + 16 * j, y);
      }
    }
}

static void panel_product(int64_t n, Factor first, Factor second, const float *bias, float *y32, bf16 *y16, int64_t ldy) {
  int64_t blocks = (n + MAX_ROWS - 1) / MAX_ROWS;
  for (int64_t i = 0; i < blocks; i++) {
    int rows = n * (i + 1) / blocks - n * i / blocks;
    switch (rows) {
#define CASE(R) case R: block(R, first, second, bias, y32, y16, ldy); break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
    first.x += rows * first.ld;
    second.x += rows * second.ld;
    if (y32) y32 += rows * ldy; else y16 += rows * ldy;
  }
}

// y = Wx + B(Ax) + bias in bf16, or Wx in fp32. All threads call it. `which` is the place of the product in a
// `LayerAdapter`, and `t` has room for [n, rank].
static void product(const Linear *p, int64_t n, const bf16 *x, const Part *parts, int64_t layer, int which, bf16 *t,
                    int64_t wide, float *y32, bf16 *y16) {
  int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
  int any = 0;
  for (int64_t done = 0, i = 0; done < n; done += parts[i++].rows) {
    const LowRank *low = (const LowRank *)(parts[i].layers + layer) + which;
    int64_t count = parts[i].layers ? (low->rank + PANEL - 1) / PANEL : 0;
    for (int64_t j = thread; j < count; j += threads) {
      Factor factor = {x + done * p->in, p->in, p->in / 2, low->down + j * PANEL * p->in}, none = {x, 0, 0, x};
      panel_product(parts[i].rows, factor, none, NULL, NULL, t + done * wide + j * PANEL, wide);
    }
    any |= count > 0;
  }
  if (any) {
#pragma omp barrier
  }
  int64_t count = p->out / PANEL;
  for (int64_t j = count * thread / threads; j < count * (thread + 1) / threads; j++)
    for (int64_t done = 0, i = 0; done < n; done += parts[i++].rows) {
      const LowRank *low = (const LowRank *)(parts[i].layers + layer) + which;
      int64_t rank = parts[i].layers ? low->rank : 0;
      Factor first = {x + done * p->in, p->in, p->in / 2, p->weight + j * PANEL * p->in};
      Factor second = {t + done * wide, wide, rank / 2, rank ? low->up + j * PANEL * rank : x};
      panel_product(parts[i].rows, first, second, p->bias ? p->bias + j * PANEL : NULL,
                    y32 ? y32 + done * p->out + j * PANEL : NULL, y16 ? y16 + done * p->out + j * PANEL : NULL, p->out);
    }
#pragma omp barrier
}

// Rows

ALWAYS_INLINE void norm_row(const Norm *norm, const bf16 *x, bf16 *y, int64_t size) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += 16) {
    __m512 v = load(x + i);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  __m512 r = _mm512_set1_ps(1.f / sqrtf(norm->eps + _mm512_reduce_add_ps(squares) / size));
  for (int64_t i = 0; i < size; i += 16)
    store(y + i, _mm512_mul_ps(_mm512_mul_ps(load(x + i), r), _mm512_loadu_ps(norm->gain + i)));
}

// h += y or norm(y), then x = norm(h). Both threads have their own rows.
static void add_and_norm(int64_t n, int64_t size, const Norm *after, bf16 *y, bf16 *h, const Norm *before, bf16 *x) {
#pragma omp for schedule(static)
  for (int64_t t = 0; t < n; t++) {
    bf16 *row = h + t * size;
    if (y) {
      if (after->gain) norm_row(after, y + t * size, y + t * size, size);
      for (int64_t i = 0; i < size; i += 16) store(row + i, _mm512_add_ps(load(row + i), load(y + t * size + i)));
    }
    norm_row(before, row, x + t * size, size);
  }
}

ALWAYS_INLINE void rotate(bf16 *x, const bf16 *cos, const bf16 *sin, int64_t size) {  // the first half of `sin` is negative
  int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += 16) {
    __m512 a = load(x + i), b = load(x + half + i);
    store(x + i, _mm512_fmadd_ps(b, load(sin + i), rounded(_mm512_mul_ps(a, load(cos + i)))));
    store(x + half + i, _mm512_fmadd_ps(a, load(sin + half + i), rounded(_mm512_mul_ps(b, load(cos + half + i)))));
  }
}

// Rotates queries and keys, and stores keys and values.
static void rotate_and_store(const Shape *s, const Layer *layer, const Segment *segments, int64_t count, bf16 *qkv,
                             const bf16 *cos, const bf16 *sin, bf16 *keys, bf16 *values, int64_t length) {
  int64_t D = s->head_dim, Q = s->query_heads, K = s->key_heads, width = (Q + 2 * K) * D;
  for (int64_t i = 0; i < count; i++) {
    const Segment *part = segments + i;
#pragma omp for schedule(static) nowait
    for (int64_t j = 0; j < part->count; j++) {
      int64_t t = part->row + j;
      bf16 *row = qkv + t * width;
      for (int64_t head = 0; head < Q + K; head++) {
        const Norm *norm = head < Q ? &layer->of_queries : &layer->of_keys;
        if (norm->gain) norm_row(norm, row + head * D, row + head * D, D);
        rotate(row + head * D, cos + t * D, sin + t * D, D);
      }
      for (int64_t head = 0; head < K; head++) {
        int64_t cell = ((part->slot * K + head) * length + part->position + j) * D;
        memcpy(keys + cell, row + (Q + head) * D, D * sizeof(bf16));
        memcpy(values + cell, row + (Q + K + head) * D, D * sizeof(bf16));
      }
    }
  }
#pragma omp barrier
}

static void gate(int64_t n, int64_t inner, int64_t gelu, const bf16 *gate_up, bf16 *x) {
  const __m512 one = _mm512_set1_ps(1.f);
#pragma omp for schedule(static)
  for (int64_t t = 0; t < n; t++)
    for (int64_t i = 0; i < inner; i += 16) {
      __m512 g = load(gate_up + t * 2 * inner + i), u = g;
      if (gelu) {  // x sigmoid(2u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
        __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_mul_ps(g, g), g), _mm512_set1_ps(0.044715f), g);
        u = _mm512_mul_ps(cubic, _mm512_set1_ps(2 * 0.7978845608f));
      }
      __m512 y = _mm512_div_ps(g, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), u))));
      store(x + t * inner + i, _mm512_mul_ps(rounded(y), load(gate_up + t * 2 * inner + inner + i)));
    }
}

// Attention

// Replaces scores by probabilities. Returns the reciprocal of their sum.
ALWAYS_INLINE float softmax(float *scores, int64_t first, int64_t last, int64_t padded, float scale) {
  __m512 top = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps(), factor = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < first; i++) scores[i] = -1e30f;
  for (int64_t i = last; i < padded; i++) scores[i] = -1e30f;
  for (int64_t i = 0; i < padded; i += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(scores + i));
  top = _mm512_set1_ps(_mm512_reduce_max_ps(top));
  for (int64_t i = 0; i < padded; i += 16) {
    __m512 p = exp16(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + i), top), factor));
    sum = _mm512_add_ps(sum, p);
    _mm512_storeu_ps(scores + i, p);
  }
  return 1.f / _mm512_reduce_add_ps(sum);
}

// Attention of one token: `group` queries with the same keys. `scores` has group * padded numbers.
static void attend_one(int group, int64_t D, const bf16 *q, const bf16 *keys, const bf16 *values, int64_t first,
                       int64_t last, float scale, float *scores, bf16 *out) {
  int64_t padded = (last + 15) / 16 * 16;
  for (int64_t l = first; l < last; l++)
    for (int g = 0; g < group; g++) {
      __m512 sum = _mm512_setzero_ps();
      for (int64_t d = 0; d < D; d += 32)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(q + g * D + d), (__m512bh)_mm512_loadu_si512(keys + l * D + d));
      scores[g * padded + l] = _mm512_reduce_add_ps(sum);
    }
  float sums[group];
  for (int g = 0; g < group; g++) sums[g] = softmax(scores + g * padded, first, last, padded, scale);
  for (int begin = 0; begin < group; begin += 6) {
    int n = group - begin < 6 ? group - begin : 6;
    for (int64_t d = 0; d < D; d += 32) {
      __m512 total[6][2];
      for (int g = 0; g < 6; g++) total[g][0] = total[g][1] = _mm512_setzero_ps();
      for (int64_t l = first; l < last; l++) {
        __m512 v0 = load(values + l * D + d), v1 = load(values + l * D + d + 16);
        for (int g = 0; g < 6; g++) {
          __m512 p = _mm512_set1_ps(g < n ? scores[(begin + g) * padded + l] : 0);
          total[g][0] = _mm512_fmadd_ps(p, v0, total[g][0]);
          total[g][1] = _mm512_fmadd_ps(p, v1, total[g][1]);
        }
      }
      for (int g = 0; g < n; g++)
        for (int j = 0; j < 2; j++)
          store(out + (begin + g) * D + d + 16 * j, _mm512_mul_ps(total[g][j], _mm512_set1_ps(sums[begin + g])));
    }
  }
}

// Packs keys [L, D] as panels of keys, and values as panels of dimensions. L is a multiple of PANEL. Missing ones are 0.
static void pack_keys_and_values(int64_t D, int64_t L, int64_t padded, const bf16 *keys, const bf16 *values, bf16 *packed_keys,
                                 bf16 *packed_values) {
  for (int64_t l = 0; l < padded; l++) {
    const int32_t *key = (const int32_t *)(keys + l * D);
    int32_t *to = (int32_t *)(packed_keys + l / PANEL * PANEL * D) + l % PANEL;
    for (int64_t k = 0; k < D / 2; k++) to[k * PANEL] = l < L ? key[k] : 0;
  }
  for (int64_t p = 0; p < D / PANEL; p++)
    for (int64_t l = 0; l < padded; l++) {
      bf16 *to = packed_values + p * PANEL * padded + l / 2 * 2 * PANEL + l % 2;
      for (int64_t d = 0; d < PANEL; d++) to[2 * d] = l < L ? values[l * D + p * PANEL + d] : 0;
    }
}

// Attention of consecutive tokens of a conversation, from `token` on: as many as have MAX_ROWS queries.
static void attend_tile(int group, int64_t D, int64_t tokens, int64_t position, const bf16 *qkv, int64_t width,
                        const bf16 *packed_keys, const bf16 *packed_values, int64_t padded, int64_t window, float scale,
                        float *scores, bf16 *probabilities, bf16 *out, int64_t out_width) {
  int rows = tokens * group;
  bf16 q[MAX_ROWS * D], result[MAX_ROWS * D];
  for (int r = 0; r < rows; r++) memcpy(q + r * D, qkv + r / group * width + r % group * D, D * sizeof(bf16));
  int64_t last = position + tokens, first = window && position + 1 > window ? position + 1 - window : 0;
  int64_t begin = first / PANEL * PANEL, end = (last + PANEL - 1) / PANEL * PANEL, size = end - begin;
  for (int64_t l = begin; l < end; l += PANEL) {
    Factor factor = {q, D, D / 2, packed_keys + l * D}, none = {q, 0, 0, packed_keys};
    panel_product(rows, factor, none, NULL, scores + l - begin, NULL, size);
  }
  for (int r = 0; r < rows; r++) {
    int64_t at = position + r / group, from = window && at + 1 > window ? at + 1 - window : 0;
    float *row = scores + r * size;
    __m512 scaled = _mm512_set1_ps(softmax(row, from - begin, at + 1 - begin, size, scale));
    for (int64_t i = 0; i < size; i += 16)
      store(probabilities + r * size + i, _mm512_mul_ps(_mm512_loadu_ps(row + i), scaled));
  }
  for (int64_t p = 0; p < D / PANEL; p++) {
    Factor factor = {probabilities, size, size / 2, packed_values + p * PANEL * padded + begin * PANEL};
    Factor none = {q, 0, 0, packed_keys};
    panel_product(rows, factor, none, NULL, NULL, result + p * PANEL, D);
  }
  for (int r = 0; r < rows; r++) memcpy(out + r / group * out_width + r % group * D, result + r * D, D * sizeof(bf16));
}

static int64_t padded_length(const Segment *part) { return (part->position + part->count + PANEL - 1) / PANEL * PANEL; }

// Attention of all new tokens. `packed` has room for the keys and values of the segments with several tokens.
static void attend(const Shape *s, const Layer *layer, const Segment *segments, int64_t count, const bf16 *qkv,
                   const bf16 *keys, const bf16 *values, int64_t length, bf16 *packed, float *scores,
                   bf16 *probabilities, bf16 *out) {
  int64_t D = s->head_dim, Q = s->query_heads, K = s->key_heads, group = Q / K, width = (Q + 2 * K) * D;
  int64_t per_tile = MAX_ROWS / group > 1 ? MAX_ROWS / group : 1;
#pragma omp for schedule(dynamic)
  for (int64_t task = 0; task < count * K; task++) {
    const Segment *part = segments + task / K;
    int64_t head = task % K, cells = (part->slot * K + head) * length * D, last = part->position + 1;
    if (part->count == 1) {
      int64_t first = layer->window && last > layer->window ? last - layer->window : 0;
      attend_one(group, D, qkv + part->row * width + head * group * D, keys + cells, values + cells, first, last,
                 layer->scale, scores, out + (part->row * Q + head * group) * D);
    } else {
      int64_t before = 0, padded = padded_length(part);
      for (const Segment *p = segments; p < part; p++) before += p->count > 1 ? padded_length(p) : 0;
      bf16 *to = packed + 2 * D * (K * before + head * padded);
      pack_keys_and_values(D, part->position + part->count, padded, keys + cells, values + cells, to, to + padded * D);
    }
  }
  int64_t before = 0;
  for (int64_t i = 0; i < count; i++) {
    const Segment *part = segments + i;
    if (part->count == 1) continue;
    int64_t padded = padded_length(part), tiles = (part->count + per_tile - 1) / per_tile;
#pragma omp for schedule(dynamic) nowait
    for (int64_t task = 0; task < tiles * K; task++) {
      int64_t head = task % K, first = (tiles - 1 - task / K) * per_tile;
      int64_t tokens = part->count - first < per_tile ? part->count - first : per_tile, row = part->row + first;
      const bf16 *from = packed + 2 * D * (K * before + head * padded);
      attend_tile(group, D, tokens, part->position + first, qkv + row * width + head * group * D, width, from,
                  from + padded * D, padded, layer->window, layer->scale, scores, probabilities,
                  out + (row * Q + head * group) * D, Q * D);
    }
    before += padded;
  }
#pragma omp barrier
}

// The pass

static int64_t wider(int64_t a, int64_t b) { return a > b ? a : b; }

// Replaces h [n, hidden], the embeddings, by the last hidden states. Returns 0, or 1 if memory is missing.
int forward(const Shape *s, const Layer *layers, const Part *parts, int64_t rank, const Cache *cache, int64_t n, bf16 *h,
            const Segment *segments, int64_t count, const bf16 *const *cos, const bf16 *const *sin, int64_t threads) {
  int64_t D = s->head_dim, K = s->key_heads, heads = s->query_heads, width = (heads + 2 * K) * D;
  int64_t step = cache->slots * K * cache->length * D, longest = 0, packed_keys = 0;
  for (int64_t i = 0; i < count; i++) {
    longest = wider(longest, padded_length(segments + i));
    packed_keys += segments[i].count > 1 ? padded_length(segments + i) : 0;
  }
  rank = (rank + PANEL - 1) / PANEL * PANEL;
  int64_t rows = wider(MAX_ROWS, heads / K), wide = wider(wider(s->hidden, s->inner), heads * D);
  int64_t sizes[] = {n * wide, n * wider(width, 2 * s->inner), n * rank, n * s->hidden, 2 * D * K * packed_keys,
                     threads * rows * longest, 2 * threads * rows * longest};
  int64_t total = 0;
  for (int i = 0; i < 7; i++) total += (sizes[i] + 31) / 32 * 32;
  bf16 *memory = aligned_alloc(64, total * sizeof(bf16)), *buffers[7], *next = memory;
  if (!memory) return 1;
  for (int i = 0; i < 7; i++) {
    buffers[i] = next;
    next += (sizes[i] + 31) / 32 * 32;
  }
  bf16 *x = buffers[0], *wide_y = buffers[1], *t = buffers[2], *y = buffers[3], *packed = buffers[4];
#pragma omp parallel num_threads(threads)
  {
    int64_t thread = omp_get_thread_num();
    bf16 *probabilities = buffers[5] + thread * rows * longest;
    float *scores = (float *)buffers[6] + thread * rows * longest;
    for (int64_t i = 0; i < s->layers; i++) {
      const Layer *l = layers + i;
      bf16 *keys = cache->kv + 2 * i * step, *values = keys + step;
      add_and_norm(n, s->hidden, i ? &l[-1].after_mlp : NULL, i ? y : NULL, h, &l->before_attention, x);
      product(&l->qkv, n, x, parts, i, 0, t, rank, NULL, wide_y);
      rotate_and_store(s, l, segments, count, wide_y, cos[l->kind], sin[l->kind], keys, values, cache->length);
      attend(s, l, segments, count, wide_y, keys, values, cache->length, packed, scores, probabilities, x);
      product(&l->o, n, x, parts, i, 1, t, rank, NULL, y);
      add_and_norm(n, s->hidden, &l->after_attention, y, h, &l->before_mlp, x);
      product(&l->gate_up, n, x, parts, i, 2, t, rank, NULL, wide_y);
      gate(n, s->inner, s->gelu, wide_y, x);
      product(&l->down, n, x, parts, i, 3, t, rank, NULL, y);
    }
    add_and_norm(n, s->hidden, &layers[s->layers - 1].after_mlp, y, h, &s->last, x);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; i++) memcpy(h + i * s->hidden, x + i * s->hidden, s->hidden * sizeof(bf16));
  }
  free(memory);
  return 0;
}

// y = Wx + B(Ax) in bf16, or in fp32 if `wide` is not 0, for n rows. t [n, rank rounded up to a multiple of PANEL] = Ax.
void linear(const Linear *p, const LowRank *low, int64_t n, const bf16 *x, bf16 *t, void *y, int64_t wide, int64_t threads) {
  Part all = {n, low->rank ? (const LayerAdapter *)low : NULL};
  int64_t rank = (low->rank + PANEL - 1) / PANEL * PANEL;
#pragma omp parallel num_threads(threads)
  product(p, n, x, &all, 0, 0, t, rank, wide ? y : NULL, wide ? NULL : y);
}
