#include "tests/support/transport_server.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/slice.h"
#include "server/base/errors.h"

namespace logprobd::testing {

GrpcServer::Options TestServerOptions() {
  GrpcServer::Options options;
  options.listen = "127.0.0.1:0";
  options.message_bytes_max = 1 << 20;
  options.receive_bytes_max = 64 << 20;
  options.version = "test";
  return options;
}

std::string TestAdminAddress() {
  return absl::StrCat("unix:", std::filesystem::temp_directory_path().string(), "/admin_", getpid(),
                      ".sock");
}

TransportServer::TransportServer(const GrpcServer::Options& options, HeadInfo head_info,
                                 bool with_head, const Clock& clock)
    : metrics(Metrics::Options{.heads = {"fake"}, .version = "test", .commit = "none"}),
      head(std::make_shared<FakeHead>(std::move(head_info))) {
  if (with_head) {
    registry.Add(head);
  }
  auto created = GrpcServer::Create(options, registry, metrics, clock);
  LOGPROBD_CHECK(created.ok(), created.status().ToString());
  server = *std::move(created);
  server->SetServing(true);
  channel = NewChannel();
  stub = v1::Scoring::NewStub(channel);
}

std::string TransportServer::address() const { return absl::StrCat("127.0.0.1:", server->port()); }

std::shared_ptr<grpc::Channel> TransportServer::NewChannel() const {
  grpc::ChannelArguments arguments;
  // Without this argument, channels to one address share a connection, and one test could break it
  // for another.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(-1);
  return grpc::CreateCustomChannel(address(), grpc::InsecureChannelCredentials(), arguments);
}

v1::ScoreRequest ValidRequest(uint32_t rows) {
  v1::ScoreRequest request;
  request.set_request_id("test");
  request.set_dtype(v1::DTYPE_BF16);
  request.set_rows(rows);
  request.set_hidden_size(8);
  std::vector<int32_t> targets(rows);
  std::iota(targets.begin(), targets.end(), 0);
  request.set_targets(BytesOf(targets));
  request.set_hidden(std::string(size_t{rows} * 16, '\x3F'));
  return request;
}

grpc::ByteBuffer BufferOf(absl::string_view bytes, size_t slice_bytes) {
  std::vector<grpc::Slice> slices;
  const size_t step = slice_bytes == 0 ? std::max<size_t>(bytes.size(), 1) : slice_bytes;
  for (size_t begin = 0; begin < bytes.size(); begin += step) {
    const absl::string_view piece = bytes.substr(begin, step);
    slices.emplace_back(piece.data(), piece.size());
  }
  return {slices.data(), slices.size()};
}

std::string StringOf(const grpc::ByteBuffer& buffer) {
  grpc::Slice slice;
  LOGPROBD_CHECK(buffer.DumpToSingleSlice(&slice).ok());
  return {reinterpret_cast<const char*>(slice.begin()), slice.size()};
}

grpc::Status CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                     const grpc::ByteBuffer& message, grpc::ByteBuffer& answer,
                     grpc::ClientContext& context) {
  grpc::GenericStub stub(channel);
  grpc::Status result;
  absl::Notification done;
  stub.UnaryCall(&context, method, grpc::StubOptions(), &message, &answer,
                 [&result, &done](grpc::Status status) {
                   result = std::move(status);
                   done.Notify();
                 });
  done.WaitForNotification();
  return result;
}

grpc::Status CallWithoutMessage(const std::shared_ptr<grpc::Channel>& channel,
                                const std::string& method) {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  grpc::Status status;
  const auto await = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
  };
  auto call = stub.PrepareCall(&context, method, &queue);
  call->StartCall(nullptr);
  await();
  call->WritesDone(nullptr);
  await();
  call->Finish(&status, nullptr);
  await();
  return status;
}

}  // namespace logprobd::testing
