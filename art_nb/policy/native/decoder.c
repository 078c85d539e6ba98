// The forward pass of a decoder without gradients.

#include "kernels.h"

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
  bf16* kv;
  int64_t slots, length;
} Cache;

// Rows

// h += y or norm(y), then x = norm(h). Each thread has its own rows.
static void add_and_norm(int64_t n, int64_t size, const Norm* after, bf16* y, bf16* h, const Norm* before, bf16* x) {
#pragma omp for schedule(static)
  for (int64_t t = 0; t < n; t++) {
    bf16* row = h + t * size;
    if (y) {
      if (after->gain) norm_row(after, y + t * size, y + t * size, size);
      for (int64_t i = 0; i < size; i += WIDTH) store(row + i, add(load(row + i), load(y + t * size + i)));
    }
    norm_row(before, row, x + t * size, size);
  }
}

// Rotates queries and keys, and stores keys and values. `places` are those of the first key head in the cache, [n].
static void rotate_and_store(const Shape* s, const Layer* layer, int64_t n, const int64_t* places, bf16* qkv,
                             const bf16* cos, const bf16* sin, bf16* keys, bf16* values, int64_t length) {
  int64_t D = s->head_dim, Q = s->query_heads, K = s->key_heads, width = (Q + 2 * K) * D;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < n; t++) {
    bf16* row = qkv + t * width;
    for (int64_t head = 0; head < Q + K; head++) {
      const Norm* norm = head < Q ? &layer->of_queries : &layer->of_keys;
      if (norm->gain) norm_row(norm, row + head * D, row + head * D, D);
      rotate(row + head * D, cos + t * D, sin + t * D, D, 0);
    }
    for (int64_t head = 0; head < K; head++) {
      int64_t cell = (places[t] + head * length) * D;
      memcpy(keys + cell, row + (Q + head) * D, D * sizeof(bf16));
      memcpy(values + cell, row + (Q + K + head) * D, D * sizeof(bf16));
    }
  }
}

// Attention

// Attention of one token: `group` queries with the same keys. `scores` has group * padded numbers.
static void attend_one(int group, int64_t D, const bf16* q, const bf16* keys, const bf16* values, int64_t first,
                       int64_t last, float scale, float* scores, bf16* out) {
  int64_t begin = first / WIDTH * WIDTH, padded = (last + WIDTH - 1) / WIDTH * WIDTH - begin;
  for (int64_t l = first; l < last; l++)
    for (int g = 0; g < group; g++) {
      Vector sum = zeros();
      for (int64_t d = 0; d < D; d += 2 * WIDTH)
        sum = add_products_of_pairs(sum, load_pairs(q + g * D + d), load_pairs(keys + l * D + d));
      scores[g * padded + l - begin] = sum_of(sum);
    }
  float sums[MAX_QUERIES];
  for (int g = 0; g < group; g++) sums[g] = softmax(scores + g * padded, first - begin, last - begin, padded, scale);
  for (int head = 0; head < group; head += 6) {
    int n = group - head < 6 ? group - head : 6;
    for (int64_t d = 0; d < D; d += 2 * WIDTH) {
      Vector total[6][2];
      for (int g = 0; g < 6; g++) total[g][0] = total[g][1] = zeros();
      for (int64_t l = first; l < last; l++) {
        Vector v0 = load(values + l * D + d), v1 = load(values + l * D + d + WIDTH);
        for (int g = 0; g < 6; g++) {
          Vector p = broadcast(g < n ? scores[(head + g) * padded + l - begin] : 0);
          total[g][0] = mul_add(p, v0, total[g][0]);
          total[g][1] = mul_add(p, v1, total[g][1]);
        }
      }
      for (int g = 0; g < n; g++)
        for (int j = 0; j < 2; j++)
          store(out + (head + g) * D + d + WIDTH * j, mul(total[g][j], broadcast(sums[head + g])));
    }
  }
}

static int64_t padded_length(const Segment* part) { return round_up(part->position + part->count); }

// Attention of all new tokens. `packed` has room for the keys and values of the segments with several tokens.
static void attend(const Shape* s, const Layer* layer, const Segment* segments, int64_t count, const bf16* qkv,
                   const bf16* keys, const bf16* values, int64_t length, bf16* packed, float* scores,
                   bf16* probabilities, bf16* out) {
  int64_t D = s->head_dim, Q = s->query_heads, K = s->key_heads, group = Q / K, width = (Q + 2 * K) * D;
  int64_t per_tile = tile_tokens(group);
#pragma omp for schedule(dynamic)
  for (int64_t task = 0; task < count * K; task++) {
    const Segment* part = segments + task / K;
    int64_t head = task % K, cells = (part->slot * K + head) * length * D;
    if (part->count == 1) {
      attend_one(group, D, qkv + part->row * width + head * group * D, keys + cells, values + cells,
                 first_visible_key(part->position, layer->window), part->position + 1, layer->scale, scores,
                 out + (part->row * Q + head * group) * D);
    } else {
      int64_t before = 0, padded = padded_length(part);
      for (const Segment* p = segments; p < part; p++) before += p->count > 1 ? padded_length(p) : 0;
      bf16* to = packed + 2 * D * (K * before + head * padded);
      pack_rows(D, part->position + part->count, padded, keys + cells, D, NULL, to, NULL);
      pack_rows(D, part->position + part->count, padded, values + cells, D, NULL, NULL, to + padded * D);
    }
  }
  int64_t before = 0;
  for (int64_t i = 0; i < count; i++) {
    const Segment* part = segments + i;
    if (part->count == 1) continue;
    int64_t padded = padded_length(part), tiles = (part->count + per_tile - 1) / per_tile;
#pragma omp for schedule(dynamic) nowait
    for (int64_t task = 0; task < tiles * K; task++) {
      int64_t head = task % K, first = (tiles - 1 - task / K) * per_tile;
      int64_t tokens = lesser(part->count - first, per_tile), row = part->row + first;
      const bf16* from = packed + 2 * D * (K * before + head * padded);
      attend_tile(group, D, tokens, part->position + first, qkv + row * width + head * group * D, width, from,
                  from + padded * D, padded, layer->window, layer->scale, scores, probabilities,
                  out + (row * Q + head * group) * D, Q * D);
    }
    before += padded;
  }
#pragma omp barrier
}

// The pass

// Replaces h [n, hidden], the embeddings, by the last hidden states. Returns 0, or 1 if a memory allocation fails.
int forward(const Shape* s, const Layer* layers, const Part* parts, int64_t rank, const Cache* cache, int64_t n,
            bf16* h, const Segment* segments, int64_t count, const bf16* const* cos, const bf16* const* sin,
            int64_t threads) {
  int64_t D = s->head_dim, K = s->key_heads, heads = s->query_heads, width = (heads + 2 * K) * D;
  int64_t step = cache->slots * K * cache->length * D, longest = 0, packed_keys = 0;
  for (int64_t i = 0; i < count; i++) {
    longest = wider(longest, padded_length(segments + i));
    packed_keys += segments[i].count > 1 ? padded_length(segments + i) : 0;
  }
  rank = round_up(rank);
  int64_t rows = wider(MAX_QUERIES, heads / K), wide = wider(wider(s->hidden, s->inner), heads * D);
  int64_t sizes[] = {n * wide,
                     n * wider(width, 2 * s->inner),
                     n * rank,
                     n * s->hidden,
                     2 * D * K * packed_keys,
                     threads * rows * longest,
                     2 * threads * rows * longest,
                     4 * n};
  int64_t total = 0;
  for (int i = 0; i < 8; i++) total += (sizes[i] + 31) / 32 * 32;
  bf16 *memory = aligned_alloc(64, total * sizeof(bf16)), *buffers[8], *next = memory;
  if (!memory) return 1;
  for (int i = 0; i < 8; i++) {
    buffers[i] = next;
    next += (sizes[i] + 31) / 32 * 32;
  }
  bf16 *x = buffers[0], *wide_y = buffers[1], *t = buffers[2], *y = buffers[3], *packed = buffers[4];
  int64_t* places = (int64_t*)buffers[7];
  for (int64_t i = 0; i < count; i++)
    for (int64_t j = 0; j < segments[i].count; j++)
      places[segments[i].row + j] = segments[i].slot * K * cache->length + segments[i].position + j;
#pragma omp parallel num_threads(threads)
  {
    int64_t thread = omp_get_thread_num();
    bf16* probabilities = buffers[5] + thread * rows * longest;
    float* scores = (float*)buffers[6] + thread * rows * longest;
    for (int64_t i = 0; i < s->layers; i++) {
      const Layer* l = layers + i;
      bf16 *keys = cache->kv + 2 * i * step, *values = keys + step;
      add_and_norm(n, s->hidden, i ? &l[-1].after_mlp : NULL, i ? y : NULL, h, &l->before_attention, x);
      product(&l->qkv, n, x, parts, i, 0, t, rank, NULL, wide_y);
      rotate_and_store(s, l, n, places, wide_y, cos[l->kind], sin[l->kind], keys, values, cache->length);
      attend(s, l, segments, count, wide_y, keys, values, cache->length, packed, scores, probabilities, x);
      product(&l->o, n, x, parts, i, 1, t, rank, NULL, y);
      add_and_norm(n, s->hidden, &l->after_attention, y, h, &l->before_mlp, x);
      product(&l->gate_up, n, x, parts, i, 2, t, rank, NULL, wide_y);
      gate(n, s->inner, s->gelu, wide_y, x);
      product(&l->down, n, x, parts, i, 3, t, rank, NULL, y);
    }
    add_and_norm(n, s->hidden, &layers[s->layers - 1].after_mlp, y, h, &s->last, h);
  }
  free(memory);
  return 0;
}
