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
  typedef float Query;
  typedef Vec Numbers;
  static constexpr int kStep = kWidth;
  static Vec key(const T* from, int64_t count) { return load_some(from, count); }
  static Vec query(const float* from) { return load(from); }
  static Vec add(Vec total, Vec a, Vec b) { return fma(a, b, total); }
};

inline void convert(float* to, const float* from, int64_t n) { memcpy(to, from, n * sizeof(float)); }

inline void convert(float* to, const bfloat16* from, int64_t n) {
  for_each_vector(n, [&](int64_t i, int64_t count) { store_some(to + i, load_some(from + i, count), count); });
}

inline void convert(bfloat16* to, const bfloat16* from, int64_t n) { memcpy(to, from, n * sizeof(bfloat16)); }

#if defined(__AVX512BF16__)
template <>
struct Dot<bfloat16> {
  typedef bfloat16 Query;
  typedef __m512bh Numbers;
  static constexpr int kStep = 2 * kWidth;
  static __m512bh key(const bfloat16* from, int64_t count) {
    if (count == kStep) return (__m512bh)_mm512_loadu_si512(from);
    return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), from);
  }
  static __m512bh query(const bfloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static Vec add(Vec total, __m512bh a, __m512bh b) { return (Vec)_mm512_dpbf16_ps((__m512)total, a, b); }
};
#endif

// products[i] = query . key i, for kWidth keys, `stride` numbers apart.
template <typename T>
inline __attribute__((always_inline)) Vec dot_keys(
    const typename Dot<T>::Query* query, const T* keys, int64_t head_dim, int64_t stride) {
  Vec totals[kWidth] = {};
  for (int64_t d = 0; d < head_dim; d += Dot<T>::kStep) {
    const int64_t count = smaller(Dot<T>::kStep, head_dim - d);
    const typename Dot<T>::Numbers q = Dot<T>::query(query + d);
    if (count == Dot<T>::kStep) {
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; i++)
        totals[i] = Dot<T>::add(totals[i], q, Dot<T>::key(keys + i * stride + d, Dot<T>::kStep));
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; i++) totals[i] = Dot<T>::add(totals[i], q, Dot<T>::key(keys + i * stride + d, count));
    }
  }
  return sums(totals);
}

template <typename T>
inline float dot_key(const typename Dot<T>::Query* query, const T* key, int64_t head_dim) {
  Vec total{};
  for (int64_t d = 0; d < head_dim; d += Dot<T>::kStep)
    total = Dot<T>::add(total, Dot<T>::query(query + d), Dot<T>::key(key + d, smaller(Dot<T>::kStep, head_dim - d)));
  return sum(total);
}

// The scratch memory of one thread.
template <typename T>
struct DecodeScratch {
  typename Dot<T>::Query* queries;  // [group][padded head_dim], zeros behind the head
  float* scores;                    // [group][kDecodeKeys]
  float* weighted;                  // [group][head_dim]
  Softmax* softmax;                 // [group]
  int64_t query_stride;

  DecodeScratch(const Attention& a, char* memory) : query_stride(round_up(a.head_dim, Dot<T>::kStep)) {
    queries = (typename Dot<T>::Query*)memory;
    memory += round_up(a.group() * query_stride * sizeof(*queries), 64);
    scores = (float*)memory;
    memory += a.group() * kDecodeKeys * sizeof(float);
    weighted = (float*)memory;
    memory += round_up(a.group() * a.head_dim * sizeof(float), 64);
    softmax = (Softmax*)memory;
  }

  static int64_t size(const Attention& a) {
    const int64_t row = round_up(a.head_dim, Dot<T>::kStep);
    return 192 + a.group() * (int64_t)((2 * row + kDecodeKeys) * sizeof(float) + sizeof(Softmax));
  }
};

template <typename T>
void score_tile(const Attention& a, const DecodePart& part, const DecodeScratch<T>& s, int64_t begin, int64_t end) {
  const int64_t dim = a.head_dim, group = a.group();
  for_each_run(a, part.sequence, part.kv_head, begin, end, [&](int64_t first, int64_t count, int64_t row) {
    const T* keys = (const T*)a.keys + row * dim;
    const char* values = (const char*)((const T*)a.values + row * dim);
    for (int64_t at = 0; at < count * dim * (int64_t)sizeof(T); at += 64) __builtin_prefetch(values + at);
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth)
      for (int64_t g = 0; g < group; g++)
        store(s.scores + g * kDecodeKeys + first - begin + i,
              dot_keys<T>(s.queries + g * s.query_stride, keys + i * dim, dim, dim));
    for (; i < count; i++)
      for (int64_t g = 0; g < group; g++)
        s.scores[g * kDecodeKeys + first - begin + i] =
            dot_key<T>(s.queries + g * s.query_stride, keys + i * dim, dim);
  });
}

// weighted[g][d ..] += sum over the tile of weight * value, for `heads` heads and `vectors` vectors of features.
template <typename T, int heads, int vectors>
inline __attribute__((always_inline)) void add_values_block(
    const Attention& a, const DecodePart& part, const float* weights, float* weighted, int64_t d, int64_t last,
    int64_t begin, int64_t end) {
  const int64_t dim = a.head_dim;
  Vec totals[heads][vectors];
  for (int g = 0; g < heads; g++)
    for (int v = 0; v < vectors; v++)
      totals[g][v] = load_some(weighted + g * dim + d + v * kWidth, v + 1 == vectors ? last : kWidth);
  for_each_run(a, part.sequence, part.kv_head, begin, end, [&](int64_t first, int64_t count, int64_t row) {
    const T* values = (const T*)a.values + row * dim + d;
    for (int64_t i = 0; i < count; i++) {
      Vec value[vectors];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; v++)
        value[v] = load_some(values + i * dim + v * kWidth, v + 1 == vectors ? last : kWidth);
#pragma GCC unroll 8
      for (int g = 0; g < heads; g++) {
        const Vec weight = broadcast(weights[g * kDecodeKeys + first - begin + i]);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) totals[g][v] = fma(weight, value[v], totals[g][v]);
      }
    }
  });
  for (int g = 0; g < heads; g++)
    for (int v = 0; v < vectors; v++)
      store_some(weighted + g * dim + d + v * kWidth, totals[g][v], v + 1 == vectors ? last : kWidth);
}

template <typename T, int heads>
void add_values(
    const Attention& a, const DecodePart& part, const float* weights, float* weighted, int64_t begin, int64_t end) {
  constexpr int kVectors = kWidth == 16 ? 4 : 2;
  int64_t d = 0;
  for (; d + kVectors * kWidth <= a.head_dim; d += kVectors * kWidth)
    add_values_block<T, heads, kVectors>(a, part, weights, weighted, d, kWidth, begin, end);
  for (; d + kWidth <= a.head_dim; d += kWidth)
    add_values_block<T, heads, 1>(a, part, weights, weighted, d, kWidth, begin, end);
  if (d < a.head_dim) add_values_block<T, heads, 1>(a, part, weights, weighted, d, a.head_dim - d, begin, end);
}

template <typename T>
void decode_tile(const Attention& a, const DecodePart& part, const DecodeScratch<T>& s, int64_t begin, int64_t end) {
  const int64_t count = end - begin, padded = round_up(count, kWidth), dim = a.head_dim, group = a.group();
  const Scores scores(a);
  score_tile<T>(a, part, s, begin, end);
  for (int64_t g = 0; g < group; g++) {
    float* row = s.scores + g * kDecodeKeys;
    for (int64_t i = count; i < padded; i++) row[i] = -INFINITY;
    const float correction = advance(scores, row, row, padded, s.softmax[g]);
    if (correction != 1)
      for_each_vector(dim, [&](int64_t d, int64_t n) {
        store_some(s.weighted + g * dim + d, load_some(s.weighted + g * dim + d, n) * correction, n);
      });
  }
  int64_t g = 0;
  for (; g + 4 <= group; g += 4)
    add_values<T, 4>(a, part, s.scores + g * kDecodeKeys, s.weighted + g * dim, begin, end);
  if (group - g == 3) add_values<T, 3>(a, part, s.scores + g * kDecodeKeys, s.weighted + g * dim, begin, end);
  if (group - g == 2) add_values<T, 2>(a, part, s.scores + g * kDecodeKeys, s.weighted + g * dim, begin, end);
  if (group - g == 1) add_values<T, 1>(a, part, s.scores + g * kDecodeKeys, s.weighted + g * dim, begin, end);
}

template <typename T>
void write_result(const Attention& a, int64_t token, int64_t head, const float* weighted, float sum) {
  T* out = (T*)a.out + (token * a.num_heads + head) * a.head_dim;
  const float inverse = 1 / sum;
  for_each_vector(a.head_dim, [&](int64_t d, int64_t n) {
    store_some(out + d, load_some(weighted + d, n) * inverse, n);
  });
}

template <typename T>
void decode(const Attention& a, const DecodePart* parts, int64_t num_parts, char* memory) {
  const DecodeScratch<T> s(a, memory);
  const int64_t dim = a.head_dim, group = a.group();
  memset((void*)s.queries, 0, group * s.query_stride * sizeof(*s.queries));
  for (const DecodePart* part = parts; part < parts + num_parts; part++) {
    const int64_t first_head = part->kv_head * group;
    const T* query = (const T*)a.query + part->token * a.query_stride + first_head * dim;
    for (int64_t g = 0; g < group; g++) {
      convert(s.queries + g * s.query_stride, query + g * dim, dim);
      s.softmax[g] = {-INFINITY, 0};
    }
    memset(s.weighted, 0, group * dim * sizeof(float));
    for (int64_t begin = part->begin; begin < part->end; begin += kDecodeKeys)
      decode_tile<T>(a, *part, s, begin, smaller(begin + kDecodeKeys, part->end));
    if (part->partial) {
      memcpy(part->partial, s.softmax, group * sizeof(Softmax));
      memcpy(part->partial + 2 * group, s.weighted, group * dim * sizeof(float));
    } else {
      for (int64_t g = 0; g < group; g++)
        write_result<T>(a, part->token, first_head + g, s.weighted + g * dim, s.softmax[g].sum);
    }
  }
}

template <typename T>
void merge(const Attention& a, const DecodePart* parts, int64_t num_parts) {
  const int64_t dim = a.head_dim, group = a.group();
  for (int64_t g = 0; g < group; g++) {
    float highest = -INFINITY, total = 0;
    for (int64_t p = 0; p < num_parts; p++) {
      const Softmax& state = ((const Softmax*)parts[p].partial)[g];
      highest = state.maximum > highest ? state.maximum : highest;
    }
    // The first part's memory takes the sum.
    float* weighted = parts[0].partial + 2 * group + g * dim;
    for (int64_t p = 0; p < num_parts; p++) {
      const Softmax& state = ((const Softmax*)parts[p].partial)[g];
      const float factor = ::exp2f(state.maximum - highest);
      const float* from = parts[p].partial + 2 * group + g * dim;
      total += state.sum * factor;
      for (int64_t d = 0; d < dim; d++) weighted[d] = (p ? weighted[d] : 0) + from[d] * factor;
    }
    write_result<T>(a, parts[0].token, parts[0].kv_head * group + g, weighted, total);
  }
}

}  // namespace
