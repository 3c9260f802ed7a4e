#include "shared/group.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace unisono::shared {
namespace {

// How often a rank that sleeps looks after the others.
constexpr std::chrono::milliseconds kTick{100};

std::shared_ptr<Mapping> mapOrClose(int fd, Layout layout) {
  try {
    return std::make_shared<Mapping>(fd, layout);
  } catch (...) {
    ::close(fd);
    throw;
  }
}

}  // namespace

Group::Group(int fd, Layout layout, std::size_t rank, std::chrono::nanoseconds timeout,
             bool (*interrupted)())
    : mapping_(mapOrClose(fd, layout)),
      rank_(rank),
      size_(layout.size),
      timeout_(timeout),
      interrupted_(interrupted),
      members_(fd, *mapping_, rank) {}

void Group::join(bool keeps_segment) {
  Identity& own = mapping_->block(rank_).identity;
  for (std::uint64_t i = 0; i < kNumJoins; ++i) {
    Turn turn(*this, {.header = {.kind = Kind::join}});
    // In the second turn: by then, all have come.
    if (i == 1) own.sees_all = !keeps_segment && members_.seesAll();
    turn.meet();
    crowded_ = members_.countCores() < size_;
    turn.finish(0);
  }
  for (std::size_t rank = 0; rank < size_; ++rank) {
    if (!mapping_->block(rank).identity.sees_all) return;
  }
  members_.unlock();
}

void Group::close() {
  std::unique_lock<std::timed_mutex> held(mutex_, std::try_to_lock);
  if (!held) {
    interruptCollective();
    held = lock();
  }
  if (closed_.exchange(true)) return;
  members_.leave();
  if (!members_.isForked()) ring();
}

void Group::interruptCollective() {
  if (members_.isForked() || hasFailed()) return;
  try {
    fail(FailureKind::lost, {rank_}, storyOfInterrupted(*mapping_, rank_));
  } catch (const Failure&) {
    // It is for that thread, and for the other ranks.
  }
}

void Group::checkHealth() {
  checkUsable();
  const Ranks lost = ranksThatAre([&](std::size_t rank) { return members_.isGone(rank); });
  if (lost.empty()) return;
  fail(FailureKind::lost, lost, storyOfLost(*mapping_, rank_, lost));
}

void Group::fail(FailureKind kind, const Ranks& ranks, const std::string& text) {
  FailureRecord& failure = mapping_->control().failure;
  std::uint32_t none = FailureRecord::none;
  if (failure.state.compare_exchange_strong(none, FailureRecord::being_written)) {
    failure.kind = kind;
    for (const std::size_t rank : ranks) failure.ranks[rank / 64] |= std::uint64_t{1} << rank % 64;
    failure.length = std::min(text.size(), FailureRecord::kMaxText);
    std::memcpy(failure.text, text.data(), failure.length);
    failure.state.store(FailureRecord::complete, std::memory_order_release);
    ring();
  }
  throwRecorded();
}

bool Group::hasFailed() const {
  return mapping_->control().failure.state.load(std::memory_order_acquire) != FailureRecord::none;
}

void Group::checkUsable() const {
  if (closed_) throw Misuse("The communicator is closed. Build a new one.");
  if (members_.isForked()) {
    throw Misuse(
        "The communicator belongs to the process that this one was forked from. Build one after "
        "the fork, or start processes with the method 'spawn'.");
  }
  if (hasFailed()) throwRecorded();
}

void Group::throwRecorded() const {
  const FailureRecord& failure = mapping_->control().failure;
  const auto complete = [&] {
    return failure.state.load(std::memory_order_acquire) == FailureRecord::complete;
  };
  const Clock::time_point limit = Clock::now() + std::chrono::seconds(1);
  while (!complete() && Clock::now() < limit) sched_yield();
  if (!complete()) {
    throw Failure(FailureKind::lost, {},
                  "A rank ended while it was saying why the others cannot go on. Look there for "
                  "the first error, then build a new communicator.");
  }
  Ranks ranks;
  for (std::size_t rank = 0; rank < size_; ++rank) {
    if (failure.ranks[rank / 64] >> rank % 64 & 1) ranks.push_back(rank);
  }
  throw Failure(failure.kind, std::move(ranks), std::string(failure.text, failure.length));
}

void Group::ring() {
  Control& control = mapping_->control();
  // Either this rank sees the sleeper, or the sleeper sees what was written before.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (control.sleepers.load(std::memory_order_relaxed) == 0) return;
  control.bell.fetch_add(1);
  wakeAll(control.bell);
}

void Group::publish(std::atomic<std::uint64_t>& count, std::uint64_t value) {
  count.store(value, std::memory_order_release);
  ring();
}

template <class Ready, class Late>
void Group::wait(const Ready& ready, const Late& late) {
  const auto over = [&] { return ready() || hasFailed(); };
  Control& control = mapping_->control();
  Clock::time_point look = Clock::time_point::min();
  if (!stayAwakeUntil(over, patienceOf(crowded_))) look = Clock::now() + kTick;
  while (!over()) {
    control.sleepers.fetch_add(1);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const std::uint32_t seen = control.bell.load();
    if (!over()) sleepOn(control.bell, seen, kTick);
    control.sleepers.fetch_sub(1);
    const Clock::time_point now = Clock::now();
    if (now < look) continue;
    look = now + kTick;
    if (interrupted_()) throw Interrupted();
    const Ranks lost =
        ranksThatAre([&](std::size_t rank) { return late(rank) && members_.isGone(rank); });
    // Their last deed may have been what is waited for.
    if (over()) break;
    if (!lost.empty()) {
      fail(FailureKind::lost, lost, storyOfLost(*mapping_, rank_, lost));
    }
    const std::chrono::nanoseconds timeout = timeout_;
    if (!deadline_) deadline_ = now + timeout - kTick;
    if (now < *deadline_) continue;
    const Ranks missing = ranksAtFault(late);
    fail(FailureKind::timeout, missing,
         storyOfTimeout(*mapping_, members_, rank_, missing, timeout));
  }
  if (!ready()) throwRecorded();
}

template <class Late>
Ranks Group::ranksThatAre(const Late& late) const {
  Ranks ranks;
  for (std::size_t rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && late(rank)) ranks.push_back(rank);
  }
  return ranks;
}

template <class Late>
Ranks Group::ranksAtFault(const Late& late) const {
  // Who is waited for may itself wait for one that is stopped, or that has not come.
  const Ranks stopped = ranksThatAre([&](std::size_t rank) { return members_.isStopped(rank); });
  if (!stopped.empty()) return stopped;
  const Ranks absent =
      ranksThatAre([&](std::size_t rank) { return mapping_->block(rank).arrived() < number_; });
  return absent.empty() ? ranksThatAre(late) : absent;
}

std::unique_lock<std::timed_mutex> Group::lock() {
#if defined(__SANITIZE_THREAD__)
  // ThreadSanitizer does not see that a mutex is taken by the steady clock.
  using Timer = std::chrono::system_clock;
#else
  using Timer = Clock;
#endif
  std::unique_lock<std::timed_mutex> held(mutex_, std::try_to_lock);
  while (!held && !held.try_lock_until(Timer::now() + kTick)) {
    if (interrupted_()) throw Interrupted();
  }
  return held;
}

void Group::compareCalls() {
  const Header& own = callOf(*mapping_, rank_, number_).header;
  const Ranks others = ranksThatAre(
      [&](std::size_t rank) { return callOf(*mapping_, rank, number_).header != own; });
  if (others.empty()) return;
  // Who is wrong cannot be known; all take part in it.
  Ranks all(size_);
  for (std::size_t rank = 0; rank < size_; ++rank) all[rank] = rank;
  fail(FailureKind::unequal, all, storyOfUnequal(*mapping_, number_));
}

Turn::Turn(Group& group, const Call& call)
    : group_(group), lock_(group.lock()), number_(group.number_ + 1), first_chunk_(group.chunks_) {
  group.checkUsable();
  group.number_ = number_;
  group.deadline_.reset();
  Call& published = group.mapping_->block(group.rank_).calls[number_ % 2].call;
  published.header = call.header;
  published.place = call.place;
  published.num_dims = call.num_dims;
  for (std::size_t i = 0; i < std::min<std::size_t>(call.num_dims, kMaxDims); ++i) {
    published.dims[i] = call.dims[i];
  }
}

Turn::~Turn() {
  if (finished_ || group_.hasFailed()) return;
  try {
    group_.fail(FailureKind::lost, {group_.rank_},
                "Rank " + std::to_string(group_.rank_) + " gave up in " +
                    wordsOf(callOf(group_.rank_)) +
                    ", interrupted or out of memory. Look there for the first error, then build a "
                    "new communicator.");
  } catch (...) {
    // It is for the others; here the reason is on its way already. Without memory for the text they
    // learn only that this rank is gone, when it is.
  }
}

std::byte* Turn::slot(std::size_t rank, std::size_t chunk) const {
  return group_.mapping_->slot(rank, first_chunk_ + chunk);
}

namespace {

// Whether the count of every rank has come to a value. Those that have are not looked at again.
template <class Count>
auto allAtLeast(std::size_t size, std::uint64_t value, const Count& count) {
  return [=, rank = std::size_t{0}]() mutable {
    while (rank < size && count(rank).load(std::memory_order_acquire) >= value) ++rank;
    return rank == size;
  };
}

}  // namespace

void Turn::awaitFreeSlot(std::size_t chunk) {
  const std::uint64_t index = first_chunk_ + chunk;
  if (index < kNumSlots) return;
  const std::uint64_t needed = index - kNumSlots + 1;
  if (needed <= group_.served_by_all_) return;
  const auto served = [this](std::size_t rank) -> auto& { return group_.progress(rank).served; };
  auto ready = allAtLeast(group_.size_, needed, served);
  group_.wait([&] { return ready(); }, [&](std::size_t rank) { return served(rank) < needed; });
}

void Turn::staged(std::size_t chunk) {
  num_staged_ = chunk + 1;
  if (!arrived_) return;
  group_.publish(group_.progress(group_.rank_).staged, first_chunk_ + num_staged_);
}

void Turn::served(std::size_t chunk) {
  group_.publish(group_.progress(group_.rank_).served, first_chunk_ + chunk + 1);
}

void Turn::awaitStaged(std::size_t chunk) {
  const std::uint64_t needed = first_chunk_ + chunk + 1;
  const auto staged = [this](std::size_t rank) -> auto& { return group_.progress(rank).staged; };
  auto ready = allAtLeast(group_.size_, needed, staged);
  group_.wait([&] { return ready(); }, [&](std::size_t rank) { return staged(rank) < needed; });
}

void Turn::awaitStagedBy(std::size_t rank, std::size_t chunk) {
  const std::uint64_t needed = first_chunk_ + chunk + 1;
  const auto& staged = group_.progress(rank).staged;
  group_.wait([&] { return staged.load(std::memory_order_acquire) >= needed; },
              [&](std::size_t other) { return other == rank; });
}

void Turn::awaitServed(std::size_t chunk) {
  const std::uint64_t needed = first_chunk_ + chunk + 1;
  const auto served = [this](std::size_t rank) -> auto& { return group_.progress(rank).served; };
  auto ready = allAtLeast(group_.size_, needed, served);
  group_.wait([&] { return ready(); }, [&](std::size_t rank) { return served(rank) < needed; });
}

void Turn::awaitCount(std::atomic<std::uint64_t>& count, std::uint64_t value) {
  const auto late = [this](std::size_t rank) {
    return group_.mapping_->block(rank).arrived() < number_;
  };
  const auto busy = [this](std::size_t rank) {
    const Identity& identity = group_.mapping_->block(rank).identity;
    return identity.finished.load(std::memory_order_acquire) < number_;
  };
  group_.wait([&] { return count.load(std::memory_order_acquire) >= value; },
              [&](std::size_t rank) {
                return group_.ranksThatAre(late).empty() ? busy(rank) : late(rank);
              });
}

void Turn::arrive() {
  Progress& own = group_.progress(group_.rank_);
  own.served.store(first_chunk_, std::memory_order_relaxed);
  own.staged.store(first_chunk_ + num_staged_, std::memory_order_relaxed);
  group_.mapping_->block(group_.rank_)
      .calls[number_ % 2]
      .number.store(number_, std::memory_order_release);
  arrived_ = true;
}

void Turn::meet() {
  if (group_.crowded_) return meetAfter([] {});
  arrive();
  group_.ring();
  const auto arrived = [this](std::size_t rank) -> auto& {
    return group_.mapping_->block(rank).calls[number_ % 2].number;
  };
  auto ready = allAtLeast(group_.size_, number_, arrived);
  group_.wait([&] { return ready(); }, [&](std::size_t rank) { return arrived(rank) < number_; });
  group_.compareCalls();
  group_.served_by_all_ = first_chunk_;
}

bool Turn::isAtOnePlace() const {
  const std::uint64_t place = callOf(group_.rank_).place;
  if (place == 0) return false;
  return group_.ranksThatAre([&](std::size_t rank) { return callOf(rank).place != place; }).empty();
}

const Call& Turn::callOf(std::size_t rank) const {
  return shared::callOf(*group_.mapping_, rank, number_);
}

void Turn::finish(std::size_t num_chunks) {
  group_.chunks_ = first_chunk_ + num_chunks;
  group_.mapping_->block(group_.rank_).identity.finished.store(number_, std::memory_order_release);
  finished_ = true;
}

}  // namespace unisono::shared
