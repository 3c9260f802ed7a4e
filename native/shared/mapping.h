// The segment of a group in the memory of this process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "shared/layout.h"

namespace unisono::shared {

// Memory of which each rank has a part, one behind the other.
struct Arena {
  std::byte* base;
  std::size_t part_bytes;
  std::size_t begin;  // where this arena would begin if the parts of a rank formed one row
};

class Mapping {
 public:
  // Throws std::system_error.
  Mapping(int fd, Layout layout);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  Control& control() const { return *reinterpret_cast<Control*>(base_); }
  RankBlock& block(std::size_t rank) const {
    return reinterpret_cast<RankBlock*>(base_ + Layout::blocksAt())[rank];
  }
  std::byte* slot(std::size_t rank, std::size_t chunk) const {
    return base_ + layout_.slotsAt() + (rank * kNumSlots + chunk % kNumSlots) * kSlotBytes;
  }
  const Layout& layout() const { return layout_; }

  // The arena in which `bytes` bytes at `data` lie in the part of `rank`, or nullptr.
  const Arena* arenaOf(const void* data, std::size_t bytes, std::size_t rank) const;

  // Stands for where all of `data` lie in arenas; 0 if some lie elsewhere.
  std::uint64_t placeOf(std::span<void* const> data, std::size_t bytes, std::size_t rank) const;

  // All ranks call these for the same number of bytes, one after the other.
  // Makes the segment as long as it must be for them. Throws std::bad_alloc.
  void lengthen(int fd, std::size_t bytes) const;
  // Returns so many bytes in the part of `rank`. Throws std::bad_alloc.
  std::byte* allocate(int fd, std::size_t bytes, std::size_t rank);

 private:
  // Where `bytes` bytes begin in the last arena; -1 if there is no room for them.
  std::ptrdiff_t placeFor(std::size_t bytes) const;
  std::size_t segmentBytes() const;

  Layout layout_;
  std::byte* base_;
  // Threads may read those that are there while one is added, so they never move.
  std::vector<Arena> arenas_;
  std::atomic<std::size_t> num_arenas_ = 0;
  std::size_t used_ = 0;  // of the last arena
};

}  // namespace unisono::shared
