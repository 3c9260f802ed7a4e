// A batch is reduced whole, whatever the number of threads, callers and items.
#include "reduce.h"

#include <thread>

#include "check.h"
#include "instruction_set.h"

using namespace unisono;

namespace {

// Items of very different sizes; input r of item k is 10^r (k + 1), so a lost input shows as a 0.
class Batch {
 public:
  explicit Batch(std::size_t num_inputs) {
    constexpr std::size_t kSizes[] = {0, 1, 100'000, 3, 1'000'000, 64, 65, 300'000};
    for (std::size_t k = 0; k < 200; ++k) {
      const std::size_t size = k < 8 ? kSizes[k] : k;
      for (std::size_t r = 0, ten = 1; r < num_inputs; ++r, ten *= 10) {
        values_.emplace_back(size, static_cast<std::int64_t>(ten * (k + 1)));
      }
      results_.emplace_back(size, -1);
    }
    for (const auto& value : values_) inputs_.push_back(value.data());
    for (auto& result : results_) outputs_.push_back(result.data());
    for (std::size_t k = 0; k < results_.size(); ++k) {
      items_.push_back({DType::int64,
                        results_[k].size(),
                        {inputs_.data() + k * num_inputs, num_inputs},
                        {outputs_.data() + k, 1}});
      expected_.push_back(0);
      for (std::size_t r = 0, ten = 1; r < num_inputs; ++r, ten *= 10) {
        expected_.back() += static_cast<std::int64_t>(ten * (k + 1));
      }
    }
  }

  void reduce(std::size_t threads) {
    for (auto& result : results_) result.assign(result.size(), -1);
    Reduction reduction(selectedTable(), Op::sum, false, items_, threads);
    reduction.finish();
    for (std::size_t k = 0; k < results_.size(); ++k) {
      for (std::int64_t value : results_[k]) CHECK(value == expected_[k]);
    }
  }

  // As when an error ends the call: helpers may be at work and are waited for.
  void giveUp() { Reduction(selectedTable(), Op::sum, false, items_, 3); }

 private:
  std::vector<std::vector<std::int64_t>> values_, results_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
  std::vector<Item> items_;
  std::vector<std::int64_t> expected_;
};

}  // namespace

int main() {
  Batch batch(3);
  for (std::size_t threads : {1, 2, 3, 8}) batch.reduce(threads);

  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([] {
      Batch own(2);
      for (int round = 0; round < 10; ++round) own.reduce(3);
    });
  }
  for (std::thread& caller : callers) caller.join();

  Reduction(selectedTable(), Op::sum, false, {}, 4).finish();
  batch.giveUp();
}
