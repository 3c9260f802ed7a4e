// Finds results that would be written over each other, or over what is still to be read.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "reduce.h"

namespace unisono {

// The first item with an output that overlaps an output or an input in the batch. Allowed are
// outputs of an item that are exactly one of its inputs, or exactly one another.
std::optional<std::size_t> findOverlap(std::span<const Item> items);

}  // namespace unisono
