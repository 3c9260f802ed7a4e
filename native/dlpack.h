// The part of the DLPack 1.x binary interface that is used here (https://dmlc.github.io/dlpack).
#pragma once

#include <cstdint>

namespace unisono::dlpack {

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

enum class DeviceType : std::int32_t { cpu = 1, cuda = 2 };

struct Device {
  DeviceType type;
  std::int32_t id;
};

enum class TypeCode : std::uint8_t {
  integer = 0,
  unsigned_integer = 1,
  floating = 2,
  bfloat = 4,
  complex = 5
};

struct DataType {
  TypeCode code;
  std::uint8_t bits;
  std::uint16_t lanes;

  bool operator==(const DataType&) const = default;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};

struct ManagedTensor {
  Version version;
  void* manager_context;
  void (*deleter)(ManagedTensor* self);
  std::uint64_t flags;
  Tensor tensor;
};

struct ExchangeHeader {
  Version version;
  ExchangeHeader* previous;  // an older table, for readers that do not know this one
};

// What `type.__dlpack_c_exchange_api__` points to. Functions return 0, or -1 with a Python error
// set.
struct ExchangeTable {
  ExchangeHeader header;
  void* allocate;
  void* managed_from_object;
  int (*object_from_managed)(ManagedTensor* tensor, void** object);
  int (*tensor_from_object)(void* object, Tensor* tensor);  // borrowed; may be absent
  void* current_stream;
};

}  // namespace unisono::dlpack
