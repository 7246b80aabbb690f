#pragma once

#include <grpcpp/server.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "logprobd/v1/scoring.grpc.pb.h"
#include "tests/support/fake_control_socket.h"

namespace logprobd::testing {

/// A Scoring service whose scores are simple functions of what it was sent, so that a client's
/// cutting and joining shows: see ExpectedLogprob and fake_scoring_service.cc. Thread-safe.
class FakeScoringService final : public v1::Scoring::Service {
 public:
  /// One head, "fake", hidden 8, vocabulary 100, bf16, limits of 1,000 rows and 1 MiB.
  FakeScoringService();

  grpc::Status Score(grpc::ServerContext* context, const v1::ScoreRequest* request,
                     v1::ScoreResponse* response) override;
  /// Answers the chunks one after the other; a failure of FailNext is a chunk's own.
  grpc::Status ScoreStream(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::ScoreResponse, v1::ScoreRequest>* stream) override;
  grpc::Status ListHeads(grpc::ServerContext* context, const v1::ListHeadsRequest* request,
                         v1::ListHeadsResponse* response) override;
  grpc::Status Verify(grpc::ServerContext* context, const v1::VerifyRequest* request,
                      v1::VerifyResponse* response) override;

  /// The answer of ListHeads; set it before the first call.
  v1::ListHeadsResponse& heads() { return heads_; }
  /// The answer of Verify; set it before the first call.
  v1::VerifyResponse& verify() { return verify_; }

  /// Rows may lie in what `control` shares from now on.
  void Share(FakeControlSocket* control);

  /// The next Score or chunk fails with `status`, and this pushback if it is not empty. Calls queue
  /// up.
  void FailNext(grpc::Status status, absl::string_view pushback_ms = "");

  /// The version that answers and ListHeads name, 3 at first. A pinned other one is refused.
  void SetWeightsVersion(uint64_t version);
  uint64_t weights_version() const;

  /// Scores wait from now on, until Release() or until they are cancelled.
  void Hold();
  void Release();
  /// Returns when `count` requests are held.
  void WaitForHeld(int64_t count);

  /// What came, in order of arrival, failed attempts included; hidden kept.
  std::vector<v1::ScoreRequest> requests() const;
  /// Value of the client_id metadata of the latest Score.
  std::string client_id() const;
  int64_t held_max() const;
  /// ScoreStream calls begun.
  int64_t streams() const;

 private:
  struct Failure {
    grpc::Status status;
    std::string pushback_ms;
  };

  /// Notes the request, waits while holding, and answers. `pushback_ms` is set with a failure.
  grpc::Status Answer(grpc::ServerContext& context, const v1::ScoreRequest& request,
                      v1::ScoreResponse& response, std::string& pushback_ms);

  v1::ListHeadsResponse heads_;
  v1::VerifyResponse verify_;
  FakeControlSocket* control_ = nullptr;

  mutable absl::Mutex mutex_;
  std::deque<Failure> failures_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::ScoreRequest> requests_ ABSL_GUARDED_BY(mutex_);
  std::string client_id_ ABSL_GUARDED_BY(mutex_);
  uint64_t weights_version_ ABSL_GUARDED_BY(mutex_) = 3;
  bool is_holding_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t held_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t held_max_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t streams_ ABSL_GUARDED_BY(mutex_) = 0;
};

/// The logprob the fake gives to a row: of its hidden bytes and its target.
float FakeLogprob(const char* hidden, int64_t hidden_bytes, int32_t target);

/// The service on a loopback address, by default on a port of its own, with grpc.health.v1.
class FakeScoringServer {
 public:
  explicit FakeScoringServer(std::string host = "127.0.0.1", int port = 0);
  ~FakeScoringServer();

  FakeScoringService& service() { return service_; }
  std::string address() const;
  int port() const { return port_; }
  void SetServing(bool serving);
  /// Ends at once, cancelling what is in flight.
  void Stop();

  /// Opens a control socket for clients on this host; before the first call.
  FakeControlSocket& Share(FakeControlSocket::Options options = {});

 private:
  std::unique_ptr<FakeControlSocket> control_;
  FakeScoringService service_;
  const std::string host_;
  int port_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace logprobd::testing
