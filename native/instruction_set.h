// Which kernels this processor can run.
#pragma once

#include <vector>

#include "kernels.h"

namespace unisono {

// Every table that was built and that this processor can run, the fastest last.
std::vector<const KernelTable*> availableTables();

// The fastest of them.
const KernelTable& selectedTable();

std::size_t elementBytes(DType dtype);

}  // namespace unisono
