// The Python module: reads the arguments, drops the GIL, runs the reduction.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "bell.h"
#include "contents.h"
#include "gpu_reader.h"
#include "host_kernel.h"
#include "instruction_set.h"
#include "memory.h"
#if defined(UNISONO_HAS_SHARED)
#include "shared_group.h"
#endif

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

  m.def("hold_same", &unisono::holdSame, "containers"_a, "lengths"_a, "held"_a,
        "Whether containers hold objects with the addresses `held`, one after another; of dicts, "
        "each key and then its value.");

  nb::class_<unisono::HostKernel>(m, "HostKernel",
                                  "Reduces contiguous CPU tensors in one pass over memory.")
      .def(nb::init<nb::type_object>(), "tensor_type"_a)
      .def("reduce", &unisono::HostKernel::reduce, "op"_a, "batch"_a, "copies"_a, "mean"_a,
           "threads"_a,
           "Reduces each item of `batch` into `copies` new tensors; None for items not taken.")
      .def("reduce_into", &unisono::HostKernel::reduceInto, "op"_a, "batch"_a, "outputs"_a,
           "mean"_a, "threads"_a,
           "Reduces each item of `batch` into its `outputs`, which may be its inputs.");

  nb::class_<unisono::GpuReader>(m, "GpuReader", "Reads where tensors are in GPU memory.")
      .def(nb::init<nb::type_object>(), "tensor_type"_a)
      .def("tables", &unisono::GpuReader::tables, "op"_a, "batch"_a, "outputs"_a, "mean"_a,
           "block"_a, "Returns the tables of a batch; None if an item is not taken.");

  nb::class_<unisono::Bell>(m, "Bell", "A bell that threads wait for.")
      .def(nb::init<int>(), "looks"_a)
      .def_prop_ro("count", &unisono::Bell::count, "How often it has rung.")
      .def("ring", &unisono::Bell::ring, "Wakes all who wait.")
      .def("wait", &unisono::Bell::wait, "seen"_a, "timeout_s"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Waits until it has rung more often than `seen`; False if it has not in time.")
      .def(
          "ring_and_wait",
          [](unisono::Bell& bell, unisono::Bell& other, std::uint64_t seen, double timeout_s) {
            // The interpreter lock is free already, so one who hears it need not wait for the lock.
            bell.ring();
            return other.wait(seen, timeout_s);
          },
          "other"_a, "seen"_a, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Rings, and waits until another bell has rung more often than `seen`.");

#if defined(UNISONO_HAS_SHARED)
  using unisono::SharedGroup;
  nb::class_<SharedGroup>(m, "SharedGroup",
                          "Collectives of CPU tensors between the processes of a host.")
      .def(nb::init<nb::type_object, nb::tuple, nb::callable, int, std::size_t, std::size_t,
                    double>(),
           "tensor_type"_a, "ops"_a, "raise_failure"_a, "fd"_a, "rank"_a, "size"_a,
           "timeout_seconds"_a)
      .def_static("segment_bytes", &SharedGroup::segmentBytes, "size"_a,
                  "How large the memory that is shared must be at first.")
      .def_prop_ro("is_crowded", &SharedGroup::isCrowded,
                   "Whether there are more ranks than cores for them.")
      .def("join", &SharedGroup::join, "keeps_segment"_a,
           "Meets all other ranks for the first time. Memory that is not kept cannot grow.")
      .def("all_reduce", &SharedGroup::allReduce, "op"_a, "terms"_a, "count"_a.none(),
           "Combines the terms in place, or returns why they are not taken.")
      .def("reduce_scatter", &SharedGroup::reduceScatter, "op"_a, "terms"_a, "count"_a.none(),
           "Returns the part of this rank, or why the terms are not taken.")
      .def("reduce_parts", &SharedGroup::reduceParts, "op"_a, "terms"_a,
           "Combines the own part in place, or returns why the terms are not taken.")
      .def("gather", &SharedGroup::gather, "tensor"_a, "root"_a.none(),
           "Returns the tensors of all ranks where they are wanted, or why it is not taken.")
      .def("lead", &SharedGroup::lead, "greeting"_a, "terms"_a, "work"_a.none(),
           "Gives `work` on rank 0 the terms of all ranks, and its first term then to all.")
      .def("share_parts", &SharedGroup::shareParts, "tensor"_a,
           "Overwrites the part of every rank in place, or returns why it is not taken.")
      .def("broadcast", &SharedGroup::broadcast, "tensor"_a, "root"_a,
           "Overwrites the tensor in place, or returns why it is not taken.")
      .def("barrier", &SharedGroup::barrier, "Returns when every rank has called it.")
      .def("allocate", &SharedGroup::allocate, "num_bytes"_a,
           "Returns bytes that all ranks share. MemoryError may be raised on some ranks alone.")
      .def("set_timeout", &SharedGroup::setTimeout, "seconds"_a,
           "Says how long collectives may wait for other ranks.")
      .def("check_health", &SharedGroup::checkHealth, "Raises if a rank is lost.")
      .def("close", &SharedGroup::close, "Leaves the group.")
      .def("fail", &SharedGroup::fail, "kind"_a, "text"_a, "ranks"_a,
           "Ends the group on all ranks, and raises.");
#endif
}
