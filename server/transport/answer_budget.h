#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace logprobd {

/// Bounds the memory of responses that clients have not received yet, in total and for each client.
///
/// gRPC's quota covers only received messages, and the queue's limits cover a request only until it
/// is answered. Without this bound, clients that send requests and do not read would make the
/// server hold every response. The bytes of a response are taken before its request is queued, so
/// that no work is wasted. Thread-safe.
class AnswerBudget {
 public:
  struct Options {
    int64_t bytes_max = int64_t{1} << 30;
    /// Share of bytes_max that one client may hold, in (0, 1].
    double client_share_max = 0.5;
  };

  /// Bytes taken from the budget. The destructor returns them. The budget must outlive the hold.
  class Hold {
   public:
    Hold() = default;
    Hold(Hold&& other) noexcept { *this = std::move(other); }
    Hold& operator=(Hold&& other) noexcept {
      Release();
      budget_ = std::exchange(other.budget_, nullptr);
      client_id_ = std::move(other.client_id_);
      bytes_ = other.bytes_;
      return *this;
    }
    ~Hold() { Release(); }

    void Release();

   private:
    friend class AnswerBudget;
    AnswerBudget* budget_ = nullptr;
    std::string client_id_;
    int64_t bytes_ = 0;
  };

  explicit AnswerBudget(const Options& options);

  /// Sets the limits for later calls of Take. Bytes already taken stay taken.
  void SetLimits(const Options& options);

  /// Takes `bytes` for a response to `client_id`. Returns RESOURCE_EXHAUSTED while this client or
  /// all clients together hold too much, and INVALID_ARGUMENT if `bytes` is more than a client may
  /// ever hold. `client_share` is the client's share in (0, 1]; 0 means client_share_max. Errors
  /// carry their reason (RejectionOf).
  absl::StatusOr<Hold> Take(const std::string& client_id, int64_t bytes, double client_share = 0);

  int64_t held_bytes() const;

 private:
  void Release(const std::string& client_id, int64_t bytes);

  mutable absl::Mutex mutex_;
  int64_t bytes_max_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t client_bytes_max_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t held_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::string, int64_t> by_client_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd
