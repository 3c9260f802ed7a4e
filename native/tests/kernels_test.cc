// Every instruction set gives the bits of the plain tree, for every operation and dtype but halves.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "check.h"
#include "instruction_set.h"

using namespace unisono;

namespace {

template <class Value>
Value apply(Op op, Value a, Value b) {
  if constexpr (std::is_floating_point_v<Value>) {
    if (op == Op::min || op == Op::max) {
      if (std::isnan(a) || std::isnan(b)) return std::nan("");
    }
  }
  using Wrapping = typename std::conditional_t<std::is_integral_v<Value>, std::make_unsigned<Value>,
                                               std::type_identity<Value>>::type;
  using Wide = std::conditional_t<std::is_integral_v<Value>, std::uint64_t, Value>;
  const Wide x = static_cast<Wrapping>(a), y = static_cast<Wrapping>(b);
  if (op == Op::sum) return static_cast<Value>(x + y);
  if (op == Op::prod) return static_cast<Value>(x * y);
  return op == Op::min ? (b < a ? b : a) : (b > a ? b : a);
}

// Level by level, as the definition says; the kernels split from the top.
template <class Value>
Value tree(Op op, std::vector<Value>& level) {
  for (std::size_t size = level.size(); size > 1; size = (size + 1) / 2) {
    for (std::size_t i = 0; i + 1 < size; i += 2) level[i / 2] = apply(op, level[i], level[i + 1]);
    if (size % 2 == 1) level[size / 2] = level[size - 1];
  }
  return level[0];
}

template <class Value>
bool same(Value a, Value b) {
  if (a != a) return b != b;  // the payload of a NaN is free
  return std::memcmp(&a, &b, sizeof a) == 0;
}

struct Case {
  Op op;
  std::size_t divisor;
  std::size_t num_inputs;
  std::size_t count;
  std::size_t shift;        // elements from an aligned start
  std::size_t num_outputs;  // new ones
  std::size_t in_place;     // the input that is an output too, or num_inputs
  bool streaming;
};

// The first element at the start of a cache line; `values` holds a line more than is used.
template <class Value>
Value* alignedStart(std::vector<Value>& values) {
  const std::size_t past = reinterpret_cast<std::uintptr_t>(values.data()) % 64;
  return values.data() + (past == 0 ? 0 : (64 - past) / sizeof(Value));
}

template <class Value>
void check(const KernelTable& table, DType dtype, const Case& c) {
  constexpr Value kGuard = 77;
  std::vector<std::vector<Value>> inputs;
  std::vector<Value> expected, leaves(c.num_inputs);
  for (std::size_t r = 0; r < c.num_inputs; ++r) {
    inputs.push_back(
        randomValues<Value>(c.shift + c.count + 1, static_cast<unsigned>(r + c.count)));
  }
  for (std::size_t i = 0; i < c.count; ++i) {
    for (std::size_t r = 0; r < c.num_inputs; ++r) leaves[r] = inputs[r][c.shift + i];
    Value total = tree(c.op, leaves);
    if (c.divisor != 0) total /= static_cast<Value>(c.divisor);
    expected.push_back(total);
  }
  const std::vector<Value> room(c.shift + c.count + 1 + 64 / sizeof(Value), kGuard);
  std::vector<std::vector<Value>> outputs(c.num_outputs, room);
  std::vector<const void*> sources;
  std::vector<void*> targets;
  for (auto& input : inputs) sources.push_back(input.data() + c.shift);
  for (auto& output : outputs) targets.push_back(alignedStart(output) + c.shift);
  if (c.in_place < c.num_inputs) targets.push_back(inputs[c.in_place].data() + c.shift);

  const Kernel kernel =
      table.kernels[static_cast<std::size_t>(c.op)][static_cast<std::size_t>(dtype)];
  const std::size_t middle = c.count / 3;  // a task need not begin at the start
  for (const auto& [begin, end] : {std::pair{std::size_t{0}, middle}, {middle, c.count}}) {
    kernel({sources.data(), sources.size(), targets.data(), targets.size(), begin, end, c.divisor,
            c.streaming});
  }
  for (const void* target : targets) {
    const Value* result = static_cast<const Value*>(target);
    for (std::size_t i = 0; i < c.count; ++i) {
      CHECK(same(expected[i], result[i]), "%s op %d dtype %d inputs %zu count %zu element %zu\n",
            table.instruction_set, int(c.op), int(dtype), c.num_inputs, c.count, i);
    }
  }
  for (auto& output : outputs) {
    Value* start = alignedStart(output);
    CHECK(std::all_of(output.data(), start + c.shift, [](Value v) { return v == kGuard; }));
    CHECK(start[c.shift + c.count] == kGuard);
  }
}

template <class Value>
void checkAll(const KernelTable& table, DType dtype) {
  const bool floating = std::is_floating_point_v<Value>;
  for (Op op : {Op::sum, Op::prod, Op::min, Op::max}) {
    for (bool mean : {false, true}) {
      if (mean && (!floating || op != Op::sum)) continue;
      const auto by = [&](std::size_t divisor) { return mean ? divisor : 0; };
      for (std::size_t r = 1; r <= 17; ++r) {
        for (std::size_t count : {0, 1, 7, 33, 255, 256, 257, 513, 2049}) {
          if (count == 2049 && r % 8 > 1) continue;  // the many blocks of some are enough
          check<Value>(table, dtype, {op, by(r), r, count, count % 3, 1, r, false});
          check<Value>(table, dtype, {op, by(r), r, count, 1, count % 4, r, true});
          check<Value>(table, dtype, {op, by(r), r, count, 0, 1 + count % 3, r, true});
        }
        for (std::size_t k = 0; k < r; k += r < 10 ? 1 : (r - 1) / 2) {
          check<Value>(table, dtype, {op, by(k + 1), r, 300, 2, k % 3, k, false});
        }
      }
      for (std::size_t count = 0; count <= 70; ++count) {
        check<Value>(table, dtype, {op, by(count), 3, count, 1, 2, 3, false});
        check<Value>(table, dtype, {op, by(8), 8, count, 0, 1, 8, false});
      }
      for (std::size_t r : {63, 64, 65, 129, 513}) {
        check<Value>(table, dtype, {op, by(r + 1), r, 300, 0, 1, r, false});
      }
    }
  }
}

}  // namespace

int main() {
  for (const KernelTable* table : availableTables()) {
    std::printf("%s\n", table->instruction_set);
    checkAll<float>(*table, DType::float32);
    checkAll<double>(*table, DType::float64);
    checkAll<std::int8_t>(*table, DType::int8);
    checkAll<std::int16_t>(*table, DType::int16);
    checkAll<std::int32_t>(*table, DType::int32);
    checkAll<std::int64_t>(*table, DType::int64);
    checkAll<std::uint8_t>(*table, DType::uint8);
    checkAll<std::uint16_t>(*table, DType::uint16);
    checkAll<std::uint32_t>(*table, DType::uint32);
    checkAll<std::uint64_t>(*table, DType::uint64);
  }
}
