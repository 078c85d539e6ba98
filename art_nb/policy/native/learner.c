// Products with frozen weights, and the other operations of a decoder layer with their gradients. Each function returns
// 0, or 1 if a memory allocation fails.

#include "kernels.h"

// y = Wx + B(Ax) in bf16, or in fp32 if `fp32` is not 0, for n rows. t [n, rank rounded up to a multiple of PANEL] =
// Ax.
int linear(const Linear* p, const LowRank* low, int64_t n, const bf16* x, bf16* t, void* y, int64_t fp32,
           int64_t threads) {
  Part all = {n, low->rank ? (const LayerAdapter*)low : NULL};
  int64_t rank = round_up(low->rank);
#pragma omp parallel num_threads(threads)
  product(p, n, x, &all, 0, 0, t, rank, fp32 ? y : NULL, fp32 ? NULL : y);
  return 0;
}

#ifdef FP32_PRODUCTS

// total [rows, COLUMNS] += x32 W for 2 WIDTH columns of W [count, ldw]: first the even columns, then the odd ones.
ALWAYS_INLINE void accumulate_columns(int rows, const float* x32, int64_t count, const bf16* w, int64_t ldw,
                                      float* total) {
  Vector sums[MAX_ROWS][VECTORS];
  load_sums(rows, 2, total, sums);
  for (int64_t k = 0; k < count; k++, w += ldw) {
    Pairs columns = load_pairs(w);
    Vector weights[] = {lower(columns), upper(columns)};
    add_products(rows, 2, x32 + k, weights, sums);
  }
  store_sums(rows, 2, sums, total);
}

// total [n, COLUMNS] += X W for `columns` columns of W [count, ldw].
static void add_columns(int64_t n, int64_t columns, const bf16* x, int64_t count, const bf16* w, int64_t ldw,
                        float* total) {
  float x32[MAX_ROWS * CHUNK] __attribute__((aligned(64)));
  int64_t blocks = (n + MAX_ROWS - 1) / MAX_ROWS;
  for (int64_t begin = 0; begin < count; begin += CHUNK)
    for (int64_t i = 0; i < blocks; i++) {
      int64_t row = n * i / blocks, rows = n * (i + 1) / blocks - row, size = lesser(count - begin, CHUNK);
      widen(rows, x + row * count + begin, count, size, x32);
      for (int64_t c = 0; c < columns; c += 2 * WIDTH) {
#define ACCUMULATE_COLUMNS(R) accumulate_columns(R, x32, size, w + begin * ldw + c, ldw, total + row * COLUMNS + c);
        FOR_ROWS(rows, ACCUMULATE_COLUMNS)
      }
    }
}

// y [n, in] = x W + t A for x [n, out], W [out, in], t [n, rank] and A [rank, in], which are not packed.
int transposed_linear(int64_t n, int64_t out, int64_t in, int64_t rank, const bf16* x, const bf16* w, const bf16* t,
                      const bf16* a, bf16* y, int64_t threads) {
  int64_t pairs = in / (2 * WIDTH);
#pragma omp parallel num_threads(threads)
  {
    float total[ROWS * COLUMNS] __attribute__((aligned(64)));
    int64_t thread = omp_get_thread_num(), team = omp_get_num_threads(), last = pairs * (thread + 1) / team * 2 * WIDTH;
    for (int64_t c = pairs * thread / team * 2 * WIDTH; c < last; c += COLUMNS)
      for (int64_t row = 0; row < n; row += ROWS) {
        int64_t rows = lesser(ROWS, n - row), columns = lesser(COLUMNS, last - c);
        memset(total, 0, rows * COLUMNS * sizeof(float));
        add_columns(rows, columns, x + row * out, out, w + c, in, total);
        add_columns(rows, columns, t + row * rank, rank, a + c, in, total);
        for (int64_t r = 0; r < rows; r++)
          for (int64_t j = 0; j < columns; j += 2 * WIDTH) {
            const float* sums = total + r * COLUMNS + j;
            store_pairs(y + (row + r) * in + c + j, join(load_fp32(sums), load_fp32(sums + WIDTH)));
          }
      }
  }
  return 0;
}

#endif

// Rows

// y = x r gain with r = 1 / sqrt(mean(x^2) + eps), n rows
int norm_forward(int64_t n, int64_t size, const bf16* x, const float* gain, double eps, bf16* y, float* r,
                 int64_t threads) {
  Norm norm = {gain, eps};
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < n; t++) r[t] = norm_row(&norm, x + t * size, y + t * size, size);
  return 0;
}

int norm_backward(int64_t n, int64_t size, const bf16* x, const float* gain, const float* r, const bf16* dy, bf16* dx,
                  int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < n; t++) {
    Vector sum = zeros(), scale = broadcast(r[t]);
    for (int64_t i = 0; i < size; i += WIDTH)
      sum = mul_add(mul(load(dy + t * size + i), load_fp32(gain + i)), load(x + t * size + i), sum);
    Vector along = broadcast(sum_of(sum) * r[t] * r[t] / size);
    for (int64_t i = 0; i < size; i += WIDTH) {
      Vector d = mul(load(dy + t * size + i), load_fp32(gain + i));
      store(dx + t * size + i, mul(minus_mul(along, load(x + t * size + i), d), scale));
    }
  }
  return 0;
}

int gate_forward(int64_t n, int64_t inner, int64_t gelu, const bf16* gate_up, bf16* y, int64_t threads) {
#pragma omp parallel num_threads(threads)
  gate(n, inner, gelu, gate_up, y);
  return 0;
}

int gate_backward(int64_t n, int64_t inner, int64_t gelu, const bf16* gate_up, const bf16* dy, bf16* dgate_up,
                  int64_t threads) {
  const Vector one = broadcast(1.f);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < n; t++) {
    const bf16* row = gate_up + t * 2 * inner;
    bf16* to = dgate_up + t * 2 * inner;
    for (int64_t i = 0; i < inner; i += WIDTH) {
      Vector g = load(row + i), d = load(dy + t * inner + i), slope, s = sigmoid_of(g, gelu, &slope);
      Vector y = mul(g, s);  // dy/dg = s + y (1 - s) dz/dg
      Vector derivative = mul_add(mul(y, sub(one, s)), slope, s);
      store(to + i, mul(mul(d, load(row + inner + i)), derivative));
      store(to + inner + i, mul(d, rounded(y)));
    }
  }
  return 0;
}

// Splits rows [q, k, v] of heads, and rotates queries and keys.
int split_forward(int64_t n, int64_t Q, int64_t K, int64_t D, const bf16* qkv, const bf16* cos, const bf16* sin,
                  bf16* q, bf16* k, bf16* v, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < n; t++) {
    const bf16* row = qkv + t * (Q + 2 * K) * D;
    memcpy(q + t * Q * D, row, Q * D * sizeof(bf16));
    memcpy(k + t * K * D, row + Q * D, K * D * sizeof(bf16));
    memcpy(v + t * K * D, row + (Q + K) * D, K * D * sizeof(bf16));
    for (int64_t head = 0; head < Q; head++) rotate(q + (t * Q + head) * D, cos + t * D, sin + t * D, D, 0);
    for (int64_t head = 0; head < K; head++) rotate(k + (t * K + head) * D, cos + t * D, sin + t * D, D, 0);
  }
  return 0;
}

int split_backward(int64_t n, int64_t Q, int64_t K, int64_t D, const bf16* dq, const bf16* dk, const bf16* dv,
                   const bf16* cos, const bf16* sin, bf16* dqkv, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < n; t++) {
    bf16* row = dqkv + t * (Q + 2 * K) * D;
    memcpy(row, dq + t * Q * D, Q * D * sizeof(bf16));
    memcpy(row + Q * D, dk + t * K * D, K * D * sizeof(bf16));
    memcpy(row + (Q + K) * D, dv + t * K * D, K * D * sizeof(bf16));
    for (int64_t head = 0; head < Q + K; head++) rotate(row + head * D, cos + t * D, sin + t * D, D, 1);
  }
  return 0;
}

// Attention of the segments of a prefix tree

typedef struct {  // tokens from `start` on, whose keys are nodes[first_key ...]: `before` nodes, then the tokens
                  // themselves
  int64_t start, count, before, first_key;
} TreeSegment;

typedef struct {
  int64_t tokens, query_heads, key_heads, head_dim, window, count;
  const TreeSegment* segments;
  const int64_t* nodes;
  float scale;
} Tree;

#define BLOCK_ROWS 48  // queries of a block of the backward pass

static int64_t keys_of(const TreeSegment* segment) { return round_up(segment->before + segment->count); }

// The place of the packed keys of each segment, [count + 1], in rows of all heads.
static void places(const Tree* s, int64_t* place) {
  place[0] = 0;
  for (int64_t i = 0; i < s->count; i++) place[i + 1] = place[i] + s->key_heads * keys_of(s->segments + i);
}

// out [tokens, query_heads, D].
int attention_forward(const Tree* s, const bf16* q, const bf16* k, const bf16* v, bf16* out, int64_t threads) {
  int64_t D = s->head_dim, Q = s->query_heads, K = s->key_heads, group = Q / K, longest = 0, place[s->count + 1];
  int64_t per_tile = tile_tokens(group), rows = wider(MAX_QUERIES, group);
  for (int64_t i = 0; i < s->count; i++) longest = wider(longest, keys_of(s->segments + i));
  places(s, place);
  bf16* packed = aligned_alloc(64, 2 * place[s->count] * D * sizeof(bf16) + threads * rows * longest * 6);
  if (!packed) return 1;
#pragma omp parallel num_threads(threads)
  {
    float* scores = (float*)(packed + 2 * place[s->count] * D) + omp_get_thread_num() * rows * longest;
    bf16* probabilities =
        packed + 2 * place[s->count] * D + 2 * threads * rows * longest + omp_get_thread_num() * rows * longest;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < s->count * K; task++) {
      const TreeSegment* part = s->segments + task / K;
      int64_t padded = keys_of(part), head = task % K, L = part->before + part->count;
      bf16* to = packed + 2 * D * (place[task / K] + head * padded);
      pack_rows(D, L, padded, k + head * D, K * D, s->nodes + part->first_key, to, NULL);
      pack_rows(D, L, padded, v + head * D, K * D, s->nodes + part->first_key, NULL, to + padded * D);
    }
    for (int64_t i = 0; i < s->count; i++) {
      const TreeSegment* part = s->segments + i;
      int64_t padded = keys_of(part), tiles = (part->count + per_tile - 1) / per_tile;
#pragma omp for schedule(dynamic) nowait
      for (int64_t task = 0; task < tiles * K; task++) {
        int64_t head = task % K, first = (tiles - 1 - task / K) * per_tile, row = part->start + first;
        int64_t tokens = lesser(part->count - first, per_tile);
        const bf16* from = packed + 2 * D * (place[i] + head * padded);
        attend_tile(group, D, tokens, part->before + first, q + (row * Q + head * group) * D, Q * D, from,
                    from + padded * D, padded, s->window, s->scale, scores, probabilities,
                    out + (row * Q + head * group) * D, Q * D);
      }
    }
  }
  free(packed);
  return 0;
}

// Writes pairs of rows r and r + 1 of x [.., size] to the transpose [size, pairs of rows].
ALWAYS_INLINE void transpose_pair(const float* x, int64_t size, int64_t pair, int64_t pairs, bf16_pair* transpose) {
  const float *low = x + 2 * pair * size, *high = low + size;
  for (int64_t l = 0; l < size; l += WIDTH)
    scatter(transpose + l * pairs + pair, pairs, join(load_fp32(low + l), load_fp32(high + l)));
}

typedef struct {  // memory of a thread
  bf16 *q, *dout, *ds, *by_column, *result;
  bf16_pair* transpose;
  float *p, *dp, *sums, *dk, *dv;
} Workspace;

// d[nodes[l]] += transpose [L, rows] times x [rows, D] for the keys l from `begin` to `end`.
static void add_to_keys(int64_t D, int64_t stride, int64_t rows, int64_t begin, int64_t end, int64_t size,
                        const bf16* x, const int64_t* nodes, const Workspace* w, float* d) {
  pack_rows(D, rows, rows, x, D, NULL, NULL, w->by_column);
  Factor factor = {(const bf16*)w->transpose, rows, rows / 2, w->by_column, PANEL * rows};
  multiply(size, D / PANEL, factor, w->sums, NULL, D);
  for (int64_t l = begin; l < end; l++)
    for (int64_t i = 0; i < D; i += WIDTH) {
      float* to = d + nodes[l] * stride + i;
      store_fp32(to, add(load_fp32(to), load_fp32(w->sums + (l - begin) * D + i)));
    }
}

// Gradients of `count` tokens of a segment from token `first` on, for one key head. P is computed again.
static void block_backward(const Tree* s, const TreeSegment* part, int64_t head, int64_t first, int64_t count,
                           const bf16* q, const bf16* dout, const bf16* key_rows, const Workspace* w, bf16* dq) {
  int64_t D = s->head_dim, Q = s->query_heads, K = s->key_heads, group = Q / K, padded = keys_of(part);
  const bf16 *key_columns = key_rows + padded * D, *value_rows = key_columns + padded * D;
  int64_t rows = count * group, even = rows + rows % 2, position = part->before + first, last = position + count;
  int64_t begin = first_visible_key(position, s->window) / PANEL * PANEL, size = round_up(last) - begin;
  for (int64_t r = 0; r < rows; r++) {
    int64_t from = ((part->start + first + r / group) * Q + head * group + r % group) * D;
    memcpy(w->q + r * D, q + from, D * sizeof(bf16));
    memcpy(w->dout + r * D, dout + from, D * sizeof(bf16));
  }
  memset(w->q + rows * D, 0, (even - rows) * D * sizeof(bf16));
  memset(w->dout + rows * D, 0, (even - rows) * D * sizeof(bf16));
  Factor queries = {w->q, D, D / 2, key_rows + begin * D, PANEL * D};
  Factor gradients = {w->dout, D, D / 2, value_rows + begin * D, PANEL * D};
  multiply(even, size / PANEL, queries, w->p, NULL, size);
  multiply(even, size / PANEL, gradients, w->dp, NULL, size);
  for (int64_t r = 0; r < even; r++) {
    float *p = w->p + r * size, *dp = w->dp + r * size;
    int64_t at = position + r / group, from = first_visible_key(at, s->window);
    Vector scaled = broadcast(r < rows ? softmax(p, from - begin, at + 1 - begin, size, s->scale) : 0);
    Vector sum = zeros();
    for (int64_t i = 0; i < size; i += WIDTH) {
      Vector probability = mul(load_fp32(p + i), scaled);
      store_fp32(p + i, probability);
      sum = mul_add(probability, load_fp32(dp + i), sum);
    }
    Vector mean = broadcast(sum_of(sum)), scale = broadcast(s->scale);
    for (int64_t i = 0; i < size; i += WIDTH) {  // dS = scale P (dP - sum(P dP))
      Vector d = sub(load_fp32(dp + i), mean);
      d = mul(mul(d, load_fp32(p + i)), scale);
      store_fp32(dp + i, d);
      store(w->ds + r * size + i, d);
    }
  }
  Factor factor = {w->ds, size, size / 2, key_columns + begin * PANEL, PANEL * padded};
  multiply(rows, D / PANEL, factor, NULL, w->result, D);
  for (int64_t r = 0; r < rows; r++)
    memcpy(dq + ((part->start + first + r / group) * Q + head * group + r % group) * D, w->result + r * D,
           D * sizeof(bf16));
  const int64_t* nodes = s->nodes + part->first_key;
  for (int64_t pair = 0; pair < even / 2; pair++) transpose_pair(w->dp, size, pair, even / 2, w->transpose);
  add_to_keys(D, K * D, even, begin, last, size, w->q, nodes, w, w->dk + head * D);
  for (int64_t pair = 0; pair < even / 2; pair++) transpose_pair(w->p, size, pair, even / 2, w->transpose);
  add_to_keys(D, K * D, even, begin, last, size, w->dout, nodes, w, w->dv + head * D);
}

// Divides the blocks among threads: `owner` [blocks]. The division depends on the sizes only, so sums are reproducible.
static void share_blocks(const Tree* s, int64_t per_block, int64_t threads, int64_t* owner) {
  int64_t load_of[threads], block = 0;
  memset(load_of, 0, sizeof(load_of));
  for (int64_t i = 0; i < s->count; i++)
    for (int64_t head = 0; head < s->key_heads; head++)
      for (int64_t first = 0; first < s->segments[i].count; first += per_block) {
        int64_t least = 0;
        for (int64_t t = 1; t < threads; t++)
          if (load_of[t] < load_of[least]) least = t;
        owner[block++] = least;
        load_of[least] += s->segments[i].before + first + per_block;
      }
}

// Gradients of queries, keys and values.
int attention_backward(const Tree* s, const bf16* q, const bf16* k, const bf16* v, const bf16* dout, bf16* dq, bf16* dk,
                       bf16* dv, int64_t threads) {
  int64_t D = s->head_dim, Q = s->query_heads, K = s->key_heads, group = Q / K, longest = 0, blocks = 0,
          n = s->tokens * K * D;
  int64_t per_block = wider(1, BLOCK_ROWS / group), rows = per_block * group + 1, place[s->count + 1];
  for (int64_t i = 0; i < s->count; i++) {
    longest = wider(longest, keys_of(s->segments + i));
    blocks += K * ((s->segments[i].count + per_block - 1) / per_block);
  }
  places(s, place);
  int64_t sizes[] = {
      rows * D * 2,       rows * D * 2,       rows * longest * 2, rows * D * 2, rows * D * 2, rows * longest * 2,
      rows * longest * 4, rows * longest * 4, longest * D * 4,    n * 4,        n * 4};
  int64_t per_thread = 0, total = 3 * place[s->count] * D * sizeof(bf16) + blocks * sizeof(int64_t);
  for (int i = 0; i < 11; i++) per_thread += sizes[i] = (sizes[i] + 63) / 64 * 64;
  total = (total + 63) / 64 * 64;
  char* memory = aligned_alloc(64, total + threads * per_thread);
  if (!memory) return 1;
  bf16* packed = (bf16*)memory;
  int64_t* owner = (int64_t*)(packed + 3 * place[s->count] * D);
  share_blocks(s, per_block, threads, owner);
#pragma omp parallel num_threads(threads)
  {
    int64_t thread = omp_get_thread_num(), team = omp_get_num_threads(), block = 0;
    void* buffers[11];
    char* next = memory + total + thread * per_thread;
    for (int i = 0; i < 11; next += sizes[i++]) buffers[i] = next;
    Workspace w = {buffers[0], buffers[1], buffers[2], buffers[3], buffers[4], buffers[5],
                   buffers[6], buffers[7], buffers[8], buffers[9], buffers[10]};
    memset(w.dk, 0, n * 4);
    memset(w.dv, 0, n * 4);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < s->count * K; task++) {
      const TreeSegment* part = s->segments + task / K;
      int64_t padded = keys_of(part), head = task % K, L = part->before + part->count;
      bf16* to = packed + 3 * D * (place[task / K] + head * padded);
      pack_rows(D, L, padded, k + head * D, K * D, s->nodes + part->first_key, to, to + padded * D);
      pack_rows(D, L, padded, v + head * D, K * D, s->nodes + part->first_key, to + 2 * padded * D, NULL);
    }
    for (int64_t i = 0; i < s->count; i++)
      for (int64_t head = 0; head < K; head++)
        for (int64_t first = 0; first < s->segments[i].count; first += per_block) {
          if (owner[block++] % team != thread) continue;
          const TreeSegment* part = s->segments + i;
          int64_t count = lesser(part->count - first, per_block);
          block_backward(s, part, head, first, count, q, dout, packed + 3 * D * (place[i] + head * keys_of(part)), &w,
                         dq);
        }
#pragma omp barrier
    const float* first_dk = (float*)(memory + total + per_thread - sizes[10] - sizes[9]);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; i += WIDTH) {
      Vector keys = zeros(), values = keys;
      for (int64_t t = 0; t < team; t++) {
        const float* of_keys = first_dk + t * per_thread / 4 + i;
        keys = add(keys, load_fp32(of_keys));
        values = add(values, load_fp32(of_keys + sizes[9] / 4));
      }
      store(dk + i, keys);
      store(dv + i, values);
    }
  }
  free(memory);
  return 0;
}
