#include "shared/story.h"

#include <algorithm>
#include <cstdio>

namespace unisono::shared {
namespace {

const char* nameOf(Kind kind) {
  constexpr const char* kNames[] = {"nothing",    "join",        "all_reduce", "reduce_scatter",
                                    "all_gather", "share_parts", "gather",     "broadcast",
                                    "barrier",    "allocate"};
  return kNames[static_cast<std::size_t>(kind)];
}

const char* nameOf(Op op) {
  constexpr const char* kNames[kNumOps] = {"sum", "prod", "min", "max"};
  return kNames[static_cast<std::size_t>(op)];
}

std::string nameOfDType(std::uint32_t dtype) {
  constexpr const char* kNames[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const std::uint32_t code = dtype & 0xff, bits = dtype >> 8 & 0xff;
  if (code >= std::size(kNames)) return "dtype " + std::to_string(code);
  return code == 6 ? kNames[code] : kNames[code] + std::to_string(bits);
}

std::string shapeOf(const Call& call) {
  std::string text = "[";
  for (std::size_t i = 0; i < std::min<std::size_t>(call.num_dims, kMaxDims); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(call.dims[i]);
  }
  return text + (call.num_dims > kMaxDims ? ", ...]" : "]");
}

bool isReduction(Kind kind) { return kind == Kind::all_reduce || kind == Kind::reduce_scatter; }

// Joining the group is not counted among the calls.
std::string wordsOfCall(const Call& call, std::uint64_t number) {
  if (call.header.kind == Kind::join) return "the start";
  return "call " + std::to_string(number - kNumJoins) + ", " + wordsOf(call);
}

std::string lastSeen(const Mapping& mapping, std::size_t rank) {
  const RankBlock& block = mapping.block(rank);
  const std::uint64_t finished = block.identity.finished.load(std::memory_order_acquire);
  const std::uint64_t arrived = block.arrived();
  if (arrived == 0) return "never came";
  if (arrived > finished) return "was in " + wordsOfCall(callOf(mapping, rank, arrived), arrived);
  return "had finished " + wordsOfCall(callOf(mapping, rank, finished), finished) +
         ", and called nothing since";
}

std::string processOf(const Mapping& mapping, std::size_t rank) {
  const std::int32_t pid = mapping.block(rank).identity.pid;
  return pid == 0 ? "" : " (process " + std::to_string(pid) + ")";
}

std::string openingOf(const Mapping& mapping, std::size_t rank) {
  return "Rank " + std::to_string(rank) + " " + lastSeen(mapping, rank) + ", and ";
}

}  // namespace

std::string wordsOf(const Ranks& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

std::string wordsOf(const Call& call) {
  const Header& header = call.header;
  std::string text = nameOf(header.kind);
  switch (header.kind) {
    case Kind::none:
    case Kind::join:
    case Kind::barrier:
      return text;
    case Kind::allocate:
      return text + " of " + std::to_string(header.elements) + " bytes";
    default:
      break;
  }
  if (isReduction(header.kind)) {
    const std::string mean = "mean over " + std::to_string(header.divisor);
    text += "(" + (header.divisor != 0 ? mean : std::string(nameOf(header.op))) + ")";
  } else if (header.kind == Kind::gather || header.kind == Kind::broadcast) {
    text += "(root " + std::to_string(header.root) + ")";
  }
  text += " of ";
  if (header.num_terms > 1) text += std::to_string(header.num_terms) + " times ";
  return text + nameOfDType(header.dtype) + shapeOf(call);
}

const Call& callOf(const Mapping& mapping, std::size_t rank, std::uint64_t number) {
  return mapping.block(rank).calls[number % 2].call;
}

std::string storyOfInterrupted(const Mapping& mapping, std::size_t rank) {
  return openingOf(mapping, rank) +
         "closed its communicator while a thread of it was still there. Look there for the first "
         "error, then build a new communicator.";
}

std::string storyOfLost(const Mapping& mapping, std::size_t rank, const Ranks& lost) {
  std::string text = openingOf(mapping, rank) + "cannot go on without " + wordsOf(lost) + ".";
  for (const std::size_t other : lost) {
    const bool left = mapping.block(other).identity.presence == Presence::left;
    text += " Rank " + std::to_string(other) + processOf(mapping, other) +
            (left ? " has closed its communicator" : " has ended, killed or crashed") + "; it " +
            lastSeen(mapping, other) + ".";
  }
  return text + " Look there for the first error, then build a new communicator.";
}

std::string storyOfTimeout(const Mapping& mapping, const Members& members, std::size_t rank,
                           const Ranks& late, std::chrono::nanoseconds timeout) {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g", std::chrono::duration<double>(timeout).count());
  std::string text =
      openingOf(mapping, rank) + "waited " + seconds + " s for " + wordsOf(late) + ".";
  for (const std::size_t other : late) {
    text += " Rank " + std::to_string(other) + processOf(mapping, other) + " " +
            lastSeen(mapping, other) +
            (members.isStopped(other) ? "; its process is stopped by a signal." : ".");
  }
  return text +
         " Look at what these ranks do, or raise `timeout_seconds` if they only need longer.";
}

std::string storyOfUnequal(const Mapping& mapping, std::uint64_t number) {
  const std::size_t size = mapping.layout().size;
  std::string text =
      "The ranks do not make the same call " + std::to_string(number - kNumJoins) + ": ";
  std::vector<bool> told(size, false);
  for (std::size_t rank = 0; rank < size; ++rank) {
    if (told[rank]) continue;
    const Call& call = callOf(mapping, rank, number);
    Ranks alike;
    for (std::size_t other = rank; other < size; ++other) {
      if (callOf(mapping, other, number).header != call.header) continue;
      told[other] = true;
      alike.push_back(other);
    }
    text += (rank == 0 ? "" : "; ") + wordsOf(alike) + (alike.size() == 1 ? " makes " : " make ") +
            wordsOf(call);
  }
  return text +
         ". Nothing was reduced. Make the same calls in the same order on every rank, with "
         "the same operation, root, dtype and shape.";
}

}  // namespace unisono::shared
