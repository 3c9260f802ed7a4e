// A bell wakes those who spin and those who sleep, and nobody sleeps through it.
#include "bell.h"

#include <thread>

#include "check.h"

using namespace unisono;

namespace {

void checkNobodySleepsThroughIt(int looks) {
  constexpr std::uint64_t kRounds = 2000;
  Bell there(looks), back(looks);
  std::thread other([&] {
    for (std::uint64_t i = 0; i < kRounds; ++i) {
      CHECK(there.wait(i, 30.0));
      back.ring();
    }
  });
  for (std::uint64_t i = 0; i < kRounds; ++i) {
    there.ring();
    CHECK(back.wait(i, 30.0));
  }
  other.join();
  CHECK(there.count() == kRounds);
}

void checkAllWhoWaitWake() {
  Bell bell(0);
  std::thread first([&] { CHECK(bell.wait(0, 30.0)); });
  std::thread second([&] { CHECK(bell.wait(0, 30.0)); });
  bell.ring();
  first.join();
  second.join();
}

}  // namespace

int main() {
  checkNobodySleepsThroughIt(0);
  checkNobodySleepsThroughIt(200);
  checkAllWhoWaitWake();
  CHECK(!Bell(10).wait(0, 0.01));
}
