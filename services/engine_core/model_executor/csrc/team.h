// Threads that go through the phases of a step together, and seldom sleep between them.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <atomic>

#if defined(__linux__)
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

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
  // Some 10 us: most phases end sooner, and waking a thread up takes longer. What takes more waits for a thread whose core
  // another one has taken, and which can go on on this core if it is left. Yielding leaves it to whoever is there already,
  // and costs a thread its turn behind all of them.
  static constexpr int kSpins = 800;

  void meet() {
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (num_here_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      num_here_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      // In one order with the look at who sleeps: whoever goes to sleep meanwhile sees the new phase.
      phase_.store(phase + 1, std::memory_order_seq_cst);
      if (num_asleep_.load(std::memory_order_seq_cst) > 0) wake_all();
      return;
    }
    for (int spins = 0; spins < kSpins; spins++) {
      if (phase_.load(std::memory_order_acquire) != phase) return;
      pause();
    }
    num_asleep_.fetch_add(1, std::memory_order_seq_cst);
    while (phase_.load(std::memory_order_seq_cst) == phase) sleep_while(phase);
    num_asleep_.fetch_sub(1, std::memory_order_relaxed);
  }

#if defined(__linux__)
  // Returns at once when the phase is another one already, and may return without a reason.
  void sleep_while(uint32_t phase) { syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0); }
  void wake_all() { syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
  void sleep_while(uint32_t) { sched_yield(); }
  void wake_all() {}
#endif

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  const int size_;
  // Each in a cache line of its own: one is written to while others wait for another.
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> num_here_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  std::atomic<int> num_asleep_{0};
};

}  // namespace stepwire
