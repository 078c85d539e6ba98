// A vector has WIDTH numbers in fp32. There is one version for processors with AVX512-BF16, and one for those with AVX2
// and FMA. Numbers are rounded to the nearest bf16, or to the even one of two.

#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef int32_t __attribute__((may_alias)) bf16_pair;

#ifdef __AVX512BF16__
#define WIDTH 16
#define SIMD(name) _mm512_##name
typedef __m512 Vector;
typedef __m512i Pairs;  // WIDTH pairs of bf16
#else
#define WIDTH 8
#define SIMD(name) _mm256_##name
typedef __m256 Vector;
typedef __m256i Pairs;
#ifndef FP32_PRODUCTS
#define FP32_PRODUCTS
#endif
#endif

ALWAYS_INLINE Vector zeros(void) { return SIMD(setzero_ps)(); }
ALWAYS_INLINE Vector broadcast(float x) { return SIMD(set1_ps)(x); }
ALWAYS_INLINE Vector load_fp32(const float* x) { return SIMD(loadu_ps)(x); }
ALWAYS_INLINE void store_fp32(float* x, Vector v) { SIMD(storeu_ps)(x, v); }
ALWAYS_INLINE Vector add(Vector a, Vector b) { return SIMD(add_ps)(a, b); }
ALWAYS_INLINE Vector sub(Vector a, Vector b) { return SIMD(sub_ps)(a, b); }
ALWAYS_INLINE Vector mul(Vector a, Vector b) { return SIMD(mul_ps)(a, b); }
ALWAYS_INLINE Vector ratio(Vector a, Vector b) { return SIMD(div_ps)(a, b); }
ALWAYS_INLINE Vector mul_add(Vector a, Vector b, Vector c) { return SIMD(fmadd_ps)(a, b, c); }     // ab + c
ALWAYS_INLINE Vector minus_mul(Vector a, Vector b, Vector c) { return SIMD(fnmadd_ps)(a, b, c); }  // c - ab
ALWAYS_INLINE Vector larger(Vector a, Vector b) { return SIMD(max_ps)(a, b); }                     // b if one is NaN

#ifdef __AVX512BF16__

ALWAYS_INLINE Vector nearest(Vector x) { return _mm512_roundscale_ps(x, 8); }            // integer
ALWAYS_INLINE Vector times_power(Vector x, Vector n) { return _mm512_scalef_ps(x, n); }  // x 2^n
ALWAYS_INLINE float sum_of(Vector v) { return _mm512_reduce_add_ps(v); }
ALWAYS_INLINE float max_of(Vector v) { return _mm512_reduce_max_ps(v); }

ALWAYS_INLINE Vector to_fp32(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

ALWAYS_INLINE __m256i to_bf16(Vector v) { return (__m256i)_mm512_cvtneps_pbh(v); }

ALWAYS_INLINE Vector load(const bf16* x) { return to_fp32(_mm256_loadu_si256((const __m256i*)x)); }

ALWAYS_INLINE void store(bf16* x, Vector v) { _mm256_storeu_si256((__m256i*)x, to_bf16(v)); }

ALWAYS_INLINE Vector rounded(Vector v) { return to_fp32(to_bf16(v)); }

// The first `count` numbers, and zeros.
ALWAYS_INLINE Vector load_first(const bf16* x, int64_t count) {
  __mmask16 mask = count < 16 ? (1 << count) - 1 : 0xffff;
  return to_fp32(_mm256_maskz_loadu_epi16(mask, x));
}

ALWAYS_INLINE Pairs load_pairs(const bf16* x) { return _mm512_loadu_si512(x); }

ALWAYS_INLINE Pairs broadcast_pair(bf16_pair x) { return _mm512_set1_epi32(x); }

ALWAYS_INLINE void store_pairs(bf16* x, Pairs pairs) { _mm512_storeu_si512(x, pairs); }

// The lower and the upper number of each pair.
ALWAYS_INLINE Vector lower(Pairs pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }

ALWAYS_INLINE Vector upper(Pairs pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)));
}

ALWAYS_INLINE Pairs join(Vector low, Vector high) {
  __m512i wide = _mm512_cvtepu16_epi32(to_bf16(high));
  return _mm512_or_si512(_mm512_cvtepu16_epi32(to_bf16(low)), _mm512_slli_epi32(wide, 16));
}

// Writes each pair to its own place: x[i step].
ALWAYS_INLINE void scatter(bf16_pair* x, int64_t step, Pairs pairs) {
  const __m512i order = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  _mm512_i32scatter_epi32(x, _mm512_mullo_epi32(order, _mm512_set1_epi32(step)), pairs, 4);
}

// sum + xy, where two adjacent products belong to the same number of the sum.
ALWAYS_INLINE Vector add_products_of_pairs(Vector sum, Pairs x, Pairs y) {
  return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
}

#else

ALWAYS_INLINE Vector nearest(Vector x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

ALWAYS_INLINE Vector power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

// In two steps, because 2^n can be outside of the range of fp32.
ALWAYS_INLINE Vector times_power(Vector x, Vector n) {
  __m256i whole = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_set1_ps(254.f), larger(_mm256_set1_ps(-252.f), n)));
  __m256i half = _mm256_srai_epi32(whole, 1);
  return mul(mul(x, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
}

ALWAYS_INLINE float sum_of(Vector v) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

ALWAYS_INLINE float max_of(Vector v) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// Numbers whose upper 16 bits are those of bf16. NaN stays NaN.
ALWAYS_INLINE __m256i rounded_bits(Vector v) {
  __m256i bits = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(sum, _mm256_set1_epi32(0x7fc00000), is_nan);
}

ALWAYS_INLINE Vector load(const bf16* x) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

ALWAYS_INLINE Vector load_first(const bf16* x, int64_t count) {
  bf16 numbers[WIDTH] = {0};
  if (count >= WIDTH) return load(x);
  memcpy(numbers, x, count * sizeof(bf16));
  return load(numbers);
}

ALWAYS_INLINE void store(bf16* x, Vector v) {
  __m256i wide = _mm256_srli_epi32(rounded_bits(v), 16);
  __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storeu_si128((__m128i*)x, packed);
}

ALWAYS_INLINE Pairs load_pairs(const bf16* x) { return _mm256_loadu_si256((const __m256i*)x); }

ALWAYS_INLINE void store_pairs(bf16* x, Pairs pairs) { _mm256_storeu_si256((__m256i*)x, pairs); }

ALWAYS_INLINE Vector lower(Pairs pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }

ALWAYS_INLINE Vector upper(Pairs pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000)));
}

ALWAYS_INLINE Vector rounded(Vector v) { return upper(rounded_bits(v)); }

ALWAYS_INLINE Pairs join(Vector low, Vector high) {
  return _mm256_blend_epi16(_mm256_srli_epi32(rounded_bits(low), 16), rounded_bits(high), 0xaa);
}

ALWAYS_INLINE void scatter(bf16_pair* x, int64_t step, Pairs pairs) {
  bf16_pair numbers[WIDTH];
  store_pairs((bf16*)numbers, pairs);
  for (int64_t i = 0; i < WIDTH; i++) x[i * step] = numbers[i];
}

ALWAYS_INLINE Vector add_products_of_pairs(Vector sum, Pairs x, Pairs y) {
  return mul_add(upper(x), upper(y), mul_add(lower(x), lower(y), sum));
}

#endif
