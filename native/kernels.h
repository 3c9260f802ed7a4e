// Element-wise reductions of a range of elements, compiled once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono {

enum class Op : std::uint8_t { sum, prod, min, max };
inline constexpr std::size_t kNumOps = 4;

enum class DType : std::uint8_t {
  float16,
  bfloat16,
  float32,
  float64,
  int8,
  int16,
  int32,
  int64,
  uint8,
  uint16,
  uint32,
  uint64,
};
inline constexpr std::size_t kNumDTypes = 12;

// Elements `begin` to `end` of every input are reduced into every output. An output may be one of
// the inputs; other overlaps are not allowed. A sum of floating point numbers is divided by
// `divisor` unless that is 0. `streaming` writes around the caches.
struct Task {
  const void* const* inputs;
  std::size_t num_inputs;
  void* const* outputs;
  std::size_t num_outputs;
  std::size_t begin;
  std::size_t end;
  std::size_t divisor;
  bool streaming;
};

using Kernel = void (*)(const Task&);

struct KernelTable {
  const char* instruction_set;
  Kernel kernels[kNumOps][kNumDTypes];
};

namespace baseline {
extern const KernelTable kTable;
}
namespace avx2 {
extern const KernelTable kTable;
}

}  // namespace unisono
