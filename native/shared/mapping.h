// The segment of a group in the memory of this process.
#pragma once

#include <cstddef>

#include "shared/layout.h"

namespace unisono::shared {

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
  std::byte* arena(std::size_t rank) const {
    return base_ + layout_.arenasAt() + rank * layout_.arena_bytes;
  }
  const Layout& layout() const { return layout_; }

 private:
  Layout layout_;
  std::byte* base_;
};

}  // namespace unisono::shared
