#include "tensors.h"

#include <algorithm>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

#include "instruction_set.h"

namespace nb = nanobind;

namespace unisono {
namespace {

constexpr std::uint32_t kDLPackMajor = 1;

const dlpack::ExchangeTable* findTable(nb::handle tensor_type) {
  if (!nb::hasattr(tensor_type, "__dlpack_c_exchange_api__")) {
    throw std::runtime_error(
        "The native core reads tensors through the DLPack exchange table of their type, but the "
        "type has none. Install torch 2.10 or newer, or use the reductions without the native "
        "core.");
  }
  const nb::object capsule = tensor_type.attr("__dlpack_c_exchange_api__");
  void* pointer = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
  if (pointer == nullptr) throw nb::python_error();
  const auto* header = static_cast<const dlpack::ExchangeHeader*>(pointer);
  const dlpack::Version newest = header->version;
  while (header != nullptr && header->version.major != kDLPackMajor) header = header->previous;
  const auto* table = reinterpret_cast<const dlpack::ExchangeTable*>(header);
  if (table == nullptr || table->tensor_from_object == nullptr) {
    throw std::runtime_error(
        "The native core reads the DLPack exchange table of version 1, but the type offers "
        "version " +
        std::to_string(newest.major) + "." + std::to_string(newest.minor) +
        ". Install another torch, or use the reductions without the native core.");
  }
  return table;
}

std::optional<DType> reducedDType(dlpack::DataType stored) {
  using enum dlpack::TypeCode;
  if (stored.lanes != 1) return std::nullopt;
  switch (stored.code) {
    case floating:
      if (stored.bits == 16) return DType::float16;
      if (stored.bits == 32) return DType::float32;
      if (stored.bits == 64) return DType::float64;
      break;
    case bfloat:
      if (stored.bits == 16) return DType::bfloat16;
      break;
    case complex:
      if (stored.bits == 64) return DType::float32;
      if (stored.bits == 128) return DType::float64;
      break;
    case integer:
      if (stored.bits == 8) return DType::int8;
      if (stored.bits == 16) return DType::int16;
      if (stored.bits == 32) return DType::int32;
      if (stored.bits == 64) return DType::int64;
      break;
    case unsigned_integer:
      if (stored.bits == 8) return DType::uint8;
      if (stored.bits == 16) return DType::uint16;
      if (stored.bits == 32) return DType::uint32;
      if (stored.bits == 64) return DType::uint64;
      break;
  }
  return std::nullopt;
}

std::size_t countElements(const dlpack::Tensor& tensor) {
  std::size_t count = 1;
  for (std::int32_t i = 0; i < tensor.ndim; ++i) count *= static_cast<std::size_t>(tensor.shape[i]);
  return count;
}

bool isContiguous(const dlpack::Tensor& tensor) {
  std::int64_t expected = 1;
  for (std::int32_t i = tensor.ndim; i-- > 0;) {
    if (tensor.shape[i] == 1) continue;
    if (tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

// A tensor's memory, shape and strides. `dims` continues behind the object.
struct OwnedTensor {
  dlpack::ManagedTensor managed;
  std::shared_ptr<void> memory;
  std::int64_t dims[1];

  static void release(dlpack::ManagedTensor* managed) {
    auto* self = static_cast<OwnedTensor*>(managed->manager_context);
    self->~OwnedTensor();
    ::operator delete(self);
  }
};

}  // namespace

bool TensorView::isLike(const TensorView& other) const {
  return device == other.device && stored_dtype == other.stored_dtype &&
         std::ranges::equal(shape, other.shape);
}

TensorExchange::TensorExchange(nb::type_object tensor_type, dlpack::DeviceType device_type)
    : table_(findTable(tensor_type)),
      device_type_(device_type),
      tensor_type_(tensor_type),
      parameter_type_(nb::module_::import_("torch.nn").attr("Parameter")),
      is_neg_(tensor_type.attr("is_neg")),
      is_conj_(tensor_type.attr("is_conj")) {}

const char* TensorExchange::read(nb::handle object, TensorView& view) const {
  std::size_t count;
  const char* reason = readDense(object, view, count);
  if (reason != nullptr) return reason;
  const std::optional<DType> dtype = reducedDType(view.stored_dtype);
  if (!dtype) return "has a dtype that is not supported";
  view.dtype = *dtype;
  view.bytes = count * view.stored_dtype.bits / 8;
  view.num_elements = view.bytes / elementBytes(*dtype);
  return nullptr;
}

const char* TensorExchange::readBytes(nb::handle object, TensorView& view) const {
  std::size_t count;
  const char* reason = readDense(object, view, count);
  if (reason != nullptr) return reason;
  if (view.stored_dtype.bits % 8 != 0) return "has a dtype that is not supported";
  view.dtype = DType::uint8;
  view.bytes = count * view.stored_dtype.bits * view.stored_dtype.lanes / 8;
  view.num_elements = view.bytes;
  return nullptr;
}

const char* TensorExchange::readDense(nb::handle object, TensorView& view,
                                      std::size_t& count) const {
  // Other subclasses may compute their elements, or expect results of their own type.
  const nb::handle type = object.type();
  if (!type.is(tensor_type_) && !type.is(parameter_type_)) {
    return "is neither a plain tensor nor a parameter";
  }
  dlpack::Tensor tensor;
  if (table_->tensor_from_object(object.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return "is not a dense tensor with memory of its own";
  }
  if (tensor.device.type != device_type_) return "is on another type of device";
  count = countElements(tensor);
  if (count != 0 && tensor.data == nullptr) return "is not a dense tensor with memory of its own";
  if (count != 0 && !isContiguous(tensor)) return "is not contiguous";

  // The table reports neither bit, though each changes what the elements are. What torch negates by
  // a bit are imaginary parts, which lie two apart; to ask for it takes as long as all the rest.
  using enum dlpack::TypeCode;
  const bool is_complex = tensor.dtype.code == complex;
  if ((is_complex || count == 1) && isTrue(is_neg_, object)) return "has its negative bit set";
  if (is_complex && isTrue(is_conj_, object)) return "has its conjugate bit set";

  view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  view.device = tensor.device.id;
  view.stored_dtype = tensor.dtype;
  view.shape = {tensor.shape, static_cast<std::size_t>(tensor.ndim)};
  return nullptr;
}

bool TensorExchange::isTrue(nb::handle method, nb::handle object) const {
  PyObject* self = object.ptr();
  const nb::object result = nb::steal(PyObject_Vectorcall(method.ptr(), &self, 1, nullptr));
  if (!result.is_valid()) throw nb::python_error();
  return result.ptr() == Py_True;
}

nb::object TensorExchange::make(const TensorView& like, std::shared_ptr<void> memory) const {
  const std::size_t ndim = like.shape.size();
  void* place = ::operator new(sizeof(OwnedTensor) + 2 * ndim * sizeof(std::int64_t));
  auto* owned = new (place) OwnedTensor{};
  owned->memory = std::move(memory);
  std::int64_t* shape = owned->dims;
  std::int64_t* strides = shape + ndim;
  std::int64_t stride = 1;
  for (std::size_t i = ndim; i-- > 0;) {
    shape[i] = like.shape[i];
    strides[i] = stride;
    stride *= std::max<std::int64_t>(shape[i], 1);
  }
  owned->managed = {.version = {kDLPackMajor, 0},
                    .manager_context = owned,
                    .deleter = OwnedTensor::release,
                    .flags = 0,
                    .tensor = {.data = owned->memory.get(),
                               .device = {dlpack::DeviceType::cpu, 0},
                               .ndim = static_cast<std::int32_t>(ndim),
                               .dtype = like.stored_dtype,
                               .shape = shape,
                               .strides = strides,
                               .byte_offset = 0}};
  void* object = nullptr;
  if (table_->object_from_managed(&owned->managed, &object) != 0) {
    OwnedTensor::release(&owned->managed);
    throw nb::python_error();
  }
  return nb::steal(static_cast<PyObject*>(object));
}

}  // namespace unisono
