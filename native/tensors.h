// Reads and makes torch tensors through the DLPack exchange table of their type, without libtorch.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "dlpack.h"
#include "kernels.h"

namespace unisono {

// Borrowed: good while the tensor lives and keeps its shape.
struct TensorView {
  void* data;
  std::int32_t device;  // its index among those of its type
  dlpack::DataType stored_dtype;
  std::span<const std::int64_t> shape;
  DType dtype;               // of what is reduced: the parts of complex numbers
  std::size_t num_elements;  // of `dtype`
  std::size_t bytes;

  bool isLike(const TensorView& other) const;
};

class TensorExchange {
 public:
  // Reads tensors on devices of one type, and no others.
  explicit TensorExchange(nanobind::type_object tensor_type,
                          dlpack::DeviceType device_type = dlpack::DeviceType::cpu);

  // Fills `view` and returns nullptr, or returns what is wrong with `object`.
  const char* read(nanobind::handle object, TensorView& view) const;

  // The same for any dtype, as bytes that are not reduced: `dtype` is uint8.
  const char* readBytes(nanobind::handle object, TensorView& view) const;

  // A tensor of the shape and dtype of `like` in `memory`.
  nanobind::object make(const TensorView& like, std::shared_ptr<void> memory) const;

 private:
  const char* readDense(nanobind::handle object, TensorView& view, std::size_t& count) const;
  bool isTrue(nanobind::handle method, nanobind::handle object) const;

  const dlpack::ExchangeTable* table_;
  dlpack::DeviceType device_type_;
  nanobind::object tensor_type_;
  nanobind::object parameter_type_;
  nanobind::object is_neg_;
  nanobind::object is_conj_;
};

}  // namespace unisono
