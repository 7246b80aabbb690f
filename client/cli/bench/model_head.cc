#include "client/cli/bench/model_head.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cli/bench/float_formats.h"
#include "client/cli/tensor_files/safetensors.h"
#include "nlohmann/json.hpp"

namespace logprobd::client {
namespace {

namespace fs = std::filesystem;

constexpr char kIndex[] = "model.safetensors.index.json";

/// The bias of a tied head lies beside the name that the head would have.
constexpr const char* kHeadBiases[] = {"lm_head.bias",
                                       "language_model.lm_head.bias",
                                       "model.language_model.lm_head.bias",
                                       "thinker.lm_head.bias",
                                       "output.bias",
                                       "head.bias",
                                       "transformer.output_layer.bias",
                                       "embed_out.bias",
                                       "output_layer.bias"};

/// The file that an index names for the tensor; NOT_FOUND when it names none.
absl::StatusOr<std::string> FileOfIndex(const fs::path& folder, const std::string& tensor) {
  std::ifstream stream(folder / kIndex);
  const auto index = nlohmann::json::parse(stream, nullptr, /*allow_exceptions=*/false);
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (map == index.end() || !map->is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat((folder / kIndex).string(), " is not an index: it has no weight_map"));
  }
  const auto found = map->find(tensor);
  if (found == map->end()) {
    return absl::NotFoundError(absl::StrCat(folder.string(), " has no tensor ", tensor));
  }
  const std::string name = found->is_string() ? found->get<std::string>() : "";
  if (name.empty() || absl::StrContains(name, "/") || absl::StrContains(name, "..")) {
    return absl::InvalidArgumentError(absl::StrCat((folder / kIndex).string(), " maps ", tensor,
                                                   " to something else than a file beside it"));
  }
  return (folder / name).string();
}

absl::StatusOr<Tensor> FindTensor(const fs::path& folder, const std::string& name) {
  std::error_code error;
  if (fs::exists(folder / kIndex, error)) {
    const absl::StatusOr<std::string> file = FileOfIndex(folder, name);
    if (!file.ok()) return file.status();
    return ReadSafetensors(*file, name);
  }
  std::vector<std::string> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path().string());
  }
  if (error) {
    return absl::NotFoundError(
        absl::StrCat("cannot read ", folder.string(), ": ", error.message()));
  }
  std::sort(files.begin(), files.end());
  for (const std::string& file : files) {
    absl::StatusOr<Tensor> tensor = ReadSafetensors(file, name);
    if (tensor.ok() || tensor.status().code() != absl::StatusCode::kNotFound) return tensor;
  }
  return absl::NotFoundError(files.empty()
                                 ? absl::StrCat(folder.string(), " holds no .safetensors file")
                                 : absl::StrCat(folder.string(), " has no tensor ", name));
}

bool IsFloat(ElementType type) {
  return type == ElementType::kBf16 || type == ElementType::kF16 || type == ElementType::kF32;
}

absl::StatusOr<std::vector<double>> FindBias(const fs::path& folder, const Head& head,
                                             int64_t rows) {
  std::vector<std::string> names = {
      absl::StrCat(absl::StripSuffix(head.tensor, ".weight"), ".bias")};
  names.insert(names.end(), std::begin(kHeadBiases), std::end(kHeadBiases));
  for (const std::string& name : names) {
    const absl::StatusOr<Tensor> bias = FindTensor(folder, name);
    if (bias.status().code() == absl::StatusCode::kNotFound) continue;
    if (!bias.ok()) return bias.status();
    if (!IsFloat(bias->type) || bias->shape != std::vector<int64_t>{rows}) {
      return absl::InvalidArgumentError(absl::StrCat(bias->name, " is ", ElementName(bias->type),
                                                     " ", ShapeText(bias->shape),
                                                     ", the head needs [", rows, "]"));
    }
    std::vector<double> values;
    for (int64_t i = 0; i < rows; ++i) {
      values.push_back(LoadElement(bias->data.data(), i, FileDtype(bias->type)));
    }
    return values;
  }
  return absl::NotFoundError(
      absl::StrCat("the served head has a bias, but ", folder.string(), " has no ", names.front()));
}

}  // namespace

Dtype FileDtype(ElementType type) {
  if (type == ElementType::kF16) return Dtype::kF16;
  return type == ElementType::kF32 ? Dtype::kF32 : Dtype::kBf16;
}

absl::StatusOr<ModelHead> OpenModelHead(const std::string& folder, const Head& head) {
  const auto with_advice = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(status.message(),
                                                    "; --verify wants the folder that the server "
                                                    "was given with --model, and it serves ",
                                                    head.tensor));
  };
  ModelHead model;
  absl::StatusOr<Tensor> weight = FindTensor(folder, head.tensor);
  if (!weight.ok()) return with_advice(weight.status());
  const std::vector<int64_t> shape = {head.vocab_rows, head.hidden_size};
  if (!IsFloat(weight->type) || weight->shape != shape || FileDtype(weight->type) != head.dtype) {
    return with_advice(absl::InvalidArgumentError(
        absl::StrCat(weight->name, " is ", ElementName(weight->type), " ", ShapeText(weight->shape),
                     ", the served head ", DtypeName(head.dtype), " ", ShapeText(shape))));
  }
  model.weight = *std::move(weight);
  if (head.has_bias) {
    absl::StatusOr<std::vector<double>> bias = FindBias(folder, head, head.vocab_rows);
    if (!bias.ok()) return with_advice(bias.status());
    model.bias = *std::move(bias);
  }
  return model;
}

}  // namespace logprobd::client
