#include "tests/support/fake_scoring_service.h"

#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace logprobd::testing {
namespace {

template <typename T>
std::vector<T> Decode(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

template <typename T>
void Append(T value, std::string* bytes) {
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(T));
}

void ScoreRow(const v1::ScoreRequest& request, size_t row, int32_t target, float temperature,
              v1::ScoreResponse* response) {
  const size_t row_bytes = request.hidden().size() / request.rows();
  const float logprob = FakeLogprob(request.hidden().data() + row * row_bytes,
                                    static_cast<int64_t>(row_bytes), target);
  const bool is_ignored = target == request.ignore_index();
  const uint32_t outputs = request.outputs();
  if (is_ignored) response->set_ignored_rows(response->ignored_rows() + 1);
  if ((outputs & 1) != 0) Append(is_ignored ? 0.0F : logprob, response->mutable_logprob());
  if ((outputs & 2) != 0) Append(-logprob / 2, response->mutable_entropy());
  if ((outputs & 4) != 0) Append(temperature, response->mutable_lse());
  if ((outputs & 8) != 0) {
    Append(target, response->mutable_argmax_id());
    Append(logprob / 4, response->mutable_argmax_logprob());
  }
  if ((outputs & 16) != 0) {
    Append(static_cast<uint8_t>(target % 2 == 0), response->mutable_greedy());
  }
  if ((outputs & 32) != 0) Append(0.5F, response->mutable_sum_p_squared());
  if ((outputs & 64) != 0) Append(1.0F, response->mutable_max_logit());
  if ((outputs & 128) != 0) Append(-1.0F, response->mutable_min_logit());
  if ((outputs & 256) != 0) Append(target / 2, response->mutable_target_rank());
  for (uint32_t k = 0; k < request.top_k(); ++k) {
    Append(target + static_cast<int32_t>(k), response->mutable_top_k_ids());
    Append(logprob - static_cast<float>(k), response->mutable_top_k_logprobs());
  }
}

void ScoreSegments(const v1::ScoreRequest& request, const std::vector<int32_t>& targets,
                   v1::ScoreResponse* response) {
  const auto offsets = Decode<uint32_t>(request.segment_offsets());
  const size_t row_bytes = request.rows() == 0 ? 0 : request.hidden().size() / request.rows();
  for (size_t segment = 0; segment + 1 < offsets.size(); ++segment) {
    double sum = 0;
    uint32_t rows = 0;
    bool greedy = true;
    for (size_t row = offsets[segment]; row < offsets[segment + 1]; ++row) {
      if (targets[row] == request.ignore_index()) continue;
      sum += static_cast<double>(FakeLogprob(request.hidden().data() + row * row_bytes,
                                             static_cast<int64_t>(row_bytes), targets[row]));
      greedy = greedy && targets[row] % 2 == 0;
      ++rows;
    }
    Append(sum, response->mutable_segment_logprob());
    Append(rows, response->mutable_segment_rows());
    Append(static_cast<uint8_t>(greedy), response->mutable_segment_greedy());
  }
}

}  // namespace

float FakeLogprob(const char* hidden, int64_t hidden_bytes, int32_t target) {
  uint32_t sum = 0;
  for (int64_t i = 0; i < hidden_bytes; ++i) {
    sum = sum * 31 + static_cast<unsigned char>(hidden[i]);
  }
  return -static_cast<float>(sum % 1000) - static_cast<float>(target) / 128;
}

FakeScoringService::FakeScoringService() {
  heads_.set_server_version("9.8.7");
  v1::Head& head = *heads_.add_heads();
  head.set_name("fake");
  head.set_model_type("fake_model");
  head.set_vocab_size(100);
  head.set_vocab_rows(128);
  head.set_hidden_size(8);
  head.set_dtype(v1::DTYPE_BF16);
  head.set_ready(true);
  head.set_tied(true);
  head.set_scale(1.0F);
  head.set_tensor("lm_head.weight");
  head.set_engine("fake/none");
  head.set_weight_bytes(2048);
  head.mutable_limits()->set_message_bytes_max(1 << 20);
  head.mutable_limits()->set_request_rows_max(1'000);
  head.mutable_limits()->set_top_k_max(16);
  head.mutable_limits()->set_candidates_max(10'000);
  head.mutable_limits()->set_segments_max(1'000);
  head.mutable_limits()->set_stream_window(8);
  head.add_transports("tcp");
  for (uint32_t shard = 0; shard < 2; ++shard) {
    v1::Shard& place = *head.add_layout();
    place.set_shard(shard);
    place.set_device(absl::StrCat("gpu", shard));
    place.set_vocab_begin(shard * 96);
    place.set_vocab_end(shard == 0 ? 96 : 100);
  }

  verify_.set_passed(true);
  verify_.set_rows(8);
  verify_.set_logprob_difference_max(1.5e-5);
  verify_.set_entropy_difference_max(2.5e-5);
  verify_.set_logprob_tolerance(1e-4);
  verify_.set_entropy_tolerance(2e-4);
  verify_.set_logit_stddev(3.0);
  verify_.set_weights_version(3);
  verify_.set_engine("fake/none");
  verify_.set_seconds(0.25);
}

grpc::Status FakeScoringService::Answer(grpc::ServerContext& context,
                                        const v1::ScoreRequest& received,
                                        v1::ScoreResponse& response, std::string& pushback_ms) {
  {
    absl::MutexLock lock(&mutex_);
    requests_.push_back(received);
    const auto metadata = [&](const char* key) {
      const auto found = context.client_metadata().find(key);
      return found == context.client_metadata().end()
                 ? ""
                 : std::string(found->second.data(), found->second.size());
    };
    client_id_ = metadata("client_id");
    traceparent_ = metadata("traceparent");
    authorization_ = metadata("authorization");
    if (!failures_.empty()) {
      Failure failure = std::move(failures_.front());
      failures_.pop_front();
      pushback_ms = failure.pushback_ms;
      return failure.status;
    }
    ++held_;
    held_max_ = std::max(held_max_, held_);
    // This gRPC API has no event for cancellation, so the loop polls for it.
    while (is_holding_ && !context.IsCancelled()) {
      mutex_.AwaitWithTimeout(absl::Condition(
                                  +[](bool* is_holding) { return !*is_holding; }, &is_holding_),
                              absl::Milliseconds(5));
    }
    --held_;
    if (context.IsCancelled()) return grpc::Status::CANCELLED;
  }
  if (const uint64_t live = weights_version();
      received.weights_version() != 0 && received.weights_version() != live) {
    return {grpc::StatusCode::FAILED_PRECONDITION,
            absl::StrCat("weights_version: ", received.weights_version(), " is not live; ", live,
                         " is live")};
  }
  v1::ScoreRequest request = received;
  if (control_ != nullptr) {
    if (grpc::Status status = control_->Fill(&request); !status.ok()) return status;
  }
  const auto targets = Decode<int32_t>(request.targets());
  const auto temperatures = Decode<float>(request.row_temperatures());
  response.set_request_id(request.request_id());
  response.set_rows(request.rows());
  response.set_weights_version(weights_version());
  response.mutable_timings()->set_total_us(10);
  if (request.trace()) {
    response.mutable_trace()->mutable_reply()->set_end_ns(request.rows());
  }
  for (size_t row = 0; row < request.rows(); ++row) {
    const float temperature = temperatures.empty() ? request.temperature() : temperatures[row];
    ScoreRow(request, row, targets[row], temperature, &response);
  }
  for (const int32_t id : Decode<int32_t>(request.candidate_ids())) {
    Append(-static_cast<float>(id), response.mutable_candidate_logprobs());
  }
  ScoreSegments(request, targets, &response);
  return grpc::Status::OK;
}

grpc::Status FakeScoringService::Score(grpc::ServerContext* context,
                                       const v1::ScoreRequest* request,
                                       v1::ScoreResponse* response) {
  std::string pushback_ms;
  grpc::Status status = Answer(*context, *request, *response, pushback_ms);
  if (!pushback_ms.empty()) context->AddTrailingMetadata("grpc-retry-pushback-ms", pushback_ms);
  return status;
}

grpc::Status FakeScoringService::ListHeads(grpc::ServerContext*, const v1::ListHeadsRequest*,
                                           v1::ListHeadsResponse* response) {
  *response = heads_;
  for (v1::Head& head : *response->mutable_heads()) head.set_weights_version(weights_version());
  return grpc::Status::OK;
}

grpc::Status FakeScoringService::Verify(grpc::ServerContext*, const v1::VerifyRequest*,
                                        v1::VerifyResponse* response) {
  absl::MutexLock lock(&mutex_);
  if (verify_calls_left_ == 0) return {grpc::StatusCode::INTERNAL, "the engine is lost"};
  --verify_calls_left_;
  *response = verify_;
  return grpc::Status::OK;
}

void FakeScoringService::FailVerifyAfter(int64_t calls) {
  absl::MutexLock lock(&mutex_);
  verify_calls_left_ = calls;
}

void FakeScoringService::Share(FakeControlSocket* control) {
  control_ = control;
  *heads_.mutable_local() = control->access();
}

void FakeScoringService::FailNext(grpc::Status status, absl::string_view pushback_ms) {
  absl::MutexLock lock(&mutex_);
  failures_.push_back({.status = std::move(status), .pushback_ms = std::string(pushback_ms)});
}

void FakeScoringService::SetWeightsVersion(uint64_t version) {
  absl::MutexLock lock(&mutex_);
  weights_version_ = version;
}

uint64_t FakeScoringService::weights_version() const {
  absl::MutexLock lock(&mutex_);
  return weights_version_;
}

void FakeScoringService::Hold() {
  absl::MutexLock lock(&mutex_);
  is_holding_ = true;
}

void FakeScoringService::Release() {
  absl::MutexLock lock(&mutex_);
  is_holding_ = false;
}

void FakeScoringService::WaitForHeld(int64_t count) {
  absl::MutexLock lock(&mutex_);
  const auto is_reached = [this, count]()
                              ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return held_ >= count; };
  mutex_.Await(absl::Condition(&is_reached));
}

std::vector<v1::ScoreRequest> FakeScoringService::requests() const {
  absl::MutexLock lock(&mutex_);
  return requests_;
}

std::string FakeScoringService::client_id() const {
  absl::MutexLock lock(&mutex_);
  return client_id_;
}

std::string FakeScoringService::traceparent() const {
  absl::MutexLock lock(&mutex_);
  return traceparent_;
}

std::string FakeScoringService::authorization() const {
  absl::MutexLock lock(&mutex_);
  return authorization_;
}

int64_t FakeScoringService::held_max() const {
  absl::MutexLock lock(&mutex_);
  return held_max_;
}

FakeScoringServer::FakeScoringServer(std::string host, int port)
    : host_(std::move(host)), port_(port) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address(), grpc::InsecureServerCredentials(), &port_);
  builder.SetMaxReceiveMessageSize(1 << 20);
  builder.RegisterService(&service_);
  server_ = builder.BuildAndStart();
  SetServing(true);
}

FakeScoringServer::~FakeScoringServer() {
  service_.Release();
  Stop();
}

void FakeScoringServer::Stop() { server_->Shutdown(std::chrono::system_clock::now()); }

std::string FakeScoringServer::address() const { return absl::StrCat(host_, ":", port_); }

FakeControlSocket& FakeScoringServer::Share(FakeControlSocket::Options options) {
  control_ = std::make_unique<FakeControlSocket>(std::move(options));
  service_.Share(control_.get());
  return *control_;
}

void FakeScoringServer::SetServing(bool serving) {
  server_->GetHealthCheckService()->SetServingStatus("logprobd.v1.Scoring", serving);
}

}  // namespace logprobd::testing
