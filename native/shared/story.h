// Failures of a group in words.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shared/mapping.h"
#include "shared/members.h"

namespace unisono::shared {

using Ranks = std::vector<std::size_t>;

// "rank 2", "ranks 1, 2".
std::string wordsOf(const Ranks& ranks);

// "all_reduce(sum) of float32[4, 3]".
std::string wordsOf(const Call& call);

// The call with the number `number` on `rank`.
const Call& callOf(const Mapping& mapping, std::size_t rank, std::uint64_t number);

// What `rank` tells of itself.
std::string storyOfInterrupted(const Mapping& mapping, std::size_t rank);

// What `rank` tells of others.
std::string storyOfLost(const Mapping& mapping, std::size_t rank, const Ranks& lost);
std::string storyOfTimeout(const Mapping& mapping, const Members& members, std::size_t rank,
                           const Ranks& late, std::chrono::nanoseconds timeout);
std::string storyOfUnequal(const Mapping& mapping, std::uint64_t number);

}  // namespace unisono::shared
