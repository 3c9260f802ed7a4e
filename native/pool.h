// Threads that help a caller with work it would otherwise do alone.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

namespace unisono {

// What helpers do. The number is that of the worker, the same in every call.
using Work = std::function<void(std::size_t worker)>;

class Pool {
 public:
  // The pool of this process. It is never destroyed: a thread may sleep in it when the process
  // ends.
  static Pool& instance();

  // The workers started so far.
  std::size_t numWorkers() const { return num_workers_; }

  // Those that look for work at this moment, and would begin at once; guests too.
  std::size_t numAwake() const { return num_workers_ - num_asleep_ + num_guests_; }

  // The threads that help while they wait for something else.
  std::size_t numGuests() const { return num_guests_; }

 private:
  friend class Guest;
  friend class Offer;

  struct Worker {
    explicit Worker(int core) : core(core) {}

    pthread_t thread = {};
    std::atomic<int> core;  // where it was last seen
  };

  Pool() = default;
  bool open(const Work& work, std::size_t helpers);
  void close();
  void startWorkers(std::size_t wanted);
  bool keepOff(int core);
  void wake(std::size_t helpers);
  void help(Worker& self, std::size_t index);
  bool join(Worker& self);
  bool takePlace();
  void leave();

  std::atomic<bool> taken_ = false;
  const Work* work_ = nullptr;
  // The places that are free, and in the upper half the workers inside.
  std::atomic<std::uint64_t> places_ = 0;
  std::deque<Worker> workers_;  // changed and read by those who have taken the pool
  std::atomic<std::size_t> num_workers_ = 0;
  std::atomic<std::size_t> num_guests_ = 0;

  // Only for those who sleep.
  std::mutex mutex_;
  std::condition_variable offered_;
  std::condition_variable left_;
  std::atomic<std::size_t> num_asleep_ = 0;
  std::atomic<bool> closer_sleeps_ = false;
};

// While it lives, its thread counts among those that help, and `help` is to be called again and
// again. It is for threads that wait without sleeping: the replicas that wait for one of them do
// its reduction together.
class Guest {
 public:
  Guest();
  ~Guest();
  Guest(const Guest&) = delete;
  Guest& operator=(const Guest&) = delete;

  // Does what there is to be done; false if that is nothing.
  bool help();

 private:
  Pool& pool_;
};

// While it lives, up to `helpers` threads call `work`, once each; its end waits for those that
// began. `work` must share what is to be done between all that call it. The caller calls it too,
// for no helper may come: the pool may be busy with another caller, or its threads slow to wake.
class Offer {
 public:
  Offer(Work work, std::size_t helpers);
  ~Offer();
  Offer(const Offer&) = delete;
  Offer& operator=(const Offer&) = delete;

 private:
  Work work_;
  Pool* pool_ = nullptr;
};

}  // namespace unisono
