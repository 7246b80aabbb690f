#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/base/served_head.h"

namespace logprobd::testing {

/// Describes a head with 8 hidden elements and 100 ids (104 weight rows) with small limits.
HeadInfo FakeHeadInfo();

/// Returns the answer of FakeHead: every requested output, with values that differ between rows and
/// outputs. logprob[r] = -(target + 1) / 8. With `trace`, the stages of StageTimes are 1 to 6 us
/// after `received`, in the order of its members, and the kernels take 1.5 us.
ScoreResult FakeScores(const ScoreRequest& request);

/// A ServedHead without a model. It answers within Submit, on the caller's thread, unless it is
/// held. Thread-safe.
class FakeHead final : public ServedHead {
 public:
  explicit FakeHead(HeadInfo info = FakeHeadInfo());
  ~FakeHead() override;

  std::shared_ptr<const HeadInfo> info() const override { return info_; }
  bool ready() const override;
  absl::StatusOr<RequestTicket> Submit(ScoreRequest request, ScoreCallback done) override;
  void Cancel(RequestTicket ticket) override;
  void Verify(const VerifyOptions& options, VerifyCallback done) override;

  void SetReady(bool ready);
  /// Makes Verify wait until FinishVerify.
  void HoldVerify();
  /// Blocks until a call of Verify waits.
  void WaitForVerify() const;
  /// Answers the waiting Verify with a report if `status` is OK, otherwise with `status`.
  void FinishVerify(const absl::Status& status);
  /// Makes requests wait until Release.
  void Hold();
  /// Answers the waiting requests, in reverse order if `reversed`, and answers later ones at once.
  void Release(bool reversed = false);
  /// Makes every Submit fail with `status`. If `status` is OK, Submit succeeds again.
  void RefuseWith(absl::Status status);
  /// Answers every request with `status`. If `status` is OK, requests get scores again.
  void AnswerWith(absl::Status status);

  /// Blocks until `count` requests have been submitted in total.
  void WaitForSubmitted(int64_t count) const;
  /// Blocks until `count` waiting requests have been cancelled.
  void WaitForCancelled(int64_t count) const;
  int64_t num_submitted() const;
  int64_t num_waiting() const;
  /// Returns the last submitted request, with its payload.
  ScoreRequest last_request() const;
  VerifyOptions last_verify() const;

 private:
  struct Waiting {
    RequestTicket ticket;
    ScoreRequest request;
    ScoreCallback done;
  };

  const std::shared_ptr<const HeadInfo> info_;
  mutable absl::Mutex mutex_;
  bool ready_ ABSL_GUARDED_BY(mutex_) = true;
  bool held_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);
  absl::Status answer_ ABSL_GUARDED_BY(mutex_);
  RequestTicket last_ticket_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t cancelled_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  ScoreRequest last_request_ ABSL_GUARDED_BY(mutex_);
  VerifyOptions last_verify_ ABSL_GUARDED_BY(mutex_);
  bool holds_verify_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<VerifyCallback> waiting_verify_ ABSL_GUARDED_BY(mutex_);
};

/// A HeadRegistry of given heads. Thread-safe.
class FakeRegistry final : public HeadRegistry {
 public:
  void Add(std::shared_ptr<ServedHead> head);

  absl::StatusOr<std::shared_ptr<ServedHead>> Find(absl::string_view name) const override;
  std::vector<std::shared_ptr<ServedHead>> List() const override;

 private:
  mutable absl::Mutex mutex_;
  std::vector<std::shared_ptr<ServedHead>> heads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd::testing
