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

// Returns whether the condition came true within that many looks at it.
template <class Condition>
bool spinUntil(int looks, const Condition& condition) {
  for (int i = 0; i < looks; ++i) {
    if (condition()) return true;
    pauseBriefly();
  }
  return condition();
}

}  // namespace unisono
