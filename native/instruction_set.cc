#include "instruction_set.h"

namespace unisono {

std::vector<const KernelTable*> availableTables() {
  std::vector<const KernelTable*> tables = {&baseline::kTable};
#if defined(UNISONO_HAS_AVX2)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    tables.push_back(&avx2::kTable);
  }
#endif
  return tables;
}

const KernelTable& selectedTable() {
  static const KernelTable& table = *availableTables().back();
  return table;
}

std::size_t elementBytes(DType dtype) {
  constexpr std::size_t kBytes[kNumDTypes] = {2, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8};
  return kBytes[static_cast<std::size_t>(dtype)];
}

}  // namespace unisono
