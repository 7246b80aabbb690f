#include "client/cli/score_input.h"

#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "client/cli/tensor_files/mapped_file.h"
#include "client/cli/tensor_files/npy.h"
#include "client/cli/tensor_files/safetensors.h"

namespace logprobd::client {
namespace {

/// "path.safetensors:name" in its parts; the name is `fallback` where there is none.
std::pair<std::string, std::string> SplitTensorName(const std::string& spec,
                                                    const std::string& fallback) {
  static const std::string extension = ".safetensors:";
  const size_t at = spec.rfind(extension);
  if (at == std::string::npos) return {spec, fallback};
  return {spec.substr(0, at + extension.size() - 1), spec.substr(at + extension.size())};
}

absl::StatusOr<Tensor> LoadTensor(const std::string& spec, const std::string& name) {
  const auto [path, tensor] = SplitTensorName(spec, name);
  if (absl::EndsWith(path, ".safetensors")) return ReadSafetensors(path, tensor);
  if (absl::EndsWith(path, ".npy")) return ReadNpy(path);
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": only .safetensors and .npy files hold arrays"));
}

bool IsText(const std::string& spec) {
  return !absl::EndsWith(spec, ".npy") && !absl::StrContains(spec, ".safetensors");
}

/// Calls `parse` with each word of a text file; it returns whether the word is a number.
template <typename Parse>
absl::Status ReadText(const std::string& path, const Parse& parse) {
  const absl::StatusOr<std::shared_ptr<const MappedFile>> file = MappedFile::Open(path);
  if (!file.ok()) return file.status();
  const absl::string_view text(reinterpret_cast<const char*>((*file)->data().data()),
                               (*file)->data().size());
  for (const absl::string_view word :
       absl::StrSplit(text, absl::ByAnyChar(" ,\t\r\n"), absl::SkipEmpty())) {
    if (!parse(word)) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": \"", word.substr(0, 40), "\" is not a number"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int64_t>> LoadOffsets(const std::string& spec, const std::string& name) {
  if (!IsText(spec)) {
    const absl::StatusOr<Tensor> tensor = LoadTensor(spec, name);
    if (!tensor.ok()) return tensor.status();
    return ToInt64(*tensor);
  }
  std::vector<int64_t> values;
  absl::Status status = ReadText(spec, [&values](absl::string_view word) {
    values.emplace_back();
    return absl::SimpleAtoi(word, &values.back());
  });
  if (!status.ok()) return status;
  return values;
}

absl::StatusOr<std::vector<float>> LoadFloats(const std::string& spec, const std::string& name) {
  if (!IsText(spec)) {
    const absl::StatusOr<Tensor> tensor = LoadTensor(spec, name);
    if (!tensor.ok()) return tensor.status();
    return ToFloats(*tensor);
  }
  std::vector<float> values;
  absl::Status status = ReadText(spec, [&values](absl::string_view word) {
    values.emplace_back();
    return absl::SimpleAtof(word, &values.back());
  });
  if (!status.ok()) return status;
  return values;
}

/// The type on the wire of hidden data of `type`, where `stated` is the user's word on it.
absl::StatusOr<Dtype> HiddenDtype(const Tensor& hidden, const std::string& stated) {
  std::optional<Dtype> dtype;
  if (hidden.type == ElementType::kBf16) dtype = Dtype::kBf16;
  if (hidden.type == ElementType::kF16) dtype = Dtype::kF16;
  if (hidden.type == ElementType::kF32) dtype = Dtype::kF32;
  if (hidden.type == ElementType::kU16) {
    if (stated == "bf16") return Dtype::kBf16;
    if (stated == "f16") return Dtype::kF16;
    return absl::InvalidArgumentError(
        absl::StrCat(hidden.name, " holds uint16: say what it is with --dtype bf16 or f16"));
  }
  if (!dtype.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(hidden.name, " holds ", ElementName(hidden.type),
                                                   ", must hold bf16, f16 or f32"));
  }
  if (!stated.empty() && stated != DtypeName(*dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat(hidden.name, " holds ", DtypeName(*dtype), ", but --dtype says ", stated));
  }
  return *dtype;
}

/// The same numbers in one dimension.
Tensor Flat(Tensor tensor) {
  tensor.shape = {tensor.elements()};
  return tensor;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ScoreInput>> ScoreInput::Load(const ScoreFiles& files) {
  std::unique_ptr<ScoreInput> input(new ScoreInput);
  absl::Status status = input->LoadHidden(files);
  if (status.ok()) status = input->LoadTargets(files);
  if (status.ok()) status = input->LoadCandidates(files);
  if (status.ok()) status = input->LoadRest(files);
  if (!status.ok()) return status;
  return input;
}

absl::Status ScoreInput::LoadHidden(const ScoreFiles& files) {
  absl::StatusOr<Tensor> hidden =
      LoadTensor(files.hidden.empty() ? files.input : files.hidden, files.hidden_name);
  if (!hidden.ok()) return hidden.status();
  const absl::StatusOr<Dtype> dtype = HiddenDtype(*hidden, files.dtype);
  if (!dtype.ok()) return dtype.status();
  if (hidden->shape.size() < 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        hidden->name, " has shape ", ShapeText(hidden->shape), ", must be [rows, hidden_size]"));
  }
  // [batch, sequence, hidden_size] is as good: rows are counted through.
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < hidden->shape.size(); ++i) rows *= hidden->shape[i];
  hidden_ = *std::move(hidden);
  args_.hidden = hidden_.data;
  args_.dtype = *dtype;
  args_.rows = rows;
  args_.hidden_size = hidden_.shape.back();
  return absl::OkStatus();
}

absl::Status ScoreInput::LoadTargets(const ScoreFiles& files) {
  absl::StatusOr<Tensor> tensor =
      LoadTensor(files.targets.empty() ? files.input : files.targets, files.targets_name);
  if (!tensor.ok()) return tensor.status();
  if (tensor->elements() != args_.rows) {
    return absl::InvalidArgumentError(
        absl::StrCat(tensor->name, " has shape ", ShapeText(tensor->shape),
                     ", must have one id for each of the ", args_.rows, " rows of ", hidden_.name,
                     " ", ShapeText(hidden_.shape)));
  }
  absl::StatusOr<std::vector<int32_t>> targets = ToTokenIds(Flat(*std::move(tensor)));
  if (!targets.ok()) return targets.status();
  targets_ = *std::move(targets);
  args_.targets = targets_;
  return absl::OkStatus();
}

absl::Status ScoreInput::LoadCandidates(const ScoreFiles& files) {
  if (!files.candidates.empty()) {
    candidate_offsets_.push_back(0);
    for (int64_t row = 0; row < args_.rows; ++row) {
      candidate_ids_.insert(candidate_ids_.end(), files.candidates.begin(), files.candidates.end());
      candidate_offsets_.push_back(static_cast<int64_t>(candidate_ids_.size()));
    }
  } else if (!files.candidate_ids.empty()) {
    absl::StatusOr<Tensor> tensor = LoadTensor(files.candidate_ids, "candidate_ids");
    if (!tensor.ok()) return tensor.status();
    if (!files.candidate_offsets.empty()) {
      absl::StatusOr<std::vector<int64_t>> offsets =
          LoadOffsets(files.candidate_offsets, "candidate_offsets");
      if (!offsets.ok()) return offsets.status();
      candidate_offsets_ = *std::move(offsets);
    } else if (tensor->shape.size() == 2 && tensor->shape[0] == args_.rows) {
      for (int64_t row = 0; row <= args_.rows; ++row) {
        candidate_offsets_.push_back(row * tensor->shape[1]);
      }
    } else {
      return absl::InvalidArgumentError(absl::StrCat(
          tensor->name, " has shape ", ShapeText(tensor->shape), ", must be [rows = ", args_.rows,
          ", candidates], or one list with --candidate-offsets"));
    }
    absl::StatusOr<std::vector<int32_t>> ids = ToTokenIds(Flat(*std::move(tensor)));
    if (!ids.ok()) return ids.status();
    candidate_ids_ = *std::move(ids);
  }
  args_.candidate_ids = candidate_ids_;
  args_.candidate_offsets = candidate_offsets_;
  return absl::OkStatus();
}

absl::Status ScoreInput::LoadRest(const ScoreFiles& files) {
  if (!files.row_temperatures.empty()) {
    absl::StatusOr<std::vector<float>> values =
        LoadFloats(files.row_temperatures, "row_temperatures");
    if (!values.ok()) return values.status();
    row_temperatures_ = *std::move(values);
    args_.row_temperatures = row_temperatures_;
  }
  if (!files.segments.empty()) {
    absl::StatusOr<std::vector<int64_t>> offsets = LoadOffsets(files.segments, "segments");
    if (!offsets.ok()) return offsets.status();
    if (offsets->empty()) {
      return absl::InvalidArgumentError(absl::StrCat(files.segments, " holds no offsets"));
    }
    segment_offsets_ = *std::move(offsets);
    args_.segment_offsets = segment_offsets_;
  }
  return absl::OkStatus();
}

}  // namespace logprobd::client
