// float16 and bfloat16 are widened, reduced in float32 and rounded once, to the nearest even.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "check.h"
#include "instruction_set.h"

using namespace unisono;

namespace {

// One of the two formats, by its definition and without any trick.
struct Format {
  DType dtype;
  int exponent_bits;
  int mantissa_bits;

  float widen(std::uint16_t bits) const {
    const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const float sign = bits >> 15 ? -1.0f : 1.0f;
    if (exponent == (1 << exponent_bits) - 1) return mantissa ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp(float(mantissa), 1 - bias - mantissa_bits);
    return sign *
           std::ldexp(float(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
  }

  std::uint16_t infinity() const {
    return static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
  }

  // The nearest of all values; infinity stands for the next power of two.
  std::uint16_t narrow(float value) const {
    const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
    const double magnitude = std::fabs(double(value));
    std::uint16_t low = 0, high = infinity();
    const auto at = [&](std::uint16_t bits) {
      const double step = std::ldexp(1.0, (1 << (exponent_bits - 1)));
      return bits == infinity() ? step : double(widen(bits));
    };
    if (magnitude >= at(high)) return sign | high;
    while (high - low > 1) {
      const auto middle = static_cast<std::uint16_t>((low + high) / 2);
      (at(middle) <= magnitude ? low : high) = middle;
    }
    const double below = magnitude - at(low), above = at(high) - magnitude;
    const bool up = above < below || (above == below && low % 2 == 1);
    return sign | (up ? high : low);
  }

  bool isNan(std::uint16_t bits) const { return (bits & 0x7fff) > infinity(); }
};

using Halves = std::vector<std::uint16_t>;

Halves reduce(const KernelTable& table, const Format& format, Op op, bool mean,
              const std::vector<Halves>& inputs) {
  const std::size_t count = inputs[0].size();
  Halves result(count);
  std::vector<const void*> sources;
  for (const Halves& input : inputs) sources.push_back(input.data());
  const Kernel kernel =
      table.kernels[static_cast<std::size_t>(op)][static_cast<std::size_t>(format.dtype)];
  const std::size_t divisor = mean ? sources.size() : 0;
  void* target = result.data();
  kernel({sources.data(), sources.size(), &target, 1, 0, count, divisor, false});

  alignas(64) static std::uint16_t around_the_caches[2][65536];
  void* targets[] = {around_the_caches[0], around_the_caches[1]};
  kernel({sources.data(), sources.size(), targets, 2, 0, count, divisor, true});
  for (const auto& copy : around_the_caches) CHECK(std::equal(result.begin(), result.end(), copy));
  return result;
}

void checkSame(const Format& format, float expected, std::uint16_t found) {
  if (std::isnan(expected)) {
    CHECK(format.isNan(found));
  } else {
    CHECK(format.narrow(expected) == found, "expected %a, found %a\n", expected,
          format.widen(found));
  }
}

void check(const KernelTable& table, const Format& format) {
  Halves all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);

  // x + -0 is x: what is widened is what was stored.
  const Halves same = reduce(table, format, Op::sum, false, {all, Halves(65536, 0x8000)});
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (format.isNan(all[i])) {
      CHECK(format.isNan(same[i]));
    } else {
      CHECK(same[i] == all[i]);
    }
  }

  std::mt19937 order(1);
  for (int round = 0; round < 4; ++round) {
    Halves second = all, third = all;
    std::shuffle(second.begin(), second.end(), order);
    std::shuffle(third.begin(), third.end(), order);
    const Halves product = reduce(table, format, Op::prod, false, {all, second});
    const Halves mean = reduce(table, format, Op::sum, true, {all, second, third});
    const Halves least = reduce(table, format, Op::min, false, {all, second});
    for (std::size_t i = 0; i < all.size(); ++i) {
      const float a = format.widen(all[i]), b = format.widen(second[i]), c = format.widen(third[i]);
      checkSame(format, a * b, product[i]);
      checkSame(format, (a + b + c) / 3.0f, mean[i]);
      checkSame(format, std::isnan(a) || std::isnan(b) ? NAN : (b < a ? b : a), least[i]);
    }
  }
}

}  // namespace

int main() {
  for (const KernelTable* table : availableTables()) {
    check(*table, {DType::float16, 5, 10});
    check(*table, {DType::bfloat16, 8, 7});
  }
}
