// One matrix product of a layer, of whichever kind its weight is, as work for a team of threads.
#pragma once

#include "arguments.h"
#include "team.h"

namespace stepwire {

using OptionalTensor = std::optional<Tensor>;

// Numbers that are worth going to memory of another core for.
constexpr int64_t kNumbersPerPart = 1 << 12;

// Of one product: with a few thousand numbers each they fill half of the cache that a core has to itself.
constexpr int64_t kBlockRows = 128;

// One of the two, as the weight is.
struct Product {
  bool is_int8;
  PackedProduct packed;
  Int8Product int8;
};

struct Linear {
  Tensor panels;
  OptionalTensor bias;
  // Of a weight of int8.
  OptionalTensor scales, sums;
  int64_t depth, columns;

  int64_t padded_depth() const { return panels.size(1) * panels.size(3); }

  Product product(const Tensor& x, const Tensor& out, const Tensor& quantized) const {
    const void* bias_numbers = bias ? bias->const_data_ptr() : nullptr;
    const int64_t rows = x.size(0);
    if (!scales)
      return {false,
              {x.const_data_ptr(), panels.const_data_ptr(), bias_numbers, out.mutable_data_ptr(), rows, columns, depth,
               panels.size(2), padded_depth()},
              {}};
    int8_t* memory = quantized.mutable_data_ptr<int8_t>();
    return {true,
            {},
            {x.const_data_ptr(), bias_numbers, panels.const_data_ptr<int8_t>(), scales->const_data_ptr<float>(),
             sums->const_data_ptr<int32_t>(), out.mutable_data_ptr(), memory,
             (float*)(memory + rows * 2 * padded_depth()), rows, columns, depth, padded_depth()}};
  }
};

inline void check_linear(const Linear& linear) {
  TORCH_CHECK(linear.scales.has_value() == linear.sums.has_value(), "scales and sums come together");
  if (!linear.scales) return check_panels(linear.panels, linear.panels, linear.depth, linear.columns);
  check_int8_panels(linear.panels, linear.depth, linear.columns);
  check_floats(*linear.scales, linear.columns, "scales");
  check_indices<int32_t>(*linear.sums, linear.panels.size(0) * 32, "sums");
}

inline void check_linear_type(const Linear& linear, const Tensor& like) {
  TORCH_CHECK(linear.scales || linear.panels.scalar_type() == like.scalar_type(),
              "a weight of another type than its layer's cache");
  check_bias(linear.bias, like, linear.columns);
}

// f(begin, end) for parts of the rows, of so many numbers each.
template <typename F>
void share_rows(Team& team, int64_t rows, int64_t columns, const F& f) {
  team.share(rows, std::max<int64_t>(1, kNumbersPerPart / columns), f);
}

// f(first row, rows, first panel, end), in blocks of rows that stay in a core's own cache while the panels pass by.
template <typename F>
void share_blocks(Team& team, int64_t rows, int64_t panels, const F& f) {
  const int64_t num_blocks = (rows + kBlockRows - 1) / kBlockRows;
  team.share(num_blocks * panels, 1, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t block = begin / panels, last = std::min(end, (block + 1) * panels), first = block * kBlockRows;
      f(first, std::min(rows - first, kBlockRows), begin - block * panels, last - block * panels);
      begin = last;
    }
  });
}

inline void share_packed(const Kernels& kernels, Team& team, const PackedProduct& product) {
  const int64_t panels = (product.columns + product.panel_columns - 1) / product.panel_columns;
  share_blocks(team, product.rows, panels, [&](int64_t first, int64_t rows, int64_t begin, int64_t end) {
    PackedProduct part = product;
    part.x = (const char*)product.x + first * product.depth * kernels.number_size;
    part.out = (char*)product.out + first * product.columns * kernels.number_size;
    part.rows = rows;
    kernels.multiply_packed(part, begin, end);
  });
}

inline void share_int8(const Kernels& kernels, Team& team, const Int8Product& product) {
  const int64_t panels = (product.columns + 31) / 32;
  share_rows(team, product.rows, product.depth,
             [&](int64_t begin, int64_t end) { kernels.quantize(product, begin, end); });
  share_blocks(team, product.rows, panels, [&](int64_t first, int64_t rows, int64_t begin, int64_t end) {
    Int8Product part = product;
    part.quantized = product.quantized + first * 2 * product.padded_depth;
    part.row_scales = product.row_scales + first;
    part.out = (char*)product.out + first * product.columns * kernels.number_size;
    part.rows = rows;
    kernels.multiply_int8(part, begin, end);
  });
}

inline void share_product(const Kernels& kernels, Team& team, const Product& product) {
  product.is_int8 ? share_int8(kernels, team, product.int8) : share_packed(kernels, team, product.packed);
}

}  // namespace stepwire
