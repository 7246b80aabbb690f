#include "server/weights/head_names.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace logprobd {
namespace {

constexpr std::array<absl::string_view, 9> kHeads = {
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.language_model.lm_head.weight",
    "thinker.lm_head.weight",
    "output.weight",
    "head.weight",
    "transformer.output_layer.weight",
    "embed_out.weight",
    "output_layer.weight",
};

constexpr std::array<absl::string_view, 14> kEmbeddings = {
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "thinker.model.embed_tokens.weight",
    "transformer.wte.weight",
    "wte.weight",
    "transformer.word_embeddings.weight",
    "model.tok_embeddings.weight",
    "tok_embeddings.weight",
    "model.decoder.embed_tokens.weight",
    "transformer.embedding.word_embeddings.weight",
    "embedding.word_embeddings.weight",
    "gpt_neox.embed_in.weight",
    "backbone.embeddings.weight",
};

// Suffixes that GPTQ and AWQ, compressed-tensors and FP8, DeepSeek, bitsandbytes and MLX use.
constexpr std::array<absl::string_view, 16> kQuantizedSuffixes = {
    ".qweight",        ".qzeros",           ".scales",
    ".g_idx",          ".weight_packed",    ".weight_scale",
    ".weight_scale_2", ".weight_scale_inv", ".weight_zero_point",
    ".scale",          ".input_scale",      ".SCB",
    ".weight.absmax",  ".weight.quant_map", ".biases",
    ".weight_shape",
};

constexpr size_t kLookalikesMax = 8;

absl::string_view BaseOf(absl::string_view weight_name) {
  return absl::StripSuffix(weight_name, ".weight");
}

// Returns whether `name` looks like that of a head. Names in the layers of a model are left out,
// because they are many and would hide the useful ones.
bool LooksLikeHead(absl::string_view name) {
  return absl::EndsWith(name, ".weight") && !absl::StrContains(name, "layers.") &&
         !absl::StrContains(name, "mtp") &&
         (absl::StrContains(name, "head") || absl::StrContains(name, "embed") ||
          absl::StrContains(name, "wte") || absl::StrContains(name, "output"));
}

}  // namespace

absl::Span<const absl::string_view> HeadTensorNames() { return kHeads; }

absl::Span<const absl::string_view> EmbeddingTensorNames() { return kEmbeddings; }

std::string BiasNameOf(absl::string_view weight_name) {
  return absl::EndsWith(weight_name, ".weight") ? absl::StrCat(BaseOf(weight_name), ".bias") : "";
}

std::vector<std::string> QuantizedNamesOf(absl::string_view weight_name) {
  std::vector<std::string> names;
  names.reserve(kQuantizedSuffixes.size());
  for (const absl::string_view suffix : kQuantizedSuffixes) {
    names.push_back(absl::StrCat(BaseOf(weight_name), suffix));
  }
  return names;
}

HeadNameFilter::HeadNameFilter(absl::string_view head_tensor) {
  const auto add = [this](absl::string_view weight_name) {
    selected_.insert(std::string(weight_name));
    selected_.insert(BiasNameOf(weight_name));
    for (std::string& name : QuantizedNamesOf(weight_name)) {
      selected_.insert(std::move(name));
    }
  };
  std::for_each(kHeads.begin(), kHeads.end(), add);
  std::for_each(kEmbeddings.begin(), kEmbeddings.end(), add);
  if (!head_tensor.empty()) {
    add(head_tensor);
  }
  selected_.erase("");
}

bool HeadNameFilter::Wants(absl::string_view name) {
  if (selected_.contains(name)) {
    return true;
  }
  if (lookalikes_.size() < kLookalikesMax && LooksLikeHead(name)) {
    lookalikes_.emplace_back(name);
  }
  return false;
}

}  // namespace logprobd
