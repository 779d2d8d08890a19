// What the debug build checks besides: that every number in the tensors of a step points where it may.
#pragma once

#include <ATen/core/Tensor.h>

namespace stepwire {

// [blocks, heads, slots, features]
inline void check_slots(const at::Tensor& slots, const at::Tensor& keys) {
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const int64_t num_slots = keys.size(0) * keys.size(2);
  for (int64_t i = 0; i < slots.size(0); i++)
    TORCH_CHECK(slot[i] >= 0 && slot[i] < num_slots, "slot ", slot[i], " of token ", i, " is not one of ", num_slots);
}

inline void check_batch(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& block_tables,
                        const at::Tensor& seq_lens, const at::Tensor& query_starts) {
  const int64_t num_blocks = keys.size(0), block_size = keys.size(2);
  const int32_t *starts = query_starts.const_data_ptr<int32_t>(), *lens = seq_lens.const_data_ptr<int32_t>();
  TORCH_CHECK(starts[0] == 0, "the first sequence starts at token ", starts[0]);
  for (int64_t s = 0; s < seq_lens.size(0); s++) {
    const int64_t num_queries = starts[s + 1] - starts[s];
    TORCH_CHECK(num_queries >= 0 && starts[s + 1] <= query.size(0), "sequence ", s, " ends at token ", starts[s + 1],
                " of ", query.size(0));
    TORCH_CHECK(lens[s] >= num_queries, "sequence ", s, " has ", num_queries, " tokens in this step, but only ", lens[s]);
    const int64_t needed = (lens[s] + block_size - 1) / block_size;
    TORCH_CHECK(needed <= block_tables.size(1), "sequence ", s, " needs ", needed, " blocks of ", block_tables.size(1));
    const int32_t* table = block_tables.const_data_ptr<int32_t>() + s * block_tables.stride(0);
    for (int64_t i = 0; i < needed; i++)
      TORCH_CHECK(table[i] >= 0 && table[i] < num_blocks, "block ", table[i], " of sequence ", s, " is not one of ",
                  num_blocks);
  }
}

}  // namespace stepwire
