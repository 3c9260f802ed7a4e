// Collectives of torch tensors between the processes of a host.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "shared/group.h"
#include "shared/reductions.h"
#include "tensors.h"

namespace unisono {

// Methods that take tensors return a text that says what is wrong with them, before anything is
// sent, where the tensors are not taken as they are.
class SharedGroup {
 public:
  // `ops` are the objects that stand for sum, mean, min, max and prod. `raise_failure` is called
  // with the kind, the text and the ranks of a failure, and raises it. Owns `fd`.
  SharedGroup(nanobind::type_object tensor_type, nanobind::tuple ops,
              nanobind::callable raise_failure, int fd, std::size_t rank, std::size_t size,
              double timeout_seconds);

  static std::size_t segmentBytes(std::size_t size);

  void join(bool keeps_segment);
  nanobind::object allReduce(nanobind::handle op, nanobind::handle terms, nanobind::handle count);
  nanobind::object reduceScatter(nanobind::handle op, nanobind::handle terms,
                                 nanobind::handle count);
  nanobind::object reduceParts(nanobind::handle op, nanobind::handle terms);
  // To every rank if `root` is None.
  nanobind::object gather(nanobind::handle tensor, nanobind::handle root);
  // Gives `work` on rank 0 the terms of all ranks, and its first term then to all; without `work`,
  // ranks only greet each other. Returns the greetings of all ranks if they differ.
  nanobind::object lead(nanobind::bytes greeting, nanobind::handle terms, nanobind::handle work);
  nanobind::object shareParts(nanobind::handle tensor);
  nanobind::object broadcast(nanobind::handle tensor, std::size_t root);
  void barrier();
  nanobind::object allocate(std::size_t bytes);
  void setTimeout(double seconds);
  void checkHealth();
  void close();
  // Ends the group on all ranks, and raises.
  void fail(const std::string& kind, const std::string& text, nanobind::handle ranks);
  bool isCrowded() const { return group_.isCrowded(); }

 private:
  struct Request;

  template <class Work>
  void run(const Work& work);
  nanobind::object read(shared::Kind kind, nanobind::handle op, nanobind::handle terms,
                        nanobind::handle count, Request& request) const;

  TensorExchange exchange_;
  nanobind::tuple ops_;
  nanobind::callable raise_failure_;
  shared::Group group_;
};

}  // namespace unisono
