#include "shared/mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <system_error>

namespace unisono::shared {
namespace {

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

}  // namespace

Mapping::Mapping(int fd, Layout layout) : layout_(layout), base_(reserve(layout.bytes())) {
  const std::size_t bytes = layout.bytes();
  if (mmap(base_, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0) ==
      MAP_FAILED) {
    const int error = errno;
    munmap(base_, bytes);
    throw std::system_error(error, std::generic_category(), "Shared memory cannot be mapped");
  }
  // Advice, which a kernel without it may leave: huge pages, and no gigabytes in a core dump.
  madvise(base_, bytes, MADV_HUGEPAGE);
  madvise(base_, bytes, MADV_DONTDUMP);
}

Mapping::~Mapping() { munmap(base_, layout_.bytes()); }

}  // namespace unisono::shared
