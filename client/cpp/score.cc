#include "client/cpp/score.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace logprobd::client {

absl::string_view TransportName(Transport transport) {
  switch (transport) {
    case Transport::kTcp:
      return "tcp";
    case Transport::kUnix:
      return "unix";
    case Transport::kSharedMemory:
      return "shm";
    case Transport::kCudaIpc:
      return "cuda_ipc";
  }
  return "unknown";
}

absl::StatusOr<TransportChoice> ParseTransportChoice(absl::string_view text) {
  if (text == "auto") return TransportChoice::kAuto;
  if (text == "tcp") return TransportChoice::kTcp;
  if (text == "shm") return TransportChoice::kSharedMemory;
  if (text == "cuda-ipc" || text == "cuda_ipc") return TransportChoice::kCudaIpc;
  return absl::InvalidArgumentError(
      absl::StrCat("transport is \"", text, "\", must be auto, tcp, shm or cuda-ipc"));
}

namespace {

// Upper bounds with which no product below overflows 64 bits.
constexpr int64_t kRowsMax = int64_t{1} << 40;
constexpr int64_t kHiddenSizeMax = int64_t{1} << 20;

absl::Status CheckOffsets(absl::string_view name, absl::Span<const int64_t> offsets, int64_t end,
                          absl::string_view end_name) {
  if (offsets.empty()) return absl::OkStatus();
  if (offsets.front() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, "[0] is ", offsets.front(), ", must be 0"));
  }
  for (size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1]) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, "[", i, "] is ", offsets[i], ", less than the one before it (",
                       offsets[i - 1], "): offsets must not decrease"));
    }
  }
  if (offsets.back() != end) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " ends at ", offsets.back(), ", must end at ", end_name, " = ", end));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckScoreArgs(const ScoreArgs& args) {
  if (args.rows < 0 || args.rows > kRowsMax) {
    return absl::InvalidArgumentError(absl::StrCat("rows is ", args.rows, ", must be 0 to 2^40"));
  }
  if (args.hidden_size < 0 || args.hidden_size > kHiddenSizeMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("hidden_size is ", args.hidden_size, ", must be 0 to ", kHiddenSizeMax));
  }
  if (args.dtype != Dtype::kBf16 && args.dtype != Dtype::kF16 && args.dtype != Dtype::kF32) {
    return absl::InvalidArgumentError(absl::StrCat("dtype is ", static_cast<int32_t>(args.dtype),
                                                   ", must be kBf16, kF16 or kF32"));
  }
  const int64_t hidden_bytes = args.rows * args.hidden_size * DtypeBytes(args.dtype);
  if (args.device_rows.has_value() && args.device_rows->bytes != hidden_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("device_rows has ", args.device_rows->bytes,
                     " bytes, must have rows x hidden_size x size of dtype = ", hidden_bytes));
  }
  if (args.device_rows.has_value() && args.device_rows->offset < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("device_rows has offset ", args.device_rows->offset, ", must be >= 0"));
  }
  const bool may_be_missing = args.device_rows.has_value() && args.hidden.empty();
  if (static_cast<int64_t>(args.hidden.size()) != hidden_bytes && !may_be_missing) {
    return absl::InvalidArgumentError(
        absl::StrCat("hidden has ", args.hidden.size(), " bytes, must have rows x hidden_size x ",
                     DtypeBytes(args.dtype), " (", DtypeName(args.dtype), ") = ", args.rows, " x ",
                     args.hidden_size, " x ", DtypeBytes(args.dtype), " = ", hidden_bytes));
  }
  if (static_cast<int64_t>(args.targets.size()) != args.rows) {
    return absl::InvalidArgumentError(absl::StrCat(
        "targets has ", args.targets.size(), " ids, must have one per row: rows = ", args.rows));
  }
  if (!args.row_temperatures.empty() &&
      static_cast<int64_t>(args.row_temperatures.size()) != args.rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("row_temperatures has ", args.row_temperatures.size(),
                     " values, must have one per row: rows = ", args.rows));
  }
  if (args.top_k < 0) {
    return absl::InvalidArgumentError(absl::StrCat("top_k is ", args.top_k, ", must be >= 0"));
  }
  if (args.candidate_offsets.empty() && !args.candidate_ids.empty()) {
    return absl::InvalidArgumentError(
        "candidate_ids requires candidate_offsets: rows + 1 values that start at 0");
  }
  if (!args.candidate_offsets.empty() &&
      static_cast<int64_t>(args.candidate_offsets.size()) != args.rows + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("candidate_offsets has ", args.candidate_offsets.size(),
                     " values, must have rows + 1 = ", args.rows + 1));
  }
  if (absl::Status status =
          CheckOffsets("candidate_offsets", args.candidate_offsets,
                       static_cast<int64_t>(args.candidate_ids.size()), "the number of candidates");
      !status.ok()) {
    return status;
  }
  constexpr size_t kTraceparentBytesMax = 256;
  if (args.traceparent.size() > kTraceparentBytesMax ||
      !std::all_of(args.traceparent.begin(), args.traceparent.end(),
                   [](char c) { return c >= ' ' && c <= '~'; })) {
    return absl::InvalidArgumentError(absl::StrCat("traceparent has ", args.traceparent.size(),
                                                   " bytes, must be at most ", kTraceparentBytesMax,
                                                   " printable ASCII characters"));
  }
  return CheckOffsets("segment_offsets", args.segment_offsets, args.rows, "rows");
}

}  // namespace logprobd::client
