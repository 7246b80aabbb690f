#include "server/weights/head_names.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace logprobd {
namespace {

constexpr size_t kNamesMax = 8;  // For messages.
// For names that a user may ignore: those beyond are refused like the first.
constexpr size_t kIgnorableMax = 1'000;

absl::string_view StemOf(absl::string_view weight_name) {
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

// A checkpoint with an index passes the names of the opened files a second time.
void AddOnce(std::vector<std::string>& names, absl::string_view name, size_t max = kNamesMax) {
  if (names.size() < max && std::find(names.begin(), names.end(), name) == names.end()) {
    names.emplace_back(name);
  }
}

// Returns `first`, unless it is empty, and then the others of `names`.
std::vector<std::string> WithFirst(const std::string& first,
                                   const std::vector<std::string>& names) {
  std::vector<std::string> all;
  if (!first.empty()) all.push_back(first);
  std::copy_if(names.begin(), names.end(), std::back_inserter(all),
               [&first](const std::string& name) { return name != first; });
  return all;
}

}  // namespace

std::string BiasNameOf(absl::string_view weight_name) {
  return absl::EndsWith(weight_name, ".weight") ? absl::StrCat(StemOf(weight_name), ".bias") : "";
}

std::vector<std::string> QuantizedNamesOf(absl::string_view weight_name) {
  std::vector<std::string> names;
  for (const std::string& suffix : HeadRules::Get().quantized_suffixes) {
    names.push_back(absl::StrCat(StemOf(weight_name), suffix));
  }
  return names;
}

bool IsFinalLogitsBias(absl::string_view name) {
  return name == kFinalLogitsBias || absl::EndsWith(name, absl::StrCat(".", kFinalLogitsBias));
}

HeadNames::HeadNames(const TypeRule* rule, absl::string_view head_tensor) {
  const HeadRules& rules = HeadRules::Get();
  heads_ = WithFirst(rule == nullptr ? "" : rule->head, rules.head_names);
  embeddings_ = WithFirst(rule == nullptr ? "" : rule->embedding, rules.embedding_names);
  const auto add = [this, &rules](absl::string_view weight_name) {
    selected_.insert(std::string(weight_name));
    selected_.insert(BiasNameOf(weight_name));
    for (std::string& name : QuantizedNamesOf(weight_name)) selected_.insert(std::move(name));
    for (const std::string& sibling : rules.head_siblings) {
      selected_.insert(absl::StrCat(StemOf(weight_name), ".", sibling));
    }
    unknown_parts_[absl::StrCat(StemOf(weight_name), ".")];
  };
  std::for_each(heads_.begin(), heads_.end(), add);
  std::for_each(embeddings_.begin(), embeddings_.end(), add);
  if (!head_tensor.empty()) add(head_tensor);
  selected_.erase("");
}

bool HeadNames::Wants(absl::string_view name) {
  if (selected_.contains(name)) return true;
  if (IsFinalLogitsBias(name)) {
    AddOnce(final_biases_, name);
    return true;
  }
  const HeadRules& rules = HeadRules::Get();
  if (unknown_heads_.size() < kIgnorableMax && rules.MayBeHead(name)) {
    AddOnce(unknown_heads_, name, kIgnorableMax);
  }
  if (unknown_transforms_.size() < kIgnorableMax && rules.MayShiftLogits(name)) {
    AddOnce(unknown_transforms_, name, kIgnorableMax);
  }
  for (auto& [stem, parts] : unknown_parts_) {
    if (absl::StartsWith(name, stem)) AddOnce(parts, name);
  }
  if (LooksLikeHead(name)) AddOnce(lookalikes_, name);
  return false;
}

const std::vector<std::string>& HeadNames::UnknownPartsOf(absl::string_view weight_name) const {
  return unknown_parts_.at(absl::StrCat(StemOf(weight_name), "."));
}

}  // namespace logprobd
