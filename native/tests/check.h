// Checks that stay on in release builds. The first that fails ends the test.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      __VA_OPT__(std::fprintf(stderr, __VA_ARGS__);)                       \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

// Any bit pattern: for floating types that means subnormal numbers, infinities and NaN too.
template <class Value>
std::vector<Value> randomValues(std::size_t count, unsigned seed) {
  std::mt19937_64 bits(seed);
  std::vector<Value> values(count);
  for (Value& value : values) {
    const std::uint64_t pattern = bits();
    std::memcpy(&value, &pattern, sizeof value);
  }
  return values;
}
