// Reads where the tensors of a batch are in GPU memory: the table of a kernel that runs there.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string_view>

#include "tensors.h"

namespace unisono {

class GpuReader {
 public:
  explicit GpuReader(nanobind::type_object tensor_type)
      : exchange_(tensor_type, dlpack::DeviceType::cuda) {}

  // A list of (dtype, device, inputs, outputs, rows, blocks, is aligned, bytes of the rows), one
  // for each kind of item; None if an item is not taken.
  nanobind::object tables(std::string_view op, nanobind::handle batch, nanobind::handle outputs,
                          bool mean, std::int64_t block) const;

 private:
  TensorExchange exchange_;
};

}  // namespace unisono
