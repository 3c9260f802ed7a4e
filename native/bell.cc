#include "bell.h"

#include <chrono>

#include "pool.h"
#include "spin.h"

namespace unisono {

void Bell::ring() {
  count_.fetch_add(1);
  // One who goes to sleep says so first and then looks once more, so nobody sleeps through it.
  if (sleepers_.load() == 0) return;
  const std::lock_guard lock(mutex_);
  rung_.notify_all();
}

bool Bell::wait(std::uint64_t seen, double timeout_s) {
  const auto has_rung = [&] { return count_.load() > seen; };
  if (looks_ > 0) {
    Guest guest;
    const auto has_rung_or_helped = [&] { return has_rung() || guest.help(); };
    // What a guest has helped with is often what it waits for.
    while (spinUntil(looks_, has_rung_or_helped)) {
      if (has_rung()) return true;
    }
  }
  std::unique_lock lock(mutex_);
  sleepers_.fetch_add(1);
  const bool rang = rung_.wait_for(lock, std::chrono::duration<double>(timeout_s), has_rung);
  sleepers_.fetch_sub(1);
  return rang;
}

}  // namespace unisono
