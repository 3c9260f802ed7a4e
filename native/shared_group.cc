#include "shared_group.h"

#include <array>
#include <chrono>
#include <memory>
#include <new>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "arguments.h"
#include "instruction_set.h"
#include "memory.h"
#include "shared/movements.h"

namespace nb = nanobind;

namespace unisono {
namespace {

using shared::FailureKind;
using shared::Kind;

constexpr std::array<std::pair<std::string_view, FailureKind>, 3> kFailures = {
    {{"lost", FailureKind::lost},
     {"timeout", FailureKind::timeout},
     {"unequal", FailureKind::unequal}}};

// In the order of the objects given for them.
constexpr std::array<Op, 5> kOps = {Op::sum, Op::sum, Op::min, Op::max, Op::prod};
constexpr std::size_t kMean = 1;

bool isInterrupted() {
  const nb::gil_scoped_acquire locked;
  return PyErr_CheckSignals() != 0;
}

nb::object text(const char* reason) { return nb::str(reason); }

std::uint32_t packed(dlpack::DataType dtype) {
  return static_cast<std::uint32_t>(dtype.code) | std::uint32_t{dtype.bits} << 8 |
         std::uint32_t{dtype.lanes} << 16;
}

void describe(const TensorView& view, shared::Call& call) {
  call.header.dtype = packed(view.stored_dtype);
  call.num_dims = view.shape.size();
  for (std::size_t i = 0; i < std::min(view.shape.size(), shared::kMaxDims); ++i) {
    call.dims[i] = view.shape[i];
  }
}

void describeExactly(const TensorView& view, shared::Call& call) {
  describe(view, call);
  call.header.elements = view.num_elements;
  std::uint64_t hash = view.shape.size();
  for (const std::int64_t dim : view.shape) {
    hash = hash * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(dim) + 1;
  }
  call.header.shape_hash = hash;
}

// The tensor that another rank brings to a gather.
TensorView viewOf(const shared::Call& call, dlpack::DataType dtype) {
  TensorView view = {};
  view.stored_dtype = dtype;
  view.shape = {call.dims, call.num_dims};
  view.bytes = std::size_t{dtype.bits} * dtype.lanes / 8;
  for (const std::int64_t dim : view.shape) view.bytes *= static_cast<std::size_t>(dim);
  return view;
}

}  // namespace

// A reduction that was read.
struct SharedGroup::Request {
  shared::Call call;
  TensorView view;
  nb::tuple tensors;
  std::vector<void*> data;

  shared::Terms terms() const { return {view.dtype, view.num_elements, data}; }
};

namespace {

std::chrono::nanoseconds inNanoseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(seconds));
}

}  // namespace

SharedGroup::SharedGroup(nb::type_object tensor_type, nb::tuple ops, nb::callable raise_failure,
                         int fd, std::size_t rank, std::size_t size, double timeout_seconds)
    : exchange_(tensor_type),
      ops_(std::move(ops)),
      raise_failure_(std::move(raise_failure)),
      group_(fd, {size}, rank, inNanoseconds(timeout_seconds), isInterrupted) {}

void SharedGroup::setTimeout(double seconds) { group_.setTimeout(inNanoseconds(seconds)); }

std::size_t SharedGroup::segmentBytes(std::size_t size) { return shared::Layout{size}.bytes(); }

// Calls `work` without the GIL, and raises what it throws.
template <class Work>
void SharedGroup::run(const Work& work) {
  try {
    const nb::gil_scoped_release unlocked;
    work();
  } catch (const shared::Failure& failure) {
    nb::list ranks;
    for (const std::size_t rank : failure.ranks) ranks.append(rank);
    const char* kind = "lost";
    for (const auto& [name, known] : kFailures) {
      if (known == failure.kind) kind = name.data();
    }
    raise_failure_(kind, failure.text.c_str(), ranks);
  } catch (const shared::Misuse& misuse) {
    raise_failure_("misuse", misuse.what(), nb::list());
  } catch (const shared::Interrupted&) {
    throw nb::python_error();
  }
}

void SharedGroup::join(bool keeps_segment) {
  run([&] { group_.join(keeps_segment); });
}

nb::object SharedGroup::read(Kind kind, nb::handle op, nb::handle terms, nb::handle count,
                             Request& request) const {
  std::size_t index = 0;
  while (index < kOps.size() && !op.is(ops_[index])) ++index;
  if (index == kOps.size()) return text("cannot be combined by an operation that is not known");
  request.tensors = toTuple(terms, "terms");
  const std::size_t num_terms = request.tensors.size();
  if (num_terms == 0) return text("is missing: each rank brings at least one term");
  if (!shared::fitsSlots(group_.size(), num_terms)) return text("is one of too many terms");

  request.data.reserve(num_terms);
  for (std::size_t i = 0; i < num_terms; ++i) {
    TensorView view;
    const char* reason = exchange_.read(request.tensors[i], view);
    if (reason != nullptr) return text(reason);
    if (i == 0) request.view = view;
    if (!view.isLike(request.view)) return text("has another shape or dtype than the first");
    request.data.push_back(view.data);
  }
  const bool is_complex = request.view.stored_dtype.code == dlpack::TypeCode::complex;
  if (is_complex && kOps[index] != Op::sum) return text("is complex: only sums are taken");
  if (index == kMean && request.view.dtype > DType::float64) {
    return text("holds integers, which have no mean of their dtype");
  }

  request.call.header.kind = kind;
  request.call.header.op = kOps[index];
  request.call.header.num_terms = num_terms;
  if (index == kMean) {
    const bool counted = !count.is_none();
    request.call.header.divisor =
        counted ? nb::cast<std::size_t>(count) : group_.size() * num_terms;
  }
  describeExactly(request.view, request.call);
  return nb::none();
}

nb::object SharedGroup::allReduce(nb::handle op, nb::handle terms, nb::handle count) {
  Request request;
  nb::object refusal = read(Kind::all_reduce, op, terms, count, request);
  if (!refusal.is_none()) return refusal;
  run([&] { shared::allReduce(group_, selectedTable(), request.call, request.terms()); });
  return refusal;
}

nb::object SharedGroup::reduceScatter(nb::handle op, nb::handle terms, nb::handle count) {
  Request request;
  nb::object refusal = read(Kind::reduce_scatter, op, terms, count, request);
  if (!refusal.is_none()) return refusal;
  const bool is_complex = request.view.stored_dtype.code == dlpack::TypeCode::complex;
  const std::size_t unit = is_complex ? 2 : 1;
  const std::size_t numel = request.view.num_elements / unit;
  const std::size_t rank = group_.rank(), size = group_.size();
  const std::int64_t length =
      static_cast<std::int64_t>(numel * (rank + 1) / size - numel * rank / size);
  TensorView result = request.view;
  result.shape = {&length, 1};
  const std::size_t bytes =
      static_cast<std::size_t>(length) * unit * elementBytes(request.view.dtype);
  std::shared_ptr<void> memory = Allocator(Allocator::slotBytes(bytes)).allocate(bytes);
  run([&] {
    shared::reduceScatter(group_, selectedTable(), request.call, request.terms(), unit,
                          memory.get());
  });
  return exchange_.make(result, std::move(memory));
}

nb::object SharedGroup::reduceParts(nb::handle op, nb::handle terms) {
  Request request;
  nb::object refusal = read(Kind::reduce_scatter, op, terms, nb::none(), request);
  if (!refusal.is_none()) return refusal;
  const std::size_t unit = request.view.stored_dtype.code == dlpack::TypeCode::complex ? 2 : 1;
  run([&] { shared::reduceParts(group_, selectedTable(), request.call, request.terms(), unit); });
  return refusal;
}

nb::object SharedGroup::gather(nb::handle tensor, nb::handle root) {
  TensorView view;
  const char* reason = exchange_.readBytes(tensor, view);
  if (reason != nullptr) return text(reason);
  if (view.shape.size() > shared::kMaxDims) return text("has more than 15 dimensions");
  shared::Call call;
  const bool is_rooted = !root.is_none();
  call.header.kind = is_rooted ? Kind::gather : Kind::all_gather;
  if (is_rooted) call.header.root = static_cast<std::uint16_t>(nb::cast<std::size_t>(root));
  describe(view, call);
  std::optional<shared::Gather> gather;
  run([&] { gather.emplace(group_, call, view.data, view.bytes); });

  const bool reads = !is_rooted || call.header.root == group_.rank();
  nb::list tensors;
  std::vector<std::size_t> bytes;
  std::vector<void*> outputs;
  for (std::size_t rank = 0; rank < group_.size(); ++rank) {
    const TensorView like = viewOf(gather->callOf(rank), view.stored_dtype);
    bytes.push_back(like.bytes);
    if (!reads) continue;
    std::shared_ptr<void> memory = Allocator(Allocator::slotBytes(like.bytes)).allocate(like.bytes);
    outputs.push_back(memory.get());
    tensors.append(exchange_.make(like, std::move(memory)));
  }
  run([&] { gather->run(bytes, outputs); });
  if (!reads) return nb::none();
  return std::move(tensors);
}

nb::object SharedGroup::lead(nb::bytes greeting, nb::handle terms, nb::handle work) {
  const bool greets_only = work.is_none();
  const nb::tuple tensors = toTuple(terms, "terms");
  std::vector<std::span<const std::byte>> pieces = {
      {static_cast<const std::byte*>(greeting.data()), greeting.size()}};
  TensorView first = {};
  std::size_t bytes = greeting.size();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    TensorView view;
    const char* reason = exchange_.readBytes(tensors[i], view);
    if (reason != nullptr) return text(reason);
    if (i == 0) first = view;
    if (view.bytes != first.bytes) return text("has another size than the first");
    pieces.emplace_back(static_cast<const std::byte*>(view.data), view.bytes);
    bytes += view.bytes;
  }
  if (bytes > shared::Lead::kMostBytes) return text("is too large");
  const std::int64_t length = static_cast<std::int64_t>(bytes);
  TensorView message = {};
  message.stored_dtype = {dlpack::TypeCode::unsigned_integer, 8, 1};
  message.shape = {&length, 1};
  shared::Call call;
  call.header.kind = Kind::all_gather;
  describe(message, call);

  std::optional<shared::Lead> lead;
  bool are_same = false;
  run([&] {
    lead.emplace(group_, call, pieces);
    are_same = lead->haveSameGreeting();
    if (!are_same) return;
    if (greets_only) {
      lead->finish();
    } else if (group_.rank() != 0) {
      lead->share({static_cast<std::byte*>(first.data), first.bytes});
    }
  });
  if (!are_same) {
    nb::list greetings;
    for (std::size_t rank = 0; rank < group_.size(); ++rank) {
      greetings.append(nb::bytes(lead->broughtBy(rank), greeting.size()));
    }
    run([&] { lead->finish(); });
    return std::move(greetings);
  }
  if (greets_only || group_.rank() != 0) return nb::none();
  nb::list brought;
  for (std::size_t rank = 0; rank < group_.size(); ++rank) {
    // Good until `work` returns.
    auto* data = const_cast<std::byte*>(lead->broughtBy(rank)) + greeting.size();
    for (std::size_t i = 0; i < tensors.size(); ++i, data += first.bytes) {
      brought.append(exchange_.make(first, {group_.mapping(), data}));
    }
  }
  work(brought);
  run([&] { lead->share({static_cast<std::byte*>(first.data), first.bytes}); });
  return nb::none();
}

nb::object SharedGroup::shareParts(nb::handle tensor) {
  TensorView view;
  const char* reason = exchange_.readBytes(tensor, view);
  if (reason != nullptr) return text(reason);
  shared::Call call;
  call.header.kind = Kind::share_parts;
  describeExactly(view, call);
  std::vector<std::size_t> bytes;
  std::vector<std::byte*> places;
  const std::size_t item = std::size_t{view.stored_dtype.bits} * view.stored_dtype.lanes / 8;
  const std::size_t numel = view.bytes / item, size = group_.size();
  for (std::size_t rank = 0; rank < size; ++rank) {
    const std::size_t begin = numel * rank / size, end = numel * (rank + 1) / size;
    bytes.push_back((end - begin) * item);
    places.push_back(static_cast<std::byte*>(view.data) + begin * item);
  }
  run([&] { shared::shareParts(group_, call, places, bytes); });
  return nb::none();
}

nb::object SharedGroup::broadcast(nb::handle tensor, std::size_t root) {
  TensorView view;
  const char* reason = exchange_.readBytes(tensor, view);
  if (reason != nullptr) return text(reason);
  shared::Call call;
  call.header.kind = Kind::broadcast;
  call.header.root = static_cast<std::uint16_t>(root);
  describeExactly(view, call);
  run([&] { shared::broadcast(group_, call, view.data, view.bytes); });
  return nb::none();
}

void SharedGroup::barrier() {
  run([&] { shared::barrier(group_); });
}

nb::object SharedGroup::allocate(std::size_t bytes) {
  std::byte* data = nullptr;
  run([&] { data = shared::allocate(group_, bytes); });
  const std::int64_t length = static_cast<std::int64_t>(bytes);
  TensorView view = {};
  view.stored_dtype = {dlpack::TypeCode::unsigned_integer, 8, 1};
  view.shape = {&length, 1};
  // The tensor keeps the mapping, which may outlive the group.
  return exchange_.make(view, {group_.mapping(), data});
}

void SharedGroup::checkHealth() {
  run([&] { group_.checkHealth(); });
}

void SharedGroup::close() {
  run([&] { group_.close(); });
}

void SharedGroup::fail(const std::string& kind, const std::string& text, nb::handle ranks) {
  shared::Ranks numbers;
  for (nb::handle rank : ranks) numbers.push_back(nb::cast<std::size_t>(rank));
  for (const auto& [name, known] : kFailures) {
    if (name == kind) run([&] { group_.fail(known, numbers, text); });
  }
  throw nb::value_error("`kind` must be one of 'lost', 'timeout', 'unequal'.");
}

}  // namespace unisono
