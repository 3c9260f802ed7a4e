// What lies where in the segment that the ranks of a group share. All zeros is its first state.
//
//   Control | RankBlock for each rank | slots of each rank | arenas, each with a part for each rank
//
// The segment begins without an arena, and grows by one when memory is asked for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace unisono::shared {

inline constexpr std::size_t kMaxRanks = 256;
inline constexpr std::size_t kMaxDims = 15;
inline constexpr std::size_t kMaxCores = 1024;
// Through a slot data go in chunks; three let one be filled while one is summed and one is emptied.
inline constexpr std::size_t kNumSlots = 3;
inline constexpr std::size_t kSlotBytes = std::size_t{512} << 10;
// The first calls, which are not counted in errors.
inline constexpr std::uint64_t kNumJoins = 2;
inline constexpr std::size_t kLine = 64;
// Processors fetch cache lines in pairs.
inline constexpr std::size_t kApart = 2 * kLine;
inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

constexpr std::size_t roundUp(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

enum class Kind : std::uint8_t {
  none,
  join,
  all_reduce,
  reduce_scatter,
  all_gather,
  share_parts,
  gather,
  broadcast,
  barrier,
  allocate,
};

// What must be the same on every rank. `elements` and `shape_hash` are 0 where shapes may differ.
struct Header {
  Kind kind = Kind::none;
  Op op = Op::sum;
  std::uint16_t root = 0;
  std::uint32_t dtype = 0;  // as DLPack writes it: code, bits, lanes
  std::uint64_t num_terms = 0;
  std::uint64_t divisor = 0;
  std::uint64_t elements = 0;
  std::uint64_t shape_hash = 0;

  bool operator==(const Header&) const = default;
};

struct Call {
  Header header;
  std::uint64_t place = 0;  // stands for where the terms lie in the arenas; 0: elsewhere
  std::uint64_t num_dims = 0;
  std::int64_t dims[kMaxDims] = {};
};

// A call and, written last, its number since the start: one cache line tells the others all.
struct alignas(kApart) PublishedCall {
  std::atomic<std::uint64_t> number;
  Call call;
};

// Counts of chunks since the start. Read by all, written by its rank.
struct alignas(kApart) Progress {
  std::atomic<std::uint64_t> staged;  // those that it has put into its slots
  std::atomic<std::uint64_t> served;  // those of which it needs nothing more from other slots
};

enum class Presence : std::uint32_t { absent, present, left };

struct alignas(kApart) Identity {
  std::atomic<Presence> presence;
  std::int32_t pid;
  std::uint64_t pid_namespace;
  std::uint64_t begin, end;             // where the segment is mapped in its process
  bool sees_all;                        // finds the mappings of all ranks
  std::atomic<bool> unlocked;           // the others look for its mapping, not for its lock
  std::atomic<std::uint64_t> finished;  // calls
  std::uint64_t cores[kMaxCores / 64];  // on which it may run
};

struct RankBlock {
  // A rank may begin the next call while others still read this one, but not the next but one.
  PublishedCall calls[2];
  Progress progress;
  Identity identity;

  std::uint64_t arrived() const {
    const std::uint64_t even = calls[0].number.load(std::memory_order_acquire);
    const std::uint64_t odd = calls[1].number.load(std::memory_order_acquire);
    return even > odd ? even : odd;
  }
};

enum class FailureKind : std::uint32_t { none, lost, timeout, unequal };

// The first failure is that of all.
struct alignas(kApart) FailureRecord {
  enum State : std::uint32_t { none, being_written, complete };
  static constexpr std::size_t kMaxText = 8192;

  std::atomic<std::uint32_t> state;
  FailureKind kind;
  std::uint64_t ranks[kMaxRanks / 64];
  std::uint64_t length;
  char text[kMaxText];
};

struct alignas(kApart) Counter {
  std::atomic<std::uint64_t> value;
};

struct Control {
  FailureRecord failure;
  alignas(kApart) std::atomic<std::uint32_t> bell;  // a futex
  std::atomic<std::uint32_t> sleepers;
  Counter arrivals;     // of all ranks in all calls
  Counter met;          // calls to which all have come
  Counter claimed[2];   // pieces of work that is shared, in even and odd rounds
  Counter finished[2];  // the same
};

struct Layout {
  std::size_t size;

  static constexpr std::size_t blocksAt() { return roundUp(sizeof(Control), kHugePageBytes); }
  constexpr std::size_t slotsAt() const {
    return roundUp(blocksAt() + size * sizeof(RankBlock), kHugePageBytes);
  }
  // Without arenas.
  constexpr std::size_t bytes() const {
    return roundUp(slotsAt() + size * kNumSlots * kSlotBytes, kHugePageBytes);
  }
};

}  // namespace unisono::shared
