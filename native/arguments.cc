#include "arguments.h"

#include <array>
#include <string>
#include <utility>

namespace nb = nanobind;

namespace unisono {
namespace {

constexpr std::array<std::pair<std::string_view, Op>, kNumOps> kOps = {
    {{"sum", Op::sum}, {"prod", Op::prod}, {"min", Op::min}, {"max", Op::max}}};

}  // namespace

nb::tuple toTuple(nb::handle sequence, const char* name) {
  if (PyTuple_Check(sequence.ptr())) return nb::borrow<nb::tuple>(sequence);
  if (!PyList_Check(sequence.ptr())) {
    const nb::str type = nb::type_name(sequence.type());
    const std::string text =
        std::string("`") + name + "` must be made of lists or tuples, got " + type.c_str() + ".";
    throw nb::type_error(text.c_str());
  }
  nb::object tuple = nb::steal(PySequence_Tuple(sequence.ptr()));
  if (!tuple.is_valid()) throw nb::python_error();
  return nb::borrow<nb::tuple>(tuple);
}

Op parseOp(std::string_view name, bool mean) {
  for (const auto& [known, op] : kOps) {
    if (name != known) continue;
    if (!mean || op == Op::sum) return op;
    const std::string text = "`mean` divides a sum, got op '" + std::string(name) +
                             "'. Use op 'sum', or set `mean` to False.";
    throw nb::value_error(text.c_str());
  }
  const std::string text =
      "`op` must be one of 'sum', 'prod', 'min', 'max', got '" + std::string(name) + "'.";
  throw nb::value_error(text.c_str());
}

std::size_t parseThreads(std::int64_t threads) {
  if (threads >= 1) return static_cast<std::size_t>(threads);
  const std::string text =
      "`threads` counts the caller and must be 1 or more, got " + std::to_string(threads) + ".";
  throw nb::value_error(text.c_str());
}

std::vector<std::size_t> parseCopies(nb::handle copies) {
  const nb::tuple numbers = toTuple(copies, "copies");
  std::vector<std::size_t> parsed;
  parsed.reserve(numbers.size());
  for (nb::handle number : numbers) {
    const Py_ssize_t count = PyLong_AsSsize_t(number.ptr());
    if (count == -1 && PyErr_Occurred()) throw nb::python_error();
    if (count < 0) {
      const std::string text = "`copies` must be 0 or more, got " + std::to_string(count) +
                               " for item " + std::to_string(parsed.size()) + ".";
      throw nb::value_error(text.c_str());
    }
    parsed.push_back(static_cast<std::size_t>(count));
  }
  return parsed;
}

std::vector<nb::tuple> parseBatch(nb::handle batch, const char* name) {
  const nb::tuple items = toTuple(batch, name);
  std::vector<nb::tuple> parsed;
  parsed.reserve(items.size());
  for (nb::handle item : items) parsed.push_back(toTuple(item, name));
  return parsed;
}

void checkLengths(std::size_t num_items, std::size_t num_others, const char* name) {
  if (num_items == num_others) return;
  const std::string text = "`batch` has " + std::to_string(num_items) + " items but `" + name +
                           "` has " + std::to_string(num_others) + "; give one for each item.";
  throw nb::value_error(text.c_str());
}

}  // namespace unisono
