// Functions that decoder.c and learner.c share. Inputs are bf16, sums are fp32.
//
// With FP32_PRODUCTS, numbers are converted to fp32 before they are multiplied. AVX2 has no instruction for bf16 pairs,
// and that of Intel's processors has half the throughput of multiplications in fp32.
//
// A matrix W [out, in] is stored in panels of 32 outputs: panel p contains, for each pair of inputs, the pairs of its
// 32 outputs. A row of the result is a sum over the inputs in ascending order, so it does not depend on the other rows.

#pragma once

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#define PANEL 32
#define MAX_QUERIES 12  // of a tile of attention. Also the largest group of query heads
#define CASE(R, CALL) \
  case R:             \
    CALL(R) break;
// CALL with a number of rows that is known when this is compiled
#define FOR_ROWS(rows, CALL)                                                              \
  switch (rows) {                                                                         \
    CASE(1, CALL)                                                                         \
    CASE(2, CALL) CASE(3, CALL) CASE(4, CALL) CASE(5, CALL) CASE(6, CALL) MORE_ROWS(CALL) \
  }
#define VECTORS (PANEL / WIDTH)  // of the columns of a panel
// Rows of a block of two vectors. Its sums need 24 of the 32 registers, or 12 of 16.
#ifdef __AVX512BF16__
#define MAX_ROWS 12
#define MORE_ROWS(CALL) CASE(7, CALL) CASE(8, CALL) CASE(9, CALL) CASE(10, CALL) CASE(11, CALL) CASE(12, CALL)
#else
#define MAX_ROWS 6
#define MORE_ROWS(CALL)
#endif

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

ALWAYS_INLINE Vector exponential(Vector x) {  // 2^n p(r) with x = n log 2 + r
  x = larger(broadcast(-104.f), x);           // NaN stays NaN
  Vector n = nearest(mul(x, broadcast(1.44269504f)));
  Vector r = minus_mul(n, broadcast(0.693359375f), x);
  r = minus_mul(n, broadcast(-2.12194440e-4f), r);
  Vector p = broadcast(1.f / 720);
  p = mul_add(p, r, broadcast(1.f / 120));
  p = mul_add(p, r, broadcast(1.f / 24));
  p = mul_add(p, r, broadcast(1.f / 6));
  p = mul_add(p, r, broadcast(.5f));
  p = mul_add(p, r, broadcast(1.f));
  p = mul_add(p, r, broadcast(1.f));
  return times_power(p, n);
}

// Products

typedef struct {  // rows X and panels of W
  const bf16* x;
  int64_t ld, pairs;
  const bf16* w;
  int64_t stride;  // numbers between two panels
} Factor;

// The rows from `row` on, and the panels from `panel` on.
static Factor part_of(Factor f, int64_t row, int64_t panel) {
  return (Factor){f.x + row * f.ld, f.ld, f.pairs, f.w + panel * f.stride, f.stride};
}

// Stores a vector of the result, in fp32 to `y32` or in bf16 to `y16`.
ALWAYS_INLINE void store_result(Vector sum, const float* bias, float* y32, bf16* y16) {
  if (y32) {
    store_fp32(y32, sum);
  } else {
    store(y16, bias ? add(rounded(sum), load_fp32(bias)) : sum);
  }
}

#ifdef FP32_PRODUCTS

// CHUNK * COLUMNS weights and ROWS * COLUMNS sums stay in the second-level cache.
#define CHUNK 256    // inputs that are converted to fp32 at a time
#define COLUMNS 256  // that are multiplied by the converted inputs
#define ROWS 144
#define PANELS_AT_ONCE (COLUMNS / PANEL)

// Writes up to CHUNK inputs of each row to x32 [rows, CHUNK].
static void widen(int64_t rows, const bf16* x, int64_t ldx, int64_t count, float* x32) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < count; i += WIDTH) store_fp32(x32 + r * CHUNK + i, load_first(x + r * ldx + i, count - i));
}

ALWAYS_INLINE void load_sums(int rows, int vectors, const float* from, Vector sums[][VECTORS]) {
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < vectors; j++) sums[r][j] = load_fp32(from + r * COLUMNS + WIDTH * j);
}

ALWAYS_INLINE void store_sums(int rows, int vectors, Vector sums[][VECTORS], float* to) {
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < vectors; j++) store_fp32(to + r * COLUMNS + WIDTH * j, sums[r][j]);
}

// sums += v[r] w for the value v of each row.
ALWAYS_INLINE void add_products(int rows, int vectors, const float* v, const Vector* w, Vector sums[][VECTORS]) {
  for (int r = 0; r < rows; r++) {
    Vector value = broadcast(v[r * CHUNK]);
    for (int j = 0; j < vectors; j++) sums[r][j] = mul_add(value, w[j], sums[r][j]);
  }
}

// total [rows, COLUMNS] += x32 W for the first vectors of a panel.
ALWAYS_INLINE void accumulate(int rows, int vectors, const float* x32, int64_t pairs, const bf16* w, float* total) {
  Vector sums[MAX_ROWS][VECTORS], weights[VECTORS];
  load_sums(rows, vectors, total, sums);
  for (int64_t k = 0; k < pairs; k++, w += 2 * PANEL) {
    for (int j = 0; j < vectors; j++) weights[j] = lower(load_pairs(w + 2 * WIDTH * j));
    add_products(rows, vectors, x32 + 2 * k, weights, sums);
    for (int j = 0; j < vectors; j++) weights[j] = upper(load_pairs(w + 2 * WIDTH * j));
    add_products(rows, vectors, x32 + 2 * k + 1, weights, sums);
  }
  store_sums(rows, vectors, sums, total);
}

// total [n, COLUMNS] += X W for columns of consecutive panels. A single row has all columns of a panel at once, so that
// the processor has more independent sums to work on.
static void add_factor(int64_t n, int64_t columns, Factor f, float* total) {
  float x32[MAX_ROWS * CHUNK] __attribute__((aligned(64)));
  int64_t blocks = (n + MAX_ROWS - 1) / MAX_ROWS;
  for (int64_t begin = 0; begin < f.pairs; begin += CHUNK / 2)
    for (int64_t i = 0; i < blocks; i++) {
      int64_t row = n * i / blocks, rows = n * (i + 1) / blocks - row, count = lesser(f.pairs - begin, CHUNK / 2);
      widen(rows, f.x + row * f.ld + 2 * begin, f.ld, 2 * count, x32);
      for (int64_t c = 0; c < columns; c += rows == 1 ? PANEL : 2 * WIDTH) {
        const bf16* w = f.w + c / PANEL * f.stride + 2 * (c % PANEL + begin * PANEL);
#define ACCUMULATE(R) accumulate(R, R == 1 ? VECTORS : 2, x32, count, w, total + row * COLUMNS + c);
        FOR_ROWS(rows, ACCUMULATE)
      }
    }
}

// Writes rows of consecutive panels of x W' + t B' + bias, in fp32 to `y32` or in bf16 to `y16`.
static void panel_product(int64_t n, int64_t panels, Factor first, Factor second, const float* bias, float* y32,
                          bf16* y16, int64_t ldy) {
  float total[ROWS * COLUMNS] __attribute__((aligned(64)));
  int64_t at_once = n == 1 ? 1 : PANELS_AT_ONCE;  // a single row reads the weights in the order of the memory
  for (int64_t p = 0; p < panels; p += at_once)
    for (int64_t row = 0; row < n; row += ROWS) {
      int64_t columns = lesser(at_once, panels - p) * PANEL, rows = lesser(ROWS, n - row);
      memset(total, 0, rows * COLUMNS * sizeof(float));
      add_factor(rows, columns, part_of(first, row, p), total);
      add_factor(rows, columns, part_of(second, row, p), total);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c += WIDTH) {
          int64_t column = p * PANEL + c, place = (row + r) * ldy + column;
          store_result(load_fp32(total + r * COLUMNS + c), bias ? bias + column : NULL, y32 ? y32 + place : NULL,
                       y16 ? y16 + place : NULL);
        }
    }
}

#else

#define PANELS_AT_ONCE 1

ALWAYS_INLINE void accumulate(int rows, int vectors, Factor f, Vector sums[][VECTORS]) {
  for (int64_t k = 0; k < f.pairs; k++, f.w += 2 * PANEL)
    for (int r = 0; r < rows; r++) {
      Pairs pair = broadcast_pair(*(const bf16_pair*)(f.x + r * f.ld + 2 * k));
      for (int j = 0; j < vectors; j++)
        sums[r][j] = add_products_of_pairs(sums[r][j], pair, load_pairs(f.w + 2 * WIDTH * j));
    }
}

// Writes rows of a panel.
ALWAYS_INLINE void block(int rows, Factor first, Factor second, const float* bias, float* y32, bf16* y16, int64_t ldy) {
  Vector sums[MAX_ROWS][VECTORS];
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < VECTORS; j++) sums[r][j] = zeros();
  accumulate(rows, VECTORS, first, sums);
  accumulate(rows, VECTORS, second, sums);
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < VECTORS; j++) {
      int64_t place = r * ldy + WIDTH * j;
      store_result(sums[r][j], bias ? bias + WIDTH * j : NULL, y32 ? y32 + place : NULL, y16 ? y16 + place : NULL);
    }
}

// Writes rows of consecutive panels of x W' + t B' + bias, in fp32 to `y32` or in bf16 to `y16`.
static void panel_product(int64_t n, int64_t panels, Factor first, Factor second, const float* bias, float* y32,
                          bf16* y16, int64_t ldy) {
  int64_t blocks = (n + MAX_ROWS - 1) / MAX_ROWS;
  for (int64_t p = 0; p < panels; p++)
    for (int64_t i = 0; i < blocks; i++) {
      int64_t row = n * i / blocks, rows = n * (i + 1) / blocks - row, place = row * ldy + p * PANEL;
      Factor left = part_of(first, row, p), right = part_of(second, row, p);
      const float* of_panel = bias ? bias + p * PANEL : NULL;
#define BLOCK(R) block(R, left, right, of_panel, y32 ? y32 + place : NULL, y16 ? y16 + place : NULL, ldy);
      FOR_ROWS(rows, BLOCK)
    }
}

#endif

// Writes n rows of the product of a factor and `panels` panels.
static void multiply(int64_t n, int64_t panels, Factor factor, float* y32, bf16* y16, int64_t ldy) {
  Factor none = {factor.x, 0, 0, factor.w, 0};
  panel_product(n, panels, factor, none, NULL, y32, y16, ldy);
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
      Factor factor = {x + begin * p->in, p->in, p->in / 2, low->down + panel * PANEL * p->in, 0};
      multiply(end - begin, 1, factor, NULL, t + begin * ldt + panel * PANEL, ldt);
    }
    any |= count > 0;
  }
  if (any) {
#pragma omp barrier
  }
  int64_t count = p->out / PANEL, last = count * (thread + 1) / threads;
  for (int64_t j = count * thread / threads; j < last; j += PANELS_AT_ONCE)
    for (int64_t done = 0, i = 0; done < n; done += parts[i++].rows) {
      const LowRank* low = (const LowRank*)(parts[i].adapters + layer) + which;
      int64_t rank = parts[i].adapters ? low->rank : 0, place = done * p->out + j * PANEL;
      Factor first = {x + done * p->in, p->in, p->in / 2, p->weight + j * PANEL * p->in, PANEL * p->in};
      Factor second = {t + done * ldt, ldt, rank / 2, rank ? low->up + j * PANEL * rank : x, PANEL * rank};
      panel_product(parts[i].rows, lesser(PANELS_AT_ONCE, last - j), first, second,
                    p->bias ? p->bias + j * PANEL : NULL, y32 ? y32 + place : NULL, y16 ? y16 + place : NULL, p->out);
    }
#pragma omp barrier
}

// Rows

// y = x r gain. Returns r, the reciprocal root mean square.
ALWAYS_INLINE float norm_row(const Norm* norm, const bf16* x, bf16* y, int64_t size) {
  Vector squares = zeros();
  for (int64_t i = 0; i < size; i += WIDTH) {
    Vector v = load(x + i);
    squares = mul_add(v, v, squares);
  }
  float r = 1.f / sqrtf(norm->eps + sum_of(squares) / size);
  for (int64_t i = 0; i < size; i += WIDTH)
    store(y + i, mul(mul(load(x + i), broadcast(r)), load_fp32(norm->gain + i)));
  return r;
}

// Rotates x by the angles, or back if `back`. The first half of `sin` is negative.
ALWAYS_INLINE void rotate(bf16* x, const bf16* cos, const bf16* sin, int64_t size, int back) {
  int64_t half = size / 2;
  const Vector sign = broadcast(back ? -1.f : 1.f);
  for (int64_t i = 0; i < half; i += WIDTH) {
    Vector a = load(x + i), b = load(x + half + i);
    store(x + i, mul_add(mul(b, sign), load(sin + i), rounded(mul(a, load(cos + i)))));
    store(x + half + i, mul_add(mul(a, sign), load(sin + half + i), rounded(mul(b, load(cos + half + i)))));
  }
}

// The activation is g sigmoid(z): z = g for SiLU, and z = 2 sqrt(2 / pi) (g + 0.044715 g^3) for GELU with tanh. Returns
// sigmoid(z), and the derivative of z in `slope`.
ALWAYS_INLINE Vector sigmoid_of(Vector g, int64_t gelu, Vector* slope) {
  const Vector one = broadcast(1.f), factor = broadcast(2 * 0.7978845608f);
  Vector z = g;
  *slope = one;
  if (gelu) {
    Vector cubic = mul(mul(g, g), broadcast(0.044715f));
    z = mul(mul_add(cubic, g, g), factor);
    *slope = mul(mul_add(cubic, broadcast(3.f), one), factor);
  }
  return ratio(one, add(one, exponential(sub(zeros(), z))));
}

// x [n, inner] = activation(gate) * up. Each thread has its own rows.
static void gate(int64_t n, int64_t inner, int64_t gelu, const bf16* gate_up, bf16* x) {
#pragma omp for schedule(static)
  for (int64_t t = 0; t < n; t++)
    for (int64_t i = 0; i < inner; i += WIDTH) {
      Vector g = load(gate_up + t * 2 * inner + i), slope, y = mul(g, sigmoid_of(g, gelu, &slope));
      store(x + t * inner + i, mul(rounded(y), load(gate_up + t * 2 * inner + inner + i)));
    }
}

// Attention

// Number of tokens of a tile with at most MAX_QUERIES queries.
static int64_t tile_tokens(int64_t group) { return wider(1, MAX_QUERIES / group); }

// Replaces scores by probabilities. Returns the reciprocal of their sum.
ALWAYS_INLINE float softmax(float* scores, int64_t first, int64_t last, int64_t padded, float scale) {
  Vector top = broadcast(-INFINITY), sum = zeros(), factor = broadcast(scale);
  for (int64_t i = 0; i < first; i++) scores[i] = -1e30f;
  for (int64_t i = last; i < padded; i++) scores[i] = -1e30f;
  for (int64_t i = 0; i < padded; i += WIDTH) top = larger(top, load_fp32(scores + i));
  top = broadcast(max_of(top));
  for (int64_t i = 0; i < padded; i += WIDTH) {
    Vector p = exponential(mul(sub(load_fp32(scores + i), top), factor));
    sum = add(sum, p);
    store_fp32(scores + i, p);
  }
  return 1.f / sum_of(sum);
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

// Attention of consecutive tokens of a conversation, from `position` on. They have at most MAX_QUERIES queries.
static void attend_tile(int group, int64_t D, int64_t tokens, int64_t position, const bf16* qkv, int64_t width,
                        const bf16* packed_keys, const bf16* packed_values, int64_t padded, int64_t window, float scale,
                        float* scores, bf16* probabilities, bf16* out, int64_t out_width) {
  int rows = tokens * group;
  bf16 q[MAX_QUERIES * D], result[MAX_QUERIES * D];
  for (int r = 0; r < rows; r++) memcpy(q + r * D, qkv + r / group * width + r % group * D, D * sizeof(bf16));
  int64_t begin = first_visible_key(position, window) / PANEL * PANEL, end = round_up(position + tokens),
          size = end - begin;
  Factor with_keys = {q, D, D / 2, packed_keys + begin * D, PANEL * D};
  multiply(rows, size / PANEL, with_keys, scores, NULL, size);
  for (int r = 0; r < rows; r++) {
    int64_t at = position + r / group;
    float* row = scores + r * size;
    Vector scaled = broadcast(softmax(row, first_visible_key(at, window) - begin, at + 1 - begin, size, scale));
    for (int64_t i = 0; i < size; i += WIDTH) store(probabilities + r * size + i, mul(load_fp32(row + i), scaled));
  }
  Factor with_values = {probabilities, size, size / 2, packed_values + begin * PANEL, PANEL * padded};
  multiply(rows, D / PANEL, with_values, NULL, result, D);
  for (int r = 0; r < rows; r++) memcpy(out + r / group * out_width + r % group * D, result + r * D, D * sizeof(bf16));
}
