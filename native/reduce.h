// Reduces a batch of items, on several threads where that pays.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace unisono {

struct Item {
  DType dtype;
  std::size_t num_elements;
  std::span<const void* const> inputs;
  std::span<void* const> outputs;
};

// Begins with helpers, if any, when made; finish() joins in and returns when all is done. `items`
// and what they point to must outlive it.
class Reduction {
 public:
  Reduction(const KernelTable& table, Op op, bool mean, std::span<const Item> items,
            std::size_t max_threads);
  void finish();

 private:
  struct Piece {
    std::size_t item;
    std::size_t begin;
    std::size_t end;
  };

  // The pieces that a thread begins with. On its own cache line.
  struct alignas(64) Share {
    std::atomic<std::size_t> next = 0;
    std::size_t end = 0;
  };

  void cut(std::size_t piece_bytes);
  void divide(std::size_t traffic);
  void work(std::size_t own_share);
  void reduce(const Piece& piece) const;

  const KernelTable& table_;
  const Op op_;
  const bool mean_;
  const std::span<const Item> items_;
  bool streaming_ = false;
  std::vector<Piece> pieces_;
  std::size_t num_shares_ = 1;
  std::unique_ptr<Share[]> shares_;
  std::size_t pieces_a_claim_ = 1;
  unsigned float_mode_;
  std::optional<Offer> offer_;
};

}  // namespace unisono
