// The kernels. Compiled several times with different flags; UNISONO_INSTRUCTION_SET names the
// result.
//
// The sum of R inputs is a balanced binary tree over their positions: adjacent pairs are combined
// level by level, an odd last one is carried up. 5 inputs: ((0 + 1) + (2 + 3)) + 4. As 8 is a power
// of two, any 8 adjacent inputs that start at a multiple of 8 are a whole subtree. Up to 8 inputs
// are combined in registers and written to all outputs from there; more inputs than that go through
// blocks of partial results that stay in the first-level cache.
#include "kernels.h"

#include <bit>
#include <cstring>
#include <type_traits>

#include "half.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

// An output may be an input, which compilers must otherwise assume to overlap in any way.
#if defined(__clang__)
#define UNISONO_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define UNISONO_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace unisono::UNISONO_INSTRUCTION_SET {
namespace {

constexpr std::size_t kBlockBytes = 2048;

// For any R the unrolled loops pay only for sums, the operation of every training step.
struct Sum {
  static constexpr std::size_t kMaxParts = 8;
  template <class Value>
  UNISONO_INLINE static Value apply(Value a, Value b) {
    return static_cast<Value>(a + b);
  }
};

struct Prod {
  static constexpr std::size_t kMaxParts = 2;
  template <class Value>
  UNISONO_INLINE static Value apply(Value a, Value b) {
    // A product of two uint16 would overflow int, to which both are promoted.
    if constexpr (std::is_integral_v<Value>) return static_cast<Value>(1u * a * b);
    return a * b;
  }
};

// NaN wins. Of equal values the first is kept: torch keeps the first or the second zero, depending
// on the length.
struct Min {
  static constexpr std::size_t kMaxParts = 2;
  template <class Value>
  UNISONO_INLINE static Value apply(Value a, Value b) {
    return (b < a) | (b != b) ? b : a;
  }
};

struct Max {
  static constexpr std::size_t kMaxParts = 2;
  template <class Value>
  UNISONO_INLINE static Value apply(Value a, Value b) {
    return (b > a) | (b != b) ? b : a;
  }
};

template <class Stored>
constexpr bool kIsHalf = std::is_same_v<Stored, Float16> || std::is_same_v<Stored, Bfloat16>;

template <class Stored>
using Wide = std::conditional_t<kIsHalf<Stored>, float, Stored>;

template <class Stored>
constexpr std::size_t kBlock = kBlockBytes / sizeof(Wide<Stored>);

template <class Operation, std::size_t kFirst, std::size_t kCount, class Load>
UNISONO_INLINE auto treeOf(const Load& load) {
  if constexpr (kCount == 1) {
    return load(kFirst);
  } else {
    constexpr std::size_t kLeft = std::bit_floor(kCount - 1);
    const auto left = treeOf<Operation, kFirst, kLeft>(load);
    const auto right = treeOf<Operation, kFirst + kLeft, kCount - kLeft>(load);
    return Operation::apply(left, right);
  }
}

// Sums without a mean have `divisor` 0.
template <class Operation, std::size_t kCount, class Value>
void combineValues(const Value* const* parts, Value* total, std::size_t count, Value divisor) {
  const Value* local[kCount];
  for (std::size_t part = 0; part < kCount; ++part) local[part] = parts[part];
  const auto total_at = [&](std::size_t i) {
    return treeOf<Operation, 0, kCount>([&](std::size_t part) { return local[part][i]; });
  };
  if constexpr (std::is_floating_point_v<Value> && std::is_same_v<Operation, Sum>) {
    if (divisor != 0) {
      UNISONO_INDEPENDENT
      for (std::size_t i = 0; i < count; ++i) total[i] = total_at(i) / divisor;
      return;
    }
  }
  UNISONO_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) total[i] = total_at(i);
}

// The same where the parts or the total are halves, and all between is float32.
template <class Operation, std::size_t kCount, class Part, class Total>
void combineHalves(const Part* const* parts, Total* total, std::size_t count, float divisor) {
  const Part* local[kCount];
  for (std::size_t part = 0; part < kCount; ++part) local[part] = parts[part];
  const auto store_at = [&](Total* to, std::size_t i) {
    Floats value =
        treeOf<Operation, 0, kCount>([&](std::size_t part) { return loadLanes(local[part] + i); });
    if (divisor != 0) value /= divisor;
    storeLanes(to, value);
  };
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_at(total + i, i);
  if (i == count) return;
  Part last[kCount][kLanes] = {};
  Total last_total[kLanes];
  for (std::size_t part = 0; part < kCount; ++part) {
    std::memcpy(last[part], local[part] + i, (count - i) * sizeof(Part));
    local[part] = last[part];
  }
  store_at(last_total, 0);
  std::memcpy(total + i, last_total, (count - i) * sizeof(Total));
}

template <class Operation, std::size_t kCount, class Part, class Total>
void combineParts(const Part* const* parts, Total* total, std::size_t count, Wide<Total> divisor) {
  if constexpr (kIsHalf<Part> || kIsHalf<Total>) {
    combineHalves<Operation, kCount>(parts, total, count, divisor);
  } else {
    combineValues<Operation, kCount>(parts, total, count, divisor);
  }
}

template <class Operation, class Part, class Total>
void combine(const Part* const* parts, std::size_t num_parts, Total* total, std::size_t count,
             Wide<Total> divisor) {
  if constexpr (Operation::kMaxParts == 8) {
    switch (num_parts) {
      case 3:
        return combineParts<Operation, 3>(parts, total, count, divisor);
      case 4:
        return combineParts<Operation, 4>(parts, total, count, divisor);
      case 5:
        return combineParts<Operation, 5>(parts, total, count, divisor);
      case 6:
        return combineParts<Operation, 6>(parts, total, count, divisor);
      case 7:
        return combineParts<Operation, 7>(parts, total, count, divisor);
      case 8:
        return combineParts<Operation, 8>(parts, total, count, divisor);
    }
  }
  if (num_parts == 1) return combineParts<Operation, 1>(parts, total, count, divisor);
  combineParts<Operation, 2>(parts, total, count, divisor);
}

// `Total` is `Stored`, or for subtrees what `Stored` is widened to.
template <class Operation, class Stored, class Total>
void reduceRange(const void* const* inputs, std::size_t num_inputs, std::size_t begin,
                 std::size_t count, Total* total, Wide<Stored> divisor) {
  constexpr std::size_t kMaxParts = Operation::kMaxParts;
  if (num_inputs <= kMaxParts) {
    const Stored* parts[kMaxParts] = {};
    for (std::size_t i = 0; i < num_inputs; ++i) {
      parts[i] = static_cast<const Stored*>(inputs[i]) + begin;
    }
    return combine<Operation>(parts, num_inputs, total, count, divisor);
  }
  alignas(64) Wide<Stored> blocks[kMaxParts][kBlock<Stored>];
  const Wide<Stored>* parts[kMaxParts] = {};
  std::size_t subtree = 1;
  while (subtree * kMaxParts < num_inputs) subtree *= kMaxParts;
  std::size_t num_parts = 0;
  for (std::size_t first = 0; first < num_inputs; first += subtree, ++num_parts) {
    const std::size_t left = num_inputs - first;
    const std::size_t size = left < subtree ? left : subtree;
    Wide<Stored>* block = blocks[num_parts];
    reduceRange<Operation, Stored>(inputs + first, size, begin, count, block, Wide<Stored>(0));
    parts[num_parts] = block;
  }
  combine<Operation>(parts, num_parts, total, count, divisor);
}

// A vector as it is stored. Halves take half the room of the float32 they are computed in.
template <class Stored>
struct StoredVector {
  typedef Stored Type [[gnu::vector_size(4 * kLanes)]];
  static constexpr std::size_t kCount = 4 * kLanes / sizeof(Stored);
};
template <>
struct StoredVector<Float16> {
  using Type = Shorts;
  static constexpr std::size_t kCount = kLanes;
};
template <>
struct StoredVector<Bfloat16> : StoredVector<Float16> {};

template <class Operation, std::size_t kCount, class Stored>
UNISONO_INLINE auto combineVector(const Stored* const* parts, std::size_t i, Wide<Stored> divisor) {
  typename StoredVector<Stored>::Type result;
  if constexpr (kIsHalf<Stored>) {
    Floats value =
        treeOf<Operation, 0, kCount>([&](std::size_t part) { return loadLanes(parts[part] + i); });
    if (divisor != 0) value /= divisor;
    storeLanes(reinterpret_cast<Stored*>(&result), value);
  } else {
    result = treeOf<Operation, 0, kCount>([&](std::size_t part) {
      typename StoredVector<Stored>::Type value;
      std::memcpy(&value, parts[part] + i, sizeof value);
      return value;
    });
    if constexpr (std::is_floating_point_v<Stored> && std::is_same_v<Operation, Sum>) {
      if (divisor != 0) result /= divisor;
    }
  }
  return result;
}

template <class Vector>
UNISONO_INLINE void storeVector(void* to, const Vector& value, [[maybe_unused]] bool streaming) {
#if defined(__AVX2__)
  if constexpr (sizeof value == sizeof(__m256i)) {
    if (streaming) return _mm256_stream_si256(static_cast<__m256i*>(to), (__m256i)value);
  }
#endif
#if defined(__SSE2__)
  if constexpr (sizeof value == sizeof(__m128i)) {
    if (streaming) return _mm_stream_si128(static_cast<__m128i*>(to), (__m128i)value);
  }
#endif
  std::memcpy(to, &value, sizeof value);
}

// Returns where it ends: less than four vectors are left.
template <class Operation, std::size_t kCount, class Stored>
std::size_t combineToAll(const Task& task, Wide<Stored> divisor) {
  constexpr std::size_t kStep = StoredVector<Stored>::kCount;
  const Stored* parts[kCount];
  for (std::size_t k = 0; k < kCount; ++k) parts[k] = static_cast<const Stored*>(task.inputs[k]);
  std::size_t i = task.begin;
  for (; i + 4 * kStep <= task.end; i += 4 * kStep) {
    // Named one by one, or compilers put them into memory.
    const auto first = combineVector<Operation, kCount>(parts, i, divisor);
    const auto second = combineVector<Operation, kCount>(parts, i + kStep, divisor);
    const auto third = combineVector<Operation, kCount>(parts, i + 2 * kStep, divisor);
    const auto fourth = combineVector<Operation, kCount>(parts, i + 3 * kStep, divisor);
    for (std::size_t k = 0; k < task.num_outputs; ++k) {
      Stored* output = static_cast<Stored*>(task.outputs[k]) + i;
      storeVector(output, first, task.streaming);
      storeVector(output + kStep, second, task.streaming);
      storeVector(output + 2 * kStep, third, task.streaming);
      storeVector(output + 3 * kStep, fourth, task.streaming);
    }
  }
  return i;
}

template <class Operation, class Stored>
std::size_t combineInRegisters(const Task& task, Wide<Stored> divisor) {
  if constexpr (Operation::kMaxParts == 8) {
    switch (task.num_inputs) {
      case 3:
        return combineToAll<Operation, 3, Stored>(task, divisor);
      case 4:
        return combineToAll<Operation, 4, Stored>(task, divisor);
      case 5:
        return combineToAll<Operation, 5, Stored>(task, divisor);
      case 6:
        return combineToAll<Operation, 6, Stored>(task, divisor);
      case 7:
        return combineToAll<Operation, 7, Stored>(task, divisor);
      case 8:
        return combineToAll<Operation, 8, Stored>(task, divisor);
    }
  }
  return task.num_inputs == 2 ? combineToAll<Operation, 2, Stored>(task, divisor) : task.begin;
}

void copy(const void* from, void* to, std::size_t bytes, bool streaming) {
  if (from == to) return;
#if defined(__SSE2__)
  if (streaming) {
    const char* source = static_cast<const char*>(from);
    char* target = static_cast<char*>(to);
    std::size_t head = -reinterpret_cast<std::uintptr_t>(target) % 64;
    if (head > bytes) head = bytes;
    std::memcpy(target, source, head);
    std::size_t i = head;
    for (; i + 64 <= bytes; i += 64) {
      for (std::size_t part = 0; part < 64; part += 16) {
        const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i + part));
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + i + part), value);
      }
    }
    std::memcpy(target + i, source + i, bytes - i);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

template <class Stored>
void store(const Stored* total, const Task& task, std::size_t begin, std::size_t count) {
  for (std::size_t k = 0; k < task.num_outputs; ++k) {
    Stored* output = static_cast<Stored*>(task.outputs[k]) + begin;
    copy(total, output, count * sizeof(Stored), task.streaming);
  }
}

template <class Operation, class Stored>
void reduceInBlocks(const Task& task, std::size_t first, Wide<Stored> divisor) {
  alignas(64) Stored total[kBlock<Stored>];
  for (std::size_t begin = first; begin < task.end; begin += kBlock<Stored>) {
    const std::size_t left = task.end - begin;
    const std::size_t count = left < kBlock<Stored> ? left : kBlock<Stored>;
    reduceRange<Operation, Stored>(task.inputs, task.num_inputs, begin, count, total, divisor);
    store(total, task, begin, count);
  }
}

// Stores around the caches write whole vectors to where vectors may begin.
template <class Stored>
bool takesVectors(const Task& task) {
  std::uintptr_t places = 0;
  for (std::size_t k = 0; k < task.num_outputs; ++k) {
    places |= reinterpret_cast<std::uintptr_t>(static_cast<Stored*>(task.outputs[k]) + task.begin);
  }
  return !task.streaming || places % sizeof(typename StoredVector<Stored>::Type) == 0;
}

template <class Operation, class Stored>
void reduce(const Task& task) {
  const std::size_t count = task.end - task.begin;
  if (count == 0 || task.num_outputs == 0) return;
  const auto divisor = static_cast<Wide<Stored>>(task.divisor);
  if (task.num_inputs == 1 && task.divisor <= 1) {
    store(static_cast<const Stored*>(task.inputs[0]) + task.begin, task, task.begin, count);
  } else {
    const bool in_registers = takesVectors<Stored>(task);
    const std::size_t begin =
        in_registers ? combineInRegisters<Operation, Stored>(task, divisor) : task.begin;
    reduceInBlocks<Operation, Stored>(task, begin, divisor);
  }
#if defined(__SSE2__)
  if (task.streaming) _mm_sfence();
#endif
}

}  // namespace

#define UNISONO_TEXT(x) #x
#define UNISONO_NAME(x) UNISONO_TEXT(x)
// Signed sums and products wrap like unsigned ones, which the language defines.
#define UNISONO_WRAPPING(Operation)                                    \
  {reduce<Operation, Float16>,       reduce<Operation, Bfloat16>,      \
   reduce<Operation, float>,         reduce<Operation, double>,        \
   reduce<Operation, std::uint8_t>,  reduce<Operation, std::uint16_t>, \
   reduce<Operation, std::uint32_t>, reduce<Operation, std::uint64_t>, \
   reduce<Operation, std::uint8_t>,  reduce<Operation, std::uint16_t>, \
   reduce<Operation, std::uint32_t>, reduce<Operation, std::uint64_t>}
#define UNISONO_ORDERED(Operation)                                     \
  {reduce<Operation, Float16>,       reduce<Operation, Bfloat16>,      \
   reduce<Operation, float>,         reduce<Operation, double>,        \
   reduce<Operation, std::int8_t>,   reduce<Operation, std::int16_t>,  \
   reduce<Operation, std::int32_t>,  reduce<Operation, std::int64_t>,  \
   reduce<Operation, std::uint8_t>,  reduce<Operation, std::uint16_t>, \
   reduce<Operation, std::uint32_t>, reduce<Operation, std::uint64_t>}

extern const KernelTable kTable = {
    UNISONO_NAME(UNISONO_INSTRUCTION_SET),
    {UNISONO_WRAPPING(Sum), UNISONO_WRAPPING(Prod), UNISONO_ORDERED(Min), UNISONO_ORDERED(Max)},
};

}  // namespace unisono::UNISONO_INSTRUCTION_SET
