// Networks of shuffles across vectors: the transpose of a square, and the sums of many vectors at once.
#pragma once

#include <utility>

#include "vec.h"

namespace {

// Of each run of 2 * half lanes: the low (or high) half of a's, then that of b's.
template <int half, bool is_high, size_t... lane>
inline Vec halves(Vec a, Vec b, std::index_sequence<lane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(
      a, b,
      ((lane % (2 * half) < half) ? lane + is_high * half : kWidth + lane - half + is_high * half)...);
#else
  return __builtin_shuffle(
      a, b,
      IntVec{(int)((lane % (2 * half) < half) ? lane + is_high * half : kWidth + lane - half + is_high * half)...});
#endif
}

template <int half>
inline Vec low_halves(Vec a, Vec b) {
  return halves<half, false>(a, b, std::make_index_sequence<kWidth>());
}

template <int half>
inline Vec high_halves(Vec a, Vec b) {
  return halves<half, true>(a, b, std::make_index_sequence<kWidth>());
}

template <int half>
inline __attribute__((always_inline)) void transpose_from(Vec* rows) {
  if constexpr (half > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; i++) {
      if (i & half) continue;
      const Vec a = rows[i], b = rows[i + half];
      rows[i] = low_halves<half>(a, b);
      rows[i + half] = high_halves<half>(a, b);
    }
    transpose_from<half / 2>(rows);
  }
}

inline __attribute__((always_inline)) void transpose(Vec (&rows)[kWidth]) { transpose_from<kWidth / 2>(rows); }

// Of each run of 2 * half lanes: the first half of a's sums with its second, then the same of b's.
template <int half, size_t... lane>
inline Vec folded(Vec a, Vec b, std::index_sequence<lane...>) {
  // A selection and one shuffle, instead of two shuffles: those have one port only.
  const IntVec is_low = IntVec{(lane % (2 * half) < half ? -1 : 0)...};
#if defined(__clang__)
  const Vec crossed = __builtin_shufflevector(a, b, (lane % (2 * half) < half ? lane + half : kWidth + lane - half)...);
#else
  const Vec crossed =
      __builtin_shuffle(a, b, IntVec{(int)(lane % (2 * half) < half ? lane + half : kWidth + lane - half)...});
#endif
  return (is_low ? a : b) + crossed;
}

template <int half>
inline __attribute__((always_inline)) void sum_from(Vec* vectors) {
  if constexpr (half > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < half; i++)
      vectors[i] = folded<half>(vectors[i], vectors[i + half], std::make_index_sequence<kWidth>());
    sum_from<half / 2>(vectors);
  }
}

// Lane i of the result is the sum of vector i's lanes.
inline __attribute__((always_inline)) Vec sums(Vec (&vectors)[kWidth]) {
  sum_from<kWidth / 2>(vectors);
  return vectors[0];
}

}  // namespace
