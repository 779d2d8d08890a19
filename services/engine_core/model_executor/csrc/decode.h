// Attention of one query token over the keys of its sequence, a tile of keys at a time. All heads of a group share each
// key and value. How a tile is scored and added up is left to steps: decode_vectors.h, decode_tiles.h.
#pragma once

#include "decode_tiles.h"

namespace {

using stepwire::DecodePart;

// How many parts from this one on are over the same keys for heads that follow each other: what they read of the cache
// lies side by side.
inline int64_t heads_together(const DecodePart* part, const DecodePart* end) {
  const DecodePart* other = part + 1;
  while (other < end && other->sequence == part->sequence && other->begin == part->begin && other->end == part->end &&
         other->kv_head == other[-1].kv_head + 1)
    other++;
  return other - part;
}

inline void find_keys(const Attention& a, const DecodePart* part, int64_t heads, int64_t begin, Tile& tile) {
  tile.part = part;
  tile.heads = heads;
  tile.begin = begin;
  tile.end = smaller(begin + kDecodeKeys, part->end);
  tile.num_runs = 0;
  for_each_run(a, part->sequence, part->kv_head, begin, tile.end, [&](int64_t first, int64_t count, int64_t row) {
    tile.runs[tile.num_runs++] = {first - begin, count, row};
  });
}

template <typename Steps>
void decode_tile(const Attention& a, const Tile& tile, const Tile* next, const DecodeState& s, Steps& steps) {
  const int64_t count = tile.count(), padded = round_up(count, Steps::kPadding);
  const Scores scores(a);
  steps.score(tile, next);
  for (int64_t i = 0; i < tile.heads * a.group(); i++) {
    float* row = s.scores + i * kDecodeKeys;
    for (int64_t j = count; j < padded; j++) row[j] = -INFINITY;
    const float correction = advance(scores, row, steps.weights + i * kDecodeKeys, padded, s.softmax[i]);
    if (correction != 1)
      for (float* at = s.weighted + i * s.features; at < s.weighted + (i + 1) * s.features; at += kWidth)
        store(at, load(at) * correction);
  }
  steps.add(tile, next);
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

// Rows [row, row + group) are the part's.
template <typename T>
void finish_part(const Attention& a, const DecodePart& part, const DecodeState& s, int64_t row) {
  const int64_t group = a.group();
  const Softmax* const softmax = s.softmax + row;
  const float* const weighted = s.weighted + row * s.features;
  if (part.partial) {
    memcpy(part.partial, softmax, group * sizeof(Softmax));
    memcpy(part.partial + 2 * group, weighted, group * s.features * sizeof(float));
    return;
  }
  for (int64_t g = 0; g < group; g++)
    write_decoded<T>(a, part.token, part.kv_head * group + g, weighted + g * s.features, softmax[g].sum);
}

template <typename Steps>
void decode_with(const Attention& a, const DecodePart* parts, int64_t num_parts, char* memory) {
  typedef typename Steps::Number T;
  if (num_parts == 0) return;
  const DecodePart* const end = parts + num_parts;
  const auto heads_from = [&](const DecodePart* part) { return Steps::kHeadsTogether ? heads_together(part, end) : 1; };
  const DecodeState s(a, memory);
  Steps steps(a, s, memory + DecodeState::size(a));
  Tile *tile = s.tiles, *next = s.tiles + 1;
  find_keys(a, parts, heads_from(parts), parts->begin, *tile);
  for (;;) {
    const DecodePart *part = tile->part, *behind = part + tile->heads;
    const bool is_last = tile->end == part->end, is_end = is_last && behind == end;
    if (!is_last)
      find_keys(a, part, tile->heads, tile->end, *next);
    else if (!is_end)
      find_keys(a, behind, heads_from(behind), behind->begin, *next);
    if (tile->begin == part->begin) {
      s.clear(tile->heads * a.group());
      const int64_t first_head = part->kv_head * a.group();
      steps.begin((const T*)a.query + part->token * a.query_stride + first_head * a.head_dim, tile->heads);
    }
    decode_tile(a, *tile, is_end ? nullptr : next, s, steps);
    if (is_last)
      for (int64_t h = 0; h < tile->heads; h++) finish_part<T>(a, part[h], s, h * a.group());
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
