// Who of a group is there, and what the others can tell about it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shared/mapping.h"

namespace unisono::shared {

// Takes part as `rank`. A record lock on one byte of the segment shows that it is alive: the kernel
// releases it when the process ends, however it ends, and shows it across pid namespaces.
class Members {
 public:
  // Owns `fd`, which must be the only one of this process for the segment: closing another would
  // give up the lock. Throws std::system_error.
  Members(int fd, const Mapping& mapping, std::size_t rank);
  ~Members() { leave(); }
  Members(const Members&) = delete;
  Members& operator=(const Members&) = delete;

  int segment() const { return fd_; }

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

  int fd_;
  const Mapping& mapping_;
  const std::size_t rank_;
  const std::uint64_t generation_;
};

}  // namespace unisono::shared
