// Whether containers of Python still hold the very objects that they held before.
#pragma once

#include <nanobind/nanobind.h>

namespace unisono {

// Compares what `containers` hold now with the addresses in `held`, one after another, and their
// lengths with `lengths`. Both are packed 64-bit integers. Of a dict, each key and then its value
// count. The objects are not touched, because there may be thousands of them.
bool holdSame(nanobind::list containers, nanobind::bytes lengths, nanobind::bytes held);

}  // namespace unisono
