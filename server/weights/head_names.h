#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/string_view.h"
#include "server/weights/head_rules.h"

namespace logprobd {

/// Last part of the name of the bias that BART and its relatives add to the logits, [1, vocab].
inline constexpr absl::string_view kFinalLogitsBias = "final_logits_bias";

/// Returns whether `name` is "final_logits_bias", also behind other parts.
bool IsFinalLogitsBias(absl::string_view name);

/// Turns "x.weight" into "x.bias". Returns an empty string if the name does not end in ".weight".
std::string BiasNameOf(absl::string_view weight_name);

/// Returns the names next to "x.weight" that exist only if x is quantised (scales, packed integers,
/// zero points).
std::vector<std::string> QuantizedNamesOf(absl::string_view weight_name);

/// The names of a checkpoint's tensors that matter for its head. Checkpoint::Open passes every name
/// through Wants; only those that it selects are kept in memory.
class HeadNames {
 public:
  /// `rule` is the rule of the model's type, or null. `head_tensor` is the tensor that the user
  /// names, or empty.
  HeadNames(const TypeRule* rule, absl::string_view head_tensor);

  /// Returns whether a tensor is needed: a head or an embedding by name, its bias, a tensor that
  /// shows quantisation, or `head_tensor`. Notes other names that may be a head. Must be called for
  /// every name of the checkpoint.
  bool Wants(absl::string_view name);

  /// Names of heads and of input embeddings, in order of preference: that of the model's type
  /// first.
  const std::vector<std::string>& heads() const { return heads_; }
  const std::vector<std::string>& embeddings() const { return embeddings_; }

  /// Returns up to 8 of the names that may be a head and are not understood. A name that shares the
  /// part before ".weight" with a known head is not understood unless it is its weight, its bias,
  /// one of head_siblings or shows quantisation: "lm_head.lora_A.default.weight".
  const std::vector<std::string>& unknown_heads() const { return unknown_heads_; }

  /// Returns up to 8 names of tensors that belong to `weight_name`, which must be in heads(),
  /// embeddings() or the tensor that the user names, or to a part of it, and are not understood,
  /// such as "model.embed_tokens.lora_embedding_A".
  const std::vector<std::string>& UnknownPartsOf(absl::string_view weight_name) const;

  /// Returns names of tensors that may scale or shift the logits and are not understood.
  const std::vector<std::string>& unknown_transforms() const { return unknown_transforms_; }

  /// Returns the names of tensors that are final_logits_bias.
  const std::vector<std::string>& final_biases() const { return final_biases_; }

  /// Returns up to 8 names that contain "head", "embed", "wte" or "output" and are not needed.
  const std::vector<std::string>& lookalikes() const { return lookalikes_; }

 private:
  std::vector<std::string> heads_;
  std::vector<std::string> embeddings_;
  absl::flat_hash_set<std::string> selected_;
  /// Unknown parts, at most 8, by the beginning of their names: "lm_head." of each weight in
  /// selected_.
  std::map<std::string, std::vector<std::string>> unknown_parts_;
  std::vector<std::string> unknown_heads_;
  std::vector<std::string> unknown_transforms_;
  std::vector<std::string> final_biases_;
  std::vector<std::string> lookalikes_;
};

}  // namespace logprobd
