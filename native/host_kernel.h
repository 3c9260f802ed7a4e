// Reduces batches of torch tensors in host memory.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

#include "tensors.h"

namespace unisono {

class HostKernel {
 public:
  explicit HostKernel(nanobind::type_object tensor_type) : exchange_(tensor_type) {}

  nanobind::list reduce(std::string_view op, nanobind::handle batch, nanobind::handle copies,
                        bool mean, std::int64_t threads) const;
  void reduceInto(std::string_view op, nanobind::handle batch, nanobind::handle outputs, bool mean,
                  std::int64_t threads) const;

 private:
  TensorExchange exchange_;
};

}  // namespace unisono
