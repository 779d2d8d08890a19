// What the operators ask of their arguments before a kernel reads them.
#pragma once

#include <ATen/core/Tensor.h>

#include "instruction_sets.h"

#if defined(STEPWIRE_DEBUG)
#include "checks.h"
#endif

namespace stepwire {

using at::Tensor;

inline const Kernels& kernels_of(int64_t instruction_set, const Tensor& tensor) {
  const bool is_bfloat16 = tensor.scalar_type() == at::kBFloat16;
  TORCH_CHECK(is_bfloat16 || tensor.scalar_type() == at::kFloat, "the kernels work on float32 and bfloat16, not ",
              tensor.scalar_type());
  const Kernels* kernels = find_kernels(instruction_set, is_bfloat16);
  TORCH_CHECK(kernels, "this machine lacks the instructions of set ", instruction_set);
  return *kernels;
}

inline void check_rows(const Tensor& tensor, const Tensor& like, int64_t rows, int64_t columns, const char* name) {
  TORCH_CHECK(tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns && tensor.is_contiguous() &&
                  tensor.scalar_type() == like.scalar_type(),
              name, " must be contiguous, [", rows, ", ", columns, "] and of the same type, not ", tensor.sizes());
}

inline void check_residual(const Tensor& residual, const Tensor& like, int64_t rows, int64_t columns) {
  check_rows(residual, residual.scalar_type() == at::kFloat ? residual : like, rows, columns, "residual");
}

inline void check_floats(const Tensor& tensor, int64_t count, const char* name) {
  TORCH_CHECK(tensor.numel() == count && tensor.is_contiguous() && tensor.scalar_type() == at::kFloat, name,
              " must be ", count, " contiguous float32 numbers, not ", tensor.sizes());
}

template <typename Index>
inline void check_indices(const Tensor& tensor, int64_t count, const char* name) {
  TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == count && tensor.is_contiguous() &&
                  tensor.scalar_type() == c10::CppTypeToScalarType<Index>::value,
              name, " must be ", count, " contiguous numbers of ", sizeof(Index), " bytes, not ", tensor.sizes());
}

inline void check_cache(const Tensor& keys, const Tensor& values, const Tensor& like) {
  TORCH_CHECK(keys.dim() == 4 && keys.sizes() == values.sizes() && keys.is_contiguous() && values.is_contiguous() &&
                  keys.scalar_type() == like.scalar_type() && values.scalar_type() == like.scalar_type(),
              "keys and values must be contiguous, [blocks, heads, slots, features] and of the same type");
}

inline void check_bias(const std::optional<Tensor>& bias, const Tensor& x, int64_t columns) {
  if (bias)
    TORCH_CHECK(bias->numel() == columns && bias->is_contiguous() && bias->scalar_type() == x.scalar_type(),
                "bias must be ", columns, " contiguous numbers of the type of x");
}

// [panels, depth / n, columns of a panel, n], n numbers of a column side by side, for rows of `depth` of like's numbers.
inline void check_panels(const Tensor& weight, const Tensor& like, int64_t depth, int64_t columns) {
  TORCH_CHECK(weight.dim() == 4, "a weight in panels must have four dimensions, not ", weight.dim());
  const int64_t width = weight.size(2), padded = weight.size(1) * weight.size(3);
  TORCH_CHECK(weight.is_contiguous() && weight.scalar_type() == like.scalar_type() && padded >= depth &&
                  weight.size(3) == 4 / like.element_size() && width % 16 == 0 && columns > 0 &&
                  (columns + width - 1) / width == weight.size(0),
              "a weight of panels ", weight.sizes(), " can not take ", depth, " numbers to ", columns);
}

// [panels, padded depth / 4, 32, 4]
inline void check_int8_panels(const Tensor& weight, int64_t depth, int64_t columns) {
  TORCH_CHECK(weight.dim() == 4, "a weight in panels must have four dimensions, not ", weight.dim());
  const int64_t padded = weight.size(1) * 4;
  TORCH_CHECK(weight.is_contiguous() && weight.scalar_type() == at::kChar && weight.size(2) == 32 &&
                  weight.size(3) == 4 && padded % 64 == 0 && padded >= depth && columns > 0 &&
                  (columns + 31) / 32 == weight.size(0),
              "a weight of panels ", weight.sizes(), " can not take ", depth, " numbers to ", columns);
}

}  // namespace stepwire
