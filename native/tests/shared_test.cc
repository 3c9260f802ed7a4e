// Processes that share a segment: the same bits on every rank, and the same story when one is lost.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <string>
#include <thread>

#include "check.h"
#include "instruction_set.h"
#include "shared/movements.h"
#include "shared/reductions.h"

using namespace unisono;
using namespace unisono::shared;

namespace {

#if defined(__SANITIZE_THREAD__)
// ThreadSanitizer sees the threads of one process, and not what other processes write.
constexpr bool kSeesOneProcess = true;
#else
constexpr bool kSeesOneProcess = false;
#endif

using Body = std::function<void(Group&)>;

struct World {
  World(std::size_t size, const Body& body, std::chrono::milliseconds timeout,
        bool keeps_segment = true) {
    const Layout layout{size};
    const int fd = memfd_create("unisono test", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(layout.bytes())) == 0);
    for (std::size_t rank = 0; rank < size; ++rank) {
      children.push_back(fork());
      CHECK(children.back() >= 0);
      if (children.back() != 0) continue;
      alarm(60);
      {
        Group group(fd, layout, rank, timeout, [] { return false; });
        group.join(keeps_segment);
        body(group);
      }
      _exit(0);
    }
    close(fd);
  }

  // Whether the ranks but one ended well.
  void finish(std::size_t killed) {
    for (std::size_t rank = 0; rank < children.size(); ++rank) {
      int status = -1;
      CHECK(waitpid(children[rank], &status, 0) == children[rank]);
      CHECK(rank == killed || status == 0, "rank %zu: %d\n", rank, status);
    }
  }

  std::vector<pid_t> children;
};

void runRanks(std::size_t size, const Body& body) {
  World(size, body, std::chrono::seconds(30)).finish(size);
}

Call reductionOf(Kind kind, std::size_t count, std::size_t num_terms, std::size_t divisor) {
  Call call;
  call.header = {.kind = kind, .num_terms = num_terms, .divisor = divisor, .elements = count};
  return call;
}

float valueOf(std::size_t rank, std::size_t term, std::size_t i) {
  return static_cast<float>(rank + 1) + 0.25f * static_cast<float>(term) +
         static_cast<float>(i % 97);
}

// Sums of these are exact in any order; the order is tested with the kernels.
float totalOf(std::size_t size, std::size_t num_terms, std::size_t i, std::size_t divisor) {
  float total = 0;
  for (std::size_t rank = 0; rank < size; ++rank) {
    for (std::size_t term = 0; term < num_terms; ++term) total += valueOf(rank, term, i);
  }
  return divisor == 0 ? total : total / static_cast<float>(divisor);
}

void checkReductions(Group& group, std::size_t count, std::size_t num_terms, std::size_t divisor) {
  const std::size_t rank = group.rank(), size = group.size();
  std::vector<std::vector<float>> terms(num_terms, std::vector<float>(count + 1));
  std::vector<void*> data;
  for (auto& term : terms) data.push_back(term.data());
  for (int round = 0; round < 2; ++round) {
    for (std::size_t term = 0; term < num_terms; ++term) {
      for (std::size_t i = 0; i < count; ++i) terms[term][i] = valueOf(rank, term, i);
      terms[term][count] = 77;
    }
    const std::size_t begin = count * rank / size, end = count * (rank + 1) / size;
    std::vector<float> part(end - begin + 1, 77);
    const Terms all{DType::float32, count, data};
    reduceScatter(group, selectedTable(),
                  reductionOf(Kind::reduce_scatter, count, num_terms, divisor), all, 1,
                  part.data());
    allReduce(group, selectedTable(), reductionOf(Kind::all_reduce, count, num_terms, divisor),
              all);
    for (std::size_t i = 0; i < count; ++i) {
      CHECK(terms[0][i] == totalOf(size, num_terms, i, divisor), "count %zu element %zu\n", count,
            i);
      if (i >= begin && i < end) CHECK(part[i - begin] == terms[0][i]);
    }
    CHECK(terms[0][count] == 77 && part.back() == 77);
  }
}

void checkArena(Group& group, std::size_t count) {
  allocate(group, 100);
  auto* data = reinterpret_cast<float*>(allocate(group, count * sizeof(float)));
  void* term = data;
  for (int round = 0; round < 3; ++round) {
    for (std::size_t i = 0; i < count; ++i) data[i] = valueOf(group.rank(), 0, i);
    allReduce(group, selectedTable(), reductionOf(Kind::all_reduce, count, 1, 0),
              {DType::float32, count, {&term, 1}});
    for (std::size_t i = 0; i < count; ++i) CHECK(data[i] == totalOf(group.size(), 1, i, 0));
    barrier(group);
  }
}

// Each rank sums its part, and then all have all parts.
void checkParts(Group& group, std::size_t count, float* data) {
  const std::size_t rank = group.rank(), size = group.size();
  void* term = data;
  for (int round = 0; round < 3; ++round) {
    for (std::size_t i = 0; i < count; ++i) data[i] = valueOf(rank, 0, i);
    reduceParts(group, selectedTable(), reductionOf(Kind::reduce_scatter, count, 1, 0),
                {DType::float32, count, {&term, 1}}, 1);
    std::vector<std::byte*> parts;
    std::vector<std::size_t> bytes;
    for (std::size_t other = 0; other < size; ++other) {
      const std::size_t begin = count * other / size, end = count * (other + 1) / size;
      for (std::size_t i = begin; other == rank && i < end; ++i) {
        CHECK(data[i] == totalOf(size, 1, i, 0));
      }
      parts.push_back(reinterpret_cast<std::byte*>(data + begin));
      bytes.push_back((end - begin) * sizeof(float));
    }
    shareParts(group, reductionOf(Kind::share_parts, count, 0, 0), parts, bytes);
    for (std::size_t i = 0; i < count; ++i) CHECK(data[i] == totalOf(size, 1, i, 0));
  }
}

void checkLead(Group& group) {
  for (std::uint8_t round = 0; round < 7; ++round) {
    const bool differs = round == 5 && group.rank() == 1;
    const std::vector<std::uint8_t> greeting(16, differs ? 1 : 0);
    std::vector<std::uint8_t> term(1000, static_cast<std::uint8_t>(group.rank() + round));
    const std::span<const std::byte> pieces[] = {std::as_bytes(std::span(greeting)),
                                                 std::as_bytes(std::span(term))};
    Lead lead(group, reductionOf(Kind::all_gather, 0, 0, 0), pieces);
    CHECK(lead.haveSameGreeting() == (round != 5 || group.size() == 1));
    if (round >= 5) {
      lead.finish();
      continue;
    }
    if (group.rank() == 0) {
      for (std::size_t rank = 0; rank < group.size(); ++rank) {
        CHECK(lead.broughtBy(rank)[16 + 999] == static_cast<std::byte>(rank + round));
      }
      std::ranges::fill(term, static_cast<std::uint8_t>(round + 100));
    }
    lead.share(std::as_writable_bytes(std::span(term)));
    for (const std::uint8_t byte : term) CHECK(byte == round + 100);
  }
}

void checkMovements(Group& group, std::size_t bytes) {
  const std::size_t size = group.size();
  for (std::size_t root = 0; root < size; ++root) {
    std::vector<std::uint8_t> data(bytes, static_cast<std::uint8_t>(group.rank() + 1));
    Call call;
    call.header = {.kind = Kind::all_gather};
    std::vector<std::size_t> lengths(size);
    for (std::size_t rank = 0; rank < size; ++rank) lengths[rank] = rank == root ? bytes : 3;
    std::vector<std::vector<std::uint8_t>> gathered(size);
    std::vector<void*> outputs;
    for (std::size_t rank = 0; rank < size; ++rank) {
      gathered[rank].resize(lengths[rank]);
      outputs.push_back(gathered[rank].data());
    }
    data.resize(std::max<std::size_t>(bytes, 3), static_cast<std::uint8_t>(group.rank() + 1));
    Gather(group, call, data.data(), lengths[group.rank()]).run(lengths, outputs);
    for (std::size_t rank = 0; rank < size; ++rank) {
      for (const std::uint8_t byte : gathered[rank]) CHECK(byte == rank + 1);
    }
    call.header = {.kind = Kind::broadcast, .root = static_cast<std::uint16_t>(root)};
    broadcast(group, call, data.data(), bytes);
    for (std::size_t i = 0; i < bytes; ++i) CHECK(data[i] == root + 1);
  }
}

void checkCollectives(Group& group) {
  for (std::size_t count : {0, 1, 7, 1000, 20000, 300001}) {
    for (std::size_t num_terms : {1, 2, 3}) checkReductions(group, count, num_terms, 0);
    checkReductions(group, count, 1, 7);
  }
  checkArena(group, 1000);
  checkArena(group, 200001);
  for (std::size_t count : {0, 5, 300001}) {
    std::vector<float> plain(count + 1);
    checkParts(group, count, plain.data());
    auto* data = reinterpret_cast<float*>(allocate(group, (count + 1) * sizeof(float)));
    checkParts(group, count, group.rank() == 0 ? plain.data() : data);
    checkParts(group, count, data);
  }
  checkLead(group);
  for (std::size_t bytes : {0, 1, 1000, 2000001}) checkMovements(group, bytes);
}

// The threads of a rank make the same calls, so whichever comes first, all ranks agree.
void checkThreadsOfOneRank(Group& group) {
  constexpr int kThreads = 3, kRounds = 50;
  std::atomic<int> num_left = kThreads;
  std::vector<std::byte*> places[kThreads];
  std::vector<std::thread> threads;
  for (std::vector<std::byte*>& own : places) {
    threads.emplace_back([&group, &num_left, &own] {
      for (int i = 0; i < kRounds; ++i) own.push_back(allocate(group, 64));
      --num_left;
    });
  }
  while (num_left > 0) {
    group.checkHealth();
    group.setTimeout(std::chrono::seconds(30));
    std::this_thread::yield();
  }
  for (std::thread& thread : threads) thread.join();
  // A rank that leaves earlier would be lost to one that still asks.
  barrier(group);
  std::vector<std::byte*> all;
  for (const auto& own : places) all.insert(all.end(), own.begin(), own.end());
  std::ranges::sort(all);
  CHECK(std::ranges::adjacent_find(all) == all.end());
}

template <class Work>
Failure failureOf(const Work& work) {
  try {
    work();
  } catch (const Failure& failure) {
    return failure;
  }
  CHECK(false, "no failure\n");
  std::abort();
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

void checkDifferentCalls(Group& group) {
  const Failure failure = failureOf([&] {
    if (group.rank() == 1) return barrier(group);
    checkReductions(group, 5, 1, 0);
  });
  CHECK(failure.kind == FailureKind::unequal && failure.ranks.size() == group.size());
  CHECK(contains(failure.text, "rank 1 makes barrier"), "%s\n", failure.text.c_str());
  const Failure again = failureOf([&] { barrier(group); });
  CHECK(again.text == failure.text);
}

void checkKilledRank(bool keeps_segment) {
  World world(
      3,
      [keeps_segment](Group& group) {
        CHECK((group.segment() == -1) == !keeps_segment);
        checkReductions(group, 300001, 1, 0);
        if (group.rank() == 2) raise(SIGKILL);
        const auto began = Clock::now();
        const Failure failure = failureOf([&] { barrier(group); });
        CHECK(failure.kind == FailureKind::lost && failure.ranks == Ranks{2});
        CHECK(contains(failure.text, "has ended"), "%s\n", failure.text.c_str());
        CHECK(Clock::now() - began < std::chrono::seconds(10));
      },
      std::chrono::seconds(30), keeps_segment);
  world.finish(2);
}

void checkLateRank() {
  World world(
      2,
      [](Group& group) {
        if (group.rank() == 1) {
          const auto limit = Clock::now() + std::chrono::seconds(30);
          const Failure failure = failureOf([&] {
            for (; Clock::now() < limit; usleep(10'000)) group.checkHealth();
          });
          CHECK(failure.kind == FailureKind::timeout);
          return;
        }
        const Failure failure = failureOf([&] { barrier(group); });
        CHECK(failure.kind == FailureKind::timeout && failure.ranks == Ranks{1});
        CHECK(contains(failure.text, "waited 0.5 s for rank 1"), "%s\n", failure.text.c_str());
      },
      std::chrono::milliseconds(500));
  world.finish(2);
}

}  // namespace

int main() {
  runRanks(2, checkThreadsOfOneRank);
  if (kSeesOneProcess) return 0;
  for (std::size_t size : {1, 2, 3, 5}) runRanks(size, checkCollectives);
  runRanks(2, checkDifferentCalls);
  runRanks(3, checkDifferentCalls);
  checkKilledRank(false);
  checkKilledRank(true);
  checkLateRank();
}
