// What decoding keeps between its steps, and where the keys of a tile lie.
#pragma once

#include "paged.h"

namespace {

// Keys whose scores are held at a time.
constexpr int64_t kDecodeKeys = 128;

// Keys side by side in one block: the first one's number within the tile, and its row in the cache.
struct Run {
  int64_t first, count, row;
};

// Keys [begin, end) of a part, and of those behind it that are the same for the next heads: `heads` in all. The runs
// are the first one's.
struct Tile {
  const stepwire::DecodePart* part;
  int64_t heads, begin, end, num_runs;
  Run runs[kDecodeKeys];

  int64_t count() const { return end - begin; }
};

// In the scratch memory of one thread. `rows` is the number of query heads; steps may want some to spare.
struct DecodeState {
  float* scores;     // [rows][kDecodeKeys], a group's rows side by side
  float* weighted;   // [rows][features], in the order of pairs
  Softmax* softmax;  // [rows]
  Tile* tiles;       // the one at hand and the next
  int64_t features;

  DecodeState(const Attention& a, char* memory) : features(padded_features(a)) {
    const int64_t num_rows = rows(a);
    scores = (float*)memory;
    weighted = scores + num_rows * kDecodeKeys;
    softmax = (Softmax*)(weighted + num_rows * features);
    tiles = (Tile*)(softmax + num_rows);
  }

  void clear(int64_t num_rows) const {
    for (int64_t row = 0; row < num_rows; row++) softmax[row] = {-INFINITY, 0};
    memset(weighted, 0, num_rows * features * sizeof(float));
  }

  static int64_t padded_features(const Attention& a) { return round_up(a.head_dim, 2 * kWidth); }
  static int64_t rows_of_group(const Attention& a) { return a.group() <= 16 ? a.group() : round_up(a.group(), 16); }
  static int64_t rows(const Attention& a) { return larger(a.num_heads, rows_of_group(a)); }
  static int64_t size(const Attention& a) {
    return round_up(
        rows(a) * (int64_t)((kDecodeKeys + padded_features(a)) * sizeof(float) + sizeof(Softmax)) + 2 * sizeof(Tile),
        64);
  }
};

// Rows of the cache that are read soon come near, a few lines at a time: into the cache of the second level, since that
// of the first can wait for a few lines only, and memory is further away than that.
template <typename T>
inline void prefetch_rows(const void* cache, int64_t row, int64_t count, int64_t dim) {
  const char* from = (const char*)((const T*)cache + row * dim);
  for (int64_t at = 0; at < count * dim * (int64_t)sizeof(T); at += 64) __builtin_prefetch(from + at, 0, 2);
}

}  // namespace
