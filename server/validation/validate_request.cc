#include "server/validation/validate_request.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/base/errors.h"
#include "server/base/head_info.h"
#include "server/base/outputs.h"

namespace logprobd::internal {
namespace {

constexpr float kTemperatureMin = 1e-4F;
constexpr float kTemperatureMax = 1e4F;

bool IsTemperature(float value) { return value >= kTemperatureMin && value <= kTemperatureMax; }

absl::Status BadTemperature(absl::string_view what, float value) {
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": ", value, ", must be finite and in [1e-4, 1e4]"));
}

}  // namespace

absl::Status CheckTargets(absl::Span<const int32_t> targets, int64_t vocab, int32_t ignore_index) {
  const auto limit = static_cast<uint32_t>(vocab);
  const auto is_bad = [limit, ignore_index](int32_t target) {
    // A negative id becomes a large unsigned number; & instead of && keeps the loop free of
    // branches.
    return static_cast<uint32_t>(static_cast<uint32_t>(target) >= limit) &
           static_cast<uint32_t>(target != ignore_index);
  };
  uint32_t any_bad = 0;
  for (const int32_t target : targets) any_bad |= is_bad(target);
  if (any_bad == 0) return absl::OkStatus();
  size_t row = 0;
  while (is_bad(targets[row]) == 0) ++row;
  return absl::InvalidArgumentError(absl::StrCat("targets[", row, "]: ", targets[row],
                                                 ", must be in [0, ", vocab,
                                                 ") or the ignore_index ", ignore_index));
}

absl::Status CheckIds(absl::string_view field, absl::Span<const int32_t> ids, int64_t vocab) {
  const auto limit = static_cast<uint32_t>(vocab);
  uint32_t any_bad = 0;
  for (const int32_t id : ids) any_bad |= static_cast<uint32_t>(static_cast<uint32_t>(id) >= limit);
  if (any_bad == 0) return absl::OkStatus();
  size_t index = 0;
  while (static_cast<uint32_t>(ids[index]) < limit) ++index;
  return absl::InvalidArgumentError(
      absl::StrCat(field, "[", index, "]: ", ids[index], ", must be in [0, ", vocab, ")"));
}

absl::Status CheckOffsets(absl::string_view field, absl::Span<const uint32_t> offsets,
                          int64_t total, absl::string_view total_name) {
  if (offsets.empty() || offsets.front() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, "[0]: ", offsets.empty() ? "missing" : absl::StrCat(offsets.front()),
                     ", must be 0"));
  }
  uint32_t any_fall = 0;
  for (size_t i = 1; i < offsets.size(); ++i) {
    any_fall |= static_cast<uint32_t>(offsets[i] < offsets[i - 1]);
  }
  if (any_fall != 0) {
    size_t index = 1;
    while (offsets[index] >= offsets[index - 1]) ++index;
    return absl::InvalidArgumentError(absl::StrCat(field, "[", index, "]: ", offsets[index],
                                                   ", must not be below the previous offset, ",
                                                   offsets[index - 1]));
  }
  if (static_cast<int64_t>(offsets.back()) != total) {
    return absl::InvalidArgumentError(absl::StrCat(field, "[", offsets.size() - 1,
                                                   "]: ", offsets.back(), ", must end at ",
                                                   total_name, ", ", total));
  }
  return absl::OkStatus();
}

absl::Status CheckTemperature(absl::string_view field, float value) {
  return IsTemperature(value) ? absl::OkStatus() : BadTemperature(field, value);
}

absl::Status CheckTemperatures(absl::string_view field, absl::Span<const float> values,
                               absl::Span<const int32_t> targets, int32_t ignore_index) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (!IsTemperature(values[i]) && targets[i] != ignore_index) {
      return BadTemperature(absl::StrCat(field, "[", i, "]"), values[i]);
    }
  }
  return absl::OkStatus();
}

}  // namespace logprobd::internal

namespace logprobd {
namespace {

using internal::CheckIds;
using internal::CheckOffsets;
using internal::CheckTargets;
using internal::CheckTemperature;
using internal::CheckTemperatures;

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

absl::Status CheckEnums(const ScoreRequest& request) {
  if (request.dtype_number < 1 || request.dtype_number > 3) {
    return Invalid("dtype: ", request.dtype_number,
                   ", must be DTYPE_BF16 (1), DTYPE_F16 (2) or DTYPE_F32 (3)");
  }
  if (request.priority_number < 0 || request.priority_number > kNumPriorities) {
    return Invalid("priority: ", request.priority_number, ", must be in [0, ", kNumPriorities, "]");
  }
  if ((request.output_bits & ~kAllOutputBits) != 0) {
    return Invalid("outputs: ", request.output_bits, ", has bits beyond ", kAllOutputBits,
                   ", the sum of all Output values");
  }
  return absl::OkStatus();
}

/// Returns the name of the field that holds or locates the rows, and their size according to it.
std::pair<absl::string_view, int64_t> PayloadOf(const ScoreRequest& request) {
  if (request.shared_memory.has_value()) {
    return {"shared_memory.bytes", request.shared_memory->bytes};
  }
  if (request.cuda_ipc.has_value()) return {"cuda_ipc.bytes", request.cuda_ipc->memory.bytes};
  return {"hidden", request.hidden.bytes};
}

absl::Status CheckShape(const ScoreRequest& request, const HeadInfo& head) {
  if (request.hidden_size != head.hidden_size) {
    return Invalid("hidden_size: ", request.hidden_size, ", must be ", head.hidden_size,
                   " for head \"", head.name, "\"");
  }
  if (request.rows < 0 || request.rows > head.limits.request_rows_max) {
    return Invalid("rows: ", request.rows, ", must be in [0, ", head.limits.request_rows_max, "]");
  }
  int64_t elements = 0;
  int64_t bytes = 0;
  if (__builtin_mul_overflow(request.rows, request.hidden_size, &elements) ||
      __builtin_mul_overflow(elements, DtypeBytes(request.dtype()), &bytes)) {
    return Invalid("rows: ", request.rows, " x hidden_size ", request.hidden_size,
                   " is more than 2^63 bytes");
  }
  const auto [field, payload_bytes] = PayloadOf(request);
  if (payload_bytes != bytes) {
    return Invalid(field, ": ", payload_bytes, " bytes, must be ", bytes, " (", request.rows,
                   " rows x ", request.hidden_size, " x ", DtypeBytes(request.dtype()),
                   " bytes of ", DtypeName(request.dtype()), ")");
  }
  if (static_cast<int64_t>(request.targets.size()) != request.rows) {
    return Invalid("targets: ", request.targets.size(), " ids, must be ", request.rows,
                   ", one for each row");
  }
  return absl::OkStatus();
}

absl::Status CheckTargetIds(const ScoreRequest& request, const HeadInfo& head) {
  if (request.ignore_index >= 0 && request.ignore_index < head.vocab_size) {
    return Invalid("ignore_index: ", request.ignore_index, ", must lie outside [0, ",
                   head.vocab_size, "), where it would hide a real id");
  }
  return CheckTargets(request.targets, head.vocab_size, request.ignore_index);
}

absl::Status CheckAllTemperatures(const ScoreRequest& request) {
  if (request.temperature.has_value()) {
    if (!request.row_temperatures.empty()) {
      return Invalid("row_temperatures: ", request.row_temperatures.size(),
                     " values together with temperature ", *request.temperature,
                     "; send only one of the two");
    }
    LOGPROBD_RETURN_IF_ERROR(CheckTemperature("temperature", *request.temperature));
  }
  if (!request.row_temperatures.empty()) {
    if (static_cast<int64_t>(request.row_temperatures.size()) != request.rows) {
      return Invalid("row_temperatures: ", request.row_temperatures.size(), " values, must be ",
                     request.rows, ", one for each row");
    }
    LOGPROBD_RETURN_IF_ERROR(CheckTemperatures("row_temperatures", request.row_temperatures,
                                               request.targets, request.ignore_index));
  }
  if (request.entropy_temperature.has_value()) {
    LOGPROBD_RETURN_IF_ERROR(CheckTemperature("entropy_temperature", *request.entropy_temperature));
  }
  return absl::OkStatus();
}

absl::Status CheckCandidates(const ScoreRequest& request, const HeadInfo& head) {
  const auto num_ids = static_cast<int64_t>(request.candidate_ids.size());
  if (num_ids > head.limits.candidates_max) {
    return Invalid("candidate_ids: ", num_ids, " ids, must be at most ",
                   head.limits.candidates_max);
  }
  if (request.candidate_offsets.empty() && num_ids == 0) return absl::OkStatus();
  if (static_cast<int64_t>(request.candidate_offsets.size()) != request.rows + 1) {
    return Invalid("candidate_offsets: ", request.candidate_offsets.size(), " offsets, must be ",
                   request.rows + 1, ", rows + 1");
  }
  LOGPROBD_RETURN_IF_ERROR(CheckOffsets("candidate_offsets", request.candidate_offsets, num_ids,
                                        "the number of candidate_ids"));
  return CheckIds("candidate_ids", request.candidate_ids, head.vocab_size);
}

absl::Status CheckSegments(const ScoreRequest& request, const HeadInfo& head) {
  if (request.segment_offsets.empty()) return absl::OkStatus();
  if (request.num_segments() > head.limits.segments_max) {
    return Invalid("segment_offsets: ", request.num_segments(), " segments, must be at most ",
                   head.limits.segments_max);
  }
  return CheckOffsets("segment_offsets", request.segment_offsets, request.rows, "rows");
}

absl::Status CheckTopK(const ScoreRequest& request, const HeadInfo& head) {
  const int64_t top_k_max = std::min(static_cast<int64_t>(head.limits.top_k_max), head.vocab_size);
  if (request.top_k < 0 || request.top_k > top_k_max) {
    return Invalid("top_k: ", request.top_k, ", must be in [0, ", top_k_max, "]");
  }
  return absl::OkStatus();
}

/// Checks the size of the response, which is held in memory until it is sent and which the client
/// must be able to receive.
absl::Status CheckAnswerSize(const ScoreRequest& request, const HeadInfo& head) {
  const int64_t bytes = ColumnBytes(request.outputs(), request.column_counts());
  if (bytes > head.limits.message_bytes_max) {
    return Invalid("rows: ", request.rows, " rows with top_k ", request.top_k,
                   " give a response of ", bytes, " bytes, must be at most ",
                   head.limits.message_bytes_max, ": send fewer rows");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateRequest(const ScoreRequest& request, const HeadInfo& head) {
  if (request.weights_version != 0 && request.weights_version != head.weights_version) {
    return absl::FailedPreconditionError(absl::StrCat("weights_version: ", request.weights_version,
                                                      ", but version ", head.weights_version,
                                                      " is live for head \"", head.name, "\""));
  }
  LOGPROBD_RETURN_IF_ERROR(CheckEnums(request));
  LOGPROBD_RETURN_IF_ERROR(CheckShape(request, head));
  LOGPROBD_RETURN_IF_ERROR(CheckTargetIds(request, head));
  LOGPROBD_RETURN_IF_ERROR(CheckAllTemperatures(request));
  LOGPROBD_RETURN_IF_ERROR(CheckTopK(request, head));
  LOGPROBD_RETURN_IF_ERROR(CheckCandidates(request, head));
  LOGPROBD_RETURN_IF_ERROR(CheckSegments(request, head));
  return CheckAnswerSize(request, head);
}

}  // namespace logprobd
