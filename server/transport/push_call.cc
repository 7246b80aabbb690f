#include "server/transport/push_call.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "server/transport/grpc_status.h"
#include "server/transport/slice_parser.h"
#include "server/transport/weights_messages.h"

namespace logprobd {
namespace {

/// Interval at which a call that waits for a message looks whether it must end.
constexpr absl::Duration kPollPeriod = absl::Milliseconds(100);

absl::Span<const std::byte> BytesOf(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

absl::StatusOr<WeightsPush> PushOf(const v1::PushWeightsRequest& message) {
  if (!message.has_header()) {
    return absl::InvalidArgumentError("header: missing, must be the first message");
  }
  const v1::PushHeader& header = message.header();
  if (header.dtype() == v1::DTYPE_UNSPECIFIED || !v1::Dtype_IsValid(header.dtype())) {
    return absl::InvalidArgumentError(
        absl::StrCat("dtype: ", header.dtype(), ", must be DTYPE_BF16, DTYPE_F16 or DTYPE_F32"));
  }
  if (header.vocab_rows() > std::numeric_limits<uint32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("vocab_rows: ", header.vocab_rows(), ", must be less than 2^32"));
  }
  return WeightsPush{.head = header.head(),
                     .version = header.version(),
                     .dtype = static_cast<Dtype>(header.dtype()),
                     .vocab_rows = static_cast<int64_t>(header.vocab_rows()),
                     .sha256 = header.sha256(),
                     .allow_nonfinite = header.allow_nonfinite()};
}

absl::StatusOr<PushedRows> RangeOf(const ParsedPush& parsed) {
  const v1::PushedRows& rows = parsed.message.rows();
  constexpr uint64_t kMax = std::numeric_limits<uint32_t>::max();
  if (rows.row_begin() > kMax || rows.rows() > kMax || rows.rows() == 0) {
    return absl::InvalidArgumentError(absl::StrCat("rows: ", rows.rows(), " from row ",
                                                   rows.row_begin(),
                                                   ", must be at least 1 and less than 2^32"));
  }
  const int num_payloads = static_cast<int>(!parsed.data.empty()) +
                           static_cast<int>(rows.has_shared_memory()) +
                           static_cast<int>(rows.has_cuda_ipc());
  if (num_payloads != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("rows: ", num_payloads,
                     " of data, shared_memory and cuda_ipc are set, must be exactly one"));
  }
  return PushedRows{.row_begin = static_cast<int64_t>(rows.row_begin()),
                    .num_rows = static_cast<int64_t>(rows.rows()),
                    .is_bias = rows.is_bias(),
                    .pieces = parsed.data};
}

}  // namespace

void PushCall::Run() {
  absl::StatusOr<PushedWeightsResult> result = Receive();
  if (result.ok()) {
    v1::PushWeightsResponse response;
    Fill(result->pushed, *response.mutable_pushed());
    if (result->staged.has_value()) Fill(*result->staged, *response.mutable_staged());
    context_.response = SerializeMessage(response);
  }
  placed_.reset();
  context_.audit.End(result.status());
  Finish(ToAdminStatus(result.status()));  // the last action, because OnDone may delete the call
}

void PushCall::Refuse(const absl::Status& status) {
  context_.audit.End(status);
  Finish(ToAdminStatus(status));
}

absl::StatusOr<PushedWeightsResult> PushCall::Receive() {
  StartRead(&buffer_);
  LOGPROBD_RETURN_IF_ERROR(Read(kSmallMessageBytesMax).status());
  AuditedChange& audited = context_.audit.change();
  audited = {.head = context_.store.NameOf(parsed_.message.header().head()),
             .version = parsed_.message.header().version(),
             .path = "",
             .sha256 = parsed_.message.header().sha256()};
  LOGPROBD_ASSIGN_OR_RETURN(const WeightsPush push, PushOf(parsed_.message));
  LOGPROBD_RETURN_IF_ERROR(context_.audit.Begin());
  absl::StatusOr<PushedWeightsResult> result = context_.store.Push(
      push, [this] { return Next(); },
      [this](const WeightsProgress&) {
        const absl::MutexLock lock(&mutex_);
        return !is_cancelled_;
      });
  if (result.ok() && result->staged.has_value()) audited.sha256 = result->staged->sha256;
  return result;
}

void PushCall::OnReadDone(bool has_message) {
  const absl::MutexLock lock(&mutex_);
  is_read_ = true;
  has_message_ = has_message;
}

void PushCall::OnCancel() {
  const absl::MutexLock lock(&mutex_);
  is_cancelled_ = true;
}

absl::Status PushCall::CheckNotCancelled() const {
  return is_cancelled_ ? absl::CancelledError("the call was cancelled") : absl::OkStatus();
}

absl::StatusOr<bool> PushCall::Read(size_t bytes_max) {
  // The client may take long to send the next message, or never do.
  parsed_ = ParsedPush();
  slices_ = PayloadSlices();
  staging_ = std::vector<std::byte>();
  {
    const absl::MutexLock lock(&mutex_);
    const absl::Time idle_end = context_.clock.Now() + kIdleMax;
    const auto has_news = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return is_read_ || is_cancelled_;
    };
    const absl::Condition condition(&has_news);
    while (!context_.clock.AwaitUntil(mutex_, condition, context_.clock.Now() + kPollPeriod)) {
      if (context_.ends_soon) return absl::UnavailableError("the server is shutting down");
      if (context_.clock.Now() >= idle_end) {
        return absl::DeadlineExceededError(
            absl::StrCat("no message arrived for ", absl::FormatDuration(kIdleMax)));
      }
    }
    LOGPROBD_RETURN_IF_ERROR(CheckNotCancelled());
    if (!has_message_) return false;
    is_read_ = false;
  }
  if (buffer_.Length() > bytes_max) {
    return absl::InvalidArgumentError(
        absl::StrCat("a message of ", buffer_.Length(), " bytes, must be at most ", bytes_max));
  }
  slices_ = SlicesOf(buffer_);
  buffer_.Clear();
  LOGPROBD_ASSIGN_OR_RETURN(parsed_, ParsePush(slices_.pieces));
  StartRead(&buffer_);
  return true;
}

absl::StatusOr<std::optional<PushedRows>> PushCall::Next() {
  constexpr auto kMessageBytesMax = static_cast<size_t>(kDataBytesMax) + kSmallMessageBytesMax;
  if (placed_.has_value() &&
      placed_->rows_read < static_cast<int64_t>(parsed_.message.rows().rows())) {
    return NextPlaced();
  }
  placed_.reset();
  LOGPROBD_ASSIGN_OR_RETURN(const bool has_message, Read(kMessageBytesMax));
  if (!has_message) return std::nullopt;
  if (!parsed_.message.has_rows()) {
    return absl::InvalidArgumentError("rows: missing, must be in every message but the first");
  }
  const v1::PushedRows& rows = parsed_.message.rows();
  LOGPROBD_ASSIGN_OR_RETURN(PushedRows range, RangeOf(parsed_));
  if (!parsed_.data.empty()) return range;
  LOGPROBD_ASSIGN_OR_RETURN(HiddenPayload payload, FindPayload(rows));
  if (payload.bytes == 0 || payload.bytes % range.num_rows != 0 ||
      payload.bytes / range.num_rows > kDataBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rows: ", range.num_rows, ", but ", rows.has_shared_memory() ? "shared_memory" : "cuda_ipc",
        " has ", payload.bytes, " bytes"));
  }
  const int64_t row_bytes = payload.bytes / range.num_rows;
  placed_ = {.payload = std::move(payload), .row_bytes = row_bytes, .rows_read = 0};
  return NextPlaced();
}

absl::StatusOr<HiddenPayload> PushCall::FindPayload(const v1::PushedRows& rows) const {
  if (context_.same_host == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        rows.has_shared_memory() ? "shared_memory" : "cuda_ipc",
        ": this server has no Unix socket (see its flag --local); send the rows in `data`"));
  }
  if (rows.has_shared_memory()) {
    LOGPROBD_ASSIGN_OR_RETURN(
        const SharedMemorySlice slice,
        ParseSharedMemorySlice(BytesOf(rows.shared_memory().SerializeAsString())));
    return context_.same_host->Find(slice);
  }
  LOGPROBD_ASSIGN_OR_RETURN(const CudaIpcSlice slice,
                            ParseCudaIpcSlice(BytesOf(rows.cuda_ipc().SerializeAsString())));
  return context_.same_host->Find(slice);
}

absl::StatusOr<std::optional<PushedRows>> PushCall::NextPlaced() {
  {
    const absl::MutexLock lock(&mutex_);
    LOGPROBD_RETURN_IF_ERROR(CheckNotCancelled());
  }
  const v1::PushedRows& rows = parsed_.message.rows();
  const int64_t rows_left = static_cast<int64_t>(rows.rows()) - placed_->rows_read;
  const int64_t num_rows = std::min(rows_left, kDataBytesMax / placed_->row_bytes);
  const int64_t begin_bytes = placed_->rows_read * placed_->row_bytes;
  const auto num_bytes = static_cast<size_t>(num_rows * placed_->row_bytes);
  PushedRows range{.row_begin = static_cast<int64_t>(rows.row_begin()) + placed_->rows_read,
                   .num_rows = num_rows,
                   .is_bias = rows.is_bias(),
                   .pieces = {}};
  if (placed_->payload.place == PayloadPlace::kDevice) {
    staging_.resize(num_bytes);
    LOGPROBD_RETURN_IF_ERROR(
        context_.same_host->CopyToHost(placed_->payload, begin_bytes, absl::MakeSpan(staging_)));
    range.pieces = {staging_};
  } else {
    range.pieces = {
        placed_->payload.pieces[0].subspan(static_cast<size_t>(begin_bytes), num_bytes)};
  }
  placed_->rows_read += num_rows;
  return range;
}

}  // namespace logprobd
