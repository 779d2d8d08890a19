// Threads that go through the phases of a step together, without being put to sleep between them.
#pragma once

#include <sched.h>
#include <stdint.h>

#include <algorithm>
#include <atomic>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace stepwire {

class Team {
 public:
  explicit Team(int size) : size_(size) {}

  int size() const { return size_; }

  // f(begin, end) for parts of [0, count), each taken by the thread that is free: one that another process has taken
  // off its core holds the others up no longer than by what it has in hand. Returns when all of it is done.
  // Parts become smaller towards the end, down to `least`.
  template <typename F>
  void share(int64_t count, int64_t least, const F& f) {
    int64_t begin = next_.load(std::memory_order_relaxed);
    while (begin < count) {
      const int64_t end = std::min(count, begin + std::max(least, (count - begin) / (2 * size_)));
      if (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      f(begin, end);
      begin = next_.load(std::memory_order_relaxed);
    }
    meet();
  }

  // f(i) for each i below `count`, in that order, one at a time.
  template <typename F>
  void share_singly(int64_t count, const F& f) {
    for (int64_t i = next_.fetch_add(1, std::memory_order_relaxed); i < count;
         i = next_.fetch_add(1, std::memory_order_relaxed))
      f(i);
    meet();
  }

  // One thread does it, and all others wait for it.
  template <typename F>
  void alone(const F& f) {
    share_singly(1, [&](int64_t) { f(); });
  }

 private:
  // A phase takes less time than it takes to wake a thread; but where there are more threads than cores, the one that
  // is waited for may need this core.
  static constexpr int kSpins = 500;

  void meet() {
    const int64_t phase = phase_.load(std::memory_order_relaxed);
    if (num_here_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      num_here_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) spins < kSpins ? pause() : yield();
  }

  static void yield() { sched_yield(); }

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  const int size_;
  // Each in a cache line of its own: one is written to while others wait for another.
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> num_here_{0};
  alignas(64) std::atomic<int64_t> phase_{0};
};

}  // namespace stepwire
