#include "contents.h"

namespace nb = nanobind;

namespace unisono {

namespace {

// Objects that are expected one after another, in a list that nobody changes meanwhile.
class Expected {
 public:
  explicit Expected(nb::list held) : list_(held.ptr()), size_(PyList_Size(list_)) {}

  bool isNext(PyObject* found) { return at_ < size_ && PyList_GetItem(list_, at_++) == found; }

  bool hasEnded() const { return at_ == size_; }

 private:
  PyObject* list_;
  Py_ssize_t size_;
  Py_ssize_t at_ = 0;
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
      if (!expected.isNext(value)) return false;
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

bool holdSame(nb::list containers, nb::list lengths, nb::list held) {
  Expected expected(held);
  const Py_ssize_t count = PyList_Size(containers.ptr());
  if (PyList_Size(lengths.ptr()) != count) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Py_ssize_t length = PyLong_AsSsize_t(PyList_GetItem(lengths.ptr(), i));
    if (!holdsSame(PyList_GetItem(containers.ptr(), i), length, expected)) return false;
  }
  return expected.hasEnded();
}

}  // namespace unisono
