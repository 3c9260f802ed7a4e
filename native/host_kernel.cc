#include "host_kernel.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "instruction_set.h"
#include "memory.h"
#include "overlap.h"
#include "reduce.h"

namespace nb = nanobind;

namespace unisono {
namespace {

struct Refusal {
  std::size_t tensor = 0;
  const char* reason = nullptr;
};

std::size_t countTensors(const std::vector<nb::tuple>& batch) {
  std::size_t count = 0;
  for (const nb::tuple& item : batch) count += item.size();
  return count;
}

// Appends where the elements of each tensor are.
template <class Data>
Refusal readLike(const TensorExchange& exchange, const nb::tuple& tensors, const TensorView& like,
                 std::size_t first, std::vector<Data>& data) {
  for (std::size_t i = first; i < tensors.size(); ++i) {
    TensorView view;
    const char* reason = exchange.read(tensors[i], view);
    if (reason != nullptr) return {i, reason};
    if (!view.isLike(like)) return {i, "has another shape or dtype than the first input"};
    data.push_back(view.data);
  }
  return {};
}

Refusal readInputs(const TensorExchange& exchange, const nb::tuple& tensors, Op op, bool mean,
                   TensorView& like, std::vector<const void*>& data) {
  if (tensors.size() == 0)
    throw nb::value_error("An item of `batch` has no tensors; give at least one.");
  const char* reason = exchange.read(tensors[0], like);
  if (reason != nullptr) return {0, reason};
  if (like.stored_dtype.code == dlpack::TypeCode::complex && op != Op::sum) {
    return {0, "is complex: only sums are taken"};
  }
  if (mean && like.dtype > DType::float64) return {0, "holds integers, which have no mean"};
  data.push_back(like.data);
  return readLike(exchange, tensors, like, 1, data);
}

[[noreturn]] void refuse(std::size_t item, const char* kind, const Refusal& refusal) {
  const std::string text = "Item " + std::to_string(item) +
                           " cannot be reduced into its outputs: " + kind + " " +
                           std::to_string(refusal.tensor) + " " + refusal.reason +
                           ". Give contiguous CPU tensors of one shape and dtype.";
  throw nb::value_error(text.c_str());
}

// An item that is taken, and the tensors it gives.
struct Taken {
  std::size_t position;
  TensorView like;
  std::size_t copies;
};

std::vector<std::shared_ptr<void>> allocate(const std::vector<Taken>& taken) {
  std::size_t small_bytes = 0;
  std::size_t num_outputs = 0;
  for (const Taken& item : taken) {
    small_bytes += item.copies * Allocator::slotBytes(item.like.bytes);
    num_outputs += item.copies;
  }
  Allocator allocator(small_bytes);
  std::vector<std::shared_ptr<void>> memory;
  memory.reserve(num_outputs);
  for (const Taken& item : taken) {
    for (std::size_t k = 0; k < item.copies; ++k) {
      memory.push_back(allocator.allocate(item.like.bytes));
    }
  }
  return memory;
}

void finish(Reduction& reduction) {
  const nb::gil_scoped_release unlocked;
  reduction.finish();
}

}  // namespace

nb::list HostKernel::reduce(std::string_view op_name, nb::handle batch, nb::handle copies,
                            bool mean, std::int64_t threads) const {
  const Op op = parseOp(op_name, mean);
  const std::size_t max_threads = parseThreads(threads);
  const std::vector<nb::tuple> tensors = parseBatch(batch, "batch");
  const std::vector<std::size_t> num_copies = parseCopies(copies);
  checkLengths(tensors.size(), num_copies.size(), "copies");

  nb::list results;
  std::vector<Taken> taken;
  std::vector<Item> items;
  std::vector<const void*> inputs;
  taken.reserve(tensors.size());
  items.reserve(tensors.size());
  inputs.reserve(countTensors(tensors));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    results.append(nb::none());
    const std::size_t first = inputs.size();
    TensorView like;
    if (readInputs(exchange_, tensors[i], op, mean, like, inputs).reason != nullptr) {
      inputs.resize(first);
      continue;
    }
    taken.push_back({i, like, num_copies[i]});
    items.push_back(
        {like.dtype, like.num_elements, {inputs.data() + first, tensors[i].size()}, {}});
  }

  const std::vector<std::shared_ptr<void>> memory = allocate(taken);
  std::vector<void*> outputs;
  outputs.reserve(memory.size());
  for (const std::shared_ptr<void>& data : memory) outputs.push_back(data.get());
  for (std::size_t i = 0, first = 0; i < items.size(); first += taken[i++].copies) {
    items[i].outputs = {outputs.data() + first, taken[i].copies};
  }

  Reduction reduction(selectedTable(), op, mean, items, max_threads);
  // Helpers already reduce while the tensors are made: for many small ones that takes as long.
  std::size_t next = 0;
  for (const Taken& item : taken) {
    nb::object copies_made = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(item.copies)));
    if (!copies_made.is_valid()) throw nb::python_error();
    for (std::size_t k = 0; k < item.copies; ++k) {
      nb::object tensor = exchange_.make(item.like, memory[next++]);
      PyTuple_SetItem(copies_made.ptr(), static_cast<Py_ssize_t>(k), tensor.release().ptr());
    }
    results[item.position] = std::move(copies_made);
  }
  finish(reduction);
  return results;
}

void HostKernel::reduceInto(std::string_view op_name, nb::handle batch, nb::handle outputs,
                            bool mean, std::int64_t threads) const {
  const Op op = parseOp(op_name, mean);
  const std::size_t max_threads = parseThreads(threads);
  const std::vector<nb::tuple> tensors = parseBatch(batch, "batch");
  const std::vector<nb::tuple> targets = parseBatch(outputs, "outputs");
  checkLengths(tensors.size(), targets.size(), "outputs");

  std::vector<Item> items;
  std::vector<const void*> input_data;
  std::vector<void*> output_data;
  items.reserve(tensors.size());
  input_data.reserve(countTensors(tensors));
  output_data.reserve(countTensors(targets));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const void* const* inputs = input_data.data() + input_data.size();
    void* const* results = output_data.data() + output_data.size();
    TensorView like;
    Refusal refusal = readInputs(exchange_, tensors[i], op, mean, like, input_data);
    if (refusal.reason != nullptr) refuse(i, "input", refusal);
    refusal = readLike(exchange_, targets[i], like, 0, output_data);
    if (refusal.reason != nullptr) refuse(i, "output", refusal);
    items.push_back(
        {like.dtype, like.num_elements, {inputs, tensors[i].size()}, {results, targets[i].size()}});
  }
  if (const std::optional<std::size_t> item = findOverlap(items)) {
    const std::string text = "Item " + std::to_string(*item) +
                             " cannot be reduced into its outputs: one of them overlaps another "
                             "output or an input in memory. Give outputs that are apart, or are "
                             "exactly inputs of their item.";
    throw nb::value_error(text.c_str());
  }
  Reduction reduction(selectedTable(), op, mean, items, max_threads);
  finish(reduction);
}

}  // namespace unisono
