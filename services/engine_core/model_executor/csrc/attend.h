// One call's attention as work for threads: planned once, done share by share and tile by tile, merged at the end.
#pragma once

#include <stdint.h>

#include <vector>

#include "plan.h"

namespace stepwire {

// What a thread handles in about the time that it takes to wake it up: products of a query head with a key, times the
// size of a head.
constexpr int64_t kProductsPerThread = 1 << 16;

// Memory of this thread that lasts, aligned for vectors.
inline char* scratch(int64_t size) {
  thread_local std::vector<char> memory;
  if ((int64_t)memory.size() < size + 64) memory.resize(size + 64);
  return (char*)(((uintptr_t)memory.data() + 63) / 64 * 64);
}

// Good for every layer whose tokens, heads and window are those it was planned for.
class AttentionWork {
 public:
  // Few products are left to one thread, unless `all_threads` of them are awake anyway.
  void plan(const Kernels& kernels, const Attention& a, int num_threads, bool all_threads) {
    plan_.work = 0;
    plan_prefills(a, kernels.tile_queries(a), num_threads, plan_);
    plan_decodes(a, num_threads, plan_);
    if (!all_threads && plan_.work * a.group() * a.head_dim < 2 * kProductsPerThread && num_threads > 1) {
      plan_.work = 0;
      plan_decodes(a, num_threads = 1, plan_);
    }
    num_shares_ = num_threads;
    scratch_size_ = kernels.scratch_size(a);
    give_partials(kernels, a);
  }

  int num_shares() const { return num_shares_; }
  int64_t num_tiles() const { return (int64_t)plan_.tiles.size(); }
  int64_t scratch_size() const { return scratch_size_; }
  bool is_merged() const { return has_partials_; }

  // One query token each.
  void decode(const Kernels& kernels, const Attention& a, int64_t share) const {
    const int64_t first = plan_.thread_starts[share], last = plan_.thread_starts[share + 1];
    kernels.decode(a, plan_.parts.data() + first, last - first, scratch(scratch_size_));
  }

  void prefill(const Kernels& kernels, const Attention& a, int64_t tile) const {
    kernels.prefill(a, plan_.tiles[tile], scratch(scratch_size_));
  }

  // When all shares are done.
  void merge(const Kernels& kernels, const Attention& a) const {
    const std::vector<DecodePart>& parts = plan_.parts;
    for (size_t i = 0; i < parts.size();) {
      size_t end = i + 1;
      const DecodePart& first = parts[i];
      while (end < parts.size() && parts[end].sequence == first.sequence && parts[end].kv_head == first.kv_head) end++;
      if (first.partial) kernels.merge(a, &first, (int64_t)(end - i));
      i = end;
    }
  }

 private:
  // Parts of one sequence and head lie side by side; each gets its place for an unfinished result.
  void give_partials(const Kernels& kernels, const Attention& a) {
    const auto is_whole = [&](const DecodePart& part) {
      return part.begin == first_visible(a, a.seq_lens[part.sequence] - 1) && part.end == a.seq_lens[part.sequence];
    };
    const int64_t size = kernels.partial_size(a);
    int64_t count = 0;
    for (const DecodePart& part : plan_.parts) count += !is_whole(part);
    has_partials_ = count > 0;
    if ((int64_t)partials_.size() < count * size) partials_.resize(count * size);
    float* next = partials_.data();
    for (DecodePart& part : plan_.parts) {
      if (is_whole(part)) continue;
      part.partial = next;
      next += size;
    }
  }

  Plan plan_;
  std::vector<float> partials_;
  int num_shares_ = 1;
  int64_t scratch_size_ = 0;
  bool has_partials_ = false;
};

}  // namespace stepwire
