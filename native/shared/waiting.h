// Waiting for memory that another process writes: first on the processor, then asleep.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace unisono::shared {

using Clock = std::chrono::steady_clock;

inline void pauseBriefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How long to keep the processor before sleeping, in looks at the memory.
struct Patience {
  int spins;
  int yields;
};

// Where every rank has a core, the others are at work: spin for some 20 us, then sleep; a rank that
// yields to a stranger comes back later than one that is woken. Where ranks share cores, the rank
// that is waited for needs this one.
constexpr Patience patienceOf(bool crowded) {
  return crowded ? Patience{20, 200} : Patience{1000, 0};
}

template <class Ready>
bool stayAwakeUntil(const Ready& ready, Patience patience) {
  for (int i = 0; i < patience.spins; ++i) {
    if (ready()) return true;
    pauseBriefly();
  }
  for (int i = 0; i < patience.yields; ++i) {
    if (ready()) return true;
    sched_yield();
  }
  return ready();
}

// Sleeps until `word` is no longer `seen`, somebody wakes it, or `limit` has passed.
void sleepOn(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::nanoseconds limit);
void wakeAll(std::atomic<std::uint32_t>& word);

}  // namespace unisono::shared
