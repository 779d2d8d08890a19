// The kernels as torch operators: checks of types and shapes, the choice of the instruction set, and the threads.
//
// STEPWIRE_NAMESPACE names the operators; with STEPWIRE_DEBUG they check also what the tensors hold.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>

#include "arguments.h"
#include "attend.h"

namespace stepwire {
namespace {

// Numbers that a thread handles in about the time that it takes to wake it up.
constexpr int64_t kNumbersPerThread = 1 << 14;

void add_rms_norm(const Tensor& residual, const std::optional<Tensor>& x, const Tensor& weight, double eps,
                  const Tensor& out, int64_t instruction_set) {
  TORCH_CHECK(residual.dim() == 2, "residual must have two dimensions");
  const int64_t rows = residual.size(0), n = residual.size(1);
  check_rows(out, out, rows, n, "out");
  check_residual(residual, out, rows, n);
  if (x) check_rows(*x, out, rows, n, "x");
  check_floats(weight, n, "weight");
  const Kernels& kernels = kernels_of(instruction_set, out);
  const Norm norm{residual.mutable_data_ptr(), x ? x->const_data_ptr() : nullptr, weight.const_data_ptr<float>(),
                  out.mutable_data_ptr(),      n,                                  (float)eps,
                  residual.scalar_type() == at::kFloat};
  at::parallel_for(0, rows, std::max<int64_t>(1, kNumbersPerThread / std::max<int64_t>(n, 1)),
                   [&](int64_t begin, int64_t end) { kernels.add_rms_norm(norm, begin, end); });
}

void rope_and_cache(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& keys, const Tensor& values,
                    const Tensor& slots, const std::optional<Tensor>& query_norm,
                    const std::optional<Tensor>& key_norm, double eps, int64_t instruction_set) {
  check_cache(keys, values, qkv);
  const int64_t num_kv_heads = keys.size(1), head_dim = keys.size(3);
  TORCH_CHECK(qkv.dim() == 2 && qkv.is_contiguous() && head_dim > 0 && qkv.size(1) % head_dim == 0 &&
                  qkv.size(1) / head_dim > 2 * num_kv_heads,
              "qkv must be contiguous, [tokens, (query heads + 2 * ", num_kv_heads, ") * ", head_dim, "], not ",
              qkv.sizes());
  const int64_t tokens = qkv.size(0), half = cos.dim() == 2 ? cos.size(1) : -1;
  TORCH_CHECK(half >= 0 && 2 * half <= head_dim, "cos must be [tokens, at most ", head_dim / 2, "], not ", cos.sizes());
  check_floats(cos, tokens * half, "cos");
  check_floats(sin, tokens * half, "sin");
  check_indices<int64_t>(slots, tokens, "slots");
  TORCH_CHECK(query_norm.has_value() == key_norm.has_value(), "norms of queries and keys come together");
  if (query_norm) {
    check_floats(*query_norm, head_dim, "query_norm");
    check_floats(*key_norm, head_dim, "key_norm");
  }
#if defined(STEPWIRE_DEBUG)
  check_slots(slots, keys);
#endif
  const Kernels& kernels = kernels_of(instruction_set, qkv);
  const Rope rope{
      qkv.mutable_data_ptr(),
      cos.const_data_ptr<float>(),
      sin.const_data_ptr<float>(),
      nullptr,
      keys.mutable_data_ptr(),
      values.mutable_data_ptr(),
      slots.const_data_ptr<int64_t>(),
      query_norm ? query_norm->const_data_ptr<float>() : nullptr,
      key_norm ? key_norm->const_data_ptr<float>() : nullptr,
      (float)eps,
      qkv.size(1) / head_dim - 2 * num_kv_heads,
      num_kv_heads,
      head_dim,
      half,
      keys.size(2),
  };
  at::parallel_for(0, tokens, std::max<int64_t>(1, kNumbersPerThread / qkv.size(1)),
                   [&](int64_t begin, int64_t end) { kernels.rope_and_cache(rope, begin, end); });
}

void act_mul(const Tensor& gate_up, int64_t activation, const Tensor& out, int64_t instruction_set) {
  TORCH_CHECK(gate_up.dim() == 2 && out.dim() == 2, "gate_up and out must have two dimensions");
  const int64_t rows = out.size(0), n = out.size(1);
  check_rows(gate_up, out, rows, 2 * n, "gate_up");
  check_rows(out, out, rows, n, "out");
  const Kernels& kernels = kernels_of(instruction_set, out);
  const ActMul act{gate_up.const_data_ptr(), out.mutable_data_ptr(), n, activation};
  at::parallel_for(0, rows, std::max<int64_t>(1, kNumbersPerThread / std::max<int64_t>(n, 1)),
                   [&](int64_t begin, int64_t end) { kernels.act_mul(act, begin, end); });
}

void attend(const Kernels& kernels, const Attention& a) {
  thread_local AttentionWork the_work;
  AttentionWork& work = the_work;
  work.plan(kernels, a, at::in_parallel_region() ? 1 : at::get_num_threads(), false);
  std::atomic<int64_t> next_tile{0};
  at::parallel_for(0, work.num_shares(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t share = begin; share < end; share++) work.decode(kernels, a, share);
    for (int64_t i = next_tile++; i < work.num_tiles(); i = next_tile++) work.prefill(kernels, a, i);
  });
  work.merge(kernels, a);
}

void paged_attention(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& block_tables,
                     const Tensor& seq_lens, const Tensor& query_starts, double scale, int64_t window, double softcap,
                     const Tensor& out, int64_t instruction_set) {
  check_cache(keys, values, query);
  TORCH_CHECK(query.dim() == 3 && query.stride(2) == 1 && query.stride(1) == query.size(2), "heads must be contiguous");
  const int64_t num_heads = query.size(1), head_dim = query.size(2), num_kv_heads = keys.size(1);
  TORCH_CHECK(head_dim == keys.size(3) && num_kv_heads > 0 && num_heads % num_kv_heads == 0, "query ", query.sizes(),
              " does not fit keys ", keys.sizes());
  TORCH_CHECK(out.sizes() == query.sizes() && out.is_contiguous() && out.scalar_type() == query.scalar_type(),
              "out must be contiguous, of the query's shape and type");
  TORCH_CHECK(block_tables.dim() == 2 && block_tables.stride(1) == 1 && block_tables.scalar_type() == at::kInt,
              "block_tables must be int32 rows");
  const int64_t num_seqs = block_tables.size(0);
  check_indices<int32_t>(seq_lens, num_seqs, "seq_lens");
  check_indices<int32_t>(query_starts, num_seqs + 1, "query_starts");
  TORCH_CHECK(window >= 0, "a window has at least one token");
#if defined(STEPWIRE_DEBUG)
  check_batch(query, keys, block_tables, seq_lens, query_starts);
#endif
  const Attention attention{
      query.const_data_ptr(),
      out.mutable_data_ptr(),
      keys.const_data_ptr(),
      values.const_data_ptr(),
      block_tables.const_data_ptr<int32_t>(),
      seq_lens.const_data_ptr<int32_t>(),
      query_starts.const_data_ptr<int32_t>(),
      query.stride(0),
      block_tables.stride(0),
      num_seqs,
      num_heads,
      num_kv_heads,
      head_dim,
      keys.size(2),
      window,
      (float)scale,
      (float)softcap,
  };
  attend(kernels_of(instruction_set, query), attention);
}

Tensor multiply_packed(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t columns,
                       int64_t instruction_set) {
  TORCH_CHECK(x.dim() == 2, "x must have two dimensions");
  const int64_t rows = x.size(0), depth = x.size(1);
  const Kernels& kernels = kernels_of(instruction_set, x);
  TORCH_CHECK(kernels.multiply_packed, "set ", instruction_set, " has no products with packed weights");
  check_rows(x, x, rows, depth, "x");
  check_panels(weight, x, depth, columns);
  check_bias(bias, x, columns);
  const int64_t width = weight.size(2), padded = weight.size(1) * weight.size(3);
  Tensor out = at::empty({rows, columns}, x.options());
  const PackedProduct product{x.const_data_ptr(), weight.const_data_ptr(), bias ? bias->const_data_ptr() : nullptr,
                              out.mutable_data_ptr(), rows, columns, depth, width, padded};
  at::parallel_for(0, weight.size(0), std::max<int64_t>(1, kNumbersPerThread / (width * padded)),
                   [&](int64_t begin, int64_t end) { kernels.multiply_packed(product, begin, end); });
  return out;
}

// weight: [panels, padded depth / 4, 32, 4]. The rows are quantized on the way.
Tensor multiply_int8(const Tensor& x, const Tensor& weight, const Tensor& scales, const Tensor& sums,
                     const std::optional<Tensor>& bias, int64_t columns, int64_t instruction_set) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 4, "x must have two dimensions and a weight in panels four");
  const int64_t rows = x.size(0), depth = x.size(1), padded = weight.size(1) * 4, panels = weight.size(0);
  const Kernels& kernels = kernels_of(instruction_set, x);
  check_rows(x, x, rows, depth, "x");
  check_int8_panels(weight, depth, columns);
  TORCH_CHECK(kernels.multiply_int8, "set ", instruction_set, " has no products of int8");
  check_floats(scales, columns, "scales");
  check_indices<int32_t>(sums, panels * 32, "sums");
  check_bias(bias, x, columns);
  Tensor out = at::empty({rows, columns}, x.options());
  // Memory of the thread that calls, read by all of them.
  char* memory = scratch(rows * (2 * padded + sizeof(float)));
  const Int8Product product{x.const_data_ptr(), bias ? bias->const_data_ptr() : nullptr,
                            weight.const_data_ptr<int8_t>(), scales.const_data_ptr<float>(),
                            sums.const_data_ptr<int32_t>(), out.mutable_data_ptr(), (int8_t*)memory,
                            (float*)(memory + rows * 2 * padded), rows, columns, depth, padded};
  at::parallel_for(0, rows, std::max<int64_t>(1, 4 * kNumbersPerThread / padded),
                   [&](int64_t begin, int64_t end) { kernels.quantize(product, begin, end); });
  at::parallel_for(0, panels, std::max<int64_t>(1, kNumbersPerThread / (32 * padded)),
                   [&](int64_t begin, int64_t end) { kernels.multiply_int8(product, begin, end); });
  return out;
}

const Kernels& available_kernels(bool is_bfloat16, int64_t instruction_set) {
  const Kernels* kernels = find_kernels(instruction_set, is_bfloat16);
  TORCH_CHECK(kernels, "this machine lacks the instructions of set ", instruction_set);
  return *kernels;
}

int64_t packed_rows(bool is_bfloat16, int64_t instruction_set) {
  return available_kernels(is_bfloat16, instruction_set).packed_rows;
}

int64_t layers_rows(bool is_bfloat16, int64_t instruction_set) {
  return available_kernels(is_bfloat16, instruction_set).layers_rows;
}

bool has_int8(int64_t instruction_set) {
  const Kernels* kernels = find_kernels(instruction_set, false);
  return kernels && kernels->multiply_int8;
}

bool has_instruction_set(int64_t instruction_set) { return find_kernels(instruction_set, false) != nullptr; }

}  // namespace
}  // namespace stepwire

TORCH_LIBRARY(STEPWIRE_NAMESPACE, m) {
  m.def("has_instruction_set(int instruction_set) -> bool", stepwire::has_instruction_set);
  m.def("has_int8(int instruction_set) -> bool", stepwire::has_int8);
  m.def("packed_rows(bool is_bfloat16, int instruction_set) -> int", stepwire::packed_rows);
  m.def("layers_rows(bool is_bfloat16, int instruction_set) -> int", stepwire::layers_rows);
  m.def("multiply_packed(Tensor x, Tensor weight, Tensor? bias, int columns, int instruction_set) -> Tensor");
  m.def(
      "multiply_int8(Tensor x, Tensor weight, Tensor scales, Tensor sums, Tensor? bias, int columns, "
      "int instruction_set) -> Tensor");
  m.def(
      "add_rms_norm(Tensor(a!) residual, Tensor? x, Tensor weight, float eps, Tensor(b!) out, int instruction_set) "
      "-> ()");
  m.def(
      "rope_and_cache(Tensor(a!) qkv, Tensor cos, Tensor sin, Tensor(b!) keys, Tensor(c!) values, Tensor slots, "
      "Tensor? query_norm, Tensor? key_norm, float eps, int instruction_set) -> ()");
  m.def("act_mul(Tensor gate_up, int activation, Tensor(a!) out, int instruction_set) -> ()");
  m.def(
      "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor block_tables, Tensor seq_lens, "
      "Tensor query_starts, float scale, int window, float softcap, Tensor(a!) out, int instruction_set) -> ()");
}

TORCH_LIBRARY_IMPL(STEPWIRE_NAMESPACE, CPU, m) {
  m.impl("multiply_packed", stepwire::multiply_packed);
  m.impl("multiply_int8", stepwire::multiply_int8);
  m.impl("add_rms_norm", stepwire::add_rms_norm);
  m.impl("rope_and_cache", stepwire::rope_and_cache);
  m.impl("act_mul", stepwire::act_mul);
  m.impl("paged_attention", stepwire::paged_attention);
}
