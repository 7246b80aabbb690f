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

namespace logprobd {

/// A request on its way, which its client may still cancel.
struct Submission {
  std::shared_ptr<ServedHead> head;
  RequestTicket ticket = 0;

  void Cancel() const { head->Cancel(ticket); }
};

/// The one path of a ScoreRequest, for unary calls and for the chunks of a stream:
/// parse -> find the head -> validate -> submit -> reply. Thread-safe.
class ScoreHandler {
 public:
  using ReplyCallback = absl::AnyInvocable<void(ScoreReply) &&>;

  /// References must outlive the handler. Without `local` requests must bring their rows.
  ScoreHandler(const HeadRegistry& heads, Metrics& metrics, const Clock& clock,
               const AnswerBudget::Options& answers = {}, const SameHostAccess* local = nullptr)
      : heads_(heads),
        metrics_(metrics),
        clock_(clock),
        answers_(answers),
        local_(local),
        error_lines_(kErrorLinesMax, kErrorLinesWindow, clock) {}

  /// Starts on a serialised ScoreRequest; never waits. `done` is called exactly once: before this
  /// returns when the request is refused, else on a thread of the server. What is returned has been
  /// submitted, and may already be done.
  std::optional<Submission> Start(const grpc::ByteBuffer& message, const CallInfo& facts,
                                  Metrics::Method method, ReplyCallback done);

  /// To be called when a reply has been sent (or its client is gone: then no bytes); `answered` is
  /// when `done` was called, `transport` what the reply said.
  void RecordReplied(absl::Time answered, int64_t sent_bytes, Metrics::Transport transport);

  /// From now on new requests are UNAVAILABLE.
  void RefuseNew() { refuses_new_.store(true, std::memory_order_relaxed); }
  bool refuses_new() const { return refuses_new_.load(std::memory_order_relaxed); }

  /// Thread-safe, as all of it.
  void SetAnswerLimits(const AnswerBudget::Options& answers) { answers_.SetLimits(answers); }

  const HeadRegistry& heads() const { return heads_; }
  const Clock& clock() const { return clock_; }
  Metrics& metrics() { return metrics_; }
  /// Requests, Verify included, whose answer is not sent yet; the reactors count.
  WorkCount& work() { return work_; }

 private:
  /// Log lines about internal errors: a lost GPU fails thousands of requests alike.
  static constexpr int64_t kErrorLinesMax = 20;
  static constexpr absl::Duration kErrorLinesWindow = absl::Seconds(10);

  struct Pending;

  absl::Status FindPayload(ScoreRequest& request) const;
  absl::StatusOr<Submission> Submit(ScoreRequest request, const std::shared_ptr<Pending>& pending);
  void Answer(Pending& pending, absl::StatusOr<ScoreResult> result);
  void LogFailure(const Pending& pending, const ScoreReply& reply);

  const HeadRegistry& heads_;
  Metrics& metrics_;
  const Clock& clock_;
  AnswerBudget answers_;
  const SameHostAccess* const local_;
  LogLimiter error_lines_;
  WorkCount work_;
  std::atomic<bool> refuses_new_ = false;
};

}  // namespace logprobd
