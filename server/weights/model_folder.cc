// OpenModelFolder turns config.json and the checkpoint's headers into a HeadInfo and a reader of
// rows.

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "server/base/errors.h"
#include "server/base/head_info.h"
#include "server/weights/checkpoint.h"
#include "server/weights/head_choice.h"
#include "server/weights/head_config.h"
#include "server/weights/head_names.h"
#include "server/weights/head_source.h"
#include "server/weights/head_weights.h"
#include "server/weights/hub_cache.h"
#include "server/weights/regular_file.h"
#include "server/weights/safetensors.h"
#include "server/weights/steady_weights.h"
#include "server/weights/untrusted_text.h"

namespace logprobd {
namespace {

// Maximum number of rows. A tensor with more rows than any vocabulary is not a head.
constexpr int64_t kVocabRowsMax = int64_t{1} << 24;

class FileHeadWeights final : public HeadWeights {
 public:
  FileHeadWeights(HeadInfo info, StoredTensor tensor, HeadBias bias)
      : info_(std::move(info)), tensor_(std::move(tensor)), bias_(std::move(bias)) {}

  const HeadInfo& info() const override { return info_; }
  const std::vector<float>& bias() const override { return bias_.values; }
  absl::Span<const std::byte> stored_bias() const override { return bias_.stored; }

  absl::Status ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                        int64_t row_pitch_bytes) const override {
    const int64_t row_bytes = info_.hidden_size * DtypeBytes(info_.dtype);
    LOGPROBD_CHECK(row_pitch_bytes >= row_bytes, row_pitch_bytes, " < ", row_bytes);
    if (row_begin < 0 || row_end < row_begin || row_end > info_.vocab_rows) {
      return absl::OutOfRangeError(absl::StrCat("rows ", row_begin, " to ", row_end,
                                                " are outside ", PrintableName(info_.tensor),
                                                ", which has ", info_.vocab_rows, " rows"));
    }
    return tensor_.file->ReadRows(tensor_.entry.file_begin + row_begin * row_bytes,
                                  {.num_rows = row_end - row_begin,
                                   .row_bytes = row_bytes,
                                   .out = out,
                                   .row_pitch_bytes = row_pitch_bytes});
  }

 private:
  HeadInfo info_;
  StoredTensor tensor_;
  HeadBias bias_;
};

// Reads config.json of `source.folder` into `source` and parses it.
absl::StatusOr<HeadConfig> ReadHeadConfig(HeadSource& source, const AllowedRoots* roots,
                                          const LogitOverrides& overrides) {
  const std::string path = (std::filesystem::path(source.folder) / "config.json").string();
  const auto file = RegularFile::Open(path, roots);
  if (absl::IsNotFound(file.status())) {
    return absl::NotFoundError(
        absl::StrCat(file.status().message(), HubDownloadHint(source.folder, "config.json")));
  }
  LOGPROBD_RETURN_IF_ERROR(file.status());
  const int64_t bytes = (*file)->size_bytes();
  if (bytes > kConfigBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(PrintableName(path), " has ", bytes,
                                                   " bytes, the limit is ", kConfigBytesMax));
  }
  std::string& text = source.config;
  text.resize(static_cast<size_t>(bytes));
  LOGPROBD_RETURN_IF_ERROR(
      (*file)->Read(0, {reinterpret_cast<std::byte*>(text.data()), text.size()}));
  source.files.push_back(*file);
  auto config = ParseHeadConfig(text, overrides);
  if (!config.ok()) return WithContext(config.status(), PrintableName(path));
  return config;
}

// Returns a warning if the index beside the single file places the head elsewhere, as transformers
// then ignores it, too. An index that cannot be read says nothing about the single file.
std::optional<std::string> WarnOfUnusedIndex(const ModelPaths& paths, const std::string& head,
                                             const AllowedRoots* roots) {
  if (paths.unused_index.empty()) return std::nullopt;
  const auto file = RegularFile::Open(paths.unused_index, roots);
  if (!file.ok()) return std::nullopt;
  const auto places =
      ReadSafetensorsIndex(**file, [&head](absl::string_view name) { return name == head; });
  const std::string used = std::filesystem::path(paths.weights).filename().string();
  if (places.ok() && places->contains(head) && places->at(head) == used) return std::nullopt;
  return absl::StrCat(PrintableName(std::filesystem::path(paths.unused_index).filename().string()),
                      " does not place ", PrintableName(head), " in ", used,
                      ": the single file is used, as transformers does; remove the "
                      "one that is out of date");
}

// Transformers loads the adapter of a folder with its model.
std::optional<std::string> WarnOfAdapter(const ModelPaths& paths, const AllowedRoots* roots) {
  const std::filesystem::path config = std::filesystem::path(paths.folder) / "adapter_config.json";
  if (!RegularFile::Open(config.string(), roots).ok()) return std::nullopt;
  return absl::StrCat(
      config.filename().string(),
      " lies beside the weights: transformers applies that adapter, and the head "
      "is served without it; if it changes the head, merge it into the model first");
}

// Appends a file that is not null and not yet in `source`.
void AddFile(HeadSource& source, const std::shared_ptr<RegularFile>& file) {
  if (file != nullptr &&
      std::find(source.files.begin(), source.files.end(), file) == source.files.end()) {
    source.files.push_back(file);
  }
}

absl::Status CheckHidden(const TensorEntry& tensor, HeadConfig& config) {
  const std::string name = PrintableName(tensor.name);
  if (tensor.shape.size() != 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", name, " has the shape [", absl::StrJoin(tensor.shape, ", "),
                     "]; a head has two dimensions, vocabulary and hidden"));
  }
  const int64_t rows = tensor.shape[0];
  const int64_t hidden = tensor.shape[1];
  if (rows < 1 || hidden < 1 || rows > kVocabRowsMax) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", name, " has the shape [", rows, ", ",
                                                   hidden, "]; a head has 1 to ", kVocabRowsMax,
                                                   " rows and at least 1 column"));
  }
  if (!config.hidden_size.has_value()) {
    config.warnings.push_back(
        absl::StrCat("config.json has no hidden_size, n_embd or d_model; the number of the "
                     "tensor's columns is used: ",
                     hidden));
  } else if (*config.hidden_size != hidden) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor ", name, " has rows of ", hidden, " values, but config.json says hidden_size ",
        *config.hidden_size, rows == *config.hidden_size ? " (it looks transposed)" : "",
        "; config.json and weights belong to different models, or --head-tensor names the wrong "
        "one"));
  }
  return absl::OkStatus();
}

// Returns the number of valid ids. The tensor determines the number of rows, and config.json
// determines how many of them are padding.
absl::StatusOr<int64_t> ValidVocab(int64_t rows, const ModelFolderOptions& options,
                                   HeadConfig& config) {
  if (!config.vocab_size.has_value()) {
    config.warnings.push_back(absl::StrCat(
        "config.json has no vocab_size; the number of the tensor's rows is used: ", rows));
  }
  const int64_t config_vocab = config.vocab_size.value_or(rows);
  if (rows < config_vocab && !options.include_padding && !options.valid_vocab.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the head has ", rows, " rows, fewer than config.json's vocab_size ",
                     config_vocab, "; if these are all ids, set --valid-vocab ", rows));
  }
  if (options.include_padding && options.valid_vocab.has_value()) {
    return absl::InvalidArgumentError("--valid-vocab and --include-padding contradict each other");
  }
  if (options.include_padding) return rows;
  if (options.valid_vocab.has_value()) {
    if (*options.valid_vocab < 1 || *options.valid_vocab > rows) {
      return absl::InvalidArgumentError(
          absl::StrCat("--valid-vocab ", *options.valid_vocab,
                       " must be from 1 to the number of the head's rows, ", rows));
    }
    return *options.valid_vocab;
  }
  if (rows > config_vocab) {
    config.warnings.push_back(
        absl::StrCat("the head has ", rows, " rows, but config.json says vocab_size ", config_vocab,
                     "; the last ", rows - config_vocab,
                     " are not used (--include-padding or --valid-vocab changes that)"));
  }
  return config_vocab;
}

absl::StatusOr<Dtype> HeadDtype(const TensorEntry& tensor) {
  const std::optional<Dtype> dtype = ServedDtype(tensor.dtype);
  if (dtype.has_value()) return *dtype;
  const bool plain = tensor.dtype == "F64";
  return absl::UnimplementedError(absl::StrCat(
      "unsupported: ", plain ? "" : "quantised head, ", "tensor ", PrintableName(tensor.name),
      " is ", tensor.dtype,
      plain ? "; store it as F32, BF16 or F16"
            : "; serve the model's unquantised checkpoint, or store this tensor as BF16, F16 or "
              "F32"));
}

}  // namespace

absl::StatusOr<ModelFolderHead> OpenModelFolder(const std::string& path,
                                                const ModelFolderOptions& options) {
  const AllowedRoots* const roots = options.roots.get();
  if (roots != nullptr) {
    LOGPROBD_RETURN_IF_ERROR(roots->CheckPath(path));
  }
  LOGPROBD_ASSIGN_OR_RETURN(const ModelPaths paths, FindModelPaths(path, roots));
  auto source = std::make_shared<HeadSource>();
  source->folder = paths.folder;
  LOGPROBD_ASSIGN_OR_RETURN(HeadConfig config, ReadHeadConfig(*source, roots, options.logits));
  HeadNames names(config.rule, options.head_tensor);
  LOGPROBD_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(paths, names, roots));
  const std::optional<int64_t> compared = options.valid_vocab.has_value() || options.include_padding
                                              ? options.valid_vocab
                                              : config.vocab_size;
  LOGPROBD_ASSIGN_OR_RETURN(HeadChoice choice,
                            ChooseHead(checkpoint, config, names, options.head_tensor, compared));
  const TensorEntry& tensor = choice.tensor.entry;
  LOGPROBD_ASSIGN_OR_RETURN(const Dtype dtype, HeadDtype(tensor));
  LOGPROBD_RETURN_IF_ERROR(CheckHidden(tensor, config));
  const int64_t rows = tensor.shape[0];
  LOGPROBD_ASSIGN_OR_RETURN(const int64_t vocab_size, ValidVocab(rows, options, config));
  if (vocab_size > kVocabSizeMax) {
    return absl::InvalidArgumentError(absl::StrCat("the vocabulary has ", vocab_size,
                                                   " ids, the limit is ", kVocabSizeMax,
                                                   " (2^20); --valid-vocab can exclude the rest"));
  }
  LOGPROBD_ASSIGN_OR_RETURN(HeadBias bias,
                            ReadHeadBias(checkpoint, config, names, tensor.name, rows));

  if (!checkpoint.unlisted().empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a file that the index names contains ", PrintableName(checkpoint.unlisted().front()),
        ", which the index does not list; index and files belong to different checkpoints"));
  }

  HeadInfo info;
  info.name = options.head_name;
  info.model_type = config.model_type;
  info.tensor = tensor.name;
  info.hidden_size = tensor.shape[1];
  info.vocab_size = vocab_size;
  info.vocab_rows = rows;
  info.dtype = dtype;
  info.tied = choice.tied;
  info.has_bias = !bias.values.empty();
  info.scale = static_cast<float>(config.scale);
  info.softcap = static_cast<float>(config.softcap);
  info.weight_bytes = tensor.file_end - tensor.file_begin;
  info.weights_version = options.weights_version;

  ModelFolderHead head;
  head.warnings = std::move(config.warnings);
  for (const auto* warnings : {&choice.warnings, &bias.warnings}) {
    head.warnings.insert(head.warnings.end(), warnings->begin(), warnings->end());
  }
  for (auto warning : {WarnOfUnusedIndex(paths, tensor.name, roots), WarnOfAdapter(paths, roots)}) {
    if (warning.has_value()) head.warnings.push_back(*std::move(warning));
  }
  source->weight = choice.tensor;
  source->bias = bias.tensor;
  AddFile(*source, checkpoint.index());
  AddFile(*source, source->weight.file);
  AddFile(*source, source->bias.has_value() ? source->bias->file : nullptr);
  head.source = std::move(source);
  info.warnings = head.warnings;
  LOGPROBD_ASSIGN_OR_RETURN(head.weights,
                            SteadyWeights::Create(std::make_unique<FileHeadWeights>(
                                std::move(info), std::move(choice.tensor), std::move(bias))));
  return head;
}

std::string DescribeHead(const HeadInfo& head) {
  constexpr double kMebibyte = 1024.0 * 1024.0;
  const std::string cap =
      head.softcap > 0 ? absl::StrCat("cap ", head.softcap) : std::string("no cap");
  return absl::StrFormat("%s: hidden %d, vocab %d of %d rows, %s%s, %s, scale %g, %s, %s, %.1f MiB",
                         head.model_type, head.hidden_size, head.vocab_size, head.vocab_rows,
                         head.tensor, head.tied ? " (tied)" : "", DtypeName(head.dtype), head.scale,
                         cap, head.has_bias ? "bias" : "no bias",
                         static_cast<double>(head.weight_bytes) / kMebibyte);
}

}  // namespace logprobd
