#pragma once

#include <grpcpp/server.h>

#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "logprobd/v1/scoring.grpc.pb.h"
#include "tests/support/fake_control_socket.h"

namespace logprobd::testing {

/// A Scoring service whose scores are simple functions of each row, so that tests detect mistakes
/// in splitting requests and joining answers; see FakeLogprob and fake_scoring_service.cc.
/// Thread-safe.
class FakeScoringService final : public v1::Scoring::Service {
 public:
  /// Serves one head, "fake": hidden size 8, vocabulary 100, bf16, limits of 1,000 rows and 1 MiB.
  FakeScoringService();

  grpc::Status Score(grpc::ServerContext* context, const v1::ScoreRequest* request,
                     v1::ScoreResponse* response) override;
  grpc::Status ListHeads(grpc::ServerContext* context, const v1::ListHeadsRequest* request,
                         v1::ListHeadsResponse* response) override;
  grpc::Status Verify(grpc::ServerContext* context, const v1::VerifyRequest* request,
                      v1::VerifyResponse* response) override;

  /// Returns the answer of ListHeads; change it only before the first call.
  v1::ListHeadsResponse& heads() { return heads_; }
  /// Returns the answer of Verify; change it only before the first call.
  v1::VerifyResponse& verify() { return verify_; }
  /// Makes Verify return INTERNAL once it has been answered `calls` times from now on.
  void FailVerifyAfter(int64_t calls);

  /// Accepts rows in the memory that `control` shares from now on.
  void Share(FakeControlSocket* control);

  /// Makes the next Score fail with `status`, and sends `pushback_ms` if it is not empty.
  /// Several calls make several requests fail in turn.
  void FailNext(grpc::Status status, absl::string_view pushback_ms = "");

  /// Sets the version in answers and in ListHeads; initially 3. Requests that pin another version
  /// fail.
  void SetWeightsVersion(uint64_t version);
  uint64_t weights_version() const;

  /// Holds Scores from now on, until Release() or until they are cancelled.
  void Hold();
  void Release();
  /// Returns when `count` requests are held.
  void WaitForHeld(int64_t count);

  /// All requests in order of arrival, including failed attempts, with their hidden states.
  std::vector<v1::ScoreRequest> requests() const;
  /// Value of the client_id metadata of the latest Score.
  std::string client_id() const;
  /// Value of the traceparent metadata of the latest Score; "" if it has none.
  std::string traceparent() const;
  /// Value of the authorization metadata of the latest Score; "" if it has none.
  std::string authorization() const;
  int64_t held_max() const;

 private:
  struct Failure {
    grpc::Status status;
    std::string pushback_ms;
  };

  /// Records the request, waits while scores are held, and answers. A failure sets `pushback_ms`.
  grpc::Status Answer(grpc::ServerContext& context, const v1::ScoreRequest& request,
                      v1::ScoreResponse& response, std::string& pushback_ms);

  v1::ListHeadsResponse heads_;
  v1::VerifyResponse verify_;
  FakeControlSocket* control_ = nullptr;

  mutable absl::Mutex mutex_;
  std::deque<Failure> failures_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::ScoreRequest> requests_ ABSL_GUARDED_BY(mutex_);
  std::string client_id_ ABSL_GUARDED_BY(mutex_);
  std::string traceparent_ ABSL_GUARDED_BY(mutex_);
  std::string authorization_ ABSL_GUARDED_BY(mutex_);
  uint64_t weights_version_ ABSL_GUARDED_BY(mutex_) = 3;
  bool is_holding_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t held_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t held_max_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t verify_calls_left_ ABSL_GUARDED_BY(mutex_) = std::numeric_limits<int64_t>::max();
};

/// Returns the fake's logprob of a row, a function of its hidden bytes and its target.
float FakeLogprob(const char* hidden, int64_t hidden_bytes, int32_t target);

/// A server of the service on a loopback address, by default on a free port, with grpc.health.v1.
class FakeScoringServer {
 public:
  explicit FakeScoringServer(std::string host = "127.0.0.1", int port = 0);
  ~FakeScoringServer();

  FakeScoringService& service() { return service_; }
  std::string address() const;
  int port() const { return port_; }
  void SetServing(bool serving);
  /// Stops at once and cancels requests in flight.
  void Stop();

  /// Opens a control socket for same-host clients. Call before the first request.
  FakeControlSocket& Share(FakeControlSocket::Options options = {});

 private:
  std::unique_ptr<FakeControlSocket> control_;
  FakeScoringService service_;
  const std::string host_;
  int port_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace logprobd::testing
