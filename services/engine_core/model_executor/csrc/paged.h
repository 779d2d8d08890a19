// What decode and prefill share: where keys and values lie, and the softmax over a part of the keys.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace {

using stepwire::Attention;

// Calls body(first, count, row) for each run of the keys [begin, end) that lies in one block: `row` is the number of
// its first row in the cache, of head_dim numbers each.
template <typename Body>
inline __attribute__((always_inline)) void for_each_run(
    const Attention& a, int64_t sequence, int64_t kv_head, int64_t begin, int64_t end, Body body) {
  const int32_t* table = a.block_tables + sequence * a.table_stride;
  for (int64_t key = begin; key < end;) {
    const int64_t offset = key % a.block_size;
    const int64_t count = smaller(a.block_size - offset, end - key);
    body(key, count, (table[key / a.block_size] * a.num_kv_heads + kv_head) * a.block_size + offset);
    key += count;
  }
}

// The running maximum and sum of one row of scores, in powers of two.
struct Softmax {
  float maximum, sum;
};

struct Scores {
  float scale, softcap;

  explicit Scores(const Attention& a) : scale(a.scale * kLog2E), softcap(a.softcap) {
    if (softcap != 0) {
      scale = a.scale / softcap;
      softcap *= kLog2E;
    }
  }

  // A product of query and key as the power of two that it stands for.
  Vec power(Vec product) const {
    const Vec scaled = product * scale;
    if (softcap == 0) return scaled;
    return product == -INFINITY ? product : softcap * tanh(scaled);
  }

 private:
  static constexpr float kLog2E = 1.44269504088896341f;
};

// Takes in the products [0, n) of a row, n a multiple of the vector's width, those that are not visible -inf and at
// least one that is; writes the weights, and returns by what earlier results must be multiplied.
template <typename T>
inline float advance(const Scores& scores, const float* products, T* weights, int64_t n, Softmax& state) {
  Vec highest = broadcast(-INFINITY);
  if (scores.softcap == 0) {
    for (int64_t i = 0; i < n; i += kWidth) highest = max(highest, load(products + i));
    // The scale is applied behind the maximum: it is positive.
    highest = highest * scores.scale;
  } else {
    for (int64_t i = 0; i < n; i += kWidth) highest = max(highest, scores.power(load(products + i)));
  }
  const float maximum_now = maximum(highest);
  const float new_maximum = state.maximum > maximum_now ? state.maximum : maximum_now;
  const Vec minus_maximum = broadcast(-new_maximum);
  Vec total{};
  for (int64_t i = 0; i < n; i += kWidth) {
    const Vec product = load(products + i);
    const Vec weight = scores.softcap == 0 ? exp2(fma(product, broadcast(scores.scale), minus_maximum))
                                           : exp2(scores.power(product) + minus_maximum);
    total += weight;
    store(weights + i, weight);
  }
  // Nothing came before the first part, so that there is nothing to correct.
  const float correction = state.maximum == -INFINITY ? 1 : ::exp2f(state.maximum - new_maximum);
  state.maximum = new_maximum;
  state.sum = state.sum * correction + sum(total);
  return correction;
}

}  // namespace
