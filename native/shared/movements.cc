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
  stage(0);
  turn_.meet();
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
