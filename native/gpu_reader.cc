#include "gpu_reader.h"

#include <array>
#include <compare>
#include <map>
#include <span>
#include <vector>

#include "arguments.h"
#include "overlap.h"
#include "reduce.h"

namespace nb = nanobind;

namespace unisono {
namespace {

constexpr std::uintptr_t kAlignment = 16;

// As torch names them.
constexpr std::array<const char*, kNumDTypes> kNames = {"float16", "bfloat16", "float32", "float64",
                                                        "int8",    "int16",    "int32",   "int64",
                                                        "uint8",   "uint16",   "uint32",  "uint64"};

// What the items of one launch have in common.
struct Kind {
  DType dtype;
  std::int32_t device;
  std::size_t num_inputs;
  std::size_t num_outputs;

  auto operator<=>(const Kind&) const = default;
};

struct Table {
  std::int64_t num_rows = 0;
  std::int64_t num_blocks = 0;
  std::uintptr_t low_bits = 0;
  std::vector<std::int64_t> numbers;

  void add(const Item& item, std::int64_t block) {
    const auto length = static_cast<std::int64_t>(item.num_elements);
    numbers.push_back(num_blocks);
    numbers.push_back(length);
    for (const void* data : item.inputs) addAddress(data);
    for (const void* data : item.outputs) addAddress(data);
    num_rows += 1;
    num_blocks += (length + block - 1) / block;
  }

  void addAddress(const void* data) {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    low_bits |= address % kAlignment;
    numbers.push_back(static_cast<std::int64_t>(address));
  }
};

bool isTaken(const TensorView& view, Op op, bool mean) {
  const bool is_complex = view.stored_dtype.code == dlpack::TypeCode::complex;
  return !(is_complex && op != Op::sum) && !(mean && view.dtype > DType::float64);
}

}  // namespace

nb::object GpuReader::tables(std::string_view op_name, nb::handle batch, nb::handle outputs,
                             bool mean, std::int64_t block) const {
  const Op op = parseOp(op_name, mean);
  if (block < 1) throw nb::value_error("`block` must be 1 or more.");
  const bool is_in_place = outputs.is(batch);
  const std::vector<nb::tuple> tensors = parseBatch(batch, "batch");
  const std::vector<nb::tuple> targets =
      is_in_place ? std::vector<nb::tuple>() : parseBatch(outputs, "outputs");
  if (!is_in_place) checkLengths(tensors.size(), targets.size(), "outputs");

  std::size_t num_tensors = 0;
  for (const nb::tuple& item : tensors) num_tensors += item.size();
  for (const nb::tuple& item : targets) num_tensors += item.size();
  std::vector<void*> data;  // never grows, since items point into it
  data.reserve(num_tensors);

  std::vector<Item> items;
  std::vector<Kind> kinds;
  items.reserve(tensors.size());
  kinds.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].size() == 0)
      throw nb::value_error("An item of `batch` has no tensors; give at least one.");
    TensorView first;
    bool is_first = true;
    const auto append = [&](nb::handle tensor) {
      TensorView view;
      if (exchange_.read(tensor, view) != nullptr) return false;
      if (is_first) {
        if (!isTaken(view, op, mean)) return false;
        first = view;
        is_first = false;
      } else if (!view.isLike(first)) {
        return false;
      }
      data.push_back(view.data);
      return true;
    };
    void** const start = data.data() + data.size();
    for (nb::handle tensor : tensors[i]) {
      if (!append(tensor)) return nb::none();
    }
    const std::span<void* const> inputs(start, tensors[i].size());
    std::span<void* const> results = inputs;
    if (!is_in_place) {
      for (nb::handle tensor : targets[i]) {
        if (!append(tensor)) return nb::none();
      }
      results = {start + inputs.size(), targets[i].size()};
    }
    items.push_back({first.dtype, first.num_elements, {inputs.data(), inputs.size()}, results});
    kinds.push_back({first.dtype, first.device, inputs.size(), results.size()});
  }
  if (findOverlap(items)) return nb::none();

  std::map<Kind, Table> by_kind;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (items[i].num_elements != 0) by_kind[kinds[i]].add(items[i], block);
  }
  nb::list result;
  for (const auto& [kind, table] : by_kind) {
    const nb::bytes rows(table.numbers.data(), table.numbers.size() * sizeof(std::int64_t));
    result.append(nb::make_tuple(kNames[static_cast<std::size_t>(kind.dtype)], kind.device,
                                 kind.num_inputs, kind.num_outputs, table.num_rows,
                                 table.num_blocks, table.low_bits == 0, rows));
  }
  return result;
}

}  // namespace unisono
