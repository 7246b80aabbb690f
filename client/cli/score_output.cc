#include "client/cli/score_output.h"

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cli/tensor_files/npy.h"

namespace logprobd::client {
namespace {

/// One line of JSON whose values are numbers, booleans and arrays of numbers.
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

  /// The line; starts a new one.
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
      text_ += "null";  // JSON has no NaN
      return;
    }
    char digits[64];  // the shortest text that reads back to the same bits
    const auto end = std::to_chars(digits, digits + sizeof(digits), value);
    text_.append(digits, end.ptr);
  }

  std::string text_;
};

template <typename T>
void AddIfAsked(absl::string_view name, const std::vector<T>& values, size_t row, JsonLine& line) {
  if (!values.empty()) line.Add(name, values[row]);
}

}  // namespace

void WriteJsonLines(const ScoreArgs& args, const ScoreResult& result, std::ostream& out) {
  JsonLine line;
  const auto top_k = static_cast<size_t>(result.top_k);
  for (size_t row = 0; row < static_cast<size_t>(result.rows); ++row) {
    line.Add("row", row);
    line.Add("target", args.targets[row]);
    AddIfAsked("logprob", result.logprob, row, line);
    AddIfAsked("entropy", result.entropy, row, line);
    AddIfAsked("lse", result.lse, row, line);
    AddIfAsked("argmax_id", result.argmax_id, row, line);
    AddIfAsked("argmax_logprob", result.argmax_logprob, row, line);
    if (!result.greedy.empty()) line.AddBool("greedy", result.greedy[row] != 0);
    AddIfAsked("sum_p_squared", result.sum_p_squared, row, line);
    AddIfAsked("max_logit", result.max_logit, row, line);
    AddIfAsked("min_logit", result.min_logit, row, line);
    if (top_k > 0) {
      line.AddList("top_k_ids", absl::MakeConstSpan(result.top_k_ids).subspan(row * top_k, top_k));
      line.AddList("top_k_logprobs",
                   absl::MakeConstSpan(result.top_k_logprobs).subspan(row * top_k, top_k));
    }
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
                         std::vector<int64_t> shape = {}) {
    if (!status.ok() || values.empty()) return;
    if (shape.empty()) shape = {static_cast<int64_t>(values.size())};
    status = WriteNpy(
        absl::StrCat(folder, "/", name, ".npy"), descr, shape,
        {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(values[0])});
  };
  const std::vector<int64_t> top_k_shape = {result.rows, result.top_k};
  write("logprob", "<f4", result.logprob);
  write("entropy", "<f4", result.entropy);
  write("lse", "<f4", result.lse);
  write("argmax_id", "<i4", result.argmax_id);
  write("argmax_logprob", "<f4", result.argmax_logprob);
  write("greedy", "|b1", result.greedy);
  write("sum_p_squared", "<f4", result.sum_p_squared);
  write("max_logit", "<f4", result.max_logit);
  write("min_logit", "<f4", result.min_logit);
  write("top_k_ids", "<i4", result.top_k_ids, top_k_shape);
  write("top_k_logprobs", "<f4", result.top_k_logprobs, top_k_shape);
  write("candidate_logprobs", "<f4", result.candidate_logprobs);
  write("candidate_offsets", "<i8", args.candidate_offsets);
  write("segment_logprob", "<f8", result.segment_logprob);
  write("segment_rows", "<u4", result.segment_rows);
  write("segment_greedy", "|b1", result.segment_greedy);
  return status;
}

}  // namespace logprobd::client
