// A bell that threads wait for: it counts how often it has rung.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace unisono {

class Bell {
 public:
  // `looks`: how often one who waits looks before it sleeps; 0 where the cores are needed.
  explicit Bell(int looks) : looks_(looks) {}

  std::uint64_t count() const { return count_.load(std::memory_order_acquire); }

  // Wakes all who wait.
  void ring();

  // Waits until the bell has rung more often than `seen`; false if it has not within the time.
  // While it looks, the thread helps others with their reductions; see `Guest`.
  bool wait(std::uint64_t seen, double timeout_s);

 private:
  const int looks_;
  std::atomic<std::uint64_t> count_ = 0;
  std::atomic<int> sleepers_ = 0;
  std::mutex mutex_;
  std::condition_variable rung_;
};

}  // namespace unisono
