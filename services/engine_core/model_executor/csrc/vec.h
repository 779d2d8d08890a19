// A vector of floats, as wide as the instruction set this file is compiled for, and what the kernels do with it.
//
// Compilers' vector extensions serve every machine; intrinsics only where those would miss an instruction.
// Everything here is in an unnamed namespace: the same names are compiled several times with different flags, and no
// two of them may be merged by the linker.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kWidth)));
typedef int32_t IntVec __attribute__((vector_size(4 * kWidth)));
typedef uint32_t UintVec __attribute__((vector_size(4 * kWidth)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kWidth)));

struct bfloat16 {
  uint16_t bits;
};

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

inline Vec broadcast(float value) { return value - Vec{}; }

inline Vec load(const float* from) {
  Vec result;
  memcpy(&result, from, sizeof result);
  return result;
}

inline Vec load(const bfloat16* from) {
  HalfVec halves;
  memcpy(&halves, from, sizeof halves);
  return (Vec)(__builtin_convertvector(halves, UintVec) << 16);
}

inline void store(float* to, Vec value) { memcpy(to, &value, sizeof value); }

// To the nearest, ties to even; what is not a number stays so.
inline HalfVec to_bfloat16(Vec value) {
#if defined(__AVX512BF16__)
  return (HalfVec)_mm512_cvtneps_pbh((__m512)value);
#else
  const UintVec bits = (UintVec)value;
  const UintVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const IntVec is_number = value == value;
  return __builtin_convertvector((rounded & (UintVec)is_number) | (0x7fc0 & ~(UintVec)is_number), HalfVec);
#endif
}

inline void store(bfloat16* to, Vec value) {
  const HalfVec halves = to_bfloat16(value);
  memcpy(to, &halves, sizeof halves);
}

// The first `count` (fewer than a vector has) numbers, and zeros.
template <typename T>
inline Vec load_part(const T* from, int64_t count) {
  T whole[kWidth] = {};
  memcpy(whole, from, count * sizeof(T));
  return load(whole);
}

template <typename T>
inline void store_part(T* to, Vec value, int64_t count) {
  T whole[kWidth];
  store(whole, value);
  memcpy(to, whole, count * sizeof(T));
}

// Two vectors of numbers that lie side by side, in the order that costs least: bfloat16 the even ones, then the odd.
struct Pair {
  Vec a, b;
};

inline Pair load_pair(const float* from) { return {load(from), load(from + kWidth)}; }

inline Pair load_pair(const bfloat16* from) {
  UintVec bits;
  memcpy(&bits, from, sizeof bits);
  return {(Vec)(bits << 16), (Vec)(bits & 0xffff0000u)};
}

inline void store_pair(float* to, Pair pair) {
  store(to, pair.a);
  store(to + kWidth, pair.b);
}

inline void store_pair(bfloat16* to, Pair pair) {
  const UintVec bits = __builtin_convertvector(to_bfloat16(pair.a), UintVec) |
                       __builtin_convertvector(to_bfloat16(pair.b), UintVec) << 16;
  memcpy(to, &bits, sizeof bits);
}

// The first `count` numbers, at most two vectors, and zeros.
template <typename T>
inline __attribute__((always_inline)) Pair load_some_of_pair(const T* from, int64_t count) {
  if (count >= 2 * kWidth) return load_pair(from);
  T whole[2 * kWidth] = {};
  memcpy(whole, from, count * sizeof(T));
  return load_pair(whole);
}

template <typename T>
inline __attribute__((always_inline)) void store_some_of_pair(T* to, Pair pair, int64_t count) {
  if (count >= 2 * kWidth) return store_pair(to, pair);
  T whole[2 * kWidth];
  store_pair(whole, pair);
  memcpy(to, whole, count * sizeof(T));
}

// Calls body(offset, count) for every vector of n numbers; count is a constant but in the last, partial one.
template <typename Body>
inline __attribute__((always_inline)) void for_each_vector(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) body(i, kWidth);
  if (i < n) body(i, n - i);
}

template <typename T>
inline __attribute__((always_inline)) Vec load_some(const T* from, int64_t count) {
  return count == kWidth ? load(from) : load_part(from, count);
}

template <typename T>
inline __attribute__((always_inline)) void store_some(T* to, Vec value, int64_t count) {
  if (count == kWidth)
    store(to, value);
  else
    store_part(to, value, count);
}

inline Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

inline Vec min(Vec a, Vec b) { return -max(-a, -b); }

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline float sum(Vec value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)value);
#else
  float lanes[kWidth];
  store(lanes, value);
  for (int step = kWidth / 2; step > 0; step /= 2)
    for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
  return lanes[0];
#endif
}

inline float maximum(Vec value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)value);
#else
  float lanes[kWidth];
  store(lanes, value);
  for (int step = kWidth / 2; step > 0; step /= 2)
    for (int i = 0; i < step; i++) lanes[i] = lanes[i] > lanes[i + step] ? lanes[i] : lanes[i + step];
  return lanes[0];
#endif
}

// 2 to the power of a number up to 127; 0 for those below -126, minus infinity among them.
inline Vec exp2(Vec x) {
  const Vec clamped = max(x, broadcast(-127.f));
  // Adding 1.5 * 2^23 leaves the nearest integer in the lowest bits.
  const Vec shifter = broadcast(12582912.f);
  const Vec shifted = clamped + shifter;
  const Vec fraction = clamped - (shifted - shifter);
  Vec power = broadcast(1.535336188e-4f);
  power = fma(power, fraction, broadcast(1.339887440e-3f));
  power = fma(power, fraction, broadcast(9.618437357e-3f));
  power = fma(power, fraction, broadcast(5.550332471e-2f));
  power = fma(power, fraction, broadcast(2.402264791e-1f));
  power = fma(power, fraction, broadcast(6.931472028e-1f));
  power = fma(power, fraction, broadcast(1.f));
  const Vec result = (Vec)((IntVec)power + ((IntVec)shifted << 23));
  return (Vec)((IntVec)result & (IntVec)(x > -126.f));
}

inline Vec exp(Vec x) { return exp2(min(x * 1.44269504088896341f, broadcast(127.f))); }

inline Vec tanh(Vec x) {
  // Small numbers lose too much in 1 - 2 / (e^2x + 1).
  const Vec square = x * x;
  Vec series = fma(square, broadcast(-17.f / 315), broadcast(2.f / 15));
  series = fma(series, square, broadcast(-1.f / 3));
  series = fma(series * square, x, x);
  const Vec quotient = 1.f - 2.f / (exp(2.f * x) + 1.f);
  return square < 0.01f ? series : quotient;
}

// Abramowitz and Stegun 7.1.26: within 1.5e-7.
inline Vec erf(Vec x) {
  const Vec magnitude = max(x, -x);
  const Vec t = 1.f / (1.f + 0.3275911f * magnitude);
  Vec poly = broadcast(1.061405429f);
  poly = fma(poly, t, broadcast(-1.453152027f));
  poly = fma(poly, t, broadcast(1.421413741f));
  poly = fma(poly, t, broadcast(-0.284496736f));
  poly = fma(poly, t, broadcast(0.254829592f));
  const Vec result = 1.f - poly * t * exp(-x * x);
  return x < 0.f ? -result : result;
}

}  // namespace
