#include "client/cli/score_files.h"

#include <charconv>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <system_error>
#include <type_traits>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace logprobd::client {
namespace {

/// Splits "path.safetensors:name". The name is `fallback` if the spec has none.
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
      absl::StrCat(path, ": only .safetensors and .npy files can hold this array"));
}

bool IsText(const std::string& spec) {
  return !absl::EndsWith(spec, ".npy") && !absl::StrContains(spec, ".safetensors");
}

/// Calls `parse` with each word of a text file. `parse` returns false if the word is not a number.
template <typename Parse>
absl::Status ReadText(const std::string& path, const Parse& parse) {
  const absl::StatusOr<std::shared_ptr<const MappedFile>> file = MappedFile::Open(path);
  if (!file.ok()) return file.status();
  const absl::string_view text(reinterpret_cast<const char*>((*file)->data().data()),
                               (*file)->data().size());
  for (const absl::string_view word :
       absl::StrSplit(text, absl::ByAnyChar(" ,\t\r\n"), absl::SkipEmpty())) {
    if (!absl::c_all_of(word, absl::ascii_isprint)) {
      return absl::InvalidArgumentError(
          absl::StrCat(path,
                       ": must be .npy, .safetensors or text with numbers, but holds other "
                       "bytes"));
    }
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

/// Returns the dtype of the hidden states. `stated` is the value of --dtype, or empty.
absl::StatusOr<Dtype> HiddenDtype(const Tensor& hidden, const std::string& stated) {
  std::optional<Dtype> dtype;
  if (hidden.type == ElementType::kBf16) dtype = Dtype::kBf16;
  if (hidden.type == ElementType::kF16) dtype = Dtype::kF16;
  if (hidden.type == ElementType::kF32) dtype = Dtype::kF32;
  if (hidden.type == ElementType::kU16) {
    if (stated == "bf16") return Dtype::kBf16;
    if (stated == "f16") return Dtype::kF16;
    return absl::InvalidArgumentError(
        absl::StrCat(hidden.name, " holds uint16: give its type with --dtype bf16 or --dtype f16"));
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

/// Returns the tensor flattened to one dimension.
Tensor Flat(Tensor tensor) {
  tensor.shape = {tensor.elements()};
  return tensor;
}

/// Builds one line of JSON whose values are numbers, booleans and arrays of numbers.
class JsonLine {
 public:
  void AddBool(absl::string_view name, bool value) {
    AddName(name);
    text_ += value ? "true" : "false";
  }

  template <typename T>
  void Add(absl::string_view name, T value) {
    AddName(name);
    AppendNumber(value);
  }

  template <typename T>
  void AddList(absl::string_view name, absl::Span<const T> values) {
    AddName(name);
    text_ += '[';
    for (size_t i = 0; i < values.size(); ++i) {
      if (i > 0) text_ += ',';
      AppendNumber(values[i]);
    }
    text_ += ']';
  }

  /// Returns the line and starts a new one.
  std::string Finish() {
    text_ += "}\n";
    std::string line = std::move(text_);
    text_.clear();
    return line;
  }

 private:
  void AddName(absl::string_view name) {
    absl::StrAppend(&text_, text_.empty() ? "{\"" : ",\"", name, "\":");
  }

  template <typename T>
  void AppendNumber(T value) {
    if (!std::isfinite(static_cast<double>(value))) {
      text_ += "null";  // JSON has neither NaN nor infinities
      return;
    }
    char digits[64];  // to_chars writes the shortest text that reads back to the same bits
    const auto end = std::to_chars(digits, digits + sizeof(digits), value);
    text_.append(digits, end.ptr);
  }

  std::string text_;
};

template <typename T>
void AddValue(absl::string_view name, T value, JsonLine& line) {
  if constexpr (std::is_same_v<T, uint8_t>) {
    line.AddBool(name, value != 0);
  } else {
    line.Add(name, value);
  }
}

/// Returns NumPy's name of the elements of a column.
template <typename T>
constexpr absl::string_view NpyTypeOf(const std::vector<T>& /*values*/) {
  if constexpr (std::is_same_v<T, uint8_t>) return "|b1";  // flags
  if constexpr (std::is_same_v<T, int32_t>) return "<i4";
  if constexpr (std::is_same_v<T, uint32_t>) return "<u4";
  return sizeof(T) == sizeof(double) ? "<f8" : "<f4";
}

}  // namespace

absl::StatusOr<std::unique_ptr<ScoreInput>> ScoreInput::Load(const ScoreFiles& files) {
  if (!files.input.empty() && !absl::StrContains(files.input, ".safetensors")) {
    return absl::InvalidArgumentError(
        absl::StrCat(files.input,
                     ": must be a .safetensors file with hidden states and targets; "
                     "give two .npy files with --hidden and --targets"));
  }
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
  // All dimensions except the last count as rows, so that [batch, sequence, hidden_size] is
  // accepted.
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

namespace {

/// Writes when a request passed the stages of the server: begin and end of each in nanoseconds.
std::string TraceLine(size_t request, const RequestTrace& trace, JsonLine& line) {
  const auto add = [&line](absl::string_view name, const StageTrace& stage) {
    line.AddList<int64_t>(
        name, {absl::ToInt64Nanoseconds(stage.begin), absl::ToInt64Nanoseconds(stage.end)});
  };
  line.Add("request", request);
  line.Add("received_unix_ns", absl::ToUnixNanos(trace.received));
  add("receive_ns", trace.receive);
  add("queue_ns", trace.queue);
  if (trace.copy.has_value()) add("copy_ns", *trace.copy);
  if (trace.engine.has_value()) add("engine_ns", *trace.engine);
  line.Add("kernel_ns", absl::ToInt64Nanoseconds(trace.kernel));
  add("reply_ns", trace.reply);
  return line.Finish();
}

}  // namespace

void WriteJsonLines(const ScoreArgs& args, const ScoreResult& result, std::ostream& out) {
  JsonLine line;
  const auto top_k = static_cast<size_t>(result.top_k);
  for (size_t row = 0; row < static_cast<size_t>(result.rows); ++row) {
    line.Add("row", row);
    line.Add("target", args.targets[row]);
    ForEachScoreColumn([&](const auto& column) {
      const auto& values = result.*column.values;
      if (values.empty()) return;
      if (column.shape == ColumnShape::kTopK) {
        line.AddList(column.name, absl::MakeConstSpan(values).subspan(row * top_k, top_k));
      } else if (column.shape == ColumnShape::kRow) {
        AddValue(column.name, values[row], line);
      }
    });
    if (!args.candidate_offsets.empty()) {
      const auto begin = static_cast<size_t>(args.candidate_offsets[row]);
      const auto count = static_cast<size_t>(args.candidate_offsets[row + 1]) - begin;
      line.AddList("candidate_ids", args.candidate_ids.subspan(begin, count));
      line.AddList("candidate_logprobs",
                   absl::MakeConstSpan(result.candidate_logprobs).subspan(begin, count));
    }
    out << line.Finish();
  }
  for (size_t segment = 0; segment < result.segment_logprob.size(); ++segment) {
    line.Add("segment", segment);
    line.Add("logprob", result.segment_logprob[segment]);
    line.Add("rows", result.segment_rows[segment]);
    line.AddBool("greedy", result.segment_greedy[segment] != 0);
    out << line.Finish();
  }
  for (size_t request = 0; request < result.traces.size(); ++request) {
    out << TraceLine(request, result.traces[request], line);
  }
}

absl::Status WriteNpyFiles(const ScoreArgs& args, const ScoreResult& result,
                           const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot create the folder ", folder, ": ", error.message()));
  }
  absl::Status status;
  const auto write = [&](absl::string_view name, absl::string_view descr, const auto& values,
                         const std::vector<int64_t>& shape) {
    if (!status.ok() || values.empty()) return;
    status = WriteNpy(
        absl::StrCat(folder, "/", name, ".npy"), descr, shape,
        {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(values[0])});
  };
  ForEachScoreColumn([&](const auto& column) {
    const auto& values = result.*column.values;
    std::vector<int64_t> shape = {static_cast<int64_t>(values.size())};
    if (column.shape == ColumnShape::kTopK) shape = {result.rows, result.top_k};
    write(column.name, NpyTypeOf(values), values, shape);
  });
  write("candidate_offsets", "<i8", args.candidate_offsets,
        {static_cast<int64_t>(args.candidate_offsets.size())});
  return status;
}

}  // namespace logprobd::client
