// Small matrix products out of and into scratch memory, once for each way a machine can do them.
//
// C [M, N] (+)= A [M, K] * B [K, N]; rows of A and C are lda and ldc numbers apart. Every product says how it keeps A
// and B: B is packed by it, from rows of the cache. N is a multiple of kColumns, K of kDepth, and A and C have
// kRows - 1 rows to spare.
#pragma once

#include "tile_config.h"
#include "transpose.h"

namespace {

// to[d * ld + i] = rows[i * stride + d], for `count` rows and `dim` columns of Load's lanes.
template <typename Load, typename T>
void pack_transposed(float* to, int64_t ld, const T* rows, int64_t stride, int64_t count, int64_t dim) {
  constexpr int kPerLane = Load::kPerLane;
  int64_t d = 0;
  if (count == kWidth)
    for (; d + kWidth * kPerLane <= dim; d += kWidth * kPerLane) {
      Vec square[kWidth];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; i++) square[i] = Load::whole(rows + i * stride + d);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; i++) store(to + (d / kPerLane + i) * ld, square[i]);
    }
  for (; d < dim; d += kPerLane)
    for (int64_t i = 0; i < count; i++) to[d / kPerLane * ld + i] = Load::one(rows + i * stride + d, dim - d);
}

template <typename T>
struct AsFloat {
  static constexpr int kPerLane = 1;
  static Vec whole(const T* from) { return load(from); }
  static float one(const T* from, int64_t) { return load_part(from, 1)[0]; }
};

// Multiplies in float, whatever the cache holds.
struct FloatProduct {
  typedef float A;
  static constexpr int64_t kRows = 1, kColumns = 2 * kWidth, kDepth = 1;
  static constexpr int kBlock = kWidth == 16 ? 8 : 4;

  static void begin() {}
  static void end() {}

  // B = the transposed keys, [head_dim, keys].
  template <typename T>
  static void pack_keys(float* to, int64_t ld, int64_t column, const T* rows, int64_t count, int64_t dim) {
    for (int64_t i = 0; i < count; i += kWidth)
      pack_transposed<AsFloat<T>>(to + column + i, ld, rows + i * dim, dim, smaller(kWidth, count - i), dim);
  }

  // B = the values, [keys, head_dim].
  template <typename T>
  static void pack_values(float* to, int64_t ld, int64_t row, const T* rows, int64_t count, int64_t dim) {
    for (int64_t i = 0; i < count; i++)
      for_each_vector(dim, [&](int64_t d, int64_t n) {
        store_some(to + (row + i) * ld + d, load_some(rows + i * dim + d, n), n);
      });
  }

  static int64_t b_size(int64_t depth, int64_t columns) { return depth * columns; }

  template <int rows>
  static inline __attribute__((always_inline)) void block(
      int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool accumulate) {
    Vec totals[rows][2] = {};
    if (accumulate)
      for (int i = 0; i < rows; i++)
        for (int v = 0; v < 2; v++) totals[i][v] = load(c + i * ldc + v * kWidth);
    for (int64_t j = 0; j < k; j++) {
      const Vec left = load(b + j * ldb), right = load(b + j * ldb + kWidth);
#pragma GCC unroll 8
      for (int i = 0; i < rows; i++) {
        const Vec factor = broadcast(a[i * lda + j]);
        totals[i][0] = fma(factor, left, totals[i][0]);
        totals[i][1] = fma(factor, right, totals[i][1]);
      }
    }
    for (int i = 0; i < rows; i++)
      for (int v = 0; v < 2; v++) store(c + i * ldc + v * kWidth, totals[i][v]);
  }

  static void multiply(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                       float* c, int64_t ldc, bool accumulate) {
    for (int64_t j = 0; j < n; j += kColumns) {
      int64_t i = 0;
      for (; i + kBlock <= m; i += kBlock)
        block<kBlock>(k, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc, accumulate);
      for (; i < m; i++) block<1>(k, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc, accumulate);
    }
  }
};

#if defined(__AVX512BF16__)
// Two bfloat16 numbers that lie side by side, as one lane.
struct AsPairs {
  static constexpr int kPerLane = 2;
  static Vec whole(const bfloat16* from) { return (Vec)_mm512_loadu_si512(from); }
  static float one(const bfloat16* from, int64_t count) {
    bfloat16 pair[2] = {};
    memcpy(pair, from, smaller(count, 2) * sizeof(bfloat16));
    float lane;
    memcpy(&lane, pair, sizeof lane);
    return lane;
  }
};

// B holds pairs of rows: [K / 2, N, 2]; a float of it stands for a pair of bfloat16.
struct PairPacking {
  typedef bfloat16 A;
  static constexpr int64_t kColumns = 2 * kWidth, kDepth = 2 * kWidth;

  static void pack_keys(float* to, int64_t ld, int64_t column, const bfloat16* rows, int64_t count, int64_t dim) {
    for (int64_t i = 0; i < count; i += kWidth)
      pack_transposed<AsPairs>(to + column + i, ld, rows + i * dim, dim, smaller(kWidth, count - i), dim);
  }

  // Row `row` onwards: an odd first one fills up the pair that the one before it began.
  static void pack_values(float* to, int64_t ld, int64_t row, const bfloat16* rows, int64_t count, int64_t dim) {
    int64_t i = 0;
    if (row % 2) pack_one(to + row / 2 * ld, 1, rows + i++ * dim, dim);
    for (; i + 2 <= count; i += 2) {
      float* pair = to + (row + i) / 2 * ld;
      const bfloat16 *even = rows + i * dim, *odd = even + dim;
      for_each_vector(dim, [&](int64_t d, int64_t n) {
        const UintVec low = (UintVec)load_some(even + d, n) >> 16, high = (UintVec)load_some(odd + d, n);
        store_some(pair + d, (Vec)(low | high), n);
      });
    }
    if (i < count) {
      memset(to + (row + i) / 2 * ld, 0, ld * sizeof(float));
      pack_one(to + (row + i) / 2 * ld, 0, rows + i * dim, dim);
    }
  }

  static void pack_one(float* pairs, int half, const bfloat16* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d++) ((bfloat16*)pairs)[2 * d + half] = row[d];
  }

  static int64_t b_size(int64_t depth, int64_t columns) { return depth / 2 * columns; }
};

struct DotProduct : PairPacking {
  static constexpr int64_t kRows = 1;
  static constexpr int kBlock = 8;

  static void begin() {}
  static void end() {}

  template <int rows>
  static inline __attribute__((always_inline)) void block(
      int64_t k, const bfloat16* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool accumulate) {
    __m512 totals[rows][2];
    for (int i = 0; i < rows; i++)
      for (int v = 0; v < 2; v++)
        totals[i][v] = accumulate ? _mm512_loadu_ps(c + i * ldc + v * kWidth) : _mm512_setzero_ps();
    for (int64_t j = 0; j < k / 2; j++) {
      const __m512bh left = (__m512bh)_mm512_loadu_ps(b + j * ldb);
      const __m512bh right = (__m512bh)_mm512_loadu_ps(b + j * ldb + kWidth);
#pragma GCC unroll 8
      for (int i = 0; i < rows; i++) {
        int pair;
        memcpy(&pair, a + i * lda + 2 * j, sizeof pair);
        const __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
        totals[i][0] = _mm512_dpbf16_ps(totals[i][0], factor, left);
        totals[i][1] = _mm512_dpbf16_ps(totals[i][1], factor, right);
      }
    }
    for (int i = 0; i < rows; i++)
      for (int v = 0; v < 2; v++) _mm512_storeu_ps(c + i * ldc + v * kWidth, totals[i][v]);
  }

  static void multiply(int64_t m, int64_t n, int64_t k, const bfloat16* a, int64_t lda, const float* b, int64_t ldb,
                       float* c, int64_t ldc, bool accumulate) {
    for (int64_t j = 0; j < n; j += kColumns) {
      int64_t i = 0;
      for (; i + kBlock <= m; i += kBlock)
        block<kBlock>(k, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc, accumulate);
      for (; i < m; i++) block<1>(k, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc, accumulate);
    }
  }
};
#endif

#if defined(__AMX_BF16__)
// With the tile unit: 2 x 2 tiles of 16 x 16 results at a time.
struct TileProduct : PairPacking {
  static constexpr int64_t kRows = 32;

  static void begin() { configure_tiles(TileConfig()); }
  static void end() { _tile_release(); }

  static void multiply(int64_t m, int64_t n, int64_t k, const bfloat16* a, int64_t lda, const float* b, int64_t ldb,
                       float* c, int64_t ldc, bool accumulate) {
    finish_stores();
    for (int64_t i = 0; i < m; i += 32)
      for (int64_t j = 0; j < n; j += 32) square(k, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc, accumulate);
  }

  static void square(int64_t k, const bfloat16* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                     bool accumulate) {
    const int64_t c_bytes = ldc * 4, a_bytes = lda * 2, b_bytes = ldb * 4;
    if (accumulate) {
      _tile_loadd(0, c, c_bytes);
      _tile_loadd(1, c + 16, c_bytes);
      _tile_loadd(2, c + 16 * ldc, c_bytes);
      _tile_loadd(3, c + 16 * ldc + 16, c_bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t j = 0; j < k; j += 32) {
      _tile_loadd(4, a + j, a_bytes);
      _tile_loadd(5, a + 16 * lda + j, a_bytes);
      _tile_loadd(6, b + j / 2 * ldb, b_bytes);
      _tile_loadd(7, b + j / 2 * ldb + 16, b_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + 16, c_bytes);
    _tile_stored(2, c + 16 * ldc, c_bytes);
    _tile_stored(3, c + 16 * ldc + 16, c_bytes);
  }
};
#endif

}  // namespace
