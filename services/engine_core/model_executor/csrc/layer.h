// One layer of a decoder: what it is made of, and its phases in a step, which a team of threads goes through together.
#pragma once

#include <array>

#include "attend.h"
#include "ends.h"

namespace stepwire {

struct Layer {
  Linear qkv, o, gate_up, down;
  RmsNorm input, mlp, post_attention, post_mlp, query, key;
  int64_t activation, window, rope, group;
  float scale, softcap;

  std::array<const Linear*, 4> linears() const { return {&qkv, &o, &gate_up, &down}; }
};

// One layer's part in one step.
struct LayerCall {
  const Layer* layer;
  Norm input, mlp, post_attention, post_mlp;
  Product qkv, o, gate_up, down;
  Rope rope;
  Attention attention;
  const AttentionWork* work;
  ActMul act;
};

// `like` is the cache of another layer.
inline void check_layer_cache(const Layer& layer, const Rotation& rotation, const Tensor& keys, const Tensor& values,
                              const Tensor& like) {
  check_cache(keys, values, like);
  for (const Linear* linear : layer.linears()) check_linear_type(*linear, keys);
  const int64_t head_dim = keys.size(3);
  TORCH_CHECK(head_dim > 0 && layer.qkv.columns == layer.o.depth + 2 * keys.size(1) * head_dim &&
                  layer.o.depth % (head_dim * keys.size(1)) == 0,
              "a cache of ", keys.sizes(), " does not fit the layer's heads");
  TORCH_CHECK(2 * rotation.half() <= head_dim, "a rotation of more features than heads have");
  if (layer.query.weight) {
    check_floats(*layer.query.weight, head_dim, "query_norm");
    check_floats(*layer.key.weight, head_dim, "key_norm");
  }
}

inline void attend(const Kernels& kernels, Team& team, const LayerCall& call) {
  const AttentionWork& work = *call.work;
  const Attention& attention = call.attention;
  // Decodes first: a share of them is long.
  const int64_t num_shares = work.num_shares();
  const auto do_one = [&](int64_t i) {
    i < num_shares ? work.decode(kernels, attention, i) : work.prefill(kernels, attention, i - num_shares);
  };
  team.share_singly(num_shares + work.num_tiles(), do_one);
  if (work.is_merged()) team.alone([&] { work.merge(kernels, attention); });
}

inline void run_layer(const Kernels& kernels, Team& team, const LayerCall& call, int64_t rows) {
  const auto multiply = [&](const Product& product) { share_product(kernels, team, product); };
  const auto for_rows = [&](int64_t columns, const auto& f) { share_rows(team, rows, columns, f); };
  const int64_t n = call.input.num_features;
  for_rows(n, [&](int64_t begin, int64_t end) { kernels.add_rms_norm(call.input, begin, end); });
  multiply(call.qkv);
  for_rows(call.layer->qkv.columns, [&](int64_t begin, int64_t end) { kernels.rope_and_cache(call.rope, begin, end); });
  attend(kernels, team, call);
  multiply(call.o);
  for_rows(n, [&](int64_t begin, int64_t end) {
    if (call.post_attention.weight) kernels.add_rms_norm(call.post_attention, begin, end);
    kernels.add_rms_norm(call.mlp, begin, end);
  });
  multiply(call.gate_up);
  for_rows(call.layer->gate_up.columns, [&](int64_t begin, int64_t end) { kernels.act_mul(call.act, begin, end); });
  multiply(call.down);
  if (call.post_mlp.weight)
    for_rows(n, [&](int64_t begin, int64_t end) { kernels.add_rms_norm(call.post_mlp, begin, end); });
}

}  // namespace stepwire
