// What a step does before its layers and after them: rows of the embedding, rotations, the final norm, logits.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sin.h>
#include <string.h>

#include "linear.h"

namespace stepwire {

// A norm that a family of models does not have is not there.
struct RmsNorm {
  OptionalTensor weight;
  float eps;

  const float* numbers() const { return weight ? weight->const_data_ptr<float>() : nullptr; }
};

// Of one kind of rotation the cosines and sines by position, [positions, half], of all positions that were asked for.
class Rotation {
 public:
  Rotation(Tensor inv_freq, double scaling) : inv_freq_(std::move(inv_freq)), scaling_(scaling) {
    check_floats(inv_freq_, inv_freq_.size(0), "inv_freq");
    compute(kLeast);
  }

  int64_t half() const { return inv_freq_.size(0); }
  const float* cos() const { return cos_.const_data_ptr<float>(); }
  const float* sin() const { return sin_.const_data_ptr<float>(); }

  // Has those of all positions below `count` from now on.
  void reach(int64_t count) {
    if (count > cos_.size(0)) compute(std::max(count, 2 * cos_.size(0)));
  }

 private:
  static constexpr int64_t kLeast = 1024;

  // As models/rope.py does, so that they are the same.
  void compute(int64_t count) {
    const Tensor angles = at::arange(count, at::kLong).to(at::kFloat).unsqueeze(1) * inv_freq_;
    Tensor cos = at::cos(angles), sin = at::sin(angles);
    if (scaling_ != 1.0) {
      cos = cos * scaling_;
      sin = sin * scaling_;
    }
    // Both or none, when there is no memory for them.
    cos_ = std::move(cos);
    sin_ = std::move(sin);
  }

  Tensor inv_freq_, cos_, sin_;
  double scaling_;
};

// What the ends of all steps read; the head may be missing.
struct Ends {
  Tensor table;
  float scale;
  RmsNorm norm;
  std::optional<Linear> head;

  int64_t num_features() const { return table.size(1); }
};

inline void check_ends(const Ends& ends) {
  TORCH_CHECK(ends.table.dim() == 2 && ends.table.is_contiguous(), "an embedding is contiguous rows");
  check_floats(*ends.norm.weight, ends.num_features(), "final norm");
  if (!ends.head) return;
  check_linear(*ends.head);
  TORCH_CHECK(ends.head->depth == ends.num_features(), "a head for ", ends.head->depth, " features instead of ",
              ends.num_features());
}

// All of [0, limit): they come from outside, and are few.
inline void check_range(const Tensor& indices, int64_t limit, const char* name) {
  const int64_t* numbers = indices.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < indices.size(0); i++)
    TORCH_CHECK_INDEX(numbers[i] >= 0 && numbers[i] < limit, name, " ", numbers[i], " at ", i, " is not one of ",
                      limit);
}

// One step's part of it.
struct EndsCall {
  Lookup lookup;
  Norm norm;
  // Rows of the hidden states of which logits are computed here; null: of none.
  const int64_t* logits_indices;
  int64_t num_logits;
  void* gathered;
  Product head;
};

inline void begin_step(const Kernels& kernels, Team& team, const EndsCall& call, int64_t rows) {
  share_rows(team, rows, call.norm.num_features,
             [&](int64_t begin, int64_t end) { kernels.look_up(call.lookup, begin, end); });
}

inline void end_step(const Kernels& kernels, Team& team, const EndsCall& call, int64_t rows) {
  const int64_t n = call.norm.num_features, row_bytes = n * kernels.number_size;
  share_rows(team, rows, n, [&](int64_t begin, int64_t end) { kernels.add_rms_norm(call.norm, begin, end); });
  if (!call.logits_indices) return;
  share_rows(team, call.num_logits, n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      memcpy((char*)call.gathered + i * row_bytes, (const char*)call.norm.out + call.logits_indices[i] * row_bytes,
             row_bytes);
  });
  share_product(kernels, team, call.head);
}

}  // namespace stepwire
