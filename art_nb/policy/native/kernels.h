// Functions that decoder.c and learner.c share. Inputs are bf16, sums are fp32 (AVX512-BF16).
//
// With FP32_PRODUCTS, numbers are converted to fp32 before they are multiplied. On Intel's processors, the instruction
// for bf16 pairs has half the throughput of multiplications in fp32.
//
// A matrix W [out, in] is stored in panels of 32 outputs: panel p contains, for each pair of inputs, the pairs of its
// 32 outputs. A row of the result is a sum over the inputs in ascending order, so it does not depend on the other rows.

#pragma once

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PANEL 32
#define MAX_ROWS 12  // rows of a block: their sums need 24 of the 32 registers. Also the largest group of query heads
#define CASE(R, CALL) \
  case R:             \
    CALL(R) break;
// CALL with a number of rows that is known when this is compiled
#define FOR_ROWS(rows, CALL)                                                                                        \
  switch (rows) {                                                                                                   \
    CASE(1, CALL)                                                                                                   \
    CASE(2, CALL) CASE(3, CALL) CASE(4, CALL) CASE(5, CALL) CASE(6, CALL) CASE(7, CALL) CASE(8, CALL) CASE(9, CALL) \
        CASE(10, CALL) CASE(11, CALL) CASE(12, CALL)                                                                \
  }
#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef int32_t __attribute__((may_alias)) bf16_pair;

typedef struct {       // y = Wx + bias
  const bf16* weight;  // packed
  const float* bias;   // or NULL
  int64_t in, out;
} Linear;

typedef struct {          // what an adapter adds: B(Ax)
  const bf16 *down, *up;  // packed A and B
  int64_t rank;           // 0: nothing
} LowRank;

typedef struct {
  LowRank qkv, o, gate_up, down;
} LayerAdapter;

typedef struct {  // consecutive rows with the same adapter
  int64_t rows;
  const LayerAdapter* adapters;  // of all layers, or NULL: none
} Part;

typedef struct {      // RMSNorm
  const float* gain;  // NULL: no norm
  float eps;
} Norm;

// Sizes

static int64_t round_up(int64_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

static int64_t wider(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// The first key that a query at `position` sees. A window of 0 has no limit.
static int64_t first_visible_key(int64_t position, int64_t window) {
  return window ? wider(0, position + 1 - window) : 0;
}

// Numbers

ALWAYS_INLINE __m512 to_fp32(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

ALWAYS_INLINE __m512 load(const bf16* x) { return to_fp32(_mm256_loadu_si256((const __m256i*)x)); }

ALWAYS_INLINE void store(bf16* x, __m512 v) { _mm256_storeu_si256((__m256i*)x, (__m256i)_mm512_cvtneps_pbh(v)); }

ALWAYS_INLINE __m512 rounded(__m512 v) { return to_fp32((__m256i)_mm512_cvtneps_pbh(v)); }

ALWAYS_INLINE __m512 exp16(__m512 x) {           // 2^n p(r) with x = n log 2 + r
  x = _mm512_max_ps(_mm512_set1_ps(-104.f), x);  // NaN stays NaN
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

#ifdef FP32_PRODUCTS

#define CHUNK 256  // inputs whose values are converted to fp32 at a time

// The lower and the upper number of each pair.
ALWAYS_INLINE __m512 lower(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }

ALWAYS_INLINE __m512 upper(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)));
}

// Writes up to CHUNK inputs of each row to x32 [rows, CHUNK].
ALWAYS_INLINE void widen(int rows, const bf16* x, int64_t ldx, int64_t count, float* x32) {
  for (int r = 0; r < rows; r++)
    for (int64_t i = 0; i < count; i += 16) {
      __mmask16 rest = count - i < 16 ? (1 << (count - i)) - 1 : 0xffff;
      _mm512_store_ps(x32 + r * CHUNK + i, to_fp32(_mm256_maskz_loadu_epi16(rest, x + r * ldx + i)));
    }
}

// sums += v[r] w for the value v of each row.
ALWAYS_INLINE void add_products(int rows, const float* v, __m512 w0, __m512 w1, __m512 sums[][2]) {
  for (int r = 0; r < rows; r++) {
    __m512 value = _mm512_set1_ps(v[r * CHUNK]);
    sums[r][0] = _mm512_fmadd_ps(value, w0, sums[r][0]);
    sums[r][1] = _mm512_fmadd_ps(value, w1, sums[r][1]);
  }
}

ALWAYS_INLINE void accumulate(int rows, const bf16* x, int64_t ldx, const bf16* w, int64_t pairs, __m512 sums[][2]) {
  float x32[MAX_ROWS * CHUNK] __attribute__((aligned(64)));
  for (int64_t begin = 0; begin < pairs; begin += CHUNK / 2) {
    int64_t count = lesser(pairs - begin, CHUNK / 2);
    widen(rows, x + 2 * begin, ldx, 2 * count, x32);
    for (int64_t k = 0; k < count; k++, w += 2 * PANEL) {
      __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + PANEL);
      add_products(rows, x32 + 2 * k, lower(w0), lower(w1), sums);
      add_products(rows, x32 + 2 * k + 1, upper(w0), upper(w1), sums);
    }
  }
}

#else

ALWAYS_INLINE void accumulate(int rows, const bf16* x, int64_t ldx, const bf16* w, int64_t pairs, __m512 sums[][2]) {
  for (int64_t k = 0; k < pairs; k++, w += 2 * PANEL) {
    __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + PANEL);
    for (int r = 0; r < rows; r++) {
      __m512bh pair = (__m512bh)_mm512_set1_epi32(*(const bf16_pair*)(x + r * ldx + 2 * k));
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], pair, w0);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], pair, w1);
    }
  }
}

#endif

typedef struct {  // rows of a factor
  const bf16* x;
  int64_t ld, pairs;
  const bf16* w;  // the panel
} Factor;

// Writes `rows` rows of a panel of x W' + t B' + bias, in fp32 to `y32` or in bf16 to `y16`.
ALWAYS_INLINE void block(int rows, Factor first, Factor second, const float* bias, float* y32, bf16* y16, int64_t ldy) {
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

static void panel_product(int64_t n, Factor first, Factor second, const float* bias, float* y32, bf16* y16,
                          int64_t ldy) {
  int64_t blocks = (n + MAX_ROWS - 1) / MAX_ROWS;
  for (int64_t i = 0; i < blocks; i++) {
    int rows = n * (i + 1) / blocks - n * i / blocks;
#define BLOCK(R) block(R, first, second, bias, y32, y16, ldy);
    FOR_ROWS(rows, BLOCK)
    first.x += rows * first.ld;
    second.x += rows * second.ld;
    if (y32)
      y32 += rows * ldy;
    else
      y16 += rows * ldy;
  }
}

// Writes n rows of the product of a factor and its panel.
static void multiply(int64_t n, Factor factor, float* y32, bf16* y16, int64_t ldy) {
  Factor none = {factor.x, 0, 0, factor.w};
  panel_product(n, factor, none, NULL, y32, y16, ldy);
}

// y = Wx + B(Ax) + bias in bf16, or Wx in fp32. All threads call it. `which` is the place of the product in a
// `LayerAdapter`, and `t` [n, ldt] has room for Ax.
static void product(const Linear* p, int64_t n, const bf16* x, const Part* parts, int64_t layer, int which, bf16* t,
                    int64_t ldt, float* y32, bf16* y16) {
  int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
  int any = 0;
  for (int64_t done = 0, i = 0; done < n; done += parts[i++].rows) {
    const LowRank* low = (const LowRank*)(parts[i].adapters + layer) + which;
    int64_t count = parts[i].adapters ? round_up(low->rank) / PANEL : 0, rows = parts[i].rows;
    int64_t slices = lesser(threads, (rows + MAX_ROWS - 1) / MAX_ROWS);  // of the rows
    for (int64_t j = thread; j < count * slices; j += threads) {
      int64_t panel = j / slices, slice = j % slices;
      int64_t begin = done + rows * slice / slices, end = done + rows * (slice + 1) / slices;
      Factor factor = {x + begin * p->in, p->in, p->in / 2, low->down + panel * PANEL * p->in};
      multiply(end - begin, factor, NULL, t + begin * ldt + panel * PANEL, ldt);
    }
    any |= count > 0;
  }
  if (any) {
#pragma omp barrier
  }
  int64_t count = p->out / PANEL;
  for (int64_t j = count * thread / threads; j < count * (thread + 1) / threads; j++)
    for (int64_t done = 0, i = 0; done < n; done += parts[i++].rows) {
      const LowRank* low = (const LowRank*)(parts[i].adapters + layer) + which;
      int64_t rank = parts[i].adapters ? low->rank : 0;
      Factor first = {x + done * p->in, p->in, p->in / 2, p->weight + j * PANEL * p->in};
      Factor second = {t + done * ldt, ldt, rank / 2, rank ? low->up + j * PANEL * rank : x};
      panel_product(parts[i].rows, first, second, p->bias ? p->bias + j * PANEL : NULL,
                    y32 ? y32 + done * p->out + j * PANEL : NULL, y16 ? y16 + done * p->out + j * PANEL : NULL, p->out);
    }
#pragma omp barrier
}

// Rows

// y = x r gain. Returns r, the reciprocal root mean square.
ALWAYS_INLINE float norm_row(const Norm* norm, const bf16* x, bf16* y, int64_t size) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += 16) {
    __m512 v = load(x + i);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  __m512 r = _mm512_set1_ps(1.f / sqrtf(norm->eps + _mm512_reduce_add_ps(squares) / size));
  for (int64_t i = 0; i < size; i += 16)
    store(y + i, _mm512_mul_ps(_mm512_mul_ps(load(x + i), r), _mm512_loadu_ps(norm->gain + i)));
  return _mm512_cvtss_f32(r);
}

// Rotates x by the angles, or back if `back`. The first half of `sin` is negative.
ALWAYS_INLINE void rotate(bf16* x, const bf16* cos, const bf16* sin, int64_t size, int back) {
  int64_t half = size / 2;
  const __m512 sign = _mm512_set1_ps(back ? -1.f : 1.f);
  for (int64_t i = 0; i < half; i += 16) {
    __m512 a = load(x + i), b = load(x + half + i);
    store(x + i, _mm512_fmadd_ps(_mm512_mul_ps(b, sign), load(sin + i), rounded(_mm512_mul_ps(a, load(cos + i)))));
    store(x + half + i, _mm512_fmadd_ps(_mm512_mul_ps(a, sign), load(sin + half + i),
                                        rounded(_mm512_mul_ps(b, load(cos + half + i)))));
  }
}

// The activation is g sigmoid(z): z = g for SiLU, and z = 2 sqrt(2 / pi) (g + 0.044715 g^3) for GELU with tanh. Returns
// sigmoid(z), and the derivative of z in `slope`.
ALWAYS_INLINE __m512 sigmoid_of(__m512 g, int64_t gelu, __m512* slope) {
  const __m512 one = _mm512_set1_ps(1.f), factor = _mm512_set1_ps(2 * 0.7978845608f);
  __m512 z = g;
  *slope = one;
  if (gelu) {
    __m512 cubic = _mm512_mul_ps(_mm512_mul_ps(g, g), _mm512_set1_ps(0.044715f));
    z = _mm512_mul_ps(_mm512_fmadd_ps(cubic, g, g), factor);
    *slope = _mm512_mul_ps(_mm512_fmadd_ps(cubic, _mm512_set1_ps(3.f), one), factor);
  }
  return _mm512_div_ps(one, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), z))));
}

// x [n, inner] = activation(gate) * up. Each thread has its own rows.
static void gate(int64_t n, int64_t inner, int64_t gelu, const bf16* gate_up, bf16* x) {
#pragma omp for schedule(static)
  for (int64_t t = 0; t < n; t++)
    for (int64_t i = 0; i < inner; i += 16) {
      __m512 g = load(gate_up + t * 2 * inner + i), slope, y = _mm512_mul_ps(g, sigmoid_of(g, gelu, &slope));
      store(x + t * inner + i, _mm512_mul_ps(rounded(y), load(gate_up + t * 2 * inner + inner + i)));
    }
}

// Attention

// Number of tokens of a tile with at most MAX_ROWS queries.
static int64_t tile_tokens(int64_t group) { return wider(1, MAX_ROWS / group); }

// Replaces scores by probabilities. Returns the reciprocal of their sum.
ALWAYS_INLINE float softmax(float* scores, int64_t first, int64_t last, int64_t padded, float scale) {
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

// Packs L rows [D] of x as panels: `by_row` [padded / PANEL, D / 2, PANEL, 2] for products with the rows, `by_column`
// [D / PANEL, padded / 2, PANEL, 2] for sums of the rows. Either can be NULL. `rows` are indices of the rows, or NULL.
// Rows from L to `padded` are 0.
static void pack_rows(int64_t D, int64_t L, int64_t padded, const bf16* x, int64_t stride, const int64_t* rows,
                      bf16* by_row, bf16* by_column) {
  for (int64_t l = 0; l < padded; l++) {
    const bf16* row = l < L ? x + (rows ? rows[l] : l) * stride : NULL;
    if (by_row) {
      bf16_pair* to = (bf16_pair*)(by_row + l / PANEL * PANEL * D) + l % PANEL;
      for (int64_t k = 0; k < D / 2; k++) to[k * PANEL] = row ? ((const bf16_pair*)row)[k] : 0;
    }
    for (int64_t p = 0; by_column && p < D / PANEL; p++) {
      bf16* to = by_column + p * PANEL * padded + l / 2 * 2 * PANEL + l % 2;
      for (int64_t d = 0; d < PANEL; d++) to[2 * d] = row ? row[p * PANEL + d] : 0;
    }
  }
}

// Attention of consecutive tokens of a conversation, from `position` on. They have at most MAX_ROWS queries.
static void attend_tile(int group, int64_t D, int64_t tokens, int64_t position, const bf16* qkv, int64_t width,
                        const bf16* packed_keys, const bf16* packed_values, int64_t padded, int64_t window, float scale,
                        float* scores, bf16* probabilities, bf16* out, int64_t out_width) {
  int rows = tokens * group;
  bf16 q[MAX_ROWS * D], result[MAX_ROWS * D];
  for (int r = 0; r < rows; r++) memcpy(q + r * D, qkv + r / group * width + r % group * D, D * sizeof(bf16));
  int64_t begin = first_visible_key(position, window) / PANEL * PANEL, end = round_up(position + tokens),
          size = end - begin;
  for (int64_t l = begin; l < end; l += PANEL) {
    Factor factor = {q, D, D / 2, packed_keys + l * D};
    multiply(rows, factor, scores + l - begin, NULL, size);
  }
  for (int r = 0; r < rows; r++) {
    int64_t at = position + r / group;
    float* row = scores + r * size;
    __m512 scaled = _mm512_set1_ps(softmax(row, first_visible_key(at, window) - begin, at + 1 - begin, size, scale));
    for (int64_t i = 0; i < size; i += 16)
      store(probabilities + r * size + i, _mm512_mul_ps(_mm512_loadu_ps(row + i), scaled));
  }
  for (int64_t p = 0; p < D / PANEL; p++) {
    Factor factor = {probabilities, size, size / 2, packed_values + p * PANEL * padded + begin * PANEL};
    multiply(rows, factor, NULL, result + p * PANEL, D);
  }
  for (int r = 0; r < rows; r++) memcpy(out + r / group * out_width + r % group * D, result + r * D, D * sizeof(bf16));
}
