// Results are aligned and apart, and their memory is released, kept and given back.
#include "memory.h"

#include <cstdint>
#include <cstring>
#include <thread>

#include "check.h"

using namespace unisono;

namespace {

void checkSlotsAreApart() {
  std::size_t small_bytes = 0;
  for (std::size_t bytes = 0; bytes < 3000; ++bytes) small_bytes += Allocator::slotBytes(bytes);
  Allocator allocator(small_bytes);
  std::vector<std::shared_ptr<void>> slots;
  for (std::size_t bytes = 0; bytes < 3000; ++bytes) {
    slots.push_back(allocator.allocate(bytes));
    CHECK(reinterpret_cast<std::uintptr_t>(slots.back().get()) % 64 == 0);
    std::memset(slots.back().get(), static_cast<int>(bytes % 251), bytes);
  }
  for (std::size_t bytes = 0; bytes < 3000; ++bytes) {
    const auto* data = static_cast<const unsigned char*>(slots[bytes].get());
    for (std::size_t i = 0; i < bytes; ++i) CHECK(data[i] == bytes % 251);
  }
  CHECK(memoryUse().used_bytes >= small_bytes);
  CHECK(memoryUse().used_bytes < small_bytes + (4 << 20));
}

void checkSlabLivesAsLongAsItsLastSlot() {
  std::shared_ptr<void> last;
  {
    Allocator allocator(10 * Allocator::slotBytes(1000));
    for (int i = 0; i < 10; ++i) last = allocator.allocate(1000);
  }
  CHECK(memoryUse().used_bytes == 10 * Allocator::slotBytes(1000));
  last.reset();
  CHECK(memoryUse().used_bytes == 0);
}

void checkLargeMemoryIsKeptForTheNext() {
  trimMemory();
  constexpr std::size_t kBytes = 9 << 20;
  void* first = Allocator(0).allocate(kBytes).get();
  CHECK(reinterpret_cast<std::uintptr_t>(first) % (2 << 20) == 0);
  CHECK(memoryUse().used_bytes == 0 && memoryUse().kept_bytes == kBytes);
  const std::shared_ptr<void> second = Allocator(0).allocate(kBytes - 4096);
  CHECK(second.get() == first);
  const std::shared_ptr<void> third = Allocator(0).allocate(kBytes / 2);
  CHECK(third.get() != first);
}

void checkWhatIsKeptIsBounded() {
  std::vector<std::shared_ptr<void>> many;
  for (int i = 0; i < 300; ++i) many.push_back(Allocator(0).allocate(100'000));
  for (int i = 0; i < 6; ++i) many.push_back(Allocator(0).allocate(200 << 20));
  many.clear();
  CHECK(memoryUse().used_bytes == 0);
  CHECK(memoryUse().kept_bytes <= 512 << 20);
  trimMemory();
  CHECK(memoryUse().kept_bytes == 0);
}

}  // namespace

int main() {
  checkSlotsAreApart();
  checkSlabLivesAsLongAsItsLastSlot();
  checkLargeMemoryIsKeptForTheNext();
  checkWhatIsKeptIsBounded();

  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([] {
      for (int round = 0; round < 2000; ++round) Allocator(0).allocate(65536 + 64 * round);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(memoryUse().used_bytes == 0);
}
