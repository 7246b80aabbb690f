#include "tests/bench/echo_server.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include "absl/strings/str_cat.h"

namespace logprobd::testing {
namespace {

class Answer final : public grpc::ServerGenericBidiReactor {
 public:
  Answer() { StartRead(&buffer_); }

  void OnReadDone(bool is_ok) override {
    if (!is_ok) {
      Finish(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "no message"));
      return;
    }
    const grpc::Slice slice(std::string(8, '\0'));
    buffer_ = grpc::ByteBuffer(&slice, 1);
    StartWriteAndFinish(&buffer_, {}, grpc::Status::OK);
  }

  void OnDone() override { delete this; }

 private:
  grpc::ByteBuffer buffer_;
};

class Service final : public grpc::CallbackGenericService {
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    return new Answer;
  }
};

}  // namespace

struct EchoServer::Impl {
  Service service;
  int port = 0;
  std::unique_ptr<grpc::Server> server;
};

EchoServer::EchoServer() : impl_(std::make_unique<Impl>()) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &impl_->port);
  builder.SetMaxReceiveMessageSize(-1);
  builder.RegisterCallbackGenericService(&impl_->service);
  impl_->server = builder.BuildAndStart();
}

EchoServer::~EchoServer() { impl_->server->Shutdown(); }

std::string EchoServer::address() const { return absl::StrCat("127.0.0.1:", impl_->port); }

}  // namespace logprobd::testing
