// The Python module: reads the arguments, drops the GIL, runs the reduction.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include "bell.h"
#include "host_kernel.h"
#include "instruction_set.h"
#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

NB_MODULE(_native, m) {
  // The kernel lives as long as the interpreter, which does not destroy it at its end.
  nb::set_leak_warnings(false);
  m.doc() = "The native core: fused reductions of tensors in host memory.";

  m.def(
      "instruction_set", [] { return unisono::selectedTable().instruction_set; },
      "The instruction set that was chosen for this processor: avx2 or baseline.");
  m.def("trim", &unisono::trimMemory, "Gives memory kept for later results back to the system.");
  m.def(
      "memory_use",
      [] {
        const unisono::MemoryUse use = unisono::memoryUse();
        return nb::make_tuple(use.used_bytes, use.kept_bytes);
      },
      "The bytes in use by results, and the bytes kept for later ones.");

  nb::class_<unisono::HostKernel>(m, "HostKernel",
                                  "Reduces contiguous CPU tensors in one pass over memory.")
      .def(nb::init<nb::type_object>(), "tensor_type"_a)
      .def("reduce", &unisono::HostKernel::reduce, "op"_a, "batch"_a, "copies"_a, "mean"_a,
           "threads"_a,
           "Reduces each item of `batch` into `copies` new tensors; None for items not taken.")
      .def("reduce_into", &unisono::HostKernel::reduceInto, "op"_a, "batch"_a, "outputs"_a,
           "mean"_a, "threads"_a,
           "Reduces each item of `batch` into its `outputs`, which may be its inputs.");

  nb::class_<unisono::Bell>(m, "Bell", "A bell that threads wait for.")
      .def(nb::init<int>(), "looks"_a)
      .def_prop_ro("count", &unisono::Bell::count, "How often it has rung.")
      .def("ring", &unisono::Bell::ring, "Wakes all who wait.")
      .def("wait", &unisono::Bell::wait, "seen"_a, "timeout_s"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Waits until it has rung more often than `seen`; False if it has not in time.")
      .def("wait_after", &unisono::Bell::waitAfter, "other"_a, "seen"_a, "timeout_s"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Rings another bell, once it has let go of the interpreter, and waits.");
}
