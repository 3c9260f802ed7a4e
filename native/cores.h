// Which core a thread runs on, and which it may run on.
#pragma once

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

namespace unisono {

// The core that the calling thread runs on; -1 where the system does not say.
int currentCore();

#if defined(__linux__)
// Reads the cores of the process, also where OpenMP has bound its first thread to one of them.
// Returns false if the system does not say.
bool processCores(cpu_set_t& cores);
#endif

// Lets a thread run on any core of the process. A new thread has the cores of its creator, which
// may be one.
void allowAllCores(pthread_t thread);

// Lets a thread run on any core of the process but this one. Returns whether there is such a core.
bool banFromCore(pthread_t thread, int core);

}  // namespace unisono
