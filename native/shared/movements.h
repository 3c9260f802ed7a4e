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

  // Whether nothing was staged, because the data of all ranks lie at one place of their arenas.
  bool isAtOnePlace() const { return turn_.isAtOnePlace(); }
  // Ends it where nothing was staged, when all ranks are here.
  void finishTogether();

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

// Overwrites each part of a tensor with that of the rank of the part.
void shareParts(Group& group, Call call, std::span<std::byte* const> parts,
                std::span<const std::size_t> bytes);

// Brings what all ranks have to rank 0, which makes something of it that all others get, in one
// call.
class Lead {
 public:
  // The first of `pieces` is a greeting. Returns when all ranks have come. The call is that of a
  // gather of so many bytes, because some ranks may greet with that.
  Lead(Group& group, const Call& call, std::span<const std::span<const std::byte>> pieces);

  // What a rank has brought, one piece behind the other.
  const std::byte* broughtBy(std::size_t rank) const { return turn_.slot(rank, 0); }
  bool haveSameGreeting() const;
  // Ends it without a result.
  void finish();
  // Gives `result` of rank 0 to all.
  void share(std::span<std::byte> result);

  static constexpr std::size_t kMostBytes = kSlotBytes;

 private:
  Group& group_;
  Turn turn_;
  const std::size_t greeting_bytes_;
};

void barrier(Group& group);

// Returns `bytes` bytes of this rank at the same place on every rank, for which all must have
// asked. Throws std::bad_alloc where there is no memory, which may be on some ranks alone: then
// nobody may use what it has got, nor ask again.
std::byte* allocate(Group& group, std::size_t bytes);

}  // namespace unisono::shared
