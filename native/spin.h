// Waiting for a moment without going to sleep: to wake a thread takes longer than most waits here.
#pragma once

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
// thread offers the core now and then.
template <class Condition>
bool spinUntil(int looks, const Condition& condition) {
  constexpr int kLooksPerOffer = 64;
  for (int i = 1; i <= looks; ++i) {
    if (condition()) return true;
    if (i % kLooksPerOffer == 0) {
      std::this_thread::yield();
    } else {
      pauseBriefly();
    }
  }
  return condition();
}

}  // namespace unisono
