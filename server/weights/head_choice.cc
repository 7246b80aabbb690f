#include "server/weights/head_choice.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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

std::string FirstPresent(const Checkpoint& checkpoint, absl::Span<const absl::string_view> names) {
  for (const absl::string_view name : names) {
    if (checkpoint.Has(name)) {
      return std::string(name);
    }
  }
  return "";
}

// Returns the name of a tensor that only a quantised `weight_name` has, or an empty string.
std::string QuantizedTrace(const Checkpoint& checkpoint, absl::string_view weight_name) {
  for (const std::string& name : QuantizedNamesOf(weight_name)) {
    if (checkpoint.Has(name)) {
      return name;
    }
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

absl::Status NoHead(const HeadNameFilter& filter) {
  std::string hint;
  if (!filter.lookalikes().empty()) {
    hint = absl::StrCat(
        "; names that look like one: ",
        absl::StrJoin(filter.lookalikes(), ", ", [](std::string* out, const std::string& name) {
          absl::StrAppend(out, PrintableName(name));
        }));
  }
  return absl::NotFoundError(absl::StrCat(
      "the checkpoint has no head under a known name (", absl::StrJoin(HeadTensorNames(), ", "),
      ", or for tied weights ", absl::StrJoin(EmbeddingTensorNames(), ", "),
      "); name it with --head-tensor", hint));
}

// Returns whether two tensors look the same. Compares small tensors completely and large ones in
// pieces spread over their length. Reads at most 2 MiB, so that the time to open a model does not
// depend on its size.
absl::StatusOr<bool> LookTheSame(const StoredTensor& a, const StoredTensor& b) {
  if (a.entry.dtype != b.entry.dtype || a.entry.shape != b.entry.shape) {
    return false;
  }
  constexpr int64_t kPieces = 16;
  constexpr int64_t kPieceBytesMax = int64_t{64} << 10;
  const int64_t total = a.entry.file_end - a.entry.file_begin;
  const int64_t piece_bytes = std::min(kPieceBytesMax, (total + kPieces - 1) / kPieces);
  std::vector<std::byte> piece_a(static_cast<size_t>(piece_bytes));
  std::vector<std::byte> piece_b(static_cast<size_t>(piece_bytes));
  for (int64_t i = 0; i < kPieces; ++i) {
    const int64_t offset = (total - piece_bytes) * i / (kPieces - 1);
    LOGPROBD_RETURN_IF_ERROR(a.file->Read(a.entry.file_begin + offset, absl::MakeSpan(piece_a)));
    LOGPROBD_RETURN_IF_ERROR(b.file->Read(b.entry.file_begin + offset, absl::MakeSpan(piece_b)));
    if (std::memcmp(piece_a.data(), piece_b.data(), piece_a.size()) != 0) {
      return false;
    }
  }
  return true;
}

// Chooses the head if the checkpoint stores both a head and an embedding, and config.json says that
// they are tied. The embedding is correct whether or not they are equal, because the model was tied
// to it; they are compared only for the warning.
absl::StatusOr<HeadChoice> ChooseAmongTied(Checkpoint& checkpoint, const std::string& head,
                                           const std::string& embedding) {
  HeadChoice choice;
  choice.tied = true;
  LOGPROBD_ASSIGN_OR_RETURN(choice.tensor, checkpoint.Find(embedding));
  LOGPROBD_ASSIGN_OR_RETURN(const StoredTensor head_tensor, checkpoint.Find(head));
  LOGPROBD_ASSIGN_OR_RETURN(const bool same, LookTheSame(choice.tensor, head_tensor));
  if (!same) {
    choice.warnings.push_back(absl::StrCat(
        "config.json sets tie_word_embeddings, but ", head, " and ", embedding, " differ; ",
        embedding, " is used (--head-tensor ", head, " selects the other)"));
  }
  return choice;
}

absl::StatusOr<HeadChoice> ChooseByName(Checkpoint& checkpoint, const HeadConfig& config,
                                        const HeadNameFilter& filter) {
  const std::string head = FirstPresent(checkpoint, HeadTensorNames());
  const std::string embedding = FirstPresent(checkpoint, EmbeddingTensorNames());
  HeadChoice choice;
  if (!head.empty()) {
    if (config.tied.value_or(false) && !embedding.empty()) {
      return ChooseAmongTied(checkpoint, head, embedding);
    }
    LOGPROBD_ASSIGN_OR_RETURN(choice.tensor, checkpoint.Find(head));
    choice.tied = config.tied.value_or(false);
    return choice;
  }
  for (const absl::string_view name : HeadTensorNames()) {
    if (const std::string trace = QuantizedTrace(checkpoint, name); !trace.empty()) {
      return QuantizedUnsupported(trace, config);
    }
  }
  if (embedding.empty()) {
    for (const absl::string_view name : EmbeddingTensorNames()) {
      if (const std::string trace = QuantizedTrace(checkpoint, name); !trace.empty()) {
        return QuantizedUnsupported(trace, config);
      }
    }
    return NoHead(filter);
  }
  LOGPROBD_ASSIGN_OR_RETURN(choice.tensor, checkpoint.Find(embedding));
  choice.tied = true;
  if (!config.tied.value_or(true)) {
    choice.warnings.push_back(
        absl::StrCat("config.json says that the head is not tied, but the checkpoint has no head; ",
                     embedding, " is used"));
  }
  return choice;
}

}  // namespace

absl::StatusOr<HeadChoice> ChooseHead(Checkpoint& checkpoint, const HeadConfig& config,
                                      const HeadNameFilter& filter,
                                      const std::string& head_tensor) {
  HeadChoice choice;
  if (head_tensor.empty()) {
    LOGPROBD_ASSIGN_OR_RETURN(choice, ChooseByName(checkpoint, config, filter));
  } else {
    if (!checkpoint.Has(head_tensor)) {
      if (const std::string trace = QuantizedTrace(checkpoint, head_tensor); !trace.empty()) {
        return QuantizedUnsupported(trace, config);
      }
    }
    LOGPROBD_ASSIGN_OR_RETURN(choice.tensor, checkpoint.Find(head_tensor));
    const auto embeddings = EmbeddingTensorNames();
    choice.tied = std::find(embeddings.begin(), embeddings.end(), head_tensor) != embeddings.end();
  }
  const std::string& name = choice.tensor.entry.name;
  if (const std::string trace = QuantizedTrace(checkpoint, name); !trace.empty()) {
    return QuantizedUnsupported(trace, config);
  }
  return choice;
}

namespace {

std::string FindBias(const Checkpoint& checkpoint, const std::string& weight_name) {
  if (std::string sibling = BiasNameOf(weight_name); checkpoint.Has(sibling)) {
    return sibling;
  }
  // An embedding has no bias of its own, but the head that it replaces may have one.
  const auto embeddings = EmbeddingTensorNames();
  if (std::find(embeddings.begin(), embeddings.end(), weight_name) != embeddings.end()) {
    for (const absl::string_view head : HeadTensorNames()) {
      if (std::string name = BiasNameOf(head); checkpoint.Has(name)) {
        return name;
      }
    }
  }
  return "";
}

}  // namespace

absl::StatusOr<HeadBias> ReadHeadBias(Checkpoint& checkpoint, const HeadConfig& config,
                                      const std::string& weight_name, int64_t rows) {
  HeadBias result;
  const std::string name = FindBias(checkpoint, weight_name);
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
  if (bias.entry.shape != std::vector<int64_t>{rows}) {
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
  result.stored = std::move(bytes);
  result.tensor = bias;
  return result;
}

}  // namespace logprobd
