// Checks what Python passes in, before anything is read.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kernels.h"

namespace unisono {

Op parseOp(std::string_view name, bool mean);
std::size_t parseThreads(std::int64_t threads);
std::vector<std::size_t> parseCopies(nanobind::handle copies);

// A list or tuple as a tuple, which holds on to its elements while the GIL is released; a list may
// be changed by then.
nanobind::tuple toTuple(nanobind::handle sequence, const char* name);

// The lists or tuples in a list or tuple.
std::vector<nanobind::tuple> parseBatch(nanobind::handle batch, const char* name);

void checkLengths(std::size_t num_items, std::size_t num_others, const char* name);

}  // namespace unisono
