#include "memory.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace unisono {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kSmallBytes = 64 << 10;
constexpr std::size_t kSlabBytes = 1 << 20;
constexpr std::size_t kHugePageBytes = 2 << 20;
constexpr std::size_t kHugeBytes = 4 << 20;
// Below this malloc keeps the memory itself; above it every call would pay page faults again.
constexpr std::size_t kKeptBytes = 64 << 10;
constexpr std::size_t kMaxKept = 1024;
constexpr std::size_t kMaxKeptBytes = 512 << 20;

constexpr std::size_t roundUp(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

struct Region {
  void* data;
  std::size_t bytes;
};

void* systemAllocate(std::size_t bytes) {
  if (bytes < kHugeBytes) return std::aligned_alloc(kAlignment, bytes);
  void* data = std::aligned_alloc(kHugePageBytes, roundUp(bytes, kHugePageBytes));
#if defined(MADV_HUGEPAGE)
  if (data != nullptr) madvise(data, bytes, MADV_HUGEPAGE);
#endif
  return data;
}

// Freed regions, the oldest first. A training step asks for the same sizes as the one before.
class Keeper {
 public:
  static Keeper& instance() {
    static Keeper* keeper = new Keeper;  // results may be freed after the destructors of statics
    return *keeper;
  }

  Region take(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    auto best = kept_.end();
    for (auto it = kept_.begin(); it != kept_.end(); ++it) {
      const bool fits = it->bytes >= bytes && it->bytes <= bytes + bytes / 4;
      // Of equal regions the one that was freed last: it is the likeliest to be in a cache.
      if (fits && (best == kept_.end() || it->bytes <= best->bytes)) best = it;
    }
    if (best == kept_.end()) return {nullptr, 0};
    const Region region = *best;
    kept_.erase(best);
    kept_bytes_ -= region.bytes;
    return region;
  }

  void keep(Region region) noexcept {
    if (region.bytes > max_bytes_) return std::free(region.data);
    const std::lock_guard lock(mutex_);
    while (kept_.size() == kMaxKept || kept_bytes_ + region.bytes > max_bytes_) dropOldest();
    kept_.push_back(region);
    kept_bytes_ += region.bytes;
  }

  void trim() {
    const std::lock_guard lock(mutex_);
    while (!kept_.empty()) dropOldest();
  }

  std::size_t keptBytes() {
    const std::lock_guard lock(mutex_);
    return kept_bytes_;
  }

  std::atomic<std::size_t> used_bytes = 0;

 private:
  Keeper() {
    kept_.reserve(kMaxKept);
    const std::size_t physical = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
                                 static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    max_bytes_ = std::min(kMaxKeptBytes, physical / 16);
    // Another thread may hold the mutex at a fork; in the child nobody would release it.
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { instance().mutex_.unlock(); });
  }

  void dropOldest() {
    std::free(kept_.front().data);
    kept_bytes_ -= kept_.front().bytes;
    kept_.erase(kept_.begin());
  }

  std::mutex mutex_;
  std::vector<Region> kept_;
  std::size_t kept_bytes_ = 0;
  std::size_t max_bytes_;
};

Region allocateRegion(std::size_t bytes) {
  bytes = roundUp(bytes, kAlignment);
  if (bytes >= kKeptBytes) {
    const Region kept = Keeper::instance().take(bytes);
    if (kept.data != nullptr) return kept;
  }
  void* data = systemAllocate(bytes);
  if (data == nullptr) {
    Keeper::instance().trim();
    data = systemAllocate(bytes);
  }
  if (data == nullptr) throw std::bad_alloc();
  return {data, bytes};
}

std::shared_ptr<std::byte> share(Region region) {
  Keeper& keeper = Keeper::instance();
  keeper.used_bytes += region.bytes;
  const auto release = [region](std::byte*) {
    Keeper& keeper = Keeper::instance();
    keeper.used_bytes -= region.bytes;
    if (region.bytes >= kKeptBytes) {
      keeper.keep(region);
    } else {
      std::free(region.data);
    }
  };
  return {static_cast<std::byte*>(region.data), release};
}

}  // namespace

std::size_t Allocator::slotBytes(std::size_t bytes) {
  return bytes < kSmallBytes ? roundUp(std::max<std::size_t>(bytes, 1), kAlignment) : 0;
}

std::shared_ptr<void> Allocator::allocate(std::size_t bytes) {
  const std::size_t slot = slotBytes(bytes);
  if (slot == 0) return share(allocateRegion(bytes));
  if (slot > slab_left_) {
    const std::size_t slab = std::max(slot, std::min(small_bytes_, kSlabBytes));
    slab_ = share(allocateRegion(slab));
    slab_left_ = slab;
  }
  // From the end, so that no size need be remembered.
  slab_left_ -= slot;
  small_bytes_ -= std::min(slot, small_bytes_);
  return {slab_, slab_.get() + slab_left_};
}

MemoryUse memoryUse() {
  Keeper& keeper = Keeper::instance();
  return {keeper.used_bytes, keeper.keptBytes()};
}

void trimMemory() { Keeper::instance().trim(); }

}  // namespace unisono
