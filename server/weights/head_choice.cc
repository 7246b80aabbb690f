#include "server/weights/head_choice.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/base/errors.h"
#include "server/base/head_info.h"
#include "server/weights/head_names.h"
#include "server/weights/safetensors.h"
#include "server/weights/untrusted_text.h"
#include "server/weights/widen.h"

namespace logprobd {
namespace {

std::string FirstPresent(const Checkpoint& checkpoint, const std::vector<std::string>& names) {
  const auto found = std::find_if(names.begin(), names.end(),
                                  [&](const std::string& name) { return checkpoint.Has(name); });
  return found == names.end() ? "" : *found;
}

// Returns the first names for a message.
std::string Printable(const std::vector<std::string>& names) {
  constexpr size_t kShownMax = 8;
  const auto shown = absl::MakeConstSpan(names).first(std::min(names.size(), kShownMax));
  return absl::StrJoin(shown, ", ", [](std::string* out, const std::string& name) {
    absl::StrAppend(out, PrintableName(name));
  });
}

// Returns the name of a tensor that only a quantised `weight_name` has, or an empty string.
std::string QuantizedTrace(const Checkpoint& checkpoint, absl::string_view weight_name) {
  for (const std::string& name : QuantizedNamesOf(weight_name)) {
    if (checkpoint.Has(name)) return name;
  }
  return "";
}

absl::Status QuantizedUnsupported(absl::string_view trace, const HeadConfig& config) {
  return absl::UnimplementedError(absl::StrCat(
      "unsupported: quantised head (tensor ", PrintableName(trace),
      config.quantization_method.empty()
          ? ""
          : absl::StrCat(", quant_method ", PrintableName(config.quantization_method)),
      "); serve the model's unquantised checkpoint, or quantise again leaving the head out "
      "(modules_to_not_convert=['lm_head'])"));
}

absl::Status NoHead(const HeadNames& names) {
  const std::string hint = names.lookalikes().empty() ? ""
                                                      : absl::StrCat("; names that look like one: ",
                                                                     Printable(names.lookalikes()));
  return absl::InvalidArgumentError(
      absl::StrCat("the checkpoint has no head under a known name (",
                   absl::StrJoin(names.heads(), ", "), ", or for tied weights ",
                   absl::StrJoin(names.embeddings(), ", "), "); name it with --head-tensor", hint));
}

// Returns whether a name belongs to an adapter or to a part that an adapter replaces.
bool IsOfAdapter(const std::string& name) {
  const std::string lower = absl::AsciiStrToLower(name);
  const std::vector<absl::string_view> parts = absl::StrSplit(lower, '.');
  const std::vector<std::string>& adapters = HeadRules::Get().adapter_parts;
  return std::any_of(parts.begin(), parts.end(), [&adapters](absl::string_view part) {
    return std::find(adapters.begin(), adapters.end(), part) != adapters.end();
  });
}

// `names` may be a head, or a part of one, in a form that is not understood.
absl::Status NotUnderstood(const std::vector<std::string>& names) {
  if (std::any_of(names.begin(), names.end(), IsOfAdapter)) {
    return absl::UnimplementedError(
        absl::StrCat("unsupported: the head has an adapter (tensors ", Printable(names),
                     "); merge it into the model first (in PEFT: model.merge_and_unload(), then "
                     "save_pretrained)"));
  }
  return absl::UnimplementedError(absl::StrCat(
      "the checkpoint stores something that may be a head in a form that is not understood "
      "(tensors ",
      Printable(names),
      "), so no other tensor is taken for the head; serve the model's unquantised checkpoint, or "
      "name the tensor that is the head with --head-tensor"));
}

// Returns an error if the tensor `name` is quantised, has an adapter, or has parts that are not
// understood.
absl::Status CheckForm(const Checkpoint& checkpoint, const HeadConfig& config,
                       const HeadNames& names, const std::string& name) {
  if (const std::string trace = QuantizedTrace(checkpoint, name); !trace.empty()) {
    return QuantizedUnsupported(trace, config);
  }
  const std::vector<std::string>& parts = names.UnknownPartsOf(name);
  return parts.empty() ? absl::OkStatus() : NotUnderstood(parts);
}

enum class Comparison {
  kEqual,
  kDifferent,
  kUnrelated  ///< One of the two is not [>= num_rows, columns] of a type that is served.
};

// Compares the values of the first `num_rows` rows of two tensors, whatever their types. Reads both
// in blocks, which may split a row.
absl::StatusOr<Comparison> Compare(const StoredTensor& a, const StoredTensor& b,
                                   std::optional<int64_t> num_rows) {
  const std::optional<Dtype> dtype_a = ServedDtype(a.entry.dtype);
  const std::optional<Dtype> dtype_b = ServedDtype(b.entry.dtype);
  const std::vector<int64_t>& shape_a = a.entry.shape;
  const std::vector<int64_t>& shape_b = b.entry.shape;
  if (shape_a.size() != 2 || shape_b.size() != 2 || shape_a[1] != shape_b[1] ||
      !dtype_a.has_value() || !dtype_b.has_value()) {
    return Comparison::kUnrelated;
  }
  const int64_t rows = num_rows.value_or(shape_a[0]);
  if (!num_rows.has_value() && shape_a[0] != shape_b[0]) return Comparison::kDifferent;
  if (std::min(shape_a[0], shape_b[0]) < rows) return Comparison::kUnrelated;
  constexpr int64_t kBlockElements = int64_t{1} << 20;
  const int64_t total = rows * shape_a[1];
  std::vector<std::byte> bytes_a;
  std::vector<std::byte> bytes_b;
  for (int64_t begin = 0; begin < total; begin += kBlockElements) {
    const int64_t count = std::min(kBlockElements, total - begin);
    const auto read = [begin, count](const StoredTensor& tensor, Dtype dtype,
                                     std::vector<std::byte>& bytes) {
      bytes.resize(static_cast<size_t>(count * DtypeBytes(dtype)));
      return tensor.file->Read(tensor.entry.file_begin + begin * DtypeBytes(dtype),
                               absl::MakeSpan(bytes));
    };
    LOGPROBD_RETURN_IF_ERROR(read(a, *dtype_a, bytes_a));
    LOGPROBD_RETURN_IF_ERROR(read(b, *dtype_b, bytes_b));
    if (*dtype_a == *dtype_b && bytes_a == bytes_b) continue;
    const std::vector<float> values_a = Widen(bytes_a, *dtype_a);
    const std::vector<float> values_b = Widen(bytes_b, *dtype_b);
    // Values that are not numbers count as equal here; they are refused later.
    const bool are_equal =
        std::equal(values_a.begin(), values_a.end(), values_b.begin(),
                   [](float x, float y) { return x == y || (std::isnan(x) && std::isnan(y)); });
    if (!are_equal) return Comparison::kDifferent;
  }
  return Comparison::kEqual;
}

// Returns whether a tensor has a shape that the head may have.
bool MayBeHead(const StoredTensor& tensor, const HeadConfig& config,
               std::optional<int64_t> valid_vocab) {
  const std::vector<int64_t>& shape = tensor.entry.shape;
  return shape.size() == 2 && shape[0] >= valid_vocab.value_or(0) &&
         shape[1] == config.hidden_size.value_or(shape[1]);
}

// Returns an error if a tensor after `chosen` in `names`, heads or embeddings, has other values. A
// name that the model type has for itself needs no comparison.
absl::Status CheckOthers(Checkpoint& checkpoint, const HeadConfig& config,
                         const std::vector<std::string>& names, const std::string& chosen,
                         bool is_of_type, std::optional<int64_t> valid_vocab) {
  if (is_of_type) return absl::OkStatus();
  for (const std::string& other : names) {
    if (other == chosen || !checkpoint.Has(other)) continue;
    LOGPROBD_ASSIGN_OR_RETURN(const StoredTensor a, checkpoint.Find(chosen));
    LOGPROBD_ASSIGN_OR_RETURN(const StoredTensor b, checkpoint.Find(other));
    LOGPROBD_ASSIGN_OR_RETURN(const Comparison comparison, Compare(a, b, valid_vocab));
    if (comparison == Comparison::kDifferent ||
        (comparison == Comparison::kUnrelated && MayBeHead(b, config, valid_vocab))) {
      return absl::InvalidArgumentError(
          absl::StrCat("several tensors may be the head (", chosen, ", ", other,
                       ") and have different values; name one with --head-tensor"));
    }
  }
  return absl::OkStatus();
}

// Says which of two different tensors is the head, if that can be said.
enum class Evidence { kUntied, kTied, kUnclear };

// Both a head and an embedding are stored, so the flag is believed, or what the class assumes.
Evidence OfTwoTensors(const TieFlag& tied) {
  if (tied.is_contradictory) return Evidence::kUnclear;
  if (tied.is_never) return Evidence::kUntied;
  if (tied.stated.has_value()) return *tied.stated ? Evidence::kTied : Evidence::kUntied;
  if (tied.elsewhere == std::optional<bool>(false) || !tied.by_default.value_or(false)) {
    return Evidence::kUntied;
  }
  return Evidence::kTied;
}

// Only an embedding is stored. It is the head if the model's class ties it.
Evidence OfEmbeddingAlone(const TieFlag& tied) {
  if (tied.is_contradictory) return Evidence::kUnclear;
  if (tied.is_never) return Evidence::kUntied;
  if (tied.is_always) return Evidence::kTied;
  const std::optional<bool> says = tied.stated.has_value() ? tied.stated : tied.by_default;
  return !says.has_value() ? Evidence::kUnclear : *says ? Evidence::kTied : Evidence::kUntied;
}

std::string WhatTheConfigSays(const TieFlag& tied) {
  if (tied.is_contradictory) {
    return "the levels of config.json contradict each other about tie_word_embeddings";
  }
  if (tied.is_never) return "the model's class never ties its head to the embedding";
  if (tied.stated.has_value()) {
    return absl::StrCat("config.json says that the head is ", *tied.stated ? "" : "not ",
                        "tied to the embedding (", tied.name, " is ",
                        *tied.stated ? "true" : "false", ")");
  }
  if (tied.by_default.has_value()) {
    return absl::StrCat("config.json has no ", tied.name, ", which then is ",
                        *tied.by_default ? "true" : "false", " for this model type");
  }
  return "config.json has no tie_word_embeddings, and the model type is not known";
}

absl::Status Contradiction(const TieFlag& tied, const std::string& head,
                           const std::string& embedding) {
  return absl::InvalidArgumentError(absl::StrCat(
      WhatTheConfigSays(tied), ", but ", head, " and ", embedding,
      " are stored with different values: transformers ", HeadRules::Get().transformers_version,
      " uses ", head, ", and vLLM, where it does not load lm_head of a tied model, uses ",
      embedding, "; say which is right with --head-tensor ", head, " or --head-tensor ",
      embedding));
}

// Returns "lm_head.weight ([24, 8] BF16)".
std::string Described(const StoredTensor& tensor) {
  return absl::StrCat(PrintableName(tensor.entry.name), " ([",
                      absl::StrJoin(tensor.entry.shape, ", "), "] ", tensor.entry.dtype, ")");
}

absl::Status CannotBeOne(const TieFlag& tied, const StoredTensor& head,
                         const StoredTensor& embedding, std::optional<int64_t> valid_vocab) {
  return absl::InvalidArgumentError(absl::StrCat(
      WhatTheConfigSays(tied), ", but ", Described(head), " and ", Described(embedding),
      " cannot be the same tensor of ",
      valid_vocab.has_value() ? absl::StrCat(*valid_vocab, " ids") : std::string("all ids"),
      " in F32, BF16 or F16; correct vocab_size or the files, or name the head with --head-tensor ",
      head.entry.name, " or --head-tensor ", embedding.entry.name));
}

absl::StatusOr<HeadChoice> ChooseOfTwo(Checkpoint& checkpoint, const HeadConfig& config,
                                       const std::string& head, const std::string& embedding,
                                       std::optional<int64_t> valid_vocab) {
  HeadChoice choice;
  LOGPROBD_ASSIGN_OR_RETURN(choice.tensor, checkpoint.Find(head));
  const Evidence evidence = OfTwoTensors(config.tied);
  if (evidence == Evidence::kUntied) return choice;
  LOGPROBD_ASSIGN_OR_RETURN(const StoredTensor embedding_tensor, checkpoint.Find(embedding));
  LOGPROBD_ASSIGN_OR_RETURN(const Comparison comparison,
                            Compare(choice.tensor, embedding_tensor, valid_vocab));
  if (comparison == Comparison::kUnrelated) {
    return CannotBeOne(config.tied, choice.tensor, embedding_tensor, valid_vocab);
  }
  if (comparison == Comparison::kDifferent) return Contradiction(config.tied, head, embedding);
  if (evidence == Evidence::kTied) {
    choice.tensor = embedding_tensor;
    choice.tied = true;
  }
  return choice;
}

absl::StatusOr<HeadChoice> ChooseByName(Checkpoint& checkpoint, const HeadConfig& config,
                                        const HeadNames& names,
                                        std::optional<int64_t> valid_vocab) {
  const std::string head = FirstPresent(checkpoint, names.heads());
  const std::string embedding = FirstPresent(checkpoint, names.embeddings());
  HeadChoice choice;
  if (!head.empty()) {
    LOGPROBD_RETURN_IF_ERROR(CheckForm(checkpoint, config, names, head));
    const bool is_of_type = config.rule != nullptr && config.rule->head == head;
    LOGPROBD_RETURN_IF_ERROR(
        CheckOthers(checkpoint, config, names.heads(), head, is_of_type, valid_vocab));
    if (!embedding.empty()) return ChooseOfTwo(checkpoint, config, head, embedding, valid_vocab);
    LOGPROBD_ASSIGN_OR_RETURN(choice.tensor, checkpoint.Find(head));
    return choice;
  }
  // A quantised tensor explains itself better than a name that is not understood.
  for (const std::string& name : names.heads()) {
    if (const std::string trace = QuantizedTrace(checkpoint, name); !trace.empty()) {
      return QuantizedUnsupported(trace, config);
    }
  }
  if (!names.unknown_heads().empty()) return NotUnderstood(names.unknown_heads());
  if (embedding.empty()) {
    for (const std::string& name : names.embeddings()) {
      LOGPROBD_RETURN_IF_ERROR(CheckForm(checkpoint, config, names, name));
    }
    return NoHead(names);
  }
  LOGPROBD_RETURN_IF_ERROR(CheckForm(checkpoint, config, names, embedding));
  if (OfEmbeddingAlone(config.tied) != Evidence::kTied) {
    return absl::InvalidArgumentError(absl::StrCat(
        WhatTheConfigSays(config.tied), ", but the checkpoint has no head, only the embedding ",
        embedding, "; if the files are complete and that is the head, set --head-tensor ",
        embedding));
  }
  const bool is_of_type = config.rule != nullptr && config.rule->embedding == embedding;
  LOGPROBD_RETURN_IF_ERROR(
      CheckOthers(checkpoint, config, names.embeddings(), embedding, is_of_type, valid_vocab));
  LOGPROBD_ASSIGN_OR_RETURN(choice.tensor, checkpoint.Find(embedding));
  choice.tied = true;
  return choice;
}

}  // namespace

absl::StatusOr<HeadChoice> ChooseHead(Checkpoint& checkpoint, const HeadConfig& config,
                                      const HeadNames& names, const std::string& head_tensor,
                                      std::optional<int64_t> valid_vocab) {
  HeadChoice choice;
  if (head_tensor.empty()) {
    LOGPROBD_ASSIGN_OR_RETURN(choice, ChooseByName(checkpoint, config, names, valid_vocab));
  } else {
    if (!checkpoint.Has(head_tensor)) {
      if (const std::string trace = QuantizedTrace(checkpoint, head_tensor); !trace.empty()) {
        return QuantizedUnsupported(trace, config);
      }
    }
    LOGPROBD_ASSIGN_OR_RETURN(choice.tensor, checkpoint.Find(head_tensor));
    const auto& embeddings = names.embeddings();
    choice.tied = std::find(embeddings.begin(), embeddings.end(), head_tensor) != embeddings.end();
  }
  LOGPROBD_RETURN_IF_ERROR(CheckForm(checkpoint, config, names, choice.tensor.entry.name));
  std::vector<std::string> transforms = names.unknown_transforms();
  if (choice.tied && !head_tensor.empty()) {
    // The bias of a head whose name is not known would be lost with that head.
    std::copy_if(names.unknown_heads().begin(), names.unknown_heads().end(),
                 std::back_inserter(transforms),
                 [](const std::string& name) { return absl::EndsWith(name, ".bias"); });
  }
  transforms.erase(std::remove_if(transforms.begin(), transforms.end(),
                                  [&config](const std::string& tensor) {
                                    const auto& ignored = config.ignored_names;
                                    return std::find(ignored.begin(), ignored.end(), tensor) !=
                                           ignored.end();
                                  }),
                   transforms.end());
  if (!transforms.empty()) {
    return absl::UnimplementedError(absl::StrCat(
        "the checkpoint stores tensors that may scale or shift the logits and are not understood (",
        Printable(transforms), "); if they do not, set --ignore-config-key ",
        absl::StrJoin(transforms, ":")));
  }
  return choice;
}

namespace {

// Returns the name of the head's bias, or an empty string.
absl::StatusOr<std::string> FindBias(const Checkpoint& checkpoint, const HeadNames& names,
                                     const std::string& weight_name) {
  std::string found;
  if (std::string sibling = BiasNameOf(weight_name); checkpoint.Has(sibling)) found = sibling;
  // An embedding has no bias of its own, but the head that it replaces may have one.
  const auto& embeddings = names.embeddings();
  if (found.empty() &&
      std::find(embeddings.begin(), embeddings.end(), weight_name) != embeddings.end()) {
    for (const std::string& head : names.heads()) {
      if (std::string name = BiasNameOf(head); found.empty() && checkpoint.Has(name)) found = name;
    }
  }
  std::vector<std::string> biases = names.final_biases();
  if (!found.empty()) biases.push_back(std::move(found));
  if (biases.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("the checkpoint has several biases of the head (", Printable(biases),
                     "); store their sum as one of them"));
  }
  return biases.empty() ? "" : biases.front();
}

}  // namespace

absl::StatusOr<HeadBias> ReadHeadBias(Checkpoint& checkpoint, const HeadConfig& config,
                                      const HeadNames& names, const std::string& weight_name,
                                      int64_t rows) {
  HeadBias result;
  LOGPROBD_ASSIGN_OR_RETURN(const std::string name, FindBias(checkpoint, names, weight_name));
  if (name.empty()) {
    if (config.has_bias.value_or(false)) {
      return absl::InvalidArgumentError(
          absl::StrCat("config.json sets lm_head_bias, but the checkpoint has no bias for ",
                       PrintableName(weight_name), "; set lm_head_bias to false if it has none"));
    }
    return result;
  }
  if (!config.has_bias.value_or(true)) {
    result.warnings.push_back(absl::StrCat("config.json says that the head has no bias; ",
                                           PrintableName(name), " is ignored"));
    return result;
  }
  LOGPROBD_ASSIGN_OR_RETURN(const StoredTensor bias, checkpoint.Find(name));
  const bool is_final = IsFinalLogitsBias(name);
  if (bias.entry.shape != std::vector<int64_t>{rows} &&
      !(is_final && bias.entry.shape == std::vector<int64_t>{1, rows})) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", PrintableName(name), " has the shape [",
                     absl::StrJoin(bias.entry.shape, ", "), "]; the head needs [", rows, "]"));
  }
  const std::optional<Dtype> dtype = ServedDtype(bias.entry.dtype);
  if (!dtype.has_value()) {
    return absl::UnimplementedError(absl::StrCat("tensor ", PrintableName(name), " is ",
                                                 bias.entry.dtype,
                                                 "; store the bias as F32, BF16 or F16"));
  }
  std::vector<std::byte> bytes(static_cast<size_t>(bias.entry.file_end - bias.entry.file_begin));
  LOGPROBD_RETURN_IF_ERROR(bias.file->Read(bias.entry.file_begin, absl::MakeSpan(bytes)));
  result.values = Widen(bytes, *dtype);
  if (is_final && std::all_of(result.values.begin(), result.values.end(),
                              [](float value) { return value == 0.0F; })) {
    return HeadBias();
  }
  result.stored = std::move(bytes);
  result.tensor = bias;
  return result;
}

}  // namespace logprobd
