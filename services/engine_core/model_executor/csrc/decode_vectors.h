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

// weighted[g][d ..] += sum over the tile of weight * value, for `heads` heads and `pairs` pairs of vectors of features,
// of the last of which `last` are features.
template <typename T, int heads, int pairs>
inline __attribute__((always_inline)) void add_values_block(
    const Attention& a, const Tile& tile, const Tile* next, const float* weights, float* weighted, int64_t stride,
    int64_t d, int64_t last) {
  const int64_t dim = a.head_dim;
  Pair totals[heads][pairs];
  for (int g = 0; g < heads; g++)
    for (int p = 0; p < pairs; p++) totals[g][p] = load_pair(weighted + g * stride + d + p * 2 * kWidth);
  for (int64_t r = 0; r < tile.num_runs; r++) {
    const Run run = tile.runs[r];
    const T* values = (const T*)a.values + run.row * dim + d;
    const Run ahead = next && r < next->num_runs ? next->runs[r] : Run{0, 0, 0};
    for (int64_t i = 0; i < run.count; i++) {
      if (i < ahead.count) prefetch_rows<T>(a.keys, ahead.row + i, 1, dim);
      Pair value[pairs];
#pragma GCC unroll 8
      for (int p = 0; p < pairs; p++)
        value[p] = p + 1 < pairs ? load_pair(values + i * dim + p * 2 * kWidth)
                                 : load_some_of_pair(values + i * dim + p * 2 * kWidth, last);
#pragma GCC unroll 8
      for (int g = 0; g < heads; g++) {
        const Vec weight = broadcast(weights[g * kDecodeKeys + run.first + i]);
#pragma GCC unroll 8
        for (int p = 0; p < pairs; p++) {
          totals[g][p].a = fma(weight, value[p].a, totals[g][p].a);
          totals[g][p].b = fma(weight, value[p].b, totals[g][p].b);
        }
      }
    }
  }
  for (int g = 0; g < heads; g++)
    for (int p = 0; p < pairs; p++) store_pair(weighted + g * stride + d + p * 2 * kWidth, totals[g][p]);
}

template <typename T>
struct VectorSteps {
  typedef T Number;
  static constexpr int64_t kPadding = kWidth;

  const Attention& a;
  const DecodeState& s;
  typename Dot<T>::Query* queries;  // [group][padded head_dim], zeros behind the head
  const int64_t query_stride;
  float* weights;  // [group][kDecodeKeys], in the place of the scores

  static int64_t size(const Attention& a) {
    return round_up(a.group() * round_up(a.head_dim, Dot<T>::kStep) * sizeof(typename Dot<T>::Query), 64);
  }

  VectorSteps(const Attention& a, const DecodeState& s, char* memory)
      : a(a), s(s), queries((typename Dot<T>::Query*)memory), query_stride(round_up(a.head_dim, Dot<T>::kStep)),
        weights(s.scores) {
    memset((void*)queries, 0, size(a));
  }

  void begin(const T* query) {
    for (int64_t g = 0; g < a.group(); g++)
      Dot<T>::prepare(queries + g * query_stride, query + g * a.head_dim, a.head_dim);
  }

  void score(const Tile& tile) {
    if (a.head_dim == 64)
      score_with<64>(tile);
    else if (a.head_dim == 128)
      score_with<128>(tile);
    else
      score_with<0>(tile);
  }

  template <int64_t kDim>
  void score_with(const Tile& tile) {
    const int64_t dim = kDim ? kDim : a.head_dim, group = a.group();
    for (const Run* run = tile.runs; run < tile.runs + tile.num_runs; run++) {
      const T* keys = (const T*)a.keys + run->row * dim;
      float* scores = s.scores + run->first;
      const int64_t room = readable(*run);
      int64_t i = 0;
      for (; i < run->count && i + kWidth <= room; i += kWidth)
        for (int64_t g = 0; g < group; g++) {
          const int64_t soon = i + g * kWidth / group;
          prefetch_rows<T>(a.values, run->row + soon, i + (g + 1) * kWidth / group - soon, dim);
          store(scores + g * kDecodeKeys + i, dot_keys<T, kDim>(queries + g * query_stride, keys + i * dim, dim));
        }
      score_singly(*run, i);
    }
  }

  // The block goes on behind the last key: a few products too many, which no one reads, cost less than single ones.
  int64_t readable(const Run& run) const {
    return smaller(a.block_size - run.row % a.block_size, kDecodeKeys - run.first);
  }

  void score_singly(const Run& run, int64_t begin) {
    for (int64_t i = begin; i < run.count; i++)
      for (int64_t g = 0; g < a.group(); g++)
        s.scores[g * kDecodeKeys + run.first + i] =
            dot_key<T>(queries + g * query_stride, (const T*)a.keys + (run.row + i) * a.head_dim, a.head_dim);
  }

  void add(const Tile& tile, const Tile* next) {
    const int64_t group = a.group();
    int64_t g = 0;
    for (; g + 4 <= group; g += 4) add_heads<4>(tile, next, g);
    if (group - g == 3) add_heads<3>(tile, next, g);
    if (group - g == 2) add_heads<2>(tile, next, g);
    if (group - g == 1) add_heads<1>(tile, next, g);
  }

  template <int heads>
  void add_heads(const Tile& tile, const Tile* next, int64_t head) {
    constexpr int kPairs = kWidth == 16 ? 2 : 1, kStep = kPairs * 2 * kWidth;
    const float* from = weights + head * kDecodeKeys;
    float* weighted = s.weighted + head * s.features;
    int64_t d = 0;
    // What comes next is fetched once, by the first pass over the tile.
    if (head > 0) next = nullptr;
    for (; d + kStep <= a.head_dim; d += kStep, next = nullptr)
      add_values_block<T, heads, kPairs>(a, tile, next, from, weighted, s.features, d, 2 * kWidth);
    for (; d < a.head_dim; d += 2 * kWidth, next = nullptr)
      add_values_block<T, heads, 1>(a, tile, next, from, weighted, s.features, d, a.head_dim - d);
  }
};

}  // namespace
