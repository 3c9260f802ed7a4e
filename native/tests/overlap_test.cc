// Outputs may be inputs of their item, and nothing else may touch.
#include "overlap.h"

#include "check.h"

using namespace unisono;

namespace {

float memory[64];

struct Spot {
  std::vector<int> inputs;
  std::vector<int> outputs;
  std::size_t size = 8;
};

std::optional<std::size_t> find(const std::vector<Spot>& spots) {
  std::vector<std::vector<const void*>> inputs;
  std::vector<std::vector<void*>> outputs;
  std::vector<Item> items;
  for (const Spot& spot : spots) {
    inputs.emplace_back();
    outputs.emplace_back();
    for (int at : spot.inputs) inputs.back().push_back(memory + at);
    for (int at : spot.outputs) outputs.back().push_back(memory + at);
  }
  for (std::size_t i = 0; i < spots.size(); ++i) {
    items.push_back({DType::float32, spots[i].size, inputs[i], outputs[i]});
  }
  return findOverlap(items);
}

}  // namespace

int main() {
  // Apart, in place, every input, one output twice, shared inputs, empty.
  CHECK(!find({}));
  CHECK(!find({{{0, 8}, {16, 24}}}));
  CHECK(!find({{{0, 8}, {8}}, {{16, 24}, {16, 24}}}));
  CHECK(!find({{{0}, {8, 8}}}));
  CHECK(!find({{{0, 0}, {16}}, {{0, 4}, {24}}}));
  CHECK(!find({{{0}, {1}, 0}, {{0}, {1}, 0}}));

  // An input in part, another output in part, what another item reads or writes.
  CHECK(find({{{0, 8}, {4}}}) == 0u);
  CHECK(find({{{0}, {8, 15}}}) == 0u);
  CHECK(find({{{0}, {8}}, {{8}, {16}}}) == 0u);
  CHECK(find({{{0}, {8}}, {{16}, {24}}, {{9}, {40}}}) == 0u);
  CHECK(find({{{0}, {8}}, {{16}, {8}}}).has_value());
  CHECK(find({{{0}, {8}}, {{16}, {23}}, {{30}, {40}}}) == 1u);
}
