// The steps of decoding with vectors: one head's products with a vector's width of keys at a time.
#pragma once

#include "decode_state.h"
#include "transpose.h"

namespace {

// Products of queries and keys: how many numbers one step takes, and in which form the query is kept.
template <typename T>
struct Dot {
  // In the order of pairs.
  typedef float Query;
  typedef Pair Numbers;
  static constexpr int kStep = 2 * kWidth;
  static Pair key(const T* from, int64_t count) { return load_some_of_pair(from, count); }
  static Pair query(const float* from) { return load_pair(from); }
  static Vec add(Vec total, Pair x, Pair y) { return fma(x.b, y.b, fma(x.a, y.a, total)); }
  static void prepare(float* to, const T* from, int64_t n) {
    for (int64_t i = 0; i < n; i += kStep) store_pair(to + i, load_some_of_pair(from + i, n - i));
  }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<bfloat16> {
  typedef bfloat16 Query;
  typedef __m512bh Numbers;
  static constexpr int kStep = 2 * kWidth;
  static __m512bh key(const bfloat16* from, int64_t count) {
    if (count >= kStep) return (__m512bh)_mm512_loadu_si512(from);
    return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), from);
  }
  static __m512bh query(const bfloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static Vec add(Vec total, __m512bh x, __m512bh y) { return (Vec)_mm512_dpbf16_ps((__m512)total, x, y); }
  static void prepare(bfloat16* to, const bfloat16* from, int64_t n) { memcpy(to, from, n * sizeof(bfloat16)); }
};
#endif

// Lane i of the result: query . key i, for kWidth keys side by side. kDim is head_dim where that is known to the
// compiler, which then needs no address of its own for each key; else 0.
template <typename T, int64_t kDim>
inline __attribute__((always_inline)) Vec dot_keys(
    const typename Dot<T>::Query* query, const T* keys, int64_t head_dim) {
  const int64_t dim = kDim ? kDim : head_dim;
  Vec totals[kWidth] = {};
  for (int64_t d = 0; d < dim; d += Dot<T>::kStep) {
    const int64_t count = kDim ? Dot<T>::kStep : dim - d;
    const typename Dot<T>::Numbers q = Dot<T>::query(query + d);
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; i++) totals[i] = Dot<T>::add(totals[i], q, Dot<T>::key(keys + i * dim + d, count));
  }
  return sums(totals);
}

template <typename T>
inline float dot_key(const typename Dot<T>::Query* query, const T* key, int64_t head_dim) {
  Vec total{};
  for (int64_t d = 0; d < head_dim; d += Dot<T>::kStep)
    total = Dot<T>::add(total, Dot<T>::query(query + d), Dot<T>::key(key + d, head_dim - d));
  return sum(total);
}

// Keys or values of one head that lie in one block.
struct Visit {
  const void* cache;
  Run run;
};

// weighted[g][d ..] += sum over the run of weight * value, for `heads` heads and `pairs` pairs of vectors of features,
// of the last of which `last` are features. Meanwhile rows of `ahead` come near.
template <typename T, int heads, int pairs>
inline __attribute__((always_inline)) void add_values_block(
    const T* values, int64_t dim, int64_t count, Visit ahead, const float* weights, float* weighted, int64_t stride,
    int64_t last) {
  Pair totals[heads][pairs];
  for (int g = 0; g < heads; g++)
    for (int p = 0; p < pairs; p++) totals[g][p] = load_pair(weighted + g * stride + p * 2 * kWidth);
  for (int64_t i = 0; i < count; i++) {
    if (i < ahead.run.count) prefetch_rows<T>(ahead.cache, ahead.run.row + i, 1, dim);
    Pair value[pairs];
#pragma GCC unroll 8
    for (int p = 0; p < pairs; p++)
      value[p] = p + 1 < pairs ? load_pair(values + i * dim + p * 2 * kWidth)
                               : load_some_of_pair(values + i * dim + p * 2 * kWidth, last);
#pragma GCC unroll 8
    for (int g = 0; g < heads; g++) {
      const Vec weight = broadcast(weights[g * kDecodeKeys + i]);
#pragma GCC unroll 8
      for (int p = 0; p < pairs; p++) {
        totals[g][p].a = fma(weight, value[p].a, totals[g][p].a);
        totals[g][p].b = fma(weight, value[p].b, totals[g][p].b);
      }
    }
  }
  for (int g = 0; g < heads; g++)
    for (int p = 0; p < pairs; p++) store_pair(weighted + g * stride + p * 2 * kWidth, totals[g][p]);
}

// Blocks are visited one after the other, each for all heads, as they lie in memory: first a tile's keys, then its
// values.
template <typename T>
struct VectorSteps {
  typedef T Number;
  static constexpr int64_t kPadding = kWidth;
  static constexpr bool kHeadsTogether = true;
  // A block is fetched so many visits before its own, and at least one block before.
  static constexpr int64_t kVisitsAhead = 6;

  const Attention& a;
  const DecodeState& s;
  typename Dot<T>::Query* queries;  // [rows][padded head_dim], zeros behind the head
  const int64_t query_stride;
  float* weights;  // [rows][kDecodeKeys], in the place of the scores

  static int64_t size(const Attention& a) {
    return round_up(a.num_heads * round_up(a.head_dim, Dot<T>::kStep) * sizeof(typename Dot<T>::Query), 64);
  }

  VectorSteps(const Attention& a, const DecodeState& s, char* memory)
      : a(a), s(s), queries((typename Dot<T>::Query*)memory), query_stride(round_up(a.head_dim, Dot<T>::kStep)),
        weights(s.scores) {
    memset((void*)queries, 0, size(a));
  }

  void begin(const T* query, int64_t heads) {
    for (int64_t row = 0; row < heads * a.group(); row++)
      Dot<T>::prepare(queries + row * query_stride, query + row * a.head_dim, a.head_dim);
  }

  // Of one head, behind so many other blocks of the tile: first come its keys, then its values, then the next tile.
  // Behind that is nothing.
  Visit visit(const Tile& tile, const Tile* next, int64_t block, int64_t head) const {
    const int64_t n = tile.num_runs;
    if (block >= 2 * n && next) return visit(*next, nullptr, block - 2 * n, head);
    if (block >= 2 * n || head >= tile.heads) return {a.keys, {0, 0, 0}};
    Run run = tile.runs[block % n];
    run.row += head * a.block_size;
    return {block < n ? a.keys : a.values, run};
  }

  static int64_t blocks_ahead(const Tile& tile) { return larger(1, kVisitsAhead / tile.heads); }

  void score(const Tile& tile, const Tile* next) {
    if (a.head_dim == 64)
      score_with<64>(tile, next);
    else if (a.head_dim == 128)
      score_with<128>(tile, next);
    else
      score_with<0>(tile, next);
  }

  template <int64_t kDim>
  void score_with(const Tile& tile, const Tile* next) {
    for (int64_t block = 0; block < tile.num_runs; block++)
      for (int64_t head = 0; head < tile.heads; head++)
        score_run<kDim>(visit(tile, next, block, head).run, visit(tile, next, block + blocks_ahead(tile), head),
                        head * a.group());
  }

  // The rows of a group begin at `row`.
  template <int64_t kDim>
  void score_run(const Run& run, const Visit& ahead, int64_t row) {
    const int64_t dim = kDim ? kDim : a.head_dim, group = a.group(), room = readable(run);
    const T* keys = (const T*)a.keys + run.row * dim;
    float* scores = s.scores + row * kDecodeKeys + run.first;
    int64_t i = 0;
    for (; i < run.count && i + kWidth <= room; i += kWidth)
      for (int64_t g = 0; g < group; g++) {
        fetch(ahead, i + g * kWidth / group, i + (g + 1) * kWidth / group, dim);
        store(scores + g * kDecodeKeys + i,
              dot_keys<T, kDim>(queries + (row + g) * query_stride, keys + i * dim, dim));
      }
    fetch(ahead, i, ahead.run.count, dim);
    score_singly(run, i, row);
  }

  // Those of rows [begin, end) that are there.
  static void fetch(const Visit& ahead, int64_t begin, int64_t end, int64_t dim) {
    prefetch_rows<T>(ahead.cache, ahead.run.row + begin, smaller(end, ahead.run.count) - begin, dim);
  }

  // The block goes on behind the last key: a few products too many, which no one reads, cost less than single ones.
  int64_t readable(const Run& run) const {
    return smaller(a.block_size - run.row % a.block_size, kDecodeKeys - run.first);
  }

  void score_singly(const Run& run, int64_t begin, int64_t row) {
    for (int64_t i = begin; i < run.count; i++)
      for (int64_t g = 0; g < a.group(); g++)
        s.scores[(row + g) * kDecodeKeys + run.first + i] =
            dot_key<T>(queries + (row + g) * query_stride, (const T*)a.keys + (run.row + i) * a.head_dim, a.head_dim);
  }

  void add(const Tile& tile, const Tile* next) {
    const int64_t n = tile.num_runs;
    for (int64_t block = n; block < 2 * n; block++)
      for (int64_t head = 0; head < tile.heads; head++)
        add_run(visit(tile, next, block, head).run, visit(tile, next, block + blocks_ahead(tile), head),
                head * a.group());
  }

  void add_run(const Run& run, Visit ahead, int64_t row) {
    const int64_t end = row + a.group();
    fetch(ahead, run.count, ahead.run.count, a.head_dim);
    // The others are fetched once, by the first pass over the run.
    for (; row + 4 <= end; row += 4, ahead.run.count = 0) add_heads<4>(run, ahead, row);
    if (end - row == 3) add_heads<3>(run, ahead, row);
    if (end - row == 2) add_heads<2>(run, ahead, row);
    if (end - row == 1) add_heads<1>(run, ahead, row);
  }

  template <int heads>
  void add_heads(const Run& run, Visit ahead, int64_t row) {
    constexpr int kPairs = kWidth == 16 ? 2 : 1, kStep = kPairs * 2 * kWidth;
    const int64_t dim = a.head_dim;
    const T* values = (const T*)a.values + run.row * dim;
    const float* from = weights + row * kDecodeKeys + run.first;
    float* weighted = s.weighted + row * s.features;
    int64_t d = 0;
    for (; d + kStep <= dim; d += kStep, ahead.run.count = 0)
      add_values_block<T, heads, kPairs>(
          values + d, dim, run.count, ahead, from, weighted + d, s.features, 2 * kWidth);
    for (; d < dim; d += 2 * kWidth, ahead.run.count = 0)
      add_values_block<T, heads, 1>(values + d, dim, run.count, ahead, from, weighted + d, s.features, dim - d);
  }
};

}  // namespace
