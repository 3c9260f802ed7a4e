#include "shared/members.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdio>
#include <system_error>

namespace unisono::shared {
namespace {

std::atomic<std::uint64_t> forks = 0;

// Counted in the child. Asking for the pid would be a system call at each collective.
std::uint64_t generationNow() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
  return forks.load(std::memory_order_relaxed);
}

struct flock lockOf(std::size_t rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(rank);
  lock.l_len = 1;
  return lock;
}

enum class Sight { there, gone, unclear };

// Whether a process maps exactly these addresses to a file.
Sight sightOf(const Identity& identity) {
  char path[96];
  std::snprintf(path, sizeof path, "/proc/%d/map_files/%llx-%llx", identity.pid,
                static_cast<unsigned long long>(identity.begin),
                static_cast<unsigned long long>(identity.end));
  struct stat status;
  if (lstat(path, &status) == 0) return Sight::there;
  return errno == ENOENT || errno == ESRCH ? Sight::gone : Sight::unclear;
}

std::uint64_t pidNamespace() {
  struct stat status;
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

}  // namespace

Members::Members(int fd, const Mapping& mapping, std::size_t rank)
    : fd_(fd), mapping_(mapping), rank_(rank), generation_(generationNow()) {
  struct flock lock = lockOf(rank);
  if (fcntl(fd_, F_SETLK, &lock) != 0) {
    const int error = errno;
    close(fd_);
    throw std::system_error(error, std::generic_category(), "The rank is taken");
  }
  present(rank);
}

void Members::present(std::size_t rank) {
  Identity& identity = mapping_.block(rank).identity;
  identity.pid = getpid();
  identity.pid_namespace = pidNamespace();
  identity.begin = reinterpret_cast<std::uintptr_t>(&mapping_.control());
  identity.end = identity.begin + mapping_.layout().bytes();
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) {
    for (std::size_t core = 0; core < kMaxCores; ++core) {
      if (CPU_ISSET(core, &cores)) identity.cores[core / 64] |= std::uint64_t{1} << core % 64;
    }
  }
  identity.presence.store(Presence::present, std::memory_order_release);
}

bool Members::seesAll() const {
  const std::uint64_t own_namespace = pidNamespace();
  for (std::size_t rank = 0; rank < mapping_.layout().size; ++rank) {
    const Identity& identity = mapping_.block(rank).identity;
    if (own_namespace == 0 || identity.pid_namespace != own_namespace) return false;
    if (sightOf(identity) != Sight::there) return false;
  }
  return true;
}

void Members::unlock() {
  mapping_.block(rank_).identity.unlocked.store(true);
  closeSegment();
}

void Members::leave() {
  if (has_left_) return;
  has_left_ = true;
  if (!isForked()) {
    mapping_.block(rank_).identity.presence.store(Presence::left, std::memory_order_release);
  }
  closeSegment();
}

void Members::closeSegment() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

bool Members::isGone(std::size_t rank) const {
  const Identity& identity = mapping_.block(rank).identity;
  switch (identity.presence.load(std::memory_order_acquire)) {
    case Presence::absent:
      return false;
    case Presence::left:
      return true;
    case Presence::present:
      break;
  }
  if (rank == rank_) return false;
  if (fd_ >= 0) {
    struct flock lock = lockOf(rank);
    if (fcntl(fd_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK) return false;
    // It may just have given up the lock. It says so before.
    if (!identity.unlocked.load()) return true;
  }
  return sightOf(identity) == Sight::gone;
}

bool Members::isStopped(std::size_t rank) const {
  const Identity& identity = mapping_.block(rank).identity;
  if (identity.pid == 0 || identity.pid_namespace != pidNamespace()) return false;
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/stat", identity.pid);
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) return false;
  char state = ' ';
  // The name of the program stands in brackets and may hold brackets itself.
  for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) {
    if (c == ')' && std::fscanf(file, " %c", &state) != 1) state = ' ';
  }
  std::fclose(file);
  return state == 'T' || state == 't';
}

bool Members::isForked() const { return generationNow() != generation_; }

std::size_t Members::countCores() const {
  std::size_t count = 0;
  for (std::size_t word = 0; word < kMaxCores / 64; ++word) {
    std::uint64_t cores = 0;
    for (std::size_t rank = 0; rank < mapping_.layout().size; ++rank) {
      cores |= mapping_.block(rank).identity.cores[word];
    }
    count += static_cast<std::size_t>(std::popcount(cores));
  }
  return count;
}

}  // namespace unisono::shared
