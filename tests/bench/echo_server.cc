#include "tests/bench/echo_server.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace logprobd::testing {
namespace {

/// Copies the pieces of a message into memory of this thread, which is kept.
void Copy(const grpc::ByteBuffer& message) {
  thread_local std::vector<uint8_t> memory;
  if (memory.size() < message.Length()) memory.resize(message.Length());
  std::vector<grpc::Slice> slices;
  if (!message.Dump(&slices).ok()) return;
  uint8_t* end = memory.data();
  for (const grpc::Slice& slice : slices) end = std::copy(slice.begin(), slice.end(), end);
}

class Answer final : public grpc::ServerGenericBidiReactor {
 public:
  explicit Answer(bool copies) : copies_(copies) { StartRead(&buffer_); }

  void OnReadDone(bool is_ok) override {
    if (!is_ok) {
      Finish(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "no message"));
      return;
    }
    if (copies_) Copy(buffer_);
    const grpc::Slice slice(std::string(8, '\0'));
    buffer_ = grpc::ByteBuffer(&slice, 1);
    StartWriteAndFinish(&buffer_, {}, grpc::Status::OK);
  }

  void OnDone() override { delete this; }

 private:
  const bool copies_;
  grpc::ByteBuffer buffer_;
};

class Service final : public grpc::CallbackGenericService {
 public:
  explicit Service(bool copies) : copies_(copies) {}

 private:
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    return new Answer(copies_);
  }

  const bool copies_;
};

}  // namespace

struct EchoServer::Impl {
  explicit Impl(bool copies) : service(copies) {}

  Service service;
  int port = 0;
  std::unique_ptr<grpc::Server> server;
};

EchoServer::EchoServer(bool copies) : impl_(std::make_unique<Impl>(copies)) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &impl_->port);
  builder.SetMaxReceiveMessageSize(-1);
  builder.RegisterCallbackGenericService(&impl_->service);
  impl_->server = builder.BuildAndStart();
}

EchoServer::~EchoServer() { impl_->server->Shutdown(); }

std::string EchoServer::address() const { return absl::StrCat("127.0.0.1:", impl_->port); }

}  // namespace logprobd::testing
