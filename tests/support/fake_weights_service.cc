#include "tests/support/fake_weights_service.h"

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <chrono>
#include <thread>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/text_format.h"

namespace logprobd::testing {

void FakeWeightsService::Record(const std::string& method,
                                const google::protobuf::Message& request) {
  // Newer versions of Protobuf change what DebugString writes from run to run.
  google::protobuf::TextFormat::Printer printer;
  printer.SetSingleLineMode(true);
  std::string text;
  (void)printer.PrintToString(request, &text);
  absl::StripTrailingAsciiWhitespace(&text);
  absl::MutexLock lock(&mutex_);
  calls_.push_back(text.empty() ? method : absl::StrCat(method, " ", text));
}

grpc::Status FakeWeightsService::Load(grpc::ServerContext* context,
                                      const v1::LoadWeightsRequest* request,
                                      grpc::ServerWriter<v1::LoadWeightsProgress>* writer) {
  Record("Load", *request);
  for (const v1::LoadWeightsProgress& message : progress_) writer->Write(message);
  while (holds_loads_ && !context->IsCancelled()) std::this_thread::yield();
  absl::MutexLock lock(&mutex_);
  is_cancelled_ = context->IsCancelled();
  return status_;
}

grpc::Status FakeWeightsService::Commit(grpc::ServerContext* /*context*/,
                                        const v1::CommitWeightsRequest* request,
                                        v1::WeightsResponse* response) {
  Record("Commit", *request);
  *response->mutable_head() = state_;
  return status_;
}

grpc::Status FakeWeightsService::Rollback(grpc::ServerContext* /*context*/,
                                          const v1::RollbackWeightsRequest* request,
                                          v1::WeightsResponse* response) {
  Record("Rollback", *request);
  *response->mutable_head() = state_;
  return status_;
}

grpc::Status FakeWeightsService::Discard(grpc::ServerContext* /*context*/,
                                         const v1::DiscardWeightsRequest* request,
                                         v1::WeightsResponse* response) {
  Record("Discard", *request);
  *response->mutable_head() = state_;
  return status_;
}

grpc::Status FakeWeightsService::List(grpc::ServerContext* /*context*/,
                                      const v1::ListWeightsRequest* request,
                                      v1::ListWeightsResponse* response) {
  Record("List", *request);
  *response->add_heads() = state_;
  return status_;
}

std::vector<std::string> FakeWeightsService::calls() const {
  absl::MutexLock lock(&mutex_);
  return calls_;
}

void FakeWeightsService::WaitForCancelled() {
  absl::MutexLock lock(&mutex_, absl::Condition(&is_cancelled_));
}

FakeWeightsServer::FakeWeightsServer() {
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
  builder.RegisterService(&service_);
  server_ = builder.BuildAndStart();
}

FakeWeightsServer::~FakeWeightsServer() { server_->Shutdown(std::chrono::system_clock::now()); }

std::string FakeWeightsServer::address() const { return absl::StrCat("127.0.0.1:", port_); }

}  // namespace logprobd::testing
