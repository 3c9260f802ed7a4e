#include "shared/reductions.h"

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "instruction_set.h"

namespace unisono::shared {
namespace {

// Up to this much from all ranks together, everybody sums everything: one meeting instead of two.
constexpr std::size_t kOneShotBytes = 4 << 10;
// Where ranks share cores, the last to come sums for all: a meeting costs turns of the scheduler.
constexpr std::size_t kOneShotCrowdedBytes = 64 << 10;
// Read and written in one rank's arena at a time, by ranks that are on a core; where every rank has
// one, there should be work for all.
constexpr std::size_t kPieceBytes = 128 << 10;
constexpr std::size_t kLeastPieceBytes = 8 << 10;

std::byte* at(void* data, std::size_t bytes) { return static_cast<std::byte*>(data) + bytes; }

// Room for pointers, on the stack if they are few: a tiny reduction takes less than two mallocs.
class Pointers {
 public:
  explicit Pointers(std::size_t count) : count_(count) {
    if (count > few_.size()) many_.resize(count);
  }
  std::span<const void*> span() { return {many_.empty() ? few_.data() : many_.data(), count_}; }

 private:
  std::size_t count_;
  std::array<const void*, 16> few_;
  std::vector<const void*> many_;
};

// One reduction as one rank sees it.
class Shape {
 public:
  Shape(const Group& group, const KernelTable& table, const Header& header, const Terms& terms)
      : group(group),
        terms(terms),
        kernel(table.kernels[static_cast<std::size_t>(header.op)]
                            [static_cast<std::size_t>(terms.dtype)]),
        divisor(header.divisor),
        element_bytes(elementBytes(terms.dtype)),
        // 2, 4, 8, ... neighbors are a subtree of the whole tree and can be summed ahead, but not
        // halves: they would be rounded twice.
        folds(std::has_single_bit(terms.data.size()) && terms.dtype > DType::bfloat16),
        num_parts(folds ? 1 : terms.data.size()) {}

  std::size_t bytes() const { return terms.num_elements * element_bytes; }
  void* const* firstTerm() const { return terms.data.data(); }

  void reduce(std::span<const void* const> inputs, std::span<void* const> outputs,
              std::size_t count) const {
    kernel(
        {inputs.data(), inputs.size(), outputs.data(), outputs.size(), 0, count, divisor, false});
  }

  // Writes elements of the own terms to `area`, a part after another.
  void stage(std::size_t begin, std::size_t count, std::byte* area, std::size_t part_bytes) const {
    Pointers pointers(terms.data.size());
    const std::span<const void*> inputs = pointers.span();
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      inputs[i] = at(terms.data[i], begin * element_bytes);
    }
    const std::size_t inputs_a_part = inputs.size() / num_parts;
    for (std::size_t part = 0; part < num_parts; ++part) {
      void* output = area + part * part_bytes;
      kernel({inputs.data() + part * inputs_a_part, inputs_a_part, &output, 1, 0, count, 0, false});
    }
  }

  const Group& group;
  const Terms& terms;
  const Kernel kernel;
  const std::size_t divisor;
  const std::size_t element_bytes;
  const bool folds;
  const std::size_t num_parts;
};

void oneShot(Turn& turn, const Shape& shape) {
  const std::size_t part_bytes = roundUp(shape.bytes(), kLine);
  const std::size_t count = shape.terms.num_elements;
  turn.awaitFreeSlot(0);
  shape.stage(0, count, turn.slot(shape.group.rank(), 0), part_bytes);
  turn.staged(0);
  Pointers pointers(shape.group.size() * shape.num_parts);
  const std::span<const void*> inputs = pointers.span();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    inputs[i] = turn.slot(i / shape.num_parts, 0) + i % shape.num_parts * part_bytes;
  }
  if (shape.group.isCrowded()) {
    void* total = turn.slot(0, 0);
    turn.meetAfter([&] { shape.reduce(inputs, {&total, 1}, count); });
    const void* input = total;
    shape.kernel({&input, 1, shape.firstTerm(), 1, 0, count, 0, false});
  } else {
    turn.meet();
    shape.reduce(inputs, {shape.firstTerm(), 1}, count);
  }
  turn.finish(1);
}

// Where the part of a rank begins, in elements that are not divided among units.
std::size_t partOf(std::size_t num_elements, std::size_t unit, std::size_t rank, std::size_t size) {
  return num_elements / unit * rank / size * unit;
}

// Each rank has a part of the elements. A chunk holds the next piece of every part, and the slot
// has an area for each: rank r sums area r of all slots.
class TwoShot {
 public:
  TwoShot(Turn& turn, const Shape& shape, std::size_t unit, void* scattered)
      : turn_(turn),
        shape_(shape),
        rank_(shape.group.rank()),
        size_(shape.group.size()),
        unit_(unit),
        scattered_(scattered),
        part_bytes_(kSlotBytes / (size_ * shape.num_parts) / kLine * kLine),
        piece_(part_bytes_ / shape.element_bytes) {
    std::size_t longest = 0;
    for (std::size_t owner = 0; owner < size_; ++owner) {
      longest = std::max(longest, startOf(owner + 1) - startOf(owner));
    }
    num_chunks_ = std::max<std::size_t>(1, (longest + piece_ - 1) / piece_);
  }

  std::size_t numChunks() const { return num_chunks_; }

  void stage(std::size_t chunk) {
    turn_.awaitFreeSlot(chunk);
    for (std::size_t owner = 0; owner < size_; ++owner) {
      if (owner == rank_ && readsOwnTerms()) continue;
      const auto [begin, count] = pieceOf(owner, chunk);
      shape_.stage(begin, count, areaOf(rank_, owner, chunk), part_bytes_);
    }
    turn_.staged(chunk);
  }

  // Chunk 0 is staged before.
  void run() {
    for (std::size_t chunk = 0; chunk < num_chunks_; ++chunk) {
      if (chunk + 1 < num_chunks_) stage(chunk + 1);
      turn_.awaitStaged(chunk);
      reduce(chunk);
      turn_.served(chunk);
      // The peers may still sum this one.
      if (chunk > 0) collect(chunk - 1);
    }
    collect(num_chunks_ - 1);
  }

 private:
  struct Piece {
    std::size_t begin;
    std::size_t count;
  };

  std::size_t startOf(std::size_t owner) const {
    return partOf(shape_.terms.num_elements, unit_, owner, size_);
  }

  Piece pieceOf(std::size_t owner, std::size_t chunk) const {
    const std::size_t end = startOf(owner + 1);
    const std::size_t begin = std::min(startOf(owner) + chunk * piece_, end);
    return {begin, std::min(piece_, end - begin)};
  }

  std::byte* areaOf(std::size_t rank, std::size_t owner, std::size_t chunk) const {
    return turn_.slot(rank, chunk) + owner * shape_.num_parts * part_bytes_;
  }

  // The own piece need not be staged unless it is to be summed ahead.
  bool readsOwnTerms() const { return shape_.num_parts == shape_.terms.data.size(); }

  // Results go where the peers' terms were read: those cache lines are here already.
  void reduce(std::size_t chunk) {
    const auto [begin, count] = pieceOf(rank_, chunk);
    inputs_.clear();
    outputs_.clear();
    for (std::size_t rank = 0; rank < size_; ++rank) {
      std::byte* area = areaOf(rank, rank_, chunk);
      const bool own = rank == rank_ && readsOwnTerms();
      for (std::size_t part = 0; part < shape_.num_parts; ++part) {
        inputs_.push_back(own ? at(shape_.terms.data[part], begin * shape_.element_bytes)
                              : area + part * part_bytes_);
      }
      if (scattered_ == nullptr && rank != rank_) outputs_.push_back(area);
    }
    outputs_.push_back(placeOf(begin));
    shape_.reduce(inputs_, outputs_, count);
  }

  // Where the result of an own element goes.
  std::byte* placeOf(std::size_t element) const {
    if (scattered_ == nullptr) return at(*shape_.firstTerm(), element * shape_.element_bytes);
    return at(scattered_, (element - startOf(rank_)) * shape_.element_bytes);
  }

  // Fetches what the peers have put into the own slot.
  void collect(std::size_t chunk) {
    if (scattered_ != nullptr) return;
    turn_.awaitServed(chunk);
    for (std::size_t owner = 0; owner < size_; ++owner) {
      if (owner == rank_) continue;
      const auto [begin, count] = pieceOf(owner, chunk);
      const void* input = areaOf(rank_, owner, chunk);
      void* output = placeOf(begin);
      shape_.kernel({&input, 1, &output, 1, 0, count, 0, false});
    }
  }

  Turn& turn_;
  const Shape& shape_;
  const std::size_t rank_;
  const std::size_t size_;
  const std::size_t unit_;
  void* const scattered_;
  const std::size_t part_bytes_;
  const std::size_t piece_;
  std::size_t num_chunks_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

std::size_t pieceBytes(const Shape& shape) {
  if (shape.group.isCrowded()) return kPieceBytes;
  const std::size_t fair = roundUp(shape.bytes() / shape.group.size() + 1, kLine);
  return std::clamp(fair, kLeastPieceBytes, kPieceBytes);
}

// Terms that lie at one place in the arenas of all ranks, and are summed there.
class InArena {
 public:
  explicit InArena(const Shape& shape)
      : shape_(shape),
        piece_(pieceBytes(shape) / shape.element_bytes),
        inputs_(shape.group.size() * shape.terms.data.size()) {
    const Mapping& mapping = *shape.group.mapping();
    for (void* term : shape.terms.data) {
      const Arena* arena = mapping.arenaOf(term, shape.bytes(), shape.group.rank());
      strides_.push_back(static_cast<std::ptrdiff_t>(arena->part_bytes));
    }
  }

  // Together with the other ranks, for all.
  void reduceAll(Turn& turn) {
    const std::size_t count = shape_.terms.num_elements;
    std::vector<void*> outputs(shape_.group.size());
    turn.share((count + piece_ - 1) / piece_, [&](std::size_t index) {
      const std::size_t begin = index * piece_;
      for (std::size_t rank = 0; rank < outputs.size(); ++rank)
        outputs[rank] = place(0, rank, begin);
      reduce(begin, std::min(piece_, count - begin), outputs);
    });
  }

  // Elements from `begin` to `end`, for this rank alone.
  void reduceOwn(std::size_t begin, std::size_t end) {
    for (; begin < end; begin += piece_) {
      void* output = place(0, shape_.group.rank(), begin);
      reduce(begin, std::min(piece_, end - begin), {&output, 1});
    }
  }

 private:
  void* place(std::size_t term, std::size_t rank, std::size_t element) const {
    const auto steps =
        static_cast<std::ptrdiff_t>(rank) - static_cast<std::ptrdiff_t>(shape_.group.rank());
    std::byte* own = at(shape_.terms.data[term], element * shape_.element_bytes);
    return own + steps * strides_[term];
  }

  void reduce(std::size_t begin, std::size_t count, std::span<void* const> outputs) {
    for (std::size_t rank = 0, i = 0; rank < shape_.group.size(); ++rank) {
      for (std::size_t term = 0; term < strides_.size(); ++term) {
        inputs_[i++] = place(term, rank, begin);
      }
    }
    shape_.reduce(inputs_, outputs, count);
  }

  const Shape& shape_;
  const std::size_t piece_;
  std::vector<const void*> inputs_;
  // How far apart the ranks have each term.
  std::vector<std::ptrdiff_t> strides_;
};

}  // namespace

bool fitsSlots(std::size_t size, std::size_t num_terms) {
  return size * num_terms * kLine <= kSlotBytes;
}

void allReduce(Group& group, const KernelTable& table, Call call, const Terms& terms) {
  const Shape shape(group, table, call.header, terms);
  const std::size_t limit = group.isCrowded() ? kOneShotCrowdedBytes : kOneShotBytes;
  const bool small = shape.bytes() * shape.num_parts * group.size() <= limit;
  call.place = small ? 0 : group.mapping()->placeOf(terms.data, shape.bytes(), group.rank());
  Turn turn(group, call);
  if (small) return oneShot(turn, shape);
  TwoShot two_shot(turn, shape, 1, nullptr);
  if (call.place == 0) two_shot.stage(0);
  turn.meet();
  if (turn.isAtOnePlace()) {
    InArena(shape).reduceAll(turn);
    return turn.finish(0);
  }
  if (call.place != 0) two_shot.stage(0);
  two_shot.run();
  turn.finish(two_shot.numChunks());
}

void reduceScatter(Group& group, const KernelTable& table, const Call& call, const Terms& terms,
                   std::size_t unit, void* result) {
  const Shape shape(group, table, call.header, terms);
  Turn turn(group, call);
  TwoShot two_shot(turn, shape, unit, result);
  two_shot.stage(0);
  turn.meet();
  two_shot.run();
  turn.finish(two_shot.numChunks());
}

void reduceParts(Group& group, const KernelTable& table, Call call, const Terms& terms,
                 std::size_t unit) {
  const Shape shape(group, table, call.header, terms);
  call.place = group.mapping()->placeOf(terms.data, shape.bytes(), group.rank());
  Turn turn(group, call);
  const std::size_t begin = partOf(terms.num_elements, unit, group.rank(), group.size());
  TwoShot two_shot(turn, shape, unit, at(*shape.firstTerm(), begin * shape.element_bytes));
  if (call.place == 0) two_shot.stage(0);
  turn.meet();
  if (turn.isAtOnePlace()) {
    InArena(shape).reduceOwn(begin,
                             partOf(terms.num_elements, unit, group.rank() + 1, group.size()));
    return turn.finish(0);
  }
  if (call.place != 0) two_shot.stage(0);
  two_shot.run();
  turn.finish(two_shot.numChunks());
}

}  // namespace unisono::shared
