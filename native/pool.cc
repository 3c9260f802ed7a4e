#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <thread>

#include "spin.h"

namespace unisono {
namespace {

// About 200 us: longer than the gap between two calls in a row. Waking a thread that sleeps takes
// about as long as a sum of 4 MB; the workers of OpenMP runtimes spin longer.
constexpr int kSpins = 5000;

std::atomic<Pool*> current = nullptr;

}  // namespace

Pool& Pool::instance() {
  // A fork copies the pool but none of its threads, and perhaps a locked mutex: the child leaves
  // the copy alone and starts anew.
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

std::size_t Pool::numWorkers() {
  const std::lock_guard lock(mutex_);
  return num_workers_;
}

bool Pool::open(const std::function<void()>& work, std::size_t helpers) {
  if (helpers == 0 || taken_.exchange(true)) return false;
  {
    const std::lock_guard lock(mutex_);
    startWorkers(helpers);
    work_ = &work;
    places_ = helpers;
  }
  if (helpers == 1) {
    offered_.notify_one();
  } else {
    offered_.notify_all();
  }
  return true;
}

void Pool::close() {
  std::unique_lock lock(mutex_);
  places_ = 0;
  if (inside_ != 0) {
    lock.unlock();
    spinUntil(kSpins, [this] { return inside_ == 0; });
    lock.lock();
    left_.wait(lock, [this] { return inside_ == 0; });
  }
  lock.unlock();
  taken_ = false;
}

void Pool::startWorkers(std::size_t wanted) {
  if (num_workers_ >= wanted) return;
  // Signals belong to the threads of the interpreter.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (; num_workers_ < wanted; ++num_workers_) std::thread([this] { help(); }).detach();
  } catch (const std::system_error&) {
    // No thread to be had: the callers do more themselves.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Pool::help() {
  for (;;) {
    spinUntil(kSpins, [this] { return places_ > 0; });
    std::unique_lock lock(mutex_);
    offered_.wait(lock, [this] { return places_ > 0; });
    --places_;
    ++inside_;
    const std::function<void()>& work = *work_;
    lock.unlock();
    work();
    lock.lock();
    if (--inside_ == 0) left_.notify_one();
  }
}

Offer::Offer(std::function<void()> work, std::size_t helpers) : work_(std::move(work)) {
  if (helpers == 0) return;
  Pool& pool = Pool::instance();
  if (pool.open(work_, helpers)) pool_ = &pool;
}

Offer::~Offer() {
  if (pool_ != nullptr) pool_->close();
}

}  // namespace unisono
