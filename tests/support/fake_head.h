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

/// A head of 8 hidden elements and 100 ids (104 rows of weight) with small limits.
HeadInfo FakeHeadInfo();

/// What FakeHead answers: every output asked for, with values that tell rows and outputs apart.
/// logprob[r] = -(target + 1) / 8.
ScoreResult FakeScores(const ScoreRequest& request);

/// A ServedHead without a model. Answers on the caller's thread, within Submit, unless held.
/// Thread-safe.
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
  /// Verify waits until FinishVerify.
  void HoldVerify();
  /// Blocks until a Verify waits.
  void WaitForVerify() const;
  /// Answers the Verify that waits: with its report, or with an error.
  void FinishVerify(const absl::Status& status);
  /// Requests wait until Release.
  void Hold();
  /// Answers what waits, last come first when `reversed`, and answers at once from now on.
  void Release(bool reversed = false);
  /// Every Submit fails with it; OK: no longer.
  void RefuseWith(absl::Status status);
  /// Every request is answered with it; OK: no longer.
  void AnswerWith(absl::Status status);

  /// Blocks until so many requests have been submitted in all.
  void WaitForSubmitted(int64_t count) const;
  /// Blocks until so many have been cancelled while they waited.
  void WaitForCancelled(int64_t count) const;
  int64_t num_submitted() const;
  int64_t num_waiting() const;
  /// The last one submitted, payload included.
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

/// Heads by name, as HeadRegistry promises.
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
