#include "reduce.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "instruction_set.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace unisono {
namespace {

// A helper that is awake begins within a microsecond, in which its caller moves 100 KB itself. One
// that sleeps takes 20 to 70 us to come (2 cores, virtual machine).
constexpr std::size_t kBytesAThread = 128 << 10;
constexpr std::size_t kBytesASleeper = 2 << 20;
// A reduction that begins so soon after another is one of a series. For those to come it pays to
// wake a helper who may be too late for this one.
constexpr std::chrono::microseconds kSeriesGap(200);
// Read and written; small enough to share well, large enough to hide the claim.
constexpr std::size_t kPieceBytes = 256 << 10;
constexpr std::size_t kMinPieceBytes = 32 << 10;
constexpr std::size_t kPiecesAThread = 4;
// A multiple of a cache line for every dtype, so that no two threads write to one line.
constexpr std::size_t kPieceElements = 64;

std::atomic<std::chrono::steady_clock::duration> last_end = {};

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

std::chrono::steady_clock::duration now() {
  return std::chrono::steady_clock::now().time_since_epoch();
}

std::size_t usefulThreads(std::size_t traffic, std::size_t max_threads) {
  // Who waits anyway takes no core from anybody.
  max_threads += Pool::instance().numGuests();
  const std::size_t most = std::min(max_threads, traffic / kBytesAThread);
  if (most <= 1) return 1;
  if (now() - last_end.load(std::memory_order_relaxed) < kSeriesGap) return most;
  const std::size_t ready = std::min(most, 1 + Pool::instance().numAwake());
  return std::max(ready, std::min(most, traffic / kBytesASleeper));
}

}  // namespace

Reduction::Reduction(const KernelTable& table, Op op, bool mean, std::span<const Item> items,
                     std::size_t max_threads)
    : table_(table), op_(op), mean_(mean), items_(items), float_mode_(floatMode()) {
  std::size_t traffic = 0, written = 0;
  for (const Item& item : items) {
    const std::size_t bytes = item.num_elements * elementBytes(item.dtype);
    traffic += bytes * (item.inputs.size() + item.outputs.size());
    written += bytes * item.outputs.size();
  }
  // What does not fit would be read from memory to be overwritten. Little output is left in the
  // cache for those who read it next.
  const std::size_t cache = lastLevelCacheBytes();
  streaming_ = traffic > cache && written >= cache / 4;

  num_shares_ = usefulThreads(traffic, max_threads);
  cut(std::clamp(traffic / (num_shares_ * kPiecesAThread), kMinPieceBytes, kPieceBytes));
  divide(traffic);
  if (num_shares_ == 1) return;
  const auto help = [this](std::size_t worker) { work(1 + worker % (num_shares_ - 1)); };
  offer_.emplace(help, num_shares_ - 1);
}

void Reduction::cut(std::size_t piece_bytes) {
  for (std::size_t i = 0; i < items_.size(); ++i) {
    const std::size_t fitting = piece_bytes / trafficAnElement(items_[i]);
    const std::size_t step = std::max(fitting / kPieceElements, std::size_t{1}) * kPieceElements;
    for (std::size_t begin = 0; begin < items_[i].num_elements; begin += step) {
      pieces_.push_back({i, begin, std::min(begin + step, items_[i].num_elements)});
    }
  }
}

// Every thread has the same share in every call, and so finds what it has read and written before
// in the caches of its core. torch divides its work in the same way.
void Reduction::divide(std::size_t traffic) {
  shares_ = std::make_unique<Share[]>(num_shares_);
  std::size_t before = 0;
  std::size_t piece = 0;
  for (std::size_t i = 0; i < num_shares_; ++i) {
    shares_[i].next = piece;
    for (; piece < pieces_.size() && before < traffic * (i + 1) / num_shares_; ++piece) {
      const Item& item = items_[pieces_[piece].item];
      before += (pieces_[piece].end - pieces_[piece].begin) * trafficAnElement(item);
    }
    shares_[i].end = piece;
  }
  pieces_a_claim_ = std::max<std::size_t>(1, pieces_.size() / (num_shares_ * 8));
}

void Reduction::finish() {
  work(0);
  offer_.reset();
  last_end.store(now(), std::memory_order_relaxed);
}

void Reduction::work(std::size_t own_share) {
  const unsigned own_mode = floatMode();
  setFloatMode(float_mode_);
  for (std::size_t i = 0; i < num_shares_; ++i) {
    // After its own a thread turns to the others' shares: their owners may be late, or not come.
    Share& share = shares_[(own_share + i) % num_shares_];
    for (;;) {
      const std::size_t first = share.next.fetch_add(pieces_a_claim_, std::memory_order_relaxed);
      if (first >= share.end) break;
      const std::size_t last = std::min(first + pieces_a_claim_, share.end);
      for (std::size_t piece = first; piece < last; ++piece) reduce(pieces_[piece]);
    }
  }
  setFloatMode(own_mode);
}

void Reduction::reduce(const Piece& piece) const {
  const Item& item = items_[piece.item];
  // In place the lines are in the cache already: writing around it would only evict them.
  const bool streaming = streaming_ && !isInPlace(item);
  const Kernel kernel =
      table_.kernels[static_cast<std::size_t>(op_)][static_cast<std::size_t>(item.dtype)];
  kernel({item.inputs.data(), item.inputs.size(), item.outputs.data(), item.outputs.size(),
          piece.begin, piece.end, mean_ ? item.inputs.size() : 0, streaming});
}

}  // namespace unisono
