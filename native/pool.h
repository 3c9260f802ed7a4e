// Threads that help a caller with work it would otherwise do alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>

namespace unisono {

class Pool {
 public:
  // The pool of this process. It is never destroyed: a thread may sleep in it when the process
  // ends.
  static Pool& instance();

  // The workers started so far.
  std::size_t numWorkers();

 private:
  friend class Offer;

  Pool() = default;
  bool open(const std::function<void()>& work, std::size_t helpers);
  void close();
  void startWorkers(std::size_t wanted);
  void help();

  std::atomic<bool> taken_ = false;
  std::mutex mutex_;
  std::condition_variable offered_;
  std::condition_variable left_;
  const std::function<void()>* work_ = nullptr;
  std::atomic<std::size_t> places_ = 0;
  std::atomic<std::size_t> inside_ = 0;
  std::size_t num_workers_ = 0;
};

// While it lives, up to `helpers` threads call `work`, once each; its end waits for those that
// began. `work` must share what is to be done between all that call it. The caller calls it too,
// for no helper may come: the pool may be busy with another caller, or its threads slow to wake.
class Offer {
 public:
  Offer(std::function<void()> work, std::size_t helpers);
  ~Offer();
  Offer(const Offer&) = delete;
  Offer& operator=(const Offer&) = delete;

 private:
  std::function<void()> work_;
  Pool* pool_ = nullptr;
};

}  // namespace unisono
