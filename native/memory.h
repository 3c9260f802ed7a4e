// Memory for results: aligned, shared by small tensors, kept for the next call.
#pragma once

#include <cstddef>
#include <memory>

namespace unisono {

// Hands out memory for the results of one batch. What it hands out lives until the last copy of the
// pointer is gone; small pieces share a slab and so its life.
class Allocator {
 public:
  // `small_bytes` is the sum of slotBytes() of the requests to come.
  explicit Allocator(std::size_t small_bytes) : small_bytes_(small_bytes) {}

  // What a request takes from slabs: 0 for those that get their own memory.
  static std::size_t slotBytes(std::size_t bytes);

  // Aligned to 64 bytes. Throws std::bad_alloc.
  std::shared_ptr<void> allocate(std::size_t bytes);

 private:
  std::size_t small_bytes_;
  std::shared_ptr<std::byte> slab_;
  std::size_t slab_left_ = 0;
};

// The bytes now in use by results, and those kept for later ones.
struct MemoryUse {
  std::size_t used_bytes;
  std::size_t kept_bytes;
};
MemoryUse memoryUse();

// Gives the kept memory back to the system.
void trimMemory();

}  // namespace unisono
