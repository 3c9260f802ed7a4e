#include "shared/movements.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace unisono::shared {
namespace {

std::size_t numChunks(std::size_t bytes) {
  return std::max<std::size_t>(1, (bytes + kSlotBytes - 1) / kSlotBytes);
}

// The bytes of chunk `chunk` of `bytes` bytes.
std::size_t chunkBytes(std::size_t bytes, std::size_t chunk) {
  const std::size_t begin = std::min(chunk * kSlotBytes, bytes);
  return std::min(kSlotBytes, bytes - begin);
}

void copyChunk(void* to, const void* from, std::size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

}  // namespace

void broadcast(Group& group, const Call& call, void* data, std::size_t bytes) {
  auto* first = static_cast<std::byte*>(data);
  const std::size_t root = call.header.root;
  const std::size_t num_chunks = numChunks(bytes);
  Turn turn(group, call);
  const auto stage = [&](std::size_t chunk) {
    turn.awaitFreeSlot(chunk);
    copyChunk(turn.slot(root, chunk), first + chunk * kSlotBytes, chunkBytes(bytes, chunk));
    turn.staged(chunk);
  };
  if (group.rank() == root) stage(0);
  turn.meet();
  for (std::size_t chunk = 0; chunk < num_chunks; ++chunk) {
    if (group.rank() == root) {
      if (chunk > 0) stage(chunk);
    } else {
      turn.awaitStagedBy(root, chunk);
      copyChunk(first + chunk * kSlotBytes, turn.slot(root, chunk), chunkBytes(bytes, chunk));
    }
    turn.served(chunk);
  }
  turn.finish(num_chunks);
}

Gather::Gather(Group& group, const Call& call, const void* data, std::size_t bytes)
    : group_(group), turn_(group, call), data_(static_cast<const std::byte*>(data)), bytes_(bytes) {
  if (call.place == 0) stage(0);
  turn_.meet();
  if (call.place != 0 && !turn_.isAtOnePlace()) stage(0);
}

void Gather::finishTogether() {
  turn_.served(0);
  turn_.awaitServed(0);
  turn_.finish(1);
}

void Gather::stage(std::size_t chunk) {
  turn_.awaitFreeSlot(chunk);
  copyChunk(turn_.slot(group_.rank(), chunk), data_ + chunk * kSlotBytes,
            chunkBytes(bytes_, chunk));
  turn_.staged(chunk);
}

void Gather::run(std::span<const std::size_t> bytes, std::span<void* const> outputs) {
  const std::size_t num_chunks = numChunks(std::ranges::max(bytes));
  for (std::size_t chunk = 0; chunk < num_chunks; ++chunk) {
    if (chunk + 1 < num_chunks) stage(chunk + 1);
    for (std::size_t rank = 0; rank < outputs.size(); ++rank) {
      const std::size_t count = chunkBytes(bytes[rank], chunk);
      if (count == 0) continue;
      turn_.awaitStagedBy(rank, chunk);
      auto* output = static_cast<std::byte*>(outputs[rank]) + chunk * kSlotBytes;
      copyChunk(output, turn_.slot(rank, chunk), count);
    }
    turn_.served(chunk);
  }
  turn_.finish(num_chunks);
}

Lead::Lead(Group& group, const Call& call, std::span<const std::span<const std::byte>> pieces)
    : group_(group), turn_(group, call), greeting_bytes_(pieces.front().size()) {
  turn_.awaitFreeSlot(0);
  std::byte* place = turn_.slot(group_.rank(), 0);
  for (const std::span<const std::byte> piece : pieces) {
    copyChunk(place, piece.data(), piece.size());
    place += piece.size();
  }
  turn_.staged(0);
  turn_.meet();
}

bool Lead::haveSameGreeting() const {
  for (std::size_t rank = 1; rank < group_.size(); ++rank) {
    if (std::memcmp(broughtBy(rank), broughtBy(0), greeting_bytes_) != 0) return false;
  }
  return true;
}

void Lead::finish() {
  turn_.served(0);
  turn_.finish(1);
}

void Lead::share(std::span<std::byte> result) {
  // Rank 0 may have waited for other hosts.
  turn_.startAgain();
  if (group_.rank() == 0) {
    copyChunk(turn_.slot(0, 1), result.data(), result.size());
    turn_.staged(1);
  } else {
    turn_.awaitStagedBy(0, 1);
    copyChunk(result.data(), turn_.slot(0, 1), result.size());
  }
  turn_.finish(2);
}

void shareParts(Group& group, Call call, std::span<std::byte* const> parts,
                std::span<const std::size_t> bytes) {
  const std::size_t rank = group.rank(), size = group.size();
  const auto all_bytes = static_cast<std::size_t>(parts.back() - parts.front()) + bytes.back();
  void* const tensor = parts.front();
  call.place = group.mapping()->placeOf({&tensor, 1}, all_bytes, rank);
  Gather gather(group, call, parts[rank], bytes[rank]);
  if (!gather.isAtOnePlace()) {
    gather.run(bytes, {reinterpret_cast<void* const*>(parts.data()), size});
    return;
  }
  const Arena* arena = group.mapping()->arenaOf(tensor, all_bytes, rank);
  for (std::size_t step = 1; step < size; ++step) {
    const std::size_t other = (rank + step) % size;
    const auto steps = static_cast<std::ptrdiff_t>(other) - static_cast<std::ptrdiff_t>(rank);
    copyChunk(parts[other], parts[other] + steps * static_cast<std::ptrdiff_t>(arena->part_bytes),
              bytes[other]);
  }
  gather.finishTogether();
}

void barrier(Group& group) {
  Turn turn(group, {.header = {.kind = Kind::barrier}});
  turn.meet();
  turn.finish(0);
}

std::byte* allocate(Group& group, std::size_t bytes) {
  Turn turn(group, {.header = {.kind = Kind::allocate, .elements = bytes}});
  // The turn holds the group to the end, so that no other thread is given the same place.
  Mapping& mapping = *group.mapping();
  bool is_long_enough = true;
  if (group.rank() == 0) {
    try {
      mapping.lengthen(group.segment(), bytes);
    } catch (const std::bad_alloc&) {
      is_long_enough = false;
    }
  }
  turn.meet();
  std::byte* data = nullptr;
  if (is_long_enough) {
    try {
      data = mapping.allocate(group.segment(), bytes, group.rank());
    } catch (const std::bad_alloc&) {
      data = nullptr;
    }
  }
  turn.finish(0);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

}  // namespace unisono::shared
