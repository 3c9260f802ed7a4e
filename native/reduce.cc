#include "reduce.h"

#include <unistd.h>

#include <algorithm>

#include "instruction_set.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace unisono {
namespace {

// Waking a sleeping thread took its caller 17 us (2 cores, virtual machine), in which it moves 1.3
// MB itself; with this much for each thread the helper pays even then.
constexpr std::size_t kBytesAThread = 2 << 20;
// Read and written; small enough to share well, large enough to hide the claim.
constexpr std::size_t kPieceBytes = 256 << 10;
// A multiple of a cache line for every dtype, so that no two threads write to one line.
constexpr std::size_t kPieceElements = 64;

std::size_t lastLevelCacheBytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  static const long bytes =
      std::max(sysconf(_SC_LEVEL3_CACHE_SIZE), sysconf(_SC_LEVEL2_CACHE_SIZE));
  if (bytes > 0) return static_cast<std::size_t>(bytes);
#endif
  return 32 << 20;
}

// Whether subnormal numbers count as zero is a property of a thread. All must agree with the
// caller.
unsigned floatMode() {
#if defined(__x86_64__)
  return _mm_getcsr();
#else
  return 0;
#endif
}

void setFloatMode([[maybe_unused]] unsigned mode) {
#if defined(__x86_64__)
  _mm_setcsr(mode);
#endif
}

std::size_t trafficAnElement(const Item& item) {
  return elementBytes(item.dtype) * (item.inputs.size() + item.outputs.size());
}

bool isInPlace(const Item& item) {
  return std::ranges::any_of(item.outputs, [&](const void* output) {
    return std::ranges::find(item.inputs, output) != item.inputs.end();
  });
}

}  // namespace

Reduction::Reduction(const KernelTable& table, Op op, bool mean, std::span<const Item> items,
                     std::size_t max_threads)
    : table_(table), op_(op), mean_(mean), items_(items), float_mode_(floatMode()) {
  std::size_t traffic = 0;
  for (const Item& item : items) traffic += item.num_elements * trafficAnElement(item);
  // Up to twice the cache plain stores won or drew; beyond, each line would be read to be
  // overwritten.
  streaming_ = traffic > 2 * lastLevelCacheBytes();

  const std::size_t threads = std::clamp<std::size_t>(traffic / kBytesAThread, 1, max_threads);
  pieces_.reserve(items.size() + traffic / kPieceBytes);
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::size_t fitting = kPieceBytes / trafficAnElement(items[i]);
    const std::size_t step = std::max(fitting / kPieceElements, std::size_t{1}) * kPieceElements;
    for (std::size_t begin = 0; begin < items[i].num_elements; begin += step) {
      pieces_.push_back({i, begin, std::min(begin + step, items[i].num_elements)});
    }
  }
  pieces_a_claim_ = std::max<std::size_t>(1, pieces_.size() / (threads * 8));
  if (threads > 1) offer_.emplace([this] { work(); }, threads - 1);
}

void Reduction::finish() {
  work();
  offer_.reset();
}

void Reduction::work() {
  const unsigned own_mode = floatMode();
  setFloatMode(float_mode_);
  for (;;) {
    const std::size_t first = next_.fetch_add(pieces_a_claim_, std::memory_order_relaxed);
    if (first >= pieces_.size()) break;
    const std::size_t last = std::min(first + pieces_a_claim_, pieces_.size());
    for (std::size_t i = first; i < last; ++i) {
      const Piece& piece = pieces_[i];
      const Item& item = items_[piece.item];
      // In place the lines are in the cache already: writing around it would only evict them.
      const bool streaming = streaming_ && !isInPlace(item);
      const Kernel kernel =
          table_.kernels[static_cast<std::size_t>(op_)][static_cast<std::size_t>(item.dtype)];
      kernel({item.inputs.data(), item.inputs.size(), item.outputs.data(), item.outputs.size(),
              piece.begin, piece.end, mean_ ? item.inputs.size() : 0, streaming});
    }
  }
  setFloatMode(own_mode);
}

}  // namespace unisono
