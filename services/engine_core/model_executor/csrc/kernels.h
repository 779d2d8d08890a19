// What the kernels take, and the table of them that is compiled once for each instruction set.
#pragma once

#include <stdint.h>

namespace stepwire {

enum Activation : int64_t { kSilu, kGelu, kGeluTanh };

// out = rows of the table, each times the scale and rounded to the table's type as the embedding module does.
struct Lookup {
  const void* table;
  const int64_t* ids;
  float* out;
  int64_t num_features;
  float scale;  // 1: none
};

struct Norm {
  void* residual;
  const void* x;  // may be null
  const float* weight;
  void* out;
  int64_t num_features;
  float eps;
  // The residual is float whatever x and out are.
  bool is_float;
};

struct Rope {
  void* qkv;
  const float *cos, *sin;
  // Of each token its row of cos and sin; null: the tokens in turn.
  const int64_t* rows;
  void *keys, *values;
  const int64_t* slots;
  const float *query_norm, *key_norm;  // null: no norms
  float eps;
  int64_t num_heads, num_kv_heads, head_dim, rotary_half, block_size;
};

struct ActMul {
  const void* gate_up;
  void* out;
  int64_t num_features;
  int64_t activation;
};

// out [rows, columns] = x [rows, depth] * weight + bias. The weight lies in panels of columns, one behind the other, each
// [panel_depth / n, panel_columns, n] with n the numbers of a column that lie side by side: 1 of float, 2 of bfloat16.
// What is beyond columns and depth is padding.
struct PackedProduct {
  const void *x, *weight, *bias;  // bias may be null
  void* out;
  int64_t rows, columns, depth, panel_columns, panel_depth;
};

// The same with a weight of int8, of which column c is scales[c] times its numbers; `sums` are those of its numbers.
struct Int8Product {
  const void *x, *bias;  // bias may be null
  const int8_t* weight;
  const float* scales;
  const int32_t* sums;  // with padding
  void* out;
  // The rows as int8 [rows, coarse and fine, padded_depth], and their scales: `quantize` writes them.
  int8_t* quantized;
  float* row_scales;
  int64_t rows, columns, depth, padded_depth;
};

struct Attention {
  const void* query;
  void* out;
  const void *keys, *values;
  const int32_t *block_tables, *seq_lens, *query_starts;
  int64_t query_stride, table_stride;
  int64_t num_seqs, num_heads, num_kv_heads, head_dim, block_size;
  int64_t window;  // 0: none
  float scale, softcap;  // 0: none

  int64_t group() const { return num_heads / num_kv_heads; }
};

// Keys [begin, end) of a sequence for one kv head and the one query token at `token`.
struct DecodePart {
  int64_t sequence, token, kv_head, begin, end;
  // Where the unfinished result goes when other parts of the same sequence and head exist: for each head of the group
  // its maximum and its sum, then for each head its weighted values (partial_size numbers in all). Null: the part is
  // all there is, and is finished.
  float* partial;
};

// Queries [begin, end) of a sequence (counted within this step) for one kv head.
struct PrefillTile {
  int64_t sequence, kv_head, begin, end;
};

struct Kernels {
  // Bytes of one number of its tensors.
  int64_t number_size;
  void (*look_up)(const Lookup&, int64_t begin, int64_t end);
  void (*add_rms_norm)(const Norm&, int64_t begin, int64_t end);
  void (*rope_and_cache)(const Rope&, int64_t begin, int64_t end);
  void (*act_mul)(const ActMul&, int64_t begin, int64_t end);
  // Bytes of scratch memory, aligned to 64, that a thread needs for any part or tile.
  int64_t (*scratch_size)(const Attention&);
  void (*decode)(const Attention&, const DecodePart*, int64_t num_parts, char* scratch);
  int64_t (*partial_size)(const Attention&);
  // Finishes what all parts of one sequence and head left behind.
  void (*merge)(const Attention&, const DecodePart*, int64_t num_parts);
  void (*prefill)(const Attention&, const PrefillTile&, char* scratch);
  // Query tokens of one tile.
  int64_t (*tile_queries)(const Attention&);
  // Panels [begin, end); null where it would not be faster than oneDNN.
  void (*multiply_packed)(const PackedProduct&, int64_t begin, int64_t end);
  // Up to so many rows it is meant for, 0 where it is null: then the time goes into reading the weight. In a call that
  // computes whole layers it may pay for more.
  int64_t packed_rows, layers_rows;
  // Rows [begin, end), then panels [begin, end); null where the set has no instructions for it.
  void (*quantize)(const Int8Product&, int64_t begin, int64_t end);
  void (*multiply_int8)(const Int8Product&, int64_t begin, int64_t end);
};

// One for each instruction set this library is compiled for; the machine must have it.
const Kernels* amx_kernels(bool is_bfloat16);
const Kernels* avx512_kernels(bool is_bfloat16);
const Kernels* avx2_kernels(bool is_bfloat16);
const Kernels* portable_kernels(bool is_bfloat16);

}  // namespace stepwire
