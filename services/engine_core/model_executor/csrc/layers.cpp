// A whole decoder in one call, for a few tokens: threads are woken up once a step and not once an operation.
//
// It computes what torch's embedding and the operators of ops.cpp compute one by one, with the same kernels.

#include <ATen/Parallel.h>
#include <omp.h>
#include <torch/custom_class.h>

#include "layer.h"

namespace stepwire {
namespace {

// What a step brings; the lists have something for each group of layers.
struct Step {
  const Tensor &input_ids, &positions, &logits_indices;
  const std::vector<Tensor>&slots, &block_tables, &seq_lens, &query_starts;

  int64_t num_tokens() const { return input_ids.size(0); }
};

// What all layers write to in turn.
struct Buffers {
  Tensor residual, normed, qkv, attended, branch, gate_up, activated;
  // Rows of the hidden states.
  Tensor gathered;
  // Rows as int8 and their scales.
  Tensor quantized;
};

class DecoderLayers : public torch::CustomClassHolder {
 public:
  explicit DecoderLayers(int64_t instruction_set) : instruction_set_(instruction_set) {}

  // Of qkv, o, gate_up, down; norms: input, mlp, post_attention?, post_mlp?, query?, key?; numbers: activation, window,
  // number of its rope, number of its group.
  void add_layer(std::vector<Tensor> panels, std::vector<OptionalTensor> biases, std::vector<OptionalTensor> scales,
                 std::vector<OptionalTensor> sums, std::vector<int64_t> depths, std::vector<int64_t> columns,
                 std::vector<OptionalTensor> norms, std::vector<double> eps, std::vector<int64_t> numbers, double scale,
                 double softcap) {
    TORCH_CHECK(panels.size() == 4 && biases.size() == 4 && scales.size() == 4 && sums.size() == 4 &&
                    depths.size() == 4 && columns.size() == 4 && norms.size() == 6 && eps.size() == 6 &&
                    numbers.size() == 4,
                "a layer has four products, six norms and four numbers");
    std::array<Linear, 4> linears;
    for (int i = 0; i < 4; i++) {
      linears[i] = {panels[i], biases[i], scales[i], sums[i], depths[i], columns[i]};
      check_linear(linears[i]);
    }
    const int64_t n = depths[0];
    TORCH_CHECK(columns[1] == n && depths[2] == n && columns[3] == n && columns[2] == 2 * depths[3],
                "products of a layer that do not fit each other");
    std::array<RmsNorm, 6> rms_norms;
    for (int i = 0; i < 6; i++) {
      TORCH_CHECK(i > 1 || norms[i], "a layer has norms before its attention and its MLP");
      if (norms[i] && i < 4) check_floats(*norms[i], n, "norm");
      rms_norms[i] = {norms[i], (float)eps[i]};
    }
    TORCH_CHECK(norms[4].has_value() == norms[5].has_value(), "norms of queries and keys come together");
    layers_.push_back({linears[0], linears[1], linears[2], linears[3], rms_norms[0], rms_norms[1], rms_norms[2],
                       rms_norms[3], rms_norms[4], rms_norms[5], numbers[0], numbers[1], numbers[2], numbers[3],
                       (float)scale, (float)softcap});
  }

  // One kind of rotation: layers name it by its number.
  void add_rotation(Tensor inv_freq, double scaling) { rotations_.emplace_back(std::move(inv_freq), scaling); }

  // Rows of the table are scaled; a head is panels, bias?, scales?, sums?, and missing where it has none.
  void set_ends(Tensor table, double scale, Tensor norm, double eps, std::vector<OptionalTensor> head,
                int64_t columns) {
    ends_ = Ends{table, (float)scale, {norm, (float)eps}, {}};
    if (!head.empty()) ends_->head = {head.at(0).value(), head.at(1), head.at(2), head.at(3), table.size(1), columns};
    check_ends(*ends_);
  }

  // Of each layer. They stay until others come, or they are to be forgotten.
  void set_caches(std::vector<Tensor> keys, std::vector<Tensor> values) {
    TORCH_CHECK(!layers_.empty() && keys.size() == layers_.size() && values.size() == keys.size(), "caches of ",
                keys.size(), " layers for ", layers_.size());
    for (size_t i = 0; i < layers_.size(); i++) {
      const Layer& layer = layers_[i];
      TORCH_CHECK(layer.rope >= 0 && layer.rope < (int64_t)rotations_.size(), "no rotation for a layer");
      check_layer_cache(layer, rotations_[layer.rope], keys[i], values[i], keys[0]);
    }
    TORCH_CHECK(ends_ && ends_->num_features() == layers_[0].qkv.depth &&
                    ends_->table.scalar_type() == keys[0].scalar_type(),
                "no embedding, or one that does not fit the layers");
    if (ends_->head) check_linear_type(*ends_->head, keys[0]);
    keys_ = std::move(keys);
    values_ = std::move(values);
  }

  void forget_caches() {
    keys_.clear();
    values_.clear();
  }

  // input_ids and positions [T], logits_indices [N] into T -> hidden states behind the final norm [T, n], and logits
  // [N, vocabulary] unless the head is missing, or N so large that another product is meant for it.
  std::tuple<Tensor, OptionalTensor> run(const Tensor& input_ids, const Tensor& positions, const Tensor& logits_indices,
                                         const std::vector<Tensor>& slots, const std::vector<Tensor>& block_tables,
                                         const std::vector<Tensor>& seq_lens,
                                         const std::vector<Tensor>& query_starts) {
    TORCH_CHECK(!keys_.empty(), "no caches");
    const Kernels& kernels = kernels_of(instruction_set_, keys_[0]);
    TORCH_CHECK(kernels.multiply_packed, "set ", instruction_set_, " has no products with packed weights");
    const Step step{input_ids, positions, logits_indices, slots, block_tables, seq_lens, query_starts};
    check_step(step);
    reach_positions(positions);
    const int num_threads = at::in_parallel_region() ? 1 : at::get_num_threads();
    const int64_t rows = step.num_tokens();
    const Buffers buffers = make_buffers(step);
    const Tensor hidden = at::empty_like(buffers.normed);
    const OptionalTensor logits = empty_logits(kernels, step);
    const EndsCall ends = make_ends_call(step, buffers, hidden, logits);
    std::vector<LayerCall> calls;
    calls.reserve(layers_.size());
    for (size_t i = 0; i < layers_.size(); i++) calls.push_back(make_call(step, i, buffers));
    plan(kernels, calls, num_threads);
    std::optional<Team> team;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp single
      team.emplace(omp_get_num_threads());
      begin_step(kernels, *team, ends, rows);
      for (const LayerCall& call : calls) run_layer(kernels, *team, call, rows);
      end_step(kernels, *team, ends, rows);
    }
    return {hidden, logits};
  }

 private:
  void check_step(const Step& s) const {
    const int64_t tokens = s.num_tokens();
    check_indices<int64_t>(s.input_ids, tokens, "input_ids");
    check_range(s.input_ids, ends_->table.size(0), "token");
    check_indices<int64_t>(s.positions, tokens, "positions");
    check_indices<int64_t>(s.logits_indices, s.logits_indices.size(0), "logits_indices");
    check_range(s.logits_indices, tokens, "index of logits");
    TORCH_CHECK(s.block_tables.size() == s.slots.size() && s.seq_lens.size() == s.slots.size() &&
                    s.query_starts.size() == s.slots.size(),
                "lists of unequal lengths");
    for (size_t g = 0; g < s.slots.size(); g++) {
      check_indices<int64_t>(s.slots[g], tokens, "slots");
      const Tensor& tables = s.block_tables[g];
      TORCH_CHECK(tables.dim() == 2 && tables.stride(1) == 1 && tables.scalar_type() == at::kInt,
                  "block_tables must be int32 rows");
      check_indices<int32_t>(s.seq_lens[g], tables.size(0), "seq_lens");
      check_indices<int32_t>(s.query_starts[g], tables.size(0) + 1, "query_starts");
    }
    // A token has a place in the table of its sequence.
    check_range(s.positions, s.block_tables.at(0).size(1) * keys_[0].size(2), "position");
    for (size_t i = 0; i < layers_.size(); i++) check_batch_of(s, layers_[i].group, keys_[i]);
  }

  static void check_batch_of(const Step& s, int64_t group, const Tensor& keys) {
    TORCH_CHECK(group >= 0 && group < (int64_t)s.slots.size(), "no batch for a layer");
#if defined(STEPWIRE_DEBUG)
    check_slots(s.slots[group], keys);
    check_batch(s.input_ids, keys, s.block_tables[group], s.seq_lens[group], s.query_starts[group]);
#endif
  }

  void reach_positions(const Tensor& positions) {
    const int64_t *numbers = positions.const_data_ptr<int64_t>(), *end = numbers + positions.size(0);
    const int64_t* last = std::max_element(numbers, end);
    for (Rotation& rotation : rotations_) rotation.reach(last == end ? 0 : *last + 1);
  }

  // float32: rounded to the weights' type after each of its additions the residual would lose more than any product
  // does. All others are of the cache's type.
  Buffers make_buffers(const Step& s) const {
    const Layer& layer = layers_[0];
    const int64_t rows = s.num_tokens(), num_logits = s.logits_indices.size(0), n = ends_->num_features();
    const at::TensorOptions options = keys_[0].options();
    const auto make = [&](int64_t columns) { return at::empty({rows, columns}, options); };
    int64_t deepest = ends_->head && ends_->head->scales ? ends_->head->padded_depth() : 0;
    for (const Layer& one : layers_)
      for (const Linear* linear : one.linears())
        if (linear->scales) deepest = std::max(deepest, linear->padded_depth());
    const int64_t row_bytes = deepest ? 2 * deepest + (int64_t)sizeof(float) : 0;
    return {at::empty({rows, n}, options.dtype(at::kFloat)),
            make(n),
            make(layer.qkv.columns),
            make(layer.o.depth),
            make(n),
            make(layer.gate_up.columns),
            make(layer.down.depth),
            at::empty({num_logits, n}, options),
            at::empty({std::max(rows, num_logits) * row_bytes}, options.dtype(at::kChar))};
  }

  OptionalTensor empty_logits(const Kernels& kernels, const Step& s) const {
    const int64_t rows = s.logits_indices.size(0);
    if (!ends_->head || (!ends_->head->scales && rows > kernels.packed_rows)) return {};
    return at::empty({rows, ends_->head->columns}, keys_[0].options());
  }

  EndsCall make_ends_call(const Step& s, const Buffers& b, const Tensor& hidden, const OptionalTensor& logits) const {
    float* residual = b.residual.mutable_data_ptr<float>();
    const int64_t n = ends_->num_features();
    return {
        {ends_->table.const_data_ptr(), s.input_ids.const_data_ptr<int64_t>(), residual, n, ends_->scale},
        {residual, b.branch.const_data_ptr(), ends_->norm.numbers(), hidden.mutable_data_ptr(), n, ends_->norm.eps,
         true},
        logits ? s.logits_indices.const_data_ptr<int64_t>() : nullptr,
        s.logits_indices.size(0),
        b.gathered.mutable_data_ptr(),
        logits ? ends_->head->product(b.gathered, *logits, b.quantized) : Product{},
    };
  }

  LayerCall make_call(const Step& s, size_t index, const Buffers& b) const {
    const Layer& layer = layers_[index];
    const Rotation& rotation = rotations_[layer.rope];
    const Tensor &keys = keys_[index], &tables = s.block_tables[layer.group];
    const int64_t num_kv_heads = keys.size(1), head_dim = keys.size(3), n = layer.qkv.depth;
    const int64_t num_heads = layer.o.depth / head_dim;
    void *stream = b.residual.mutable_data_ptr(), *branch = b.branch.mutable_data_ptr();
    void* normed = b.normed.mutable_data_ptr();
    const bool is_branch_float = b.branch.scalar_type() == at::kFloat;
    const auto post = [&](const RmsNorm& norm) {
      return Norm{branch, nullptr, norm.numbers(), branch, n, norm.eps, is_branch_float};
    };
    return {
        &layer,
        {stream, index ? branch : nullptr, layer.input.numbers(), normed, n, layer.input.eps, true},
        {stream, branch, layer.mlp.numbers(), normed, n, layer.mlp.eps, true},
        post(layer.post_attention),
        post(layer.post_mlp),
        layer.qkv.product(b.normed, b.qkv, b.quantized),
        layer.o.product(b.attended, b.branch, b.quantized),
        layer.gate_up.product(b.normed, b.gate_up, b.quantized),
        layer.down.product(b.activated, b.branch, b.quantized),
        {b.qkv.mutable_data_ptr(), rotation.cos(), rotation.sin(), s.positions.const_data_ptr<int64_t>(),
         keys.mutable_data_ptr(), values_[index].mutable_data_ptr(), s.slots[layer.group].const_data_ptr<int64_t>(),
         layer.query.numbers(), layer.key.numbers(), layer.query.eps, num_heads, num_kv_heads, head_dim,
         rotation.half(), keys.size(2)},
        {b.qkv.const_data_ptr(), b.attended.mutable_data_ptr(), keys.const_data_ptr(),
         values_[index].const_data_ptr(), tables.const_data_ptr<int32_t>(),
         s.seq_lens[layer.group].const_data_ptr<int32_t>(), s.query_starts[layer.group].const_data_ptr<int32_t>(),
         layer.qkv.columns, tables.stride(0), tables.size(0), num_heads, num_kv_heads, head_dim, keys.size(2),
         layer.window, layer.scale, layer.softcap},
        nullptr,
        {b.gate_up.const_data_ptr(), b.activated.mutable_data_ptr(), layer.down.depth, layer.activation},
    };
  }

  // Once for all layers that attend to the same keys.
  void plan(const Kernels& kernels, std::vector<LayerCall>& calls, int num_threads) {
    std::vector<const LayerCall*> planned;
    for (LayerCall& call : calls) {
      const auto is_same = [&](const LayerCall* other) {
        const Attention &x = call.attention, &y = other->attention;
        return x.block_tables == y.block_tables && x.window == y.window && x.num_kv_heads == y.num_kv_heads &&
               x.num_heads == y.num_heads && x.head_dim == y.head_dim && x.block_size == y.block_size;
      };
      const auto found = std::find_if(planned.begin(), planned.end(), is_same);
      if (found != planned.end()) {
        call.work = (*found)->work;
        continue;
      }
      if (works_.size() <= planned.size()) works_.push_back(std::make_unique<AttentionWork>());
      AttentionWork& work = *works_[planned.size()];
      work.plan(kernels, call.attention, num_threads, true);
      call.work = &work;
      planned.push_back(&call);
    }
  }

  const int64_t instruction_set_;
  std::vector<Layer> layers_;
  std::vector<Rotation> rotations_;
  std::optional<Ends> ends_;
  std::vector<Tensor> keys_, values_;
  // They last, because their memory does.
  std::vector<std::unique_ptr<AttentionWork>> works_;
};

}  // namespace
}  // namespace stepwire

TORCH_LIBRARY_FRAGMENT(STEPWIRE_NAMESPACE, m) {
  m.class_<stepwire::DecoderLayers>("DecoderLayers")
      .def(torch::init<int64_t>())
      .def("add_layer", &stepwire::DecoderLayers::add_layer)
      .def("add_rotation", &stepwire::DecoderLayers::add_rotation)
      .def("set_ends", &stepwire::DecoderLayers::set_ends)
      .def("set_caches", &stepwire::DecoderLayers::set_caches)
      .def("forget_caches", &stepwire::DecoderLayers::forget_caches)
      .def("run", &stepwire::DecoderLayers::run);
}
