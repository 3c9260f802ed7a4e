// Whether containers of Python still hold the very objects that they held before.
#pragma once

#include <nanobind/nanobind.h>

namespace unisono {

// Compares what `containers` hold now with `held`, one after another, and their lengths with
// `lengths`. Of a dict the values count. Objects are compared by their address and are not touched,
// because there may be thousands of them.
bool holdSame(nanobind::list containers, nanobind::list lengths, nanobind::list held);

}  // namespace unisono
