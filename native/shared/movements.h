// Collectives that move bytes between the ranks of a group.
#pragma once

#include <cstddef>
#include <span>

#include "shared/group.h"

namespace unisono::shared {

// Overwrites `data` with that of the root, which `call` names.
void broadcast(Group& group, const Call& call, void* data, std::size_t bytes);

// A gather in two steps: after the first the calls of all ranks tell how much each brings.
class Gather {
 public:
  Gather(Group& group, const Call& call, const void* data, std::size_t bytes);

  const Call& callOf(std::size_t rank) const { return turn_.callOf(rank); }

  // Writes the data of each rank to its output. There are none where nothing is wanted; `bytes` is
  // how much each rank brings in any case.
  void run(std::span<const std::size_t> bytes, std::span<void* const> outputs);

 private:
  void stage(std::size_t chunk);

  Group& group_;
  Turn turn_;
  const std::byte* const data_;
  const std::size_t bytes_;
};

void barrier(Group& group);

// Returns `bytes` bytes of this rank at the same place on every rank, for which all must have
// asked. Throws std::bad_alloc where there is no memory, which may be on some ranks alone: then
// nobody may use what it has got, nor ask again.
std::byte* allocate(Group& group, std::size_t bytes);

}  // namespace unisono::shared
