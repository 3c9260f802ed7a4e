#include "shared/mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <system_error>

namespace unisono::shared {
namespace {

constexpr std::size_t kMaxArenas = 4096;

// A range that begins at a multiple of a huge page, so that the kernel can use such pages.
std::byte* reserve(std::size_t bytes) {
  void* range = mmap(nullptr, bytes + kHugePageBytes, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "No address range for shared memory");
  }
  auto* first = static_cast<std::byte*>(range);
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(first) % kHugePageBytes;
  if (head != 0) munmap(first, head);
  munmap(first + head + bytes, kHugePageBytes - head);
  return first + head;
}

std::byte* mapped(int fd, std::size_t offset, std::size_t bytes) {
  std::byte* base = reserve(bytes);
  if (mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd,
           static_cast<off_t>(offset)) == MAP_FAILED) {
    const int error = errno;
    munmap(base, bytes);
    throw std::system_error(error, std::generic_category(), "Shared memory cannot be mapped");
  }
  // Advice, which a kernel without it may leave: huge pages, and no gigabytes in a core dump.
  madvise(base, bytes, MADV_HUGEPAGE);
  madvise(base, bytes, MADV_DONTDUMP);
  return base;
}

}  // namespace

Mapping::Mapping(int fd, Layout layout) : layout_(layout), base_(mapped(fd, 0, layout.bytes())) {
  arenas_.reserve(kMaxArenas);
}

Mapping::~Mapping() {
  for (const Arena& arena : arenas_) munmap(arena.base, layout_.size * arena.part_bytes);
  munmap(base_, layout_.bytes());
}

const Arena* Mapping::arenaOf(const void* data, std::size_t bytes, std::size_t rank) const {
  const auto first = reinterpret_cast<std::uintptr_t>(data);
  // The last ones are the largest.
  for (std::size_t i = num_arenas_.load(std::memory_order_acquire); i-- > 0;) {
    const Arena& arena = arenas_[i];
    const auto part = reinterpret_cast<std::uintptr_t>(arena.base) + rank * arena.part_bytes;
    if (first >= part && first - part <= arena.part_bytes &&
        bytes <= arena.part_bytes - (first - part)) {
      return &arena;
    }
  }
  return nullptr;
}

std::uint64_t Mapping::placeOf(std::span<void* const> data, std::size_t bytes,
                               std::size_t rank) const {
  std::uint64_t place = 1;
  for (void* one : data) {
    const Arena* arena = arenaOf(one, bytes, rank);
    if (arena == nullptr) return 0;
    const std::byte* part = arena->base + rank * arena->part_bytes;
    const auto offset = static_cast<std::uint64_t>(static_cast<const std::byte*>(one) - part);
    place = place * 0x9e3779b97f4a7c15u + arena->begin + offset + 1;
  }
  return place;
}

std::size_t Mapping::segmentBytes() const {
  if (arenas_.empty()) return layout_.bytes();
  const Arena& last = arenas_.back();
  return layout_.bytes() + layout_.size * (last.begin + last.part_bytes);
}

std::ptrdiff_t Mapping::placeFor(std::size_t bytes) const {
  if (arenas_.empty()) return -1;
  const std::size_t place = roundUp(used_, bytes < kHugePageBytes ? kApart : kHugePageBytes);
  const std::size_t part_bytes = arenas_.back().part_bytes;
  if (place > part_bytes || bytes > part_bytes - place) return -1;
  return static_cast<std::ptrdiff_t>(place);
}

void Mapping::lengthen(int fd, std::size_t bytes) const {
  if (placeFor(bytes) >= 0) return;
  if (arenas_.size() == kMaxArenas || bytes > (PTRDIFF_MAX - segmentBytes()) / layout_.size / 2) {
    throw std::bad_alloc();
  }
  const std::size_t added = layout_.size * roundUp(bytes + 1, kHugePageBytes);
  if (ftruncate(fd, static_cast<off_t>(segmentBytes() + added)) != 0) throw std::bad_alloc();
}

std::byte* Mapping::allocate(int fd, std::size_t bytes, std::size_t rank) {
  std::ptrdiff_t place = placeFor(bytes);
  if (place < 0) {
    const std::size_t part_bytes = roundUp(bytes + 1, kHugePageBytes);
    try {
      std::byte* base = mapped(fd, segmentBytes(), layout_.size * part_bytes);
      const std::size_t begin =
          arenas_.empty() ? 0 : arenas_.back().begin + arenas_.back().part_bytes;
      arenas_.push_back({base, part_bytes, begin});
    } catch (const std::system_error&) {
      throw std::bad_alloc();
    }
    num_arenas_.store(arenas_.size(), std::memory_order_release);
    place = 0;
  }
  used_ = static_cast<std::size_t>(place) + bytes;
  const Arena& last = arenas_.back();
  return last.base + rank * last.part_bytes + place;
}

}  // namespace unisono::shared
