// Waiting for a moment without going to sleep: to wake a thread takes longer than most waits here.
#pragma once

#include <chrono>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace unisono {

inline void pauseBriefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#else
  std::this_thread::yield();
#endif
}

// Returns whether the condition came true within that many looks at it. What is waited for may need
// this very core, on a busy machine or where the scheduler has put both threads there, so the
// thread offers the core now and then. If somebody takes the offer, the thread stops looking, and
// does not look for a while: the system wakes a thread that sleeps sooner than it gives the core
// back to one that has offered it.
template <class Condition>
bool spinUntil(int looks, const Condition& condition) {
  using Clock = std::chrono::steady_clock;
  constexpr int kLooksPerOffer = 64;
  constexpr std::chrono::microseconds kLongestOffer{20};
  constexpr std::chrono::milliseconds kBusyFor{20};
  static thread_local Clock::time_point busy_until{};
  if (condition()) return true;
  if (Clock::now() < busy_until) return false;
  for (int i = 2; i <= looks; ++i) {
    if (i % kLooksPerOffer == 0) {
      const auto offered = Clock::now();
      std::this_thread::yield();
      const auto now = Clock::now();
      if (now - offered > kLongestOffer) {
        busy_until = now + kBusyFor;
        break;
      }
    } else {
      pauseBriefly();
    }
    if (condition()) return true;
  }
  return condition();
}

}  // namespace unisono
