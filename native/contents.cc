#include "contents.h"

#include <cstdint>

namespace nb = nanobind;

namespace unisono {

namespace {

// Objects that are expected one after another, by their addresses.
class Expected {
 public:
  explicit Expected(nb::bytes held)
      : next_(static_cast<const std::uint64_t*>(held.data())),
        end_(next_ + held.size() / sizeof(std::uint64_t)) {}

  bool isNext(PyObject* found) {
    return next_ != end_ && *next_++ == reinterpret_cast<std::uintptr_t>(found);
  }

  bool hasEnded() const { return next_ == end_; }

 private:
  const std::uint64_t* next_;
  const std::uint64_t* end_;
};

bool holdsSame(nb::handle container, Py_ssize_t length, Expected& expected) {
  // Another thread may change a container where Python has no lock.
  nb::ft_object_guard guard(container);
  PyObject* given = container.ptr();
  if (PyDict_Check(given)) {
    if (PyDict_Size(given) != length) return false;
    Py_ssize_t position = 0;
    PyObject* key;
    PyObject* value;
    while (PyDict_Next(given, &position, &key, &value)) {
      if (!expected.isNext(key) || !expected.isNext(value)) return false;
    }
    return true;
  }
  if (PyList_Check(given)) {
    if (PyList_Size(given) != length) return false;
    for (Py_ssize_t i = 0; i < length; ++i) {
      if (!expected.isNext(PyList_GetItem(given, i))) return false;
    }
    return true;
  }
  if (PyObject_Size(given) != length) return false;
  if (length == 0) return true;
  for (nb::handle found : container) {
    if (!expected.isNext(found.ptr())) return false;
  }
  return true;
}

}  // namespace

bool holdSame(nb::list containers, nb::bytes lengths, nb::bytes held) {
  Expected expected(held);
  const std::size_t count = lengths.size() / sizeof(std::int64_t);
  if (containers.size() != count) return false;
  const auto* length = static_cast<const std::int64_t*>(lengths.data());
  for (std::size_t i = 0; i < count; ++i) {
    if (!holdsSame(PyList_GetItem(containers.ptr(), i), length[i], expected)) return false;
  }
  return expected.hasEnded();
}

}  // namespace unisono
