// Who of a group is there, and what the others can tell about it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shared/mapping.h"

namespace unisono::shared {

// Takes part as `rank`. A record lock on one byte of the segment shows that it is alive: the kernel
// releases it when the process ends, however it ends, and shows it across pid namespaces. The lock
// needs a descriptor. Ranks that see each other in /proc can do without: there, the kernel shows
// whether a process still has the segment mapped, which ends with the process, and with an exec.
class Members {
 public:
  // Owns `fd`, which must be the only one of this process for the segment: closing another would
  // give up the lock. Throws std::system_error.
  Members(int fd, const Mapping& mapping, std::size_t rank);
  ~Members() { leave(); }
  Members(const Members&) = delete;
  Members& operator=(const Members&) = delete;

  int segment() const { return fd_; }

  // Whether the mapping of every rank can be seen. All must have come.
  bool seesAll() const;
  // Closes the descriptor. Every rank must see all, and must call this.
  void unlock();

  // Says so to the others. In a forked child it only gives back the descriptor.
  void leave();

  // Whether `rank` was there and can do no more: it has left, or its process has ended.
  bool isGone(std::size_t rank) const;
  // Whether its process was stopped by a signal, as far as this process can see.
  bool isStopped(std::size_t rank) const;
  // Whether this process was forked from the one that joined.
  bool isForked() const;
  // The cores on which at least one rank may run.
  std::size_t countCores() const;

 private:
  void present(std::size_t rank);
  void closeSegment();

  int fd_;
  bool has_left_ = false;
  const Mapping& mapping_;
  const std::size_t rank_;
  const std::uint64_t generation_;
};

}  // namespace unisono::shared
