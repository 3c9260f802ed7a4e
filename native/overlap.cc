#include "overlap.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "instruction_set.h"

namespace unisono {
namespace {

struct Interval {
  std::uintptr_t begin;
  std::uintptr_t end;
  std::size_t item;

  bool overlaps(const Interval& other) const { return begin < other.end && other.begin < end; }
  bool operator==(const Interval&) const = default;
};

Interval intervalOf(const void* data, const Item& item, std::size_t index) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  return {begin, begin + item.num_elements * elementBytes(item.dtype), index};
}

}  // namespace

std::optional<std::size_t> findOverlap(std::span<const Item> items) {
  std::vector<Interval> outputs;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (items[i].num_elements == 0) continue;
    for (const void* output : items[i].outputs) outputs.push_back(intervalOf(output, items[i], i));
  }
  std::ranges::sort(outputs, {}, &Interval::begin);
  const auto is_wrong = [](const Interval& a, const Interval& b) {
    return a.overlaps(b) && a != b;
  };
  const auto wrong = std::ranges::adjacent_find(outputs, is_wrong);
  if (wrong != outputs.end()) return wrong->item;

  // The outputs are now apart or equal, so they are sorted by their ends too.
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (items[i].num_elements == 0 || items[i].inputs.data() == items[i].outputs.data()) continue;
    for (const void* data : items[i].inputs) {
      const Interval input = intervalOf(data, items[i], i);
      auto output = std::ranges::upper_bound(outputs, input.begin, {}, &Interval::end);
      for (; output != outputs.end() && output->overlaps(input); ++output) {
        if (*output != input) return output->item;
      }
    }
  }
  return std::nullopt;
}

}  // namespace unisono
