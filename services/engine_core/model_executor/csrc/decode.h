// Attention of one query token over the keys of its sequence: all heads of a group share each key and value.
#pragma once

#include "paged.h"
#include "transpose.h"

namespace {

using stepwire::DecodePart;

// Keys whose scores are held at a time.
constexpr int64_t kDecodeKeys = 128;

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

// Keys side by side in one block: the first one's number within the tile, and its row in the cache.
struct Run {
  int64_t first, count, row;
};

struct Tile {
  const DecodePart* part;
  int64_t begin, end, num_runs;
  Run runs[kDecodeKeys];
};

// The scratch memory of one thread.
template <typename T>
struct DecodeScratch {
  typename Dot<T>::Query* queries;  // [group][padded head_dim], zeros behind the head
  float* scores;                    // [group][kDecodeKeys]
  float* weighted;                  // [group][features], in the order of pairs
  Softmax* softmax;                 // [group]
  Tile* tiles;                      // the one at hand and the next
  int64_t query_stride, features;

  DecodeScratch(const Attention& a, char* memory)
      : query_stride(round_up(a.head_dim, Dot<T>::kStep)), features(round_up(a.head_dim, 2 * kWidth)) {
    queries = (typename Dot<T>::Query*)memory;
    memory += round_up(a.group() * query_stride * sizeof(*queries), 64);
    scores = (float*)memory;
    memory += a.group() * kDecodeKeys * sizeof(float);
    weighted = (float*)memory;
    memory += round_up(a.group() * features * sizeof(float), 64);
    softmax = (Softmax*)memory;
    memory += round_up(a.group() * sizeof(Softmax), 64);
    tiles = (Tile*)memory;
  }

  static int64_t size(const Attention& a) {
    const int64_t row = round_up(a.head_dim, 2 * kWidth);
    return 4 * 64 + a.group() * (int64_t)((2 * row + kDecodeKeys) * sizeof(float) + sizeof(Softmax)) + 2 * sizeof(Tile);
  }
};

inline void find_runs(const Attention& a, const DecodePart* part, int64_t begin, Tile& tile) {
  tile.part = part;
  tile.begin = begin;
  tile.end = smaller(begin + kDecodeKeys, part->end);
  tile.num_runs = 0;
  for_each_run(a, part->sequence, part->kv_head, begin, tile.end, [&](int64_t first, int64_t count, int64_t row) {
    tile.runs[tile.num_runs++] = {first - begin, count, row};
  });
}

// Rows of the cache that are read soon come near, a few lines at a time.
template <typename T>
inline void prefetch_rows(const void* cache, int64_t row, int64_t count, int64_t dim) {
  const char* from = (const char*)((const T*)cache + row * dim);
  for (int64_t at = 0; at < count * dim * (int64_t)sizeof(T); at += 64) __builtin_prefetch(from + at);
}

template <typename T, int64_t kDim>
void score_tile(const Attention& a, const Tile& tile, const DecodeScratch<T>& s) {
  const int64_t dim = kDim ? kDim : a.head_dim, group = a.group();
  for (const Run* run = tile.runs; run < tile.runs + tile.num_runs; run++) {
    const T* keys = (const T*)a.keys + run->row * dim;
    float* scores = s.scores + run->first;
    // The block goes on behind the last key: a few products too many, which no one reads, cost less than single ones.
    const int64_t room = smaller(a.block_size - run->row % a.block_size, kDecodeKeys - run->first);
    int64_t i = 0;
    for (; i < run->count && i + kWidth <= room; i += kWidth)
      for (int64_t g = 0; g < group; g++) {
        const int64_t soon = i + g * kWidth / group;
        prefetch_rows<T>(a.values, run->row + soon, i + (g + 1) * kWidth / group - soon, dim);
        store(scores + g * kDecodeKeys + i, dot_keys<T, kDim>(s.queries + g * s.query_stride, keys + i * dim, dim));
      }
    for (; i < run->count; i++)
      for (int64_t g = 0; g < group; g++)
        scores[g * kDecodeKeys + i] = dot_key<T>(s.queries + g * s.query_stride, keys + i * dim, dim);
  }
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

template <typename T, int heads>
void add_values(
    const Attention& a, const Tile& tile, const Tile* next, const DecodeScratch<T>& s, int64_t head) {
  constexpr int kPairs = kWidth == 16 ? 2 : 1, kStep = kPairs * 2 * kWidth;
  const float* weights = s.scores + head * kDecodeKeys;
  float* weighted = s.weighted + head * s.features;
  int64_t d = 0;
  // What comes next is fetched once, by the first pass over the tile.
  if (head > 0) next = nullptr;
  for (; d + kStep <= a.head_dim; d += kStep, next = nullptr)
    add_values_block<T, heads, kPairs>(a, tile, next, weights, weighted, s.features, d, 2 * kWidth);
  for (; d < a.head_dim; d += 2 * kWidth, next = nullptr)
    add_values_block<T, heads, 1>(a, tile, next, weights, weighted, s.features, d,
                                  smaller(2 * kWidth, a.head_dim - d));
}

template <typename T>
void decode_tile(const Attention& a, const Tile& tile, const Tile* next, const DecodeScratch<T>& s) {
  const int64_t count = tile.end - tile.begin, padded = round_up(count, kWidth), group = a.group();
  const Scores scores(a);
  if (a.head_dim == 64)
    score_tile<T, 64>(a, tile, s);
  else if (a.head_dim == 128)
    score_tile<T, 128>(a, tile, s);
  else
    score_tile<T, 0>(a, tile, s);
  for (int64_t g = 0; g < group; g++) {
    float* row = s.scores + g * kDecodeKeys;
    for (int64_t i = count; i < padded; i++) row[i] = -INFINITY;
    const float correction = advance(scores, row, row, padded, s.softmax[g]);
    if (correction != 1)
      for (float* at = s.weighted + g * s.features; at < s.weighted + (g + 1) * s.features; at += kWidth)
        store(at, load(at) * correction);
  }
  int64_t g = 0;
  for (; g + 4 <= group; g += 4) add_values<T, 4>(a, tile, next, s, g);
  if (group - g == 3) add_values<T, 3>(a, tile, next, s, g);
  if (group - g == 2) add_values<T, 2>(a, tile, next, s, g);
  if (group - g == 1) add_values<T, 1>(a, tile, next, s, g);
}

// `weighted` in the order of pairs.
template <typename T>
void write_decoded(const Attention& a, int64_t token, int64_t head, const float* weighted, float sum) {
  T* out = (T*)a.out + (token * a.num_heads + head) * a.head_dim;
  const float inverse = 1 / sum;
  for (int64_t d = 0; d < a.head_dim; d += 2 * kWidth) {
    const Pair pair = load_pair(weighted + d);
    store_some_of_pair(out + d, {pair.a * inverse, pair.b * inverse}, a.head_dim - d);
  }
}

template <typename T>
void begin_part(const Attention& a, const DecodePart& part, const DecodeScratch<T>& s) {
  const int64_t dim = a.head_dim, group = a.group();
  const T* query = (const T*)a.query + part.token * a.query_stride + part.kv_head * group * dim;
  for (int64_t g = 0; g < group; g++) {
    Dot<T>::prepare(s.queries + g * s.query_stride, query + g * dim, dim);
    s.softmax[g] = {-INFINITY, 0};
  }
  memset(s.weighted, 0, group * s.features * sizeof(float));
}

template <typename T>
void end_part(const Attention& a, const DecodePart& part, const DecodeScratch<T>& s) {
  const int64_t group = a.group();
  if (part.partial) {
    memcpy(part.partial, s.softmax, group * sizeof(Softmax));
    memcpy(part.partial + 2 * group, s.weighted, group * s.features * sizeof(float));
    return;
  }
  for (int64_t g = 0; g < group; g++)
    write_decoded<T>(a, part.token, part.kv_head * group + g, s.weighted + g * s.features, s.softmax[g].sum);
}

template <typename T>
void decode(const Attention& a, const DecodePart* parts, int64_t num_parts, char* memory) {
  if (num_parts == 0) return;
  const DecodeScratch<T> s(a, memory);
  memset((void*)s.queries, 0, a.group() * s.query_stride * sizeof(*s.queries));
  Tile *tile = s.tiles, *next = s.tiles + 1;
  find_runs(a, parts, parts->begin, *tile);
  for (;;) {
    const DecodePart* part = tile->part;
    const bool is_last = tile->end == part->end, is_end = is_last && part + 1 == parts + num_parts;
    if (!is_end) find_runs(a, part + is_last, is_last ? part[1].begin : tile->end, *next);
    if (tile->begin == part->begin) begin_part<T>(a, *part, s);
    decode_tile<T>(a, *tile, is_end ? nullptr : next, s);
    if (is_last) end_part<T>(a, *part, s);
    if (is_end) return;
    Tile* const done = tile;
    tile = next;
    next = done;
  }
}

template <typename T>
void merge(const Attention& a, const DecodePart* parts, int64_t num_parts) {
  const int64_t features = round_up(a.head_dim, 2 * kWidth), group = a.group();
  for (int64_t g = 0; g < group; g++) {
    float highest = -INFINITY, total = 0;
    for (int64_t p = 0; p < num_parts; p++) {
      const Softmax& state = ((const Softmax*)parts[p].partial)[g];
      highest = state.maximum > highest ? state.maximum : highest;
    }
    // The first part's memory takes the sum.
    float* weighted = parts[0].partial + 2 * group + g * features;
    for (int64_t p = 0; p < num_parts; p++) {
      const Softmax& state = ((const Softmax*)parts[p].partial)[g];
      const float factor = ::exp2f(state.maximum - highest);
      const float* from = parts[p].partial + 2 * group + g * features;
      total += state.sum * factor;
      for (int64_t d = 0; d < features; d++) weighted[d] = (p ? weighted[d] : 0) + from[d] * factor;
    }
    write_decoded<T>(a, parts[0].token, parts[0].kv_head * group + g, weighted, total);
  }
}

}  // namespace
