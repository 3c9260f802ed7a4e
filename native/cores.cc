#include "cores.h"

#if defined(__linux__)
#include <sched.h>
#include <unistd.h>
#endif

namespace unisono {

#if defined(__linux__)

int currentCore() { return sched_getcpu(); }

bool banFromCore(pthread_t thread, int core) {
  cpu_set_t cores;
  // Those of the first thread: the caller's own may be one, to which somebody has bound it.
  if (sched_getaffinity(getpid(), sizeof cores, &cores) != 0) return true;
  CPU_CLR(core, &cores);
  if (CPU_COUNT(&cores) == 0) return false;
  pthread_setaffinity_np(thread, sizeof cores, &cores);
  return true;
}

#else

int currentCore() { return -1; }
bool banFromCore(pthread_t, int) { return true; }

#endif

}  // namespace unisono
