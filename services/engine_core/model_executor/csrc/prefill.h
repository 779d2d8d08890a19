// Attention of several query tokens of a sequence: tiles of queries times tiles of keys, as small matrix products.
#pragma once

#include "paged.h"
#include "product.h"

namespace {

using stepwire::PrefillTile;

inline void convert(float* to, const float* from, int64_t n) { memcpy(to, from, n * sizeof(float)); }

inline void convert(float* to, const bfloat16* from, int64_t n) {
  for_each_vector(n, [&](int64_t i, int64_t count) { store_some(to + i, load_some(from + i, count), count); });
}

inline void convert(bfloat16* to, const bfloat16* from, int64_t n) { memcpy(to, from, n * sizeof(bfloat16)); }

// Every tile packs all keys that it sees: the more rows, the less of that. Scores and weights fill half of a core's cache.
constexpr int64_t kTileRows = 384;
constexpr int64_t kTileKeys = 128;

// All heads of a group and several query tokens make the rows of one tile: row = token * group + head.
inline int64_t tile_queries(const Attention& a) { return larger(1, kTileRows / a.group()); }

template <typename Product, typename T>
struct Prefill {
  typedef typename Product::A Number;

  const Attention& a;
  const PrefillTile& tile;
  // Features as the products need them: as columns of values and results, and as the depth of queries and keys.
  const int64_t dim, columns, depth;
  int64_t num_rows, first_position;
  Number *queries, *weights;
  float *keys, *values, *scores, *weighted;
  Softmax* softmax;

  static int64_t padded_columns(const Attention& a) { return round_up(a.head_dim, Product::kColumns); }
  static int64_t padded_depth(const Attention& a) { return round_up(a.head_dim, Product::kDepth); }
  static int64_t padded_rows(const Attention& a) { return round_up(tile_queries(a) * a.group(), Product::kRows); }

  static int64_t size(const Attention& a) {
    const int64_t rows = padded_rows(a);
    return 7 * 64 + rows * (padded_depth(a) + kTileKeys) * sizeof(Number) +
           (Product::b_size(padded_depth(a), kTileKeys) + Product::b_size(kTileKeys, padded_columns(a)) +
            rows * (kTileKeys + padded_columns(a))) *
               sizeof(float) +
           rows * sizeof(Softmax);
  }

  template <typename U>
  static void take(U*& pointer, char*& memory, int64_t count) {
    pointer = (U*)memory;
    memory += round_up(count * sizeof(U), 64);
  }

  Prefill(const Attention& a, const PrefillTile& tile, char* memory)
      : a(a), tile(tile), dim(a.head_dim), columns(padded_columns(a)), depth(padded_depth(a)) {
    const int64_t rows = padded_rows(a);
    num_rows = (tile.end - tile.begin) * a.group();
    const int64_t num_queries = a.query_starts[tile.sequence + 1] - a.query_starts[tile.sequence];
    first_position = a.seq_lens[tile.sequence] - num_queries + tile.begin;
    take(queries, memory, rows * depth);
    take(weights, memory, rows * kTileKeys);
    take(keys, memory, Product::b_size(depth, kTileKeys));
    take(values, memory, Product::b_size(kTileKeys, columns));
    take(scores, memory, rows * kTileKeys);
    take(weighted, memory, rows * columns);
    take(softmax, memory, rows);
  }

  void start() {
    const int64_t group = a.group(), start = a.query_starts[tile.sequence] + tile.begin;
    memset((void*)queries, 0, num_rows * depth * sizeof(Number));
    memset(weighted, 0, num_rows * columns * sizeof(float));
    // What lies behind the last feature must be zeros, or at least numbers.
    memset(keys, 0, Product::b_size(depth, kTileKeys) * sizeof(float));
    memset(values, 0, Product::b_size(kTileKeys, columns) * sizeof(float));
    for (int64_t row = 0; row < num_rows; row++) {
      const int64_t token = start + row / group, head = tile.kv_head * group + row % group;
      convert(queries + row * depth, (const T*)a.query + token * a.query_stride + head * dim, dim);
      softmax[row] = {-INFINITY, 0};
    }
  }

  // Behind the last key stay numbers of an earlier tile: finite ones, which no weight but 0 will meet.
  void pack(int64_t begin, int64_t end) {
    for_each_run(a, tile.sequence, tile.kv_head, begin, end, [&](int64_t first, int64_t count, int64_t row) {
      Product::pack_keys(keys, kTileKeys, first - begin, (const T*)a.keys + row * dim, count, dim);
      Product::pack_values(values, columns, first - begin, (const T*)a.values + row * dim, count, dim);
    });
  }

  // The scores of one row over the keys [begin, begin + padded) become weights.
  void weigh(int64_t row, int64_t begin, int64_t end, int64_t padded) {
    const int64_t position = first_position + row / a.group();
    const int64_t oldest = a.window ? larger(0, position - a.window + 1) : 0;
    const int64_t low = larger(oldest - begin, 0), high = smaller(end, position + 1) - begin;
    Number* to = weights + row * kTileKeys;
    if (high <= low) {
      memset((void*)to, 0, padded * sizeof(Number));
      return;
    }
    float* from = scores + row * kTileKeys;
    const int64_t first = low / kWidth * kWidth, last = round_up(high, kWidth);
    for (int64_t i = first; i < low; i++) from[i] = -INFINITY;
    for (int64_t i = high; i < last; i++) from[i] = -INFINITY;
    memset((void*)to, 0, first * sizeof(Number));
    memset((void*)(to + last), 0, (padded - last) * sizeof(Number));
    const float correction = advance(Scores(a), from + first, to + first, last - first, softmax[row]);
    if (correction != 1)
      for (int64_t d = 0; d < columns; d += kWidth)
        store(weighted + row * columns + d, load(weighted + row * columns + d) * correction);
  }

  // One row of results, its sum taken out.
  void write(int64_t token, int64_t head, const float* from, float sum) {
    T* out = (T*)a.out + (token * a.num_heads + head) * dim;
    const float inverse = 1 / sum;
    for_each_vector(dim, [&](int64_t d, int64_t n) { store_some(out + d, load_some(from + d, n) * inverse, n); });
  }

  void finish() {
    const int64_t group = a.group(), start = a.query_starts[tile.sequence] + tile.begin;
    for (int64_t row = 0; row < num_rows; row++)
      write(start + row / group, tile.kv_head * group + row % group, weighted + row * columns, softmax[row].sum);
  }

  void run() {
    const int64_t end = first_position + tile.end - tile.begin;
    const int64_t oldest = a.window ? larger(0, first_position - a.window + 1) : 0;
    start();
    Product::begin();
    for (int64_t key = oldest / a.block_size * a.block_size; key < end; key += kTileKeys) {
      const int64_t last = smaller(key + kTileKeys, end), padded = round_up(last - key, 2 * kWidth);
      pack(key, last);
      Product::multiply(num_rows, padded, depth, queries, depth, keys, kTileKeys, scores, kTileKeys, false);
      for (int64_t row = 0; row < num_rows; row++) weigh(row, key, last, padded);
      Product::multiply(num_rows, columns, padded, weights, kTileKeys, values, columns, weighted, columns, true);
    }
    Product::end();
    finish();
  }
};

}  // namespace
