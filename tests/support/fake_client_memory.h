#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/base/client_memory.h"

namespace logprobd::testing {

/// Counts pinned bytes. Thread-safe.
class FakePinning final : public HostPinning {
 public:
  absl::Status Pin(absl::Span<std::byte> memory) override {
    const absl::MutexLock lock(&mutex_, absl::Condition(&is_released_));
    if (!failure_.ok()) {
      return failure_;
    }
    pinned_bytes_ += static_cast<int64_t>(memory.size());
    return absl::OkStatus();
  }
  void Unpin(absl::Span<std::byte> memory) override {
    const absl::MutexLock lock(&mutex_);
    pinned_bytes_ -= static_cast<int64_t>(memory.size());
  }
  bool pins() const override { return true; }

  void FailWith(absl::Status status) {
    const absl::MutexLock lock(&mutex_);
    failure_ = std::move(status);
  }
  /// Makes Pin wait until Release.
  void Hold() {
    const absl::MutexLock lock(&mutex_);
    is_released_ = false;
  }
  void Release() {
    const absl::MutexLock lock(&mutex_);
    is_released_ = true;
  }
  int64_t pinned_bytes() const {
    const absl::MutexLock lock(&mutex_);
    return pinned_bytes_;
  }
  /// Blocks until exactly `bytes` bytes are pinned.
  void WaitForPinned(int64_t bytes) const {
    const auto is_so = [&]()
                           ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return pinned_bytes_ == bytes; };
    const absl::MutexLock lock(&mutex_, absl::Condition(&is_so));
  }

 private:
  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  int64_t pinned_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_released_ ABSL_GUARDED_BY(mutex_) = true;
};

/// Fakes GPU memory with memory of this process. A handle of 64 equal bytes names an allocation of
/// `bytes` bytes that is filled with that byte; other handles are unknown. Not thread-safe.
class FakeDeviceMemory final : public DeviceMemory {
 public:
  explicit FakeDeviceMemory(size_t bytes) : bytes_(bytes) {}

  absl::StatusOr<HiddenPayload> Open(const DeviceSlice& slice) override {
    opened_.push_back(slice);
    for (const uint8_t byte : slice.handle) {
      if (byte != slice.handle.front()) {
        return absl::InvalidArgumentError(
            "cuda_ipc.handle: the handle names no memory of another process");
      }
    }
    auto memory = std::make_shared<std::vector<std::byte>>(
        bytes_, static_cast<std::byte>(slice.handle.front()));
    if (slice.offset + slice.bytes > static_cast<int64_t>(bytes_)) {
      return absl::InvalidArgumentError(absl::StrCat("cuda_ipc: beyond ", bytes_));
    }
    HiddenPayload payload;
    payload.pieces = {absl::MakeConstSpan(*memory).subspan(static_cast<size_t>(slice.offset),
                                                           static_cast<size_t>(slice.bytes))};
    payload.bytes = slice.bytes;
    payload.place = PayloadPlace::kDevice;
    payload.gpu = 0;
    last_opened_ = memory;
    payload.owner = std::move(memory);
    return payload;
  }
  absl::Status CopyToHost(const HiddenPayload& slice, int64_t offset,
                          absl::Span<std::byte> out) override {
    const auto from = slice.pieces[0].subspan(static_cast<size_t>(offset), out.size());
    std::copy(from.begin(), from.end(), out.begin());
    return absl::OkStatus();
  }
  int64_t num_mappings() const override { return 0; }

  const std::vector<DeviceSlice>& opened() const { return opened_; }
  /// Returns whether anybody holds the slice that was opened last.
  bool is_in_use() const { return !last_opened_.expired(); }

 private:
  const size_t bytes_;
  std::weak_ptr<const std::vector<std::byte>> last_opened_;
  std::vector<DeviceSlice> opened_;
};

}  // namespace logprobd::testing
