// Products of a few rows with a large matrix: the matrix streams through once, and all rows take part in each number
// of it while it is in a register. Reading it is what such a product costs, so that the reads must never wait.
#pragma once

#include "product.h"

namespace {

using stepwire::PackedProduct;

// How far ahead of its use a panel is fetched, in bytes: hardware stops at the end of a page.
constexpr int64_t kAhead = 4096;

#if defined(__AVX512BF16__)
template <typename T>
inline const T* panel_of(const PackedProduct& p, int64_t panel) {
  return (const T*)p.weight + panel * p.panel_columns * p.panel_depth;
}

// out[row][column ..] = total + bias, for `count` columns.
template <typename T>
inline __attribute__((always_inline)) void store_result(
    const PackedProduct& p, int64_t row, int64_t column, Vec total, int64_t count) {
  if (p.bias) total += load_some((const T*)p.bias + column, count);
  store_some((T*)p.out + row * p.columns + column, total, count);
}

// totals: [rows, vectors], for the columns from `column` on. Not inline: it would be most of each kernel's code.
template <typename T>
__attribute__((noinline)) void store_results(
    const PackedProduct& p, int64_t row, int64_t rows, int64_t column, int64_t vectors, const Vec* totals) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t v = 0; v < vectors; v++) {
      const int64_t at = column + v * kWidth, count = smaller(kWidth, p.columns - at);
      if (count > 0) store_result<T>(p, row + i, at, totals[i * vectors + v], count);
    }
}

// One vector of a panel: for each column as many numbers of its depth as lie side by side.
template <typename T>
struct Stream {
  static constexpr int kDepth = 1;
  typedef Vec Numbers;
  typedef Vec Factor;
  static Vec numbers(const T* from) { return load(from); }
  static Vec factor(const T* x, int64_t) { return broadcast(*x); }
  static Vec add(Vec total, Vec factor, Vec numbers) { return fma(factor, numbers, total); }
};

template <>
struct Stream<bfloat16> {
  static constexpr int kDepth = 2;
  static uint32_t pair(const bfloat16* x, int64_t count) {
    // Not one memcpy of either size: that would be a call.
    if (count < 2) return x->bits;
    uint32_t bits;
    memcpy(&bits, x, sizeof bits);
    return bits;
  }
  typedef __m512bh Numbers;
  typedef __m512bh Factor;
  static Numbers numbers(const bfloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static Factor factor(const bfloat16* x, int64_t count) { return (__m512bh)_mm512_set1_epi32(pair(x, count)); }
  static Vec add(Vec total, Factor factor, Numbers numbers) {
    return (Vec)_mm512_dpbf16_ps((__m512)total, factor, numbers);
  }
};

// What is fetched while a block of rows is multiplied: `step` bytes further on for each step along the depth. Into the
// second level's cache where memory is what all wait for: the first level's waits for fewer lines at once.
struct Ahead {
  const char* from;
  int64_t step;
  bool is_far;
};

// `vectors` vectors of columns of a panel, from column `first` of it on, for `rows` rows from `row` on.
template <typename T, int rows, int vectors>
__attribute__((noinline)) void multiply_columns(
    const PackedProduct& p, int64_t panel, int64_t first, int64_t row, Ahead ahead) {
  typedef Stream<T> S;
  const int64_t step = p.panel_columns * S::kDepth;
  const T* weight = panel_of<T>(p, panel) + first * S::kDepth;
  const T* x = (const T*)p.x + row * p.depth;
  Vec totals[rows][vectors] = {};
  for (int64_t k = 0; k < p.depth; k += S::kDepth, weight += step, ahead.from += ahead.step) {
    typename S::Numbers numbers[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      ahead.is_far ? __builtin_prefetch(ahead.from + v * 64, 0, 2) : __builtin_prefetch(ahead.from + v * 64, 0, 3);
      numbers[v] = S::numbers(weight + v * kWidth * S::kDepth);
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
      const typename S::Factor factor = S::factor(x + i * p.depth + k, p.depth - k);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) totals[i][v] = S::add(totals[i][v], factor, numbers[v]);
    }
  }
  // A copy: what a pointer is taken of would not stay in registers.
  Vec results[rows][vectors];
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) results[i][v] = totals[i][v];
  store_results<T>(p, row, rows, panel * p.panel_columns + first, vectors, results[0]);
}

template <typename T, int rows>
void multiply_panel(const PackedProduct& p, int64_t panel, int64_t row, Ahead ahead) {
  for (int64_t first = 0, vectors; first < p.panel_columns; first += vectors * kWidth) {
    const int64_t rest = (p.panel_columns - first) / kWidth;
    const Ahead here{ahead.from + first * 4, ahead.step, ahead.is_far};
    vectors = rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
    if (vectors == 4) multiply_columns<T, rows, 4>(p, panel, first, row, here);
    if (vectors == 2) multiply_columns<T, rows, 2>(p, panel, first, row, here);
    if (vectors == 1) multiply_columns<T, rows, 1>(p, panel, first, row, here);
  }
}

// For at most `most` rows.
template <typename T, int most>
void multiply_rows(const PackedProduct& p, int64_t panel, int64_t row, int64_t rows, Ahead ahead) {
  if constexpr (most > 1)
    if (rows < most) return multiply_rows<T, most - 1>(p, panel, row, rows, ahead);
  multiply_panel<T, most>(p, panel, row, ahead);
}

template <typename Product, typename T>
struct FewRows {
  static constexpr int64_t kMost = 1024, kMostOfLayers = 4096;
  // With four vectors of columns: their sums and what those are made of just fit the registers.
  static constexpr int64_t kRows = 6;
  // With more blocks a panel takes longer to multiply than to read.
  static constexpr int64_t kFarBlocks = 2;

  static void multiply(const PackedProduct& p, int64_t begin, int64_t end) {
    // A step that ends no prompt asks for the logits of no row.
    if (p.rows == 0) return;
    const int64_t blocks = (p.rows + kRows - 1) / kRows;
    const int64_t bytes = p.panel_depth * p.panel_columns * sizeof(T), step = p.panel_columns * 4 / blocks;
    for (int64_t panel = begin; panel < end; panel++)
      // Blocks alike: a single row left over would take as long as four.
      for (int64_t block = 0; block < blocks; block++) {
        const int64_t row = p.rows * block / blocks, rows = p.rows * (block + 1) / blocks - row;
        // The first block of a panel reads it from memory. Would the others leave memory idle, it would be the slowest:
        // each fetches its share of the next panel.
        const char* ahead = (const char*)panel_of<T>(p, panel) + (blocks > 1 ? bytes + bytes * block / blocks : kAhead);
        multiply_rows<T, kRows>(p, panel, row, rows, {ahead, step, blocks <= kFarBlocks});
      }
  }
};

#else
// With shorter vectors it would not be faster than oneDNN.
template <typename Product, typename T>
struct FewRows {
  static constexpr int64_t kMost = 0, kMostOfLayers = 0;
  static constexpr void (*multiply)(const PackedProduct&, int64_t, int64_t) = nullptr;
};
#endif

#if defined(__AMX_BF16__)
// With the tile unit, which takes 32 rows at once as fast as memory delivers the panels.
template <>
struct FewRows<TileProduct, bfloat16> {
  static constexpr int64_t kMost = 64, kMostOfLayers = 1024;
  static constexpr int64_t kRows = 32, kColumns = 32, kDepth = 32;

  static void multiply(const PackedProduct& p, int64_t begin, int64_t end) {
    if (p.panel_columns != kColumns || p.depth % kDepth) return FewRows<DotProduct, bfloat16>::multiply(p, begin, end);
    alignas(64) float results[kRows * kColumns];
    const TileConfig tiles = config(smaller(kRows, p.rows)), last = config(p.rows % kRows);
    _tile_loadconfig(&tiles);
    for (int64_t index = begin; index < end; index++) {
      int64_t row = 0;
      for (; row + kRows <= p.rows; row += kRows) block<true>(p, index, row, kRows, results);
      if (row == p.rows) continue;
      if (row > 0) _tile_loadconfig(&last);
      p.rows - row > 16 ? block<true>(p, index, row, p.rows - row, results)
                        : block<false>(p, index, row, p.rows - row, results);
      if (row > 0) _tile_loadconfig(&tiles);
    }
    _tile_release();
  }

  // Tiles 0 to 3: results; 4 and 5: the rows; 6 and 7: the panel.
  static TileConfig config(int64_t rows) {
    TileConfig result;
    result.rows[0] = result.rows[1] = result.rows[4] = larger(smaller(rows, 16), 1);
    result.rows[2] = result.rows[3] = result.rows[5] = larger(rows - 16, 1);
    return result;
  }

  // has_high: more than 16 rows.
  template <bool has_high>
  static void block(const PackedProduct& p, int64_t panel, int64_t row, int64_t rows, float* results) {
    multiply_panel<has_high>(p, (const bfloat16*)p.x + row * p.depth, panel_of<bfloat16>(p, panel), results);
    for (int64_t column = 0; column < kColumns; column += kWidth) {
      const int64_t at = panel * kColumns + column, count = smaller(kWidth, p.columns - at);
      if (count <= 0) return;
      for (int64_t i = 0; i < rows; i++)
        store_result<bfloat16>(p, row + i, at, load(results + i * kColumns + column), count);
    }
  }

  template <bool has_high>
  static void multiply_panel(const PackedProduct& p, const bfloat16* x, const bfloat16* weight, float* results) {
    const int64_t row_bytes = p.depth * sizeof(bfloat16), panel_bytes = kColumns * 4;
    _tile_zero(0);
    _tile_zero(1);
    if (has_high) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t k = 0; k < p.depth; k += kDepth, weight += kDepth * kColumns) {
      for (int64_t at = 0; at < kDepth * panel_bytes / 2; at += 64) __builtin_prefetch((const char*)weight + kAhead + at);
      _tile_loadd(6, weight, panel_bytes);
      _tile_loadd(7, weight + kColumns, panel_bytes);
      _tile_loadd(4, x + k, row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (has_high) {
        _tile_loadd(5, x + 16 * p.depth + k, row_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, results, panel_bytes);
    _tile_stored(1, results + 16, panel_bytes);
    if (has_high) {
      _tile_stored(2, results + 16 * kColumns, panel_bytes);
      _tile_stored(3, results + 16 * kColumns + 16, panel_bytes);
    }
  }
};
#endif

}  // namespace
