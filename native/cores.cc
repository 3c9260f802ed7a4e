#include "cores.h"

#if defined(__linux__)
#include <dlfcn.h>
#include <unistd.h>

#include <vector>
#endif

namespace unisono {

#if defined(__linux__)

namespace {

template <typename Function>
Function* find(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

// Adds the cores of OpenMP's places. OMP_PROC_BIND, OMP_PLACES and GOMP_CPU_AFFINITY bind the first
// thread to one place as soon as the runtime is loaded. The places are made of the cores that the
// thread had before.
void addOpenMpCores(cpu_set_t& cores) {
  const auto num_places = find<int()>("omp_get_num_places");
  const auto num_cores = find<int(int)>("omp_get_place_num_procs");
  const auto ids = find<void(int, int*)>("omp_get_place_proc_ids");
  if (num_places == nullptr || num_cores == nullptr || ids == nullptr) return;
  for (int place = 0; place < num_places(); ++place) {
    std::vector<int> found(static_cast<std::size_t>(num_cores(place)));
    ids(place, found.data());
    for (const int core : found) CPU_SET(core, &cores);
  }
}

}  // namespace

int currentCore() { return sched_getcpu(); }

bool processCores(cpu_set_t& cores) {
  // The mask of the first thread, because somebody may have bound the caller to one core.
  if (sched_getaffinity(getpid(), sizeof cores, &cores) != 0) return false;
  addOpenMpCores(cores);
  return true;
}

void allowAllCores(pthread_t thread) {
  cpu_set_t cores;
  if (processCores(cores)) pthread_setaffinity_np(thread, sizeof cores, &cores);
}

bool banFromCore(pthread_t thread, int core) {
  cpu_set_t cores;
  if (!processCores(cores)) return true;
  CPU_CLR(core, &cores);
  if (CPU_COUNT(&cores) == 0) return false;
  pthread_setaffinity_np(thread, sizeof cores, &cores);
  return true;
}

#else

int currentCore() { return -1; }
void allowAllCores(pthread_t) {}
bool banFromCore(pthread_t, int) { return true; }

#endif

}  // namespace unisono
