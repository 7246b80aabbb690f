#include "client/cpp/local_transport.h"

#include <unistd.h>

#include <algorithm>
#include <new>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace logprobd::client {
namespace {

// Alignment of rows that the server reads in place, in bytes.
constexpr int64_t kSharedAlignment = 64;
constexpr int64_t kDeviceAlignment = 16;

std::string UuidOf(const DeviceRows& rows) {
  return {rows.device_uuid.begin(), rows.device_uuid.end()};
}

std::string Join(const std::string& first, absl::string_view second) {
  if (first.empty() || first == second) return std::string(second);
  return absl::StrCat(first, "; ", second);
}

}  // namespace

bool IsPlacementRefusal(const absl::Status& status) {
  if (status.ok() || status.code() == absl::StatusCode::kUnavailable ||
      status.code() == absl::StatusCode::kDeadlineExceeded ||
      status.code() == absl::StatusCode::kCancelled) {
    return false;
  }
  // Words in the server's messages when it refuses the memory that holds the rows.
  for (const absl::string_view word : {"shared_memory", "cuda_ipc", " region", " lease"}) {
    if (absl::StrContains(status.message(), word)) return true;
  }
  return false;
}

LocalTransport::LocalTransport(Options options)
    : options_(std::move(options)), pid_(getpid()), last_(options_.inline_transport) {}

LocalTransport::~LocalTransport() { Close(); }

void LocalTransport::Offer(std::optional<LocalAccess> access) {
  const absl::MutexLock lock(&mutex_);
  access_ = std::move(access);
}

absl::StatusOr<Placement> LocalTransport::Place(const ScoreArgs& args, const Chunk& chunk) {
  Placement inline_rows = {.transport = options_.inline_transport};
  if (chunk.rows() * args.hidden_size == 0) return inline_rows;
  const bool is_here = !args.hidden.empty();
  const TransportChoice choice = options_.choice;
  if (choice == TransportChoice::kTcp) inline_rows.reason = options_.tcp_reason;
  if (choice == TransportChoice::kCudaIpc && !args.device_rows.has_value()) {
    return absl::InvalidArgumentError("transport is cuda-ipc, but device_rows is not given");
  }
  if (args.device_rows.has_value() &&
      (choice == TransportChoice::kAuto || choice == TransportChoice::kCudaIpc)) {
    absl::StatusOr<Placement> placed = PlaceOnDevice(args, chunk);
    if (placed.ok()) return placed;
    inline_rows.reason = std::string(placed.status().message());
  }
  if (is_here && (choice == TransportChoice::kAuto || choice == TransportChoice::kSharedMemory)) {
    absl::StatusOr<Placement> placed = PlaceInRegion(args, chunk);
    if (placed.ok()) {
      placed->reason = inline_rows.reason;
      return placed;
    }
    inline_rows.reason = Join(inline_rows.reason, placed.status().message());
  }
  const bool may_be_inline = choice == TransportChoice::kAuto || choice == TransportChoice::kTcp;
  if (!is_here && choice != TransportChoice::kCudaIpc) {
    return absl::InvalidArgumentError(absl::StrCat("device_rows cannot be scored where they are (",
                                                   inline_rows.reason,
                                                   "): give the rows as hidden too"));
  }
  if (!may_be_inline) return TransportUnavailable(inline_rows.reason);
  return inline_rows;
}

absl::StatusOr<Placement> LocalTransport::PlaceOnDevice(const ScoreArgs& args, const Chunk& chunk) {
  const int64_t row_bytes = args.hidden_size * DtypeBytes(args.dtype);
  DeviceRows rows = *args.device_rows;
  rows.offset += chunk.row_begin * row_bytes;
  rows.bytes = chunk.rows() * row_bytes;
  if (rows.offset % kDeviceAlignment != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the rows of device_rows begin at byte ", rows.offset,
                     " of their allocation, must begin at a multiple of 16"));
  }
  absl::StatusOr<Shared> shared = Connected();
  if (!shared.ok()) return shared.status();
  if (!shared->lease->grant().cuda_ipc) {
    return absl::FailedPreconditionError("the server does not read GPU memory of other processes");
  }
  {
    const absl::MutexLock lock(&mutex_);
    const auto off = disabled_devices_.find(UuidOf(rows));
    if (off != disabled_devices_.end() && options_.now() < off->second.until) {
      return absl::FailedPreconditionError(off->second.reason);
    }
  }
  return Placement{.transport = Transport::kCudaIpc, .device = rows, .lease = shared->lease};
}

absl::StatusOr<Placement> LocalTransport::PlaceInRegion(const ScoreArgs& args, const Chunk& chunk) {
  const auto row_bytes = static_cast<size_t>(args.hidden_size * DtypeBytes(args.dtype));
  const absl::Span<const std::byte> hidden =
      args.hidden.subspan(static_cast<size_t>(chunk.row_begin) * row_bytes,
                          static_cast<size_t>(chunk.rows()) * row_bytes);
  std::shared_ptr<RegionPool> pool;
  {
    const absl::MutexLock lock(&mutex_);
    if (shared_.has_value()) pool = shared_->pool;
  }
  std::optional<SharedSpan> here;
  if (pool != nullptr) here = pool->Find(hidden);
  if (!here.has_value() && static_cast<int64_t>(hidden.size()) < kInlineBytes &&
      options_.choice == TransportChoice::kAuto) {
    return absl::FailedPreconditionError(absl::StrCat(
        "for ", hidden.size(), " bytes, sending the rows inside the request is faster"));
  }
  absl::StatusOr<Shared> shared = WithSharedMemory();
  if (!shared.ok()) return shared.status();
  Placement placement = {.transport = Transport::kSharedMemory, .lease = shared->lease};
  if (here.has_value() && shared->pool == pool && here->offset % kSharedAlignment == 0) {
    placement.shared = *std::move(here);
    return placement;
  }
  absl::StatusOr<std::shared_ptr<const SharedSpan>> slot =
      shared->pool->Allocate(static_cast<int64_t>(hidden.size()));
  if (!slot.ok()) return slot.status();
  copies().Copy(hidden, (*slot)->memory());
  placement.shared = **slot;
  placement.slot = *std::move(slot);
  return placement;
}

bool LocalTransport::Refused(const Placement& placement, const absl::Status& status) {
  if (placement.lease == nullptr || !IsPlacementRefusal(status)) return false;
  const absl::MutexLock lock(&mutex_);
  // The lease was lost meanwhile; the next placement has another lease.
  if (!shared_.has_value() || shared_->lease != placement.lease) return true;
  if (placement.device.has_value() && !absl::StrContains(status.message(), " lease")) {
    if (options_.choice != TransportChoice::kAuto) return false;
    // FAILED_PRECONDITION means that the server can never read this GPU. Other errors may concern
    // this memory only.
    const bool is_lasting = absl::IsFailedPrecondition(status);
    disabled_devices_[UuidOf(*placement.device)] = {
        .reason = std::string(status.message()),
        .until = is_lasting ? absl::InfiniteFuture() : options_.now() + kRetryAfter};
    return true;
  }
  return DropLease(status);
}

absl::Status LocalTransport::ErrorOf(const Placement& placement, const absl::Status& status) const {
  const bool is_unavailable = placement.lease != nullptr && absl::IsFailedPrecondition(status) &&
                              IsPlacementRefusal(status);
  return is_unavailable ? TransportUnavailable(std::string(status.message())) : status;
}

absl::StatusOr<RowBuffer> LocalTransport::AllocateRows(int64_t bytes) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("bytes is ", bytes, ", must be >= 0"));
  }
  const TransportChoice choice = options_.choice;
  if (bytes > 0 && choice != TransportChoice::kTcp) {
    absl::Status status;
    if (absl::StatusOr<Shared> shared = WithSharedMemory(); shared.ok()) {
      if (auto span = shared->pool->Allocate(bytes); span.ok()) {
        const absl::Span<std::byte> memory = (*span)->memory();
        auto owner = std::const_pointer_cast<SharedSpan>(*std::move(span));
        return RowBuffer(std::move(owner), memory, /*is_shared=*/true);
      } else {
        status = span.status();
      }
    } else {
      status = shared.status();
    }
    if (choice == TransportChoice::kSharedMemory) {
      return TransportUnavailable(std::string(status.message()));
    }
  }
  const auto size = static_cast<size_t>(bytes);
  std::shared_ptr<std::byte> memory(new (std::nothrow) std::byte[size],
                                    std::default_delete<std::byte[]>());
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot allocate ", bytes, " bytes for rows"));
  }
  const absl::Span<std::byte> span(memory.get(), size);
  return RowBuffer(std::move(memory), span, /*is_shared=*/false);
}

void LocalTransport::Used(Transport transport, std::string reason) {
  const absl::MutexLock lock(&mutex_);
  last_ = transport;
  last_reason_ = std::move(reason);
}

Transport LocalTransport::last() const {
  const absl::MutexLock lock(&mutex_);
  return last_;
}

std::string LocalTransport::last_reason() const {
  const absl::MutexLock lock(&mutex_);
  return last_reason_;
}

void LocalTransport::Close() {
  const absl::MutexLock lock(&mutex_);
  if (pid_ != getpid()) ForgetAfterFork();
  if (shared_.has_value()) shared_->lease->Close();
  shared_.reset();
  is_closed_ = true;
}

absl::StatusOr<LocalTransport::Shared> LocalTransport::Connected() {
  const absl::MutexLock lock(&mutex_);
  if (pid_ != getpid()) ForgetAfterFork();
  if (shared_.has_value() && !shared_->lease->IsAlive()) {
    DropLease(absl::UnavailableError("the server ended the lease"));
  }
  if (!shared_.has_value()) {
    absl::StatusOr<Shared> shared = Connect();
    if (!shared.ok()) return shared.status();
    shared_ = *std::move(shared);
  }
  return *shared_;
}

absl::StatusOr<LocalTransport::Shared> LocalTransport::WithSharedMemory() {
  absl::StatusOr<Shared> shared = Connected();
  if (shared.ok() && !shared->lease->grant().shared_memory) {
    return absl::FailedPreconditionError("the server shares no memory");
  }
  return shared;
}

absl::StatusOr<LocalTransport::Shared> LocalTransport::Connect() {
  if (is_closed_) return absl::CancelledError("the client is shutting down");
  if (!access_.has_value()) {
    return absl::FailedPreconditionError("the server has no control socket");
  }
  if (options_.choice == TransportChoice::kAuto && options_.now() < retry_at_) return failure_;
  absl::StatusOr<std::shared_ptr<LocalLease>> lease =
      LocalLease::Connect(*access_, options_.client_id);
  if (!lease.ok()) {
    failure_ = lease.status();
    retry_at_ = options_.now() + kRetryAfter;
    return failure_;
  }
  return Shared{.lease = *lease,
                .pool = std::make_shared<RegionPool>(*lease, options_.region_bytes)};
}

bool LocalTransport::DropLease(const absl::Status& reason) {
  if (shared_.has_value()) shared_->lease->Close();
  shared_.reset();
  disabled_devices_.clear();
  const absl::Time now = options_.now();
  const bool lately = now - lost_at_ < kRetryAfter;
  lost_at_ = now;
  if (lately) {
    failure_ = reason;
    retry_at_ = now + kRetryAfter;
  }
  return !lately || options_.choice == TransportChoice::kAuto;
}

void LocalTransport::ForgetAfterFork() {
  pid_ = getpid();
  // This closes only the child's descriptor: the parent keeps the lease.
  if (shared_.has_value()) shared_->lease->Close();
  shared_.reset();
  // The pool's threads exist only in the parent; joining them here would never return.
  static_cast<void>(copies_.release());
}

absl::Status LocalTransport::TransportUnavailable(const std::string& reason) const {
  const bool is_device = options_.choice == TransportChoice::kCudaIpc;
  return absl::UnavailableError(absl::StrCat("transport is ", is_device ? "cuda-ipc" : "shm",
                                             ", which is not available at ", options_.address, ": ",
                                             reason));
}

CopyPool& LocalTransport::copies() {
  const absl::MutexLock lock(&mutex_);
  if (copies_ == nullptr) {
    const auto others = static_cast<int>(std::thread::hardware_concurrency()) - 1;
    copies_ = std::make_unique<CopyPool>(std::clamp(others, 0, options_.copy_threads));
  }
  return *copies_;
}

}  // namespace logprobd::client
