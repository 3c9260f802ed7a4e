// The ranks of one host that share a segment: how they meet, wait for each other, and fail
// together.
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>

#include "shared/mapping.h"
#include "shared/members.h"
#include "shared/story.h"
#include "shared/waiting.h"

namespace unisono::shared {

// The group can no longer be used, on any rank.
struct Failure : std::exception {
  Failure(FailureKind kind, Ranks ranks, std::string text)
      : kind(kind), ranks(std::move(ranks)), text(std::move(text)) {}
  const char* what() const noexcept override { return text.c_str(); }

  FailureKind kind;
  Ranks ranks;
  std::string text;
};

// The group is closed, or belongs to the process that this one was forked from.
struct Misuse : std::logic_error {
  using std::logic_error::logic_error;
};

// A signal asks this process to stop waiting.
struct Interrupted {};

class Group {
 public:
  // Owns `fd`. `interrupted` is asked a few times a second while a rank waits.
  Group(int fd, Layout layout, std::size_t rank, std::chrono::nanoseconds timeout,
        bool (*interrupted)());

  // Meets all others for the first time. A segment that is not kept cannot grow: its descriptor is
  // closed if the ranks can see each other without it.
  void join(bool keeps_segment);
  // Waits for a collective of another thread of this process, then leaves. May be called twice.
  void close();
  // How long collectives wait for other ranks from now on.
  void setTimeout(std::chrono::nanoseconds timeout) { timeout_ = timeout; }
  // Throws if a rank is lost.
  void checkHealth();
  // Ends the group with this failure, or with an earlier one, and throws it.
  [[noreturn]] void fail(FailureKind kind, const Ranks& ranks, const std::string& text);

  std::size_t rank() const { return rank_; }
  std::size_t size() const { return size_; }
  // Whether there are more ranks than cores for them.
  bool isCrowded() const { return crowded_; }
  const std::shared_ptr<Mapping>& mapping() const { return mapping_; }
  // Its descriptor, which the group closes; -1 if it has done so.
  int segment() const { return members_.segment(); }

 private:
  friend class Turn;

  Progress& progress(std::size_t rank) const { return mapping_->block(rank).progress; }
  bool hasFailed() const;
  void checkUsable() const;
  [[noreturn]] void throwRecorded() const;
  void ring();
  // Ends what another thread of this rank waits for.
  void interruptCollective();
  void publish(std::atomic<std::uint64_t>& count, std::uint64_t value);
  // Returns when `ready()`; `late(rank)` says who keeps it from being so.
  template <class Ready, class Late>
  void wait(const Ready& ready, const Late& late);
  template <class Late>
  Ranks ranksThatAre(const Late& late) const;
  template <class Late>
  Ranks ranksAtFault(const Late& late) const;
  std::unique_lock<std::timed_mutex> lock();
  void compareCalls();

  const std::shared_ptr<Mapping> mapping_;
  const std::size_t rank_;
  const std::size_t size_;
  std::atomic<std::chrono::nanoseconds> timeout_;
  bool (*const interrupted_)();
  Members members_;
  std::timed_mutex mutex_;
  std::atomic<bool> closed_ = false;
  bool crowded_ = true;  // until all cores are known
  std::uint64_t number_ = 0;
  std::uint64_t chunks_ = 0;         // of all calls before
  std::uint64_t served_by_all_ = 0;  // chunks of which this is known without looking
  std::uint64_t rounds_ = 0;         // of work that was shared
  std::uint64_t claimed_[2] = {0, 0};
  std::uint64_t finished_[2] = {0, 0};
  std::optional<Clock::time_point> deadline_;  // none while nobody was waited for long
};

// One collective call. It holds the group; unless it is finished, its end is that of the group.
class Turn {
 public:
  Turn(Group& group, const Call& call);
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  // Chunks are counted from 0 in each call. A chunk may be staged before meet().
  std::byte* slot(std::size_t rank, std::size_t chunk) const;
  void awaitFreeSlot(std::size_t chunk);
  void staged(std::size_t chunk);
  void served(std::size_t chunk);
  void awaitStaged(std::size_t chunk);
  void awaitStagedBy(std::size_t rank, std::size_t chunk);
  void awaitServed(std::size_t chunk);
  // Does `work(0)` to `work(num_pieces - 1)` together with the other ranks and returns when all are
  // done: a rank that is on a core takes the next piece. Once per call, after meet().
  template <class Work>
  void share(std::size_t num_pieces, const Work& work);

  // Returns when all ranks have come and make the same call.
  void meet();
  // The same; the last to come does `work` while the others wait. For crowded groups.
  template <class Work>
  void meetAfter(const Work& work);
  // Whether the terms of all ranks lie at one place of their arenas.
  bool isAtOnePlace() const;
  const Call& callOf(std::size_t rank) const;

  // Gives the others their whole time again.
  void startAgain() { group_.deadline_.reset(); }
  void finish(std::size_t num_chunks);

 private:
  void arrive();
  void awaitCount(std::atomic<std::uint64_t>& count, std::uint64_t value);

  Group& group_;
  const std::unique_lock<std::timed_mutex> lock_;
  const std::uint64_t number_;
  const std::uint64_t first_chunk_;
  std::uint64_t num_staged_ = 0;
  bool arrived_ = false;
  bool finished_ = false;
};

template <class Work>
void Turn::meetAfter(const Work& work) {
  arrive();
  Control& control = group_.mapping_->control();
  if (control.arrivals.value.fetch_add(1) + 1 == number_ * group_.size_) {
    group_.compareCalls();
    work();
    group_.publish(control.met.value, number_);
  } else {
    awaitCount(control.met.value, number_);
  }
  group_.served_by_all_ = first_chunk_;
}

template <class Work>
void Turn::share(std::size_t num_pieces, const Work& work) {
  const std::size_t parity = group_.rounds_++ % 2;
  auto& claimed = group_.mapping_->control().claimed[parity].value;
  auto& finished = group_.mapping_->control().finished[parity].value;
  std::uint64_t num_done = 0;
  for (;; ++num_done) {
    const std::uint64_t piece = claimed.fetch_add(1) - group_.claimed_[parity];
    if (piece >= num_pieces) break;
    work(piece);
  }
  // Each rank claims once in vain.
  group_.claimed_[parity] += num_pieces + group_.size_;
  group_.finished_[parity] += num_pieces;
  if (num_done != 0) {
    finished.fetch_add(num_done);
    group_.ring();
  }
  awaitCount(finished, group_.finished_[parity]);
}

}  // namespace unisono::shared
