// The kernels that work row by row: rows of an embedding, norms, rotary embeddings with the write into the cache, gated
// activations.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace {

using stepwire::ActMul;
using stepwire::Lookup;
using stepwire::Norm;
using stepwire::Rope;

template <typename T>
Vec rounded_to(Vec value) {
  T numbers[kWidth];
  store(numbers, value);
  return load(numbers);
}

template <typename T>
void look_up(const Lookup& lookup, int64_t begin, int64_t end) {
  const int64_t n = lookup.num_features;
  for (int64_t row = begin; row < end; row++) {
    const T* from = (const T*)lookup.table + lookup.ids[row] * n;
    float* out = lookup.out + row * n;
    for_each_vector(n, [&](int64_t i, int64_t count) {
      const Vec value = load_some(from + i, count);
      store_some(out + i, lookup.scale == 1.f ? value : rounded_to<T>(value * lookup.scale), count);
    });
  }
}

template <typename T, typename Residual>
void add_rms_norm_to(const Norm& norm, int64_t begin, int64_t end) {
  const int64_t n = norm.num_features;
  for (int64_t row = begin; row < end; row++) {
    Residual* residual = (Residual*)norm.residual + row * n;
    const T* x = norm.x ? (const T*)norm.x + row * n : nullptr;
    T* out = (T*)norm.out + row * n;
    Vec squares{};
    for_each_vector(n, [&](int64_t i, int64_t count) {
      if (x) store_some(residual + i, load_some(residual + i, count) + load_some(x + i, count), count);
      // What is normalised is the sum as it was stored, rounded.
      const Vec value = load_some(residual + i, count);
      squares = fma(value, value, squares);
    });
    const Vec scale = broadcast(1.f / sqrtf(sum(squares) / n + norm.eps));
    for_each_vector(n, [&](int64_t i, int64_t count) {
      store_some(out + i, load_some(residual + i, count) * scale * load_some(norm.weight + i, count), count);
    });
  }
}

template <typename T>
void add_rms_norm(const Norm& norm, int64_t begin, int64_t end) {
  norm.is_float ? add_rms_norm_to<T, float>(norm, begin, end) : add_rms_norm_to<T, T>(norm, begin, end);
}

template <typename T>
void normalize_head(T* head, const float* weight, int64_t head_dim, float eps) {
  Vec squares{};
  for_each_vector(head_dim, [&](int64_t i, int64_t count) {
    const Vec value = load_some(head + i, count);
    squares = fma(value, value, squares);
  });
  const Vec scale = broadcast(1.f / sqrtf(sum(squares) / head_dim + eps));
  for_each_vector(head_dim, [&](int64_t i, int64_t count) {
    store_some(head + i, load_some(head + i, count) * scale * load_some(weight + i, count), count);
  });
}

struct Identity {
  static Vec of(Vec value) { return value; }
};

// A block goes to another request later, which reads its stale slots behind a mask: 0 * NaN would be NaN.
struct FiniteOrZero {
  static Vec of(Vec value) { return (Vec)((IntVec)value & (IntVec)(value - value == 0.f)); }
};

// Pairs feature i with feature i + half; `to` may be `from`.
template <typename Keep, typename T>
void rotate(const T* from, T* to, const float* cos, const float* sin, int64_t half, int64_t head_dim) {
  for_each_vector(half, [&](int64_t i, int64_t count) {
    const Vec first = load_some(from + i, count), second = load_some(from + half + i, count);
    const Vec c = load_some(cos + i, count), s = load_some(sin + i, count);
    store_some(to + i, Keep::of(first * c - second * s), count);
    store_some(to + half + i, Keep::of(second * c + first * s), count);
  });
  for_each_vector(head_dim - 2 * half, [&](int64_t i, int64_t count) {
    store_some(to + 2 * half + i, Keep::of(load_some(from + 2 * half + i, count)), count);
  });
}

template <typename T>
void rope_and_cache(const Rope& rope, int64_t begin, int64_t end) {
  const int64_t dim = rope.head_dim, half = rope.rotary_half;
  const int64_t num_heads = rope.num_heads, num_kv_heads = rope.num_kv_heads;
  for (int64_t token = begin; token < end; token++) {
    T* query = (T*)rope.qkv + token * (num_heads + 2 * num_kv_heads) * dim;
    T* key = query + num_heads * dim;
    const T* value = key + num_kv_heads * dim;
    const int64_t row = rope.rows ? rope.rows[token] : token;
    const float *cos = rope.cos + row * half, *sin = rope.sin + row * half;
    for (int64_t head = 0; head < num_heads; head++) {
      if (rope.query_norm) normalize_head(query + head * dim, rope.query_norm, dim, rope.eps);
      if (half > 0) rotate<Identity>(query + head * dim, query + head * dim, cos, sin, half, 2 * half);
    }
    const int64_t slot = rope.slots[token];
    const int64_t block = slot / rope.block_size, offset = slot % rope.block_size;
    for (int64_t head = 0; head < num_kv_heads; head++) {
      const int64_t at = ((block * num_kv_heads + head) * rope.block_size + offset) * dim;
      if (rope.key_norm) normalize_head(key + head * dim, rope.key_norm, dim, rope.eps);
      rotate<FiniteOrZero>(key + head * dim, (T*)rope.keys + at, cos, sin, half, dim);
      rotate<FiniteOrZero>(value + head * dim, (T*)rope.values + at, cos, sin, 0, dim);
    }
  }
}

struct Silu {
  static Vec of(Vec x) { return x / (1.f + exp(-x)); }
};

struct Gelu {
  static Vec of(Vec x) { return 0.5f * x * (1.f + erf(x * 0.70710678118654752f)); }
};

struct GeluTanh {
  static Vec of(Vec x) { return 0.5f * x * (1.f + tanh(0.79788456080286536f * (x + 0.044715f * x * x * x))); }
};

template <typename Function, typename T>
void act_mul_with(const ActMul& act, int64_t begin, int64_t end) {
  const int64_t n = act.num_features;
  for (int64_t row = begin; row < end; row++) {
    const T *gate = (const T*)act.gate_up + row * 2 * n, *up = gate + n;
    T* out = (T*)act.out + row * n;
    for_each_vector(n, [&](int64_t i, int64_t count) {
      store_some(out + i, Function::of(load_some(gate + i, count)) * load_some(up + i, count), count);
    });
  }
}

template <typename T>
void act_mul(const ActMul& act, int64_t begin, int64_t end) {
  switch (act.activation) {
    case stepwire::kSilu:
      return act_mul_with<Silu, T>(act, begin, end);
    case stepwire::kGelu:
      return act_mul_with<Gelu, T>(act, begin, end);
    default:
      return act_mul_with<GeluTanh, T>(act, begin, end);
  }
}

}  // namespace
