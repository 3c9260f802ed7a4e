// Helpers do each piece once, under load from several callers and after a fork.
#include "pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "bell.h"
#include "check.h"
#include "cores.h"

using namespace unisono;

namespace {

void offerManyTimes(int rounds) {
  constexpr std::size_t kPieces = 100;
  for (int round = 0; round < rounds; ++round) {
    std::atomic<std::size_t> next = 0, done = 0;
    const auto work = [&](std::size_t) {
      while (next.fetch_add(1) < kPieces) done.fetch_add(1);
    };
    {
      const Offer offer(work, static_cast<std::size_t>(round % 4));
      work(0);
    }
    CHECK(done == kPieces);
  }
}

void checkHelpersCome() {
  std::atomic<int> inside = 0;
  const auto work = [&](std::size_t) {
    ++inside;
    while (inside < 3) std::this_thread::yield();
  };
  const Offer offer(work, 2);
  work(2);
}

// A guest helps, so no worker is started.
void checkGuestsHelp() {
  std::atomic<bool> is_over = false;
  std::thread waiting([&] {
    Guest guest;
    while (!is_over) {
      if (!guest.help()) std::this_thread::yield();
    }
  });
  while (Pool::instance().numGuests() == 0) std::this_thread::yield();
  for (int round = 0; round < 100; ++round) {
    std::atomic<int> inside = 0;
    const auto work = [&](std::size_t) {
      ++inside;
      while (inside < 2) std::this_thread::yield();
    };
    const Offer offer(work, 1);
    work(1);
  }
  is_over = true;
  waiting.join();
  CHECK(Pool::instance().numGuests() == 0);
  CHECK(Pool::instance().numWorkers() == 0);
}

// A thread that waits for a bell may help meanwhile, and does not miss the bell.
void checkThoseWhoHelpHearTheBell() {
  Bell bell(1 << 30);
  std::thread guest([&] { CHECK(bell.wait(0, 30.0)); });
  for (int round = 0; round < 100; ++round) {
    const Offer offer([](std::size_t) {}, 1);
  }
  bell.ring();
  guest.join();
  CHECK(Pool::instance().numGuests() == 0);
}

// Bound to a core, as the worker that it starts would be too.
void checkHelpersComeOnOtherCores() {
#if defined(__linux__)
  if (std::thread::hardware_concurrency() < 2) return;
  const int core = currentCore();
  std::thread caller([&] {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    if (pthread_setaffinity_np(pthread_self(), sizeof cores, &cores) != 0) return;
    for (int round = 0; round < 20; ++round) {
      std::this_thread::sleep_for(std::chrono::microseconds(500 * (round % 2)));
      std::atomic<int> seen = -1;
      const auto work = [&](std::size_t) { seen = currentCore(); };
      const Offer offer(work, 1);
      while (seen == -1) std::this_thread::yield();
      CHECK(seen != core, "round %d: helper and caller on core %d\n", round, core);
    }
  });
  caller.join();
#endif
}

void checkChildHasItsOwnPool() {
  CHECK(Pool::instance().numWorkers() > 0);
  const pid_t child = fork();
  if (child == 0) {
    const bool fresh = Pool::instance().numWorkers() == 0;
    offerManyTimes(100);
    checkHelpersCome();
    _exit(fresh ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

}  // namespace

int main() {
  checkGuestsHelp();
  checkThoseWhoHelpHearTheBell();
  checkHelpersComeOnOtherCores();
  offerManyTimes(1000);
  checkHelpersCome();
#if !defined(__SANITIZE_THREAD__)
  // ThreadSanitizer lets no child start threads.
  checkChildHasItsOwnPool();
#endif
  std::vector<std::thread> callers;
  for (int i = 0; i < 2; ++i) callers.emplace_back([] { offerManyTimes(3000); });
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // The allocators of the sanitizers may be locked forever in the child.
  for (int i = 0; i < 5; ++i) checkChildHasItsOwnPool();
#endif
  for (std::thread& caller : callers) caller.join();
}
