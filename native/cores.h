// Which core a thread runs on, and which it may run on.
#pragma once

#include <pthread.h>

namespace unisono {

// The core that the calling thread runs on; -1 where the system does not say.
int currentCore();

// Lets a thread run on any core of the process but this one. Returns whether there is such a core.
bool banFromCore(pthread_t thread, int core);

}  // namespace unisono
