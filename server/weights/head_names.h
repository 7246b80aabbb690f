#pragma once

#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace logprobd {

/// Returns the names under which published checkpoints store an output head, in order of
/// preference. Names are compared as a whole, so copies in multi-token-prediction layers never
/// match.
absl::Span<const absl::string_view> HeadTensorNames();

/// Returns the names of input embeddings, which are the head of a model with tied weights.
absl::Span<const absl::string_view> EmbeddingTensorNames();

/// Turns "x.weight" into "x.bias". Returns an empty string if the name does not end in ".weight".
std::string BiasNameOf(absl::string_view weight_name);

/// Returns the names next to "x.weight" that exist only if x is quantised (scales, packed integers,
/// zero points).
std::vector<std::string> QuantizedNamesOf(absl::string_view weight_name);

/// Selects the tensors of a checkpoint that are needed to find its head: candidates, their biases,
/// the tensors that show quantisation, and the tensor that the user named. Also remembers a few
/// other names that look like a head, for messages.
class HeadNameFilter {
 public:
  /// `head_tensor` may be empty.
  explicit HeadNameFilter(absl::string_view head_tensor);

  /// Returns whether `name` is needed. Must be called for every name of the checkpoint.
  bool Wants(absl::string_view name);

  /// Returns up to 8 names that contain "head", "embed", "wte" or "output" and are not needed.
  const std::vector<std::string>& lookalikes() const { return lookalikes_; }

 private:
  absl::flat_hash_set<std::string> selected_;
  std::vector<std::string> lookalikes_;
};

}  // namespace logprobd
