// Products with a matrix of int8: a scale for each column, and for each row one that is found when it comes.
//
// A row becomes two of int8: the rounded one, and what the rounding has left, 254 times as fine. One alone loses more
// than the matrix does; the second costs little, because the matrix is read once for both.
// The panels are 32 columns wide, [padded_depth / 4, 32, 4], and the depth is padded to a multiple of 64 with zeros.
#pragma once

#include "few_rows.h"

namespace {

using stepwire::Int8Product;

constexpr int64_t kInt8Columns = 32, kInt8Depth = 64;
constexpr float kFine = 254;

#if defined(__AVX512VNNI__)
inline void store_bytes(int8_t* to, IntVec numbers, int64_t count) {
  _mm512_mask_cvtepi32_storeu_epi8(to, (__mmask16)((1 << count) - 1), (__m512i)numbers);
}

// Rows of x to int8, and the scales of their fine ones: the largest number becomes 127.
template <typename T>
void quantize(const Int8Product& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const T* x = (const T*)p.x + row * p.depth;
    int8_t *coarse = p.quantized + 2 * row * p.padded_depth, *fine = coarse + p.padded_depth;
    Vec largest{};
    for_each_vector(p.depth, [&](int64_t i, int64_t count) {
      const Vec value = load_some(x + i, count);
      largest = max(largest, max(value, -value));
    });
    const float scale = maximum(largest) / 127;
    // A row of zeros has no scale.
    const float inverse = scale > 0 ? 1 / scale : 0;
    p.row_scales[row] = scale / kFine;
    // Adding 1.5 * 2^23 leaves the nearest integer in the lowest bits.
    const Vec shifter = broadcast(12582912.f);
    for_each_vector(p.depth, [&](int64_t i, int64_t count) {
      const Vec value = load_some(x + i, count) * inverse, shifted = value + shifter;
      store_bytes(coarse + i, (IntVec)shifted, count);
      store_bytes(fine + i, (IntVec)((value - (shifted - shifter)) * kFine + shifter), count);
    });
    memset(coarse + p.depth, 0, p.padded_depth - p.depth);
    memset(fine + p.depth, 0, p.padded_depth - p.depth);
  }
}

template <typename T>
inline __attribute__((always_inline)) void store_int8_result(
    const Int8Product& p, int64_t row, int64_t column, IntVec coarse, IntVec fine, int64_t count) {
  const Vec total = __builtin_convertvector(coarse, Vec) * kFine + __builtin_convertvector(fine, Vec);
  Vec result = total * (load_some(p.scales + column, count) * p.row_scales[row]);
  if (p.bias) result += load_some((const T*)p.bias + column, count);
  store_some((T*)p.out + row * p.columns + column, result, count);
}

inline const int8_t* int8_panel(const Int8Product& p, int64_t panel) {
  return p.weight + panel * kInt8Columns * p.padded_depth;
}

inline IntVec load_ints(const void* from) {
  IntVec result;
  memcpy(&result, from, sizeof result);
  return result;
}

// The instruction multiplies unsigned with signed numbers: to the former 128 is added, and taken off in the end.
constexpr int kExcess = 128;

template <typename T, int rows>
void multiply_int8_panel(const Int8Product& p, int64_t panel, int64_t row) {
  constexpr int kVectors = kInt8Columns / kWidth;
  const int8_t *weight = int8_panel(p, panel), *x = p.quantized + 2 * row * p.padded_depth;
  // Coarse and fine rows in turn.
  IntVec totals[2 * rows][kVectors] = {};
  for (int64_t k = 0; k < p.padded_depth; k += 4, weight += 4 * kInt8Columns) {
    IntVec numbers[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++) {
      __builtin_prefetch(weight + v * 4 * kWidth + kAhead);
      numbers[v] = load_ints(weight + v * 4 * kWidth);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 2 * rows; i++) {
      uint32_t bytes;
      memcpy(&bytes, x + i * p.padded_depth + k, sizeof bytes);
      const __m512i factor = _mm512_set1_epi32(bytes ^ 0x80808080u);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++)
        totals[i][v] = (IntVec)_mm512_dpbusd_epi32((__m512i)totals[i][v], factor, (__m512i)numbers[v]);
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; v++) {
    const int64_t column = panel * kInt8Columns + v * kWidth;
    const int64_t count = smaller(kWidth, p.columns - column);
    // The sums have the padding of the panels.
    const IntVec excess = load_ints(p.sums + column) * kExcess;
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
      if (count > 0)
        store_int8_result<T>(p, row + i, column, totals[2 * i][v] - excess, totals[2 * i + 1][v] - excess, count);
  }
}

template <typename T>
void multiply_int8(const Int8Product& p, int64_t begin, int64_t end) {
  for (int64_t panel = begin; panel < end; panel++) {
    int64_t row = 0;
    for (; row + 4 <= p.rows; row += 4) multiply_int8_panel<T, 4>(p, panel, row);
    if (row + 2 <= p.rows) multiply_int8_panel<T, 2>(p, panel, row), row += 2;
    for (; row < p.rows; row++) multiply_int8_panel<T, 1>(p, panel, row);
  }
}

#else
// Without such instructions it would be slower than what it replaces.
template <typename T>
constexpr void (*quantize)(const Int8Product&, int64_t, int64_t) = nullptr;
template <typename T>
constexpr void (*multiply_int8)(const Int8Product&, int64_t, int64_t) = nullptr;
#endif

#if defined(__AMX_INT8__)
// With the tile unit, as for bfloat16.
template <typename T>
struct Int8Tiles {
  static constexpr int64_t kRows = 16;

  static void multiply(const Int8Product& p, int64_t begin, int64_t end) {
    alignas(64) int32_t results[2 * kRows * kInt8Columns];
    const TileConfig tiles = config(smaller(kRows, p.rows)), last = config(p.rows % kRows);
    _tile_loadconfig(&tiles);
    for (int64_t panel = begin; panel < end; panel++) {
      int64_t row = 0;
      for (; row + kRows <= p.rows; row += kRows) block(p, panel, row, kRows, results);
      if (row == p.rows) continue;
      if (row > 0) _tile_loadconfig(&last);
      block(p, panel, row, p.rows - row, results);
      if (row > 0) _tile_loadconfig(&tiles);
    }
    _tile_release();
  }

  // Tiles 0 to 3: coarse and fine results; 4 and 5: the rows; 6 and 7: the panel.
  static TileConfig config(int64_t rows) {
    TileConfig result;
    for (int tile = 0; tile < 6; tile++) result.rows[tile] = larger(rows, 1);
    return result;
  }

  static void block(const Int8Product& p, int64_t panel, int64_t row, int64_t rows, int32_t* results) {
    multiply_panel(p, p.quantized + 2 * row * p.padded_depth, int8_panel(p, panel), results);
    for (int64_t column = 0; column < kInt8Columns; column += kWidth) {
      const int64_t at = panel * kInt8Columns + column, count = smaller(kWidth, p.columns - at);
      if (count <= 0) return;
      for (int64_t i = 0; i < rows; i++)
        store_int8_result<T>(p, row + i, at, load_ints(results + i * kInt8Columns + column),
                             load_ints(results + (kRows + i) * kInt8Columns + column), count);
    }
  }

  static void multiply_panel(const Int8Product& p, const int8_t* x, const int8_t* weight, int32_t* results) {
    constexpr int64_t kPanelBytes = kInt8Columns * 4, kBytes = kInt8Depth * kInt8Columns;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < p.padded_depth; k += kInt8Depth, weight += kBytes) {
      for (int64_t at = 0; at < kBytes; at += 64) __builtin_prefetch(weight + kAhead + at);
      _tile_loadd(6, weight, kPanelBytes);
      _tile_loadd(7, weight + 64, kPanelBytes);
      _tile_loadd(4, x + k, 2 * p.padded_depth);
      _tile_loadd(5, x + p.padded_depth + k, 2 * p.padded_depth);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, results, kPanelBytes);
    _tile_stored(1, results + 16, kPanelBytes);
    _tile_stored(2, results + kRows * kInt8Columns, kPanelBytes);
    _tile_stored(3, results + kRows * kInt8Columns + 16, kPanelBytes);
  }
};
#endif

}  // namespace
