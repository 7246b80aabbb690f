#pragma once

#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace logprobd {

/// Names under which published checkpoints store an output head, best first. They are compared
/// whole, so the copies that multi-token-prediction layers carry are never taken.
absl::Span<const absl::string_view> HeadTensorNames();

/// Names of input embeddings, which serve as the head of a model with tied weights.
absl::Span<const absl::string_view> EmbeddingTensorNames();

/// "x.weight" -> "x.bias"; empty when the name does not end in ".weight".
std::string BiasNameOf(absl::string_view weight_name);

/// Names beside "x.weight" that only a quantised x has (scales, packed integers, zero points).
std::vector<std::string> QuantizedNamesOf(absl::string_view weight_name);

/// The tensors of a checkpoint that matter for finding its head: candidates, their biases, their
/// traces of quantisation, and the tensor that the user named. Also remembers a few other names
/// that look like a head, for messages.
class HeadNameFilter {
 public:
  /// `head_tensor` may be empty.
  explicit HeadNameFilter(absl::string_view head_tensor);

  /// Whether `name` matters; called for every name of the checkpoint.
  bool Wants(absl::string_view name);

  /// Up to 8 names with "head", "embed", "wte" or "output" in them, and always none of the wanted.
  const std::vector<std::string>& lookalikes() const { return lookalikes_; }

 private:
  absl::flat_hash_set<std::string> wanted_;
  std::vector<std::string> lookalikes_;
};

}  // namespace logprobd
