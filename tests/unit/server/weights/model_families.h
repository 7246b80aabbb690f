#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace logprobd {

/// Number of rows of the families' heads. Vocabularies are cut; hidden sizes and factors are the
/// real ones.
inline constexpr int64_t kFamilyRows = 16;

/// A published model family: its config and tensor names, and the head that they must resolve to.
struct Family {
  std::string name;
  int64_t hidden;
  std::string config;  ///< Text of config.json. $H is replaced by `hidden`, $V by kFamilyRows.
  std::vector<std::string> tensors;  ///< Names of bf16 tensors [kFamilyRows, hidden] and biases.
  std::string head;
  bool tied = false;
  double scale = 1.0;
  double softcap = 0.0;
  bool has_bias = false;
  int num_warnings = 0;
};

std::vector<Family> QwenAndLlama();
std::vector<Family> GemmaAndPhi();
std::vector<Family> DeepSeekAndOthers();
std::vector<Family> Scaled();

/// Tensor names.
inline const std::string kEmbed = "model.embed_tokens.weight";
inline const std::string kHead = "lm_head.weight";
inline const std::string kNestedEmbed = "model.language_model.embed_tokens.weight";
inline const std::string kNestedHead = "language_model.lm_head.weight";
inline const std::string kOlderNestedEmbed = "language_model.model.embed_tokens.weight";

/// Returns the text of a config.json, in which $H and $V stand for the sizes.
inline std::string Plain(const std::string& model_type, const std::string& more) {
  return absl::StrCat(R"({"model_type":")", model_type, R"(","hidden_size":$H,"vocab_size":$V)",
                      more.empty() ? "" : ",", more, "}");
}

inline std::string Tied(const std::string& model_type, const std::string& more = "") {
  return Plain(model_type,
               absl::StrCat(R"("tie_word_embeddings":true)", more.empty() ? "" : ",", more));
}

inline std::string Untied(const std::string& model_type, const std::string& more = "") {
  return Plain(model_type,
               absl::StrCat(R"("tie_word_embeddings":false)", more.empty() ? "" : ",", more));
}

inline std::string Nested(const std::string& model_type, const std::string& inner,
                          const std::string& outer = "") {
  return absl::StrCat(R"({"model_type":")", model_type,
                      R"(","text_config":{"hidden_size":$H,"vocab_size":$V)",
                      inner.empty() ? "" : ",", inner, "}", outer.empty() ? "" : ",", outer, "}");
}

}  // namespace logprobd
