#include "pool.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <thread>

#include "cores.h"
#include "spin.h"

namespace unisono {
namespace {

// About 200 us: longer than the gap between two calls in a row. Waking a thread that sleeps takes
// about as long as a sum of 4 MB; the workers of OpenMP runtimes spin longer.
constexpr int kSpins = 5000;

constexpr std::uint64_t kInside = std::uint64_t{1} << 32;

std::atomic<Pool*> current = nullptr;

}  // namespace

Pool& Pool::instance() {
  // A fork copies the pool but none of its threads, and perhaps a locked mutex: the child leaves
  // the copy alone and starts a new pool.
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { current.store(nullptr, std::memory_order_relaxed); });
  static_cast<void>(registered);
  Pool* pool = current.load();
  if (pool != nullptr) return *pool;
  Pool* created = new Pool;
  if (current.compare_exchange_strong(pool, created)) return *created;
  delete created;
  return *pool;
}

bool Pool::open(const Work& work, std::size_t helpers) {
  if (helpers == 0 || taken_.exchange(true)) return false;
  // Guests are on other cores, and awake.
  const std::size_t guests = std::min<std::size_t>(num_guests_, helpers);
  startWorkers(helpers - guests);
  if (!keepOff(currentCore())) helpers = guests;
  if (helpers == 0) {
    taken_ = false;
    return false;
  }
  work_ = &work;
  places_ = helpers;
  wake(helpers);
  return true;
}

void Pool::close() {
  const auto is_empty = [this] { return places_ < kInside; };
  places_ &= ~(kInside - 1);
  if (!spinUntil(kSpins, is_empty)) {
    std::unique_lock lock(mutex_);
    closer_sleeps_ = true;
    left_.wait(lock, is_empty);
    closer_sleeps_ = false;
  }
  taken_ = false;
}

void Pool::startWorkers(std::size_t wanted) {
  if (num_workers_ >= wanted) return;
  // Signals belong to the threads of the interpreter.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    while (num_workers_ < wanted) {
      // A new thread waits for its creator's core, which has other things to do.
      Worker& worker = workers_.emplace_back(currentCore());
      const std::size_t index = num_workers_++;
      std::thread thread([this, &worker, index] { help(worker, index); });
      worker.thread = thread.native_handle();
      allowAllCores(worker.thread);
      thread.detach();
    }
  } catch (const std::system_error&) {
    // No thread to be had: the callers do more themselves.
    workers_.pop_back();
    --num_workers_;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// A scheduler may wake a worker on the very core of its caller, though others are idle, and leave
// both there for milliseconds: then help takes more than twice the time of none. Returns whether
// there is another core.
bool Pool::keepOff(int core) {
  for (Worker& worker : workers_) {
    if (worker.core != core) continue;
    if (!banFromCore(worker.thread, core)) return false;
    worker.core = -1;
  }
  return true;
}

void Pool::wake(std::size_t helpers) {
  // One who goes to sleep says so first and then looks once more, so nobody sleeps through it.
  const std::size_t awake = numAwake();
  if (awake >= helpers) return;
  {
    const std::lock_guard lock(mutex_);
  }
  for (std::size_t i = awake; i < helpers; ++i) offered_.notify_one();
}

void Pool::help(Worker& self, std::size_t index) {
  for (;;) {
    const auto joined = [&] { return join(self); };
    if (!spinUntil(kSpins, joined)) {
      std::unique_lock lock(mutex_);
      ++num_asleep_;
      offered_.wait(lock, joined);
      --num_asleep_;
    }
    (*work_)(index);
    leave();
  }
}

bool Pool::join(Worker& self) {
  const int core = currentCore();
  if (self.core.load(std::memory_order_relaxed) != core) self.core = core;
  return takePlace();
}

bool Pool::takePlace() {
  std::uint64_t places = places_.load();
  while (places % kInside > 0) {
    if (places_.compare_exchange_weak(places, places - 1 + kInside)) return true;
  }
  return false;
}

void Pool::leave() {
  const bool is_last = places_.fetch_sub(kInside) < 2 * kInside;
  if (!is_last || !closer_sleeps_) return;
  {
    const std::lock_guard lock(mutex_);
  }
  left_.notify_one();
}

Guest::Guest() : pool_(Pool::instance()) { ++pool_.num_guests_; }

Guest::~Guest() { --pool_.num_guests_; }

bool Guest::help() {
  if (!pool_.takePlace()) return false;
  // Which share a guest begins with does not matter: it has none of its own in every call.
  (*pool_.work_)(0);
  pool_.leave();
  return true;
}

Offer::Offer(Work work, std::size_t helpers) : work_(std::move(work)) {
  if (helpers == 0) return;
  Pool& pool = Pool::instance();
  if (pool.open(work_, helpers)) pool_ = &pool;
}

Offer::~Offer() {
  if (pool_ != nullptr) pool_->close();
}

}  // namespace unisono
