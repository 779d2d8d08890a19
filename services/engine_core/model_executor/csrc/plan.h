// How one call's attention is divided among threads: by the keys there are to read, not by the number of sequences.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"

namespace stepwire {

// What one item costs beyond its keys, in keys.
constexpr int64_t kItemKeys = 16;

struct Plan {
  std::vector<DecodePart> parts;
  // Thread t decodes parts [thread_starts[t], thread_starts[t + 1]).
  std::vector<int64_t> thread_starts;
  std::vector<PrefillTile> tiles;
  // Products of a query token and a key, by one head of keys: the measure of all work.
  int64_t work = 0;
};

inline int64_t first_visible(const Attention& a, int64_t position) {
  return a.window ? std::max<int64_t>(0, position - a.window + 1) : 0;
}

// Cuts the sequences of one query token each into `num_threads` shares of equal work. A share that would end near the
// end of a sequence's head ends there: most heads are whole, and a batch of many sequences has no parts to merge.
inline void plan_decodes(const Attention& a, int num_threads, Plan& plan) {
  int64_t total = 0;
  const auto cost = [](int64_t num_keys) { return num_keys + kItemKeys; };
  for (int64_t s = 0; s < a.num_seqs; s++)
    if (a.query_starts[s + 1] - a.query_starts[s] == 1)
      total += cost(a.seq_lens[s] - first_visible(a, a.seq_lens[s] - 1)) * a.num_kv_heads;
  plan.work += total;
  const int64_t share = (total + num_threads - 1) / num_threads, slack = share / 16;
  int64_t done = 0;
  plan.parts.clear();
  plan.thread_starts.assign(1, 0);
  for (int64_t s = 0; s < a.num_seqs; s++) {
    if (a.query_starts[s + 1] - a.query_starts[s] != 1) continue;
    const int64_t first = first_visible(a, a.seq_lens[s] - 1), last = a.seq_lens[s];
    for (int64_t head = 0; head < a.num_kv_heads; head++) {
      int64_t begin = first;
      while (begin < last) {
        const int64_t target = share * (int64_t)plan.thread_starts.size();
        int64_t end = last;
        if (done + cost(last - begin) > target + slack && (int)plan.thread_starts.size() < num_threads) {
          // Whole blocks, and no crumbs.
          const int64_t block = (target - done - kItemKeys) / a.block_size * a.block_size;
          end = std::min(last, (begin + std::max<int64_t>(block, 0)) / a.block_size * a.block_size);
        }
        if (end > begin) {
          plan.parts.push_back({s, a.query_starts[s], head, begin, end, nullptr});
          done += cost(end - begin);
        }
        if (end < last || (done >= target - slack && (int)plan.thread_starts.size() < num_threads))
          plan.thread_starts.push_back((int64_t)plan.parts.size());
        begin = std::max(begin, end);
      }
    }
  }
  plan.thread_starts.resize(num_threads + 1, (int64_t)plan.parts.size());
}

// Halves the tiles until there are some for every thread, but not for ever: each packs the keys anew.
inline int64_t tile_size(const Attention& a, int64_t most, int num_threads) {
  constexpr int64_t kLeastRows = 64;
  const auto num_tiles = [&](int64_t size) {
    int64_t count = 0;
    for (int64_t s = 0; s < a.num_seqs; s++) {
      const int64_t num_queries = a.query_starts[s + 1] - a.query_starts[s];
      if (num_queries > 1) count += (num_queries + size - 1) / size * a.num_kv_heads;
    }
    return count;
  };
  int64_t size = most;
  while (size / 2 * a.group() >= kLeastRows && num_tiles(size) < 2 * num_threads) size /= 2;
  return size;
}

// Longest first: the last tiles to be taken are short, so that the threads end together.
inline void plan_prefills(const Attention& a, int64_t most_queries, int num_threads, Plan& plan) {
  const int64_t tile_queries = tile_size(a, most_queries, num_threads);
  plan.tiles.clear();
  const auto num_keys = [&](const PrefillTile& tile) {
    const int64_t before = a.seq_lens[tile.sequence] - a.query_starts[tile.sequence + 1] + a.query_starts[tile.sequence];
    return before + tile.end - first_visible(a, before + tile.begin);
  };
  for (int64_t s = 0; s < a.num_seqs; s++) {
    const int64_t num_queries = a.query_starts[s + 1] - a.query_starts[s];
    if (num_queries < 2) continue;
    for (int64_t begin = 0; begin < num_queries; begin += tile_queries)
      for (int64_t head = 0; head < a.num_kv_heads; head++)
        plan.tiles.push_back({s, head, begin, std::min(begin + tile_queries, num_queries)});
  }
  for (const PrefillTile& tile : plan.tiles) plan.work += num_keys(tile) * (tile.end - tile.begin);
  std::stable_sort(plan.tiles.begin(), plan.tiles.end(), [&](const PrefillTile& x, const PrefillTile& y) {
    return num_keys(x) * (x.end - x.begin) > num_keys(y) * (y.end - y.begin);
  });
}

}  // namespace stepwire
