#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/base/clock.h"
#include "server/base/log.h"
#include "server/base/served_head.h"
#include "server/metrics/metrics.h"
#include "server/transport/answer_budget.h"
#include "server/transport/call_info.h"
#include "server/transport/response_encoder.h"
#include "server/transport/same_host_access.h"
#include "server/transport/unread_answers.h"

namespace logprobd {

/// A submitted request, which its client can still cancel.
struct Submission {
  std::shared_ptr<ServedHead> head;
  RequestTicket ticket = 0;

  void Cancel() const { head->Cancel(ticket); }
};

/// Handles the ScoreRequest of a unary call or of a chunk of a stream: parse -> find the head ->
/// validate -> submit -> reply. Thread-safe.
class ScoreHandler {
 public:
  using ReplyCallback = absl::AnyInvocable<void(ScoreReply) &&>;

  /// References must outlive the handler. If `same_host` is null, every request must have its rows
  /// in its message. If `access` is null, callers need no tokens.
  ScoreHandler(const HeadRegistry& heads, Metrics& metrics, const Clock& clock,
               const AnswerBudget::Options& answers = {}, const SameHostAccess* same_host = nullptr,
               const AccessList* access = nullptr)
      : heads_(heads),
        metrics_(metrics),
        clock_(clock),
        answers_(answers),
        same_host_(same_host),
        access_(access),
        error_lines_(clock),
        unread_(clock) {}

  /// Handles a serialised ScoreRequest without waiting. `done` is called exactly once: before Start
  /// returns if the request is refused, otherwise on a thread of the server. Returns the submitted
  /// request, which may already be done, or nullopt if it was refused.
  std::optional<Submission> Start(const grpc::ByteBuffer& message, const CallInfo& call,
                                  Metrics::Method method, ReplyCallback done);

  /// Records that a reply was sent. `answered` is the time when `done` was called, `transport` is
  /// the transport of the reply, and `sent_bytes` is 0 if the client was gone.
  void RecordReplied(absl::Time answered, int64_t sent_bytes, Metrics::Transport transport);

  /// Refuses later requests with UNAVAILABLE.
  void RefuseNew() { refuses_new_.store(true, std::memory_order_relaxed); }
  bool refuses_new() const { return refuses_new_.load(std::memory_order_relaxed); }

  /// Sets the limits of the responses that clients have not received.
  void SetAnswerLimits(const AnswerBudget::Options& answers) { answers_.SetLimits(answers); }

  const HeadRegistry& heads() const { return heads_; }
  const AccessList* access() const { return access_; }
  const Clock& clock() const { return clock_; }
  Metrics& metrics() { return metrics_; }
  /// Returns the count of requests, including Verify, whose responses have not been sent. The
  /// reactors update it.
  WorkCount& work() { return work_; }
  /// Returns the responses that are being sent. The reactors update it.
  UnreadAnswers& unread() { return unread_; }

 private:
  struct Pending;

  /// If a validated request has a slice, sets its `hidden` to the slice, which also releases its
  /// message.
  absl::Status FindPayload(ScoreRequest& request) const;
  absl::StatusOr<Submission> Submit(ScoreRequest request, const std::shared_ptr<Pending>& pending);
  void Answer(Pending& pending, absl::StatusOr<ScoreResult> result);
  void LogFailure(const Pending& pending, const ScoreReply& reply);

  const HeadRegistry& heads_;
  Metrics& metrics_;
  const Clock& clock_;
  AnswerBudget answers_;
  const SameHostAccess* const same_host_;
  const AccessList* const access_;
  LogLimiter error_lines_;  ///< A lost GPU makes thousands of requests fail.
  WorkCount work_;
  UnreadAnswers unread_;
  std::atomic<bool> refuses_new_ = false;
};

}  // namespace logprobd
