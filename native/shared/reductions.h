// All-reduce and reduce-scatter between the ranks of a group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels.h"
#include "shared/group.h"

namespace unisono::shared {

// The terms of one rank. Every rank has the same number. All follow the order of the ranks.
struct Terms {
  DType dtype;
  std::size_t num_elements;
  std::span<void* const> data;
};

// Whether slots can hold a piece of every term of every rank.
bool fitsSlots(std::size_t size, std::size_t num_terms);

// Combines all terms into the first term of each rank. `call` says the same in its header.
void allReduce(Group& group, const KernelTable& table, Call call, const Terms& terms);

// Combines all terms and writes the part of this rank, in units of `unit` elements, to `result`.
void reduceScatter(Group& group, const KernelTable& table, const Call& call, const Terms& terms,
                   std::size_t unit, void* result);

// The same, over the own part of the first term. The other parts must stay as they are until all
// ranks are in the next call.
void reduceParts(Group& group, const KernelTable& table, Call call, const Terms& terms,
                 std::size_t unit);

}  // namespace unisono::shared
