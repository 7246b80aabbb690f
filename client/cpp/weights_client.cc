#include "client/cpp/weights_client.h"

#include <grpcpp/client_context.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/grpc_transport.h"
#include "client/cpp/secure_channel.h"
#include "logprobd/v1/weights.grpc.pb.h"

namespace logprobd::client {
namespace {

WeightsVersion FromProto(const v1::WeightsVersion& version) {
  return {.version = version.version(),
          .sha256 = version.sha256(),
          .source = version.source(),
          .loaded_unix_seconds = version.loaded_unix_seconds(),
          .weight_bytes = static_cast<int64_t>(version.weight_bytes()),
          .dtype = static_cast<Dtype>(version.dtype())};
}

HeadWeights FromProto(const v1::HeadWeightsState& state) {
  HeadWeights head;
  head.head = state.head();
  if (state.has_live()) head.live = FromProto(state.live());
  if (state.has_staged()) head.staged = FromProto(state.staged());
  if (state.has_previous()) head.previous = FromProto(state.previous());
  head.highest_version = state.highest_version();
  if (state.has_pushed()) {
    head.pushed = {.version = state.pushed().version(),
                   .rows = static_cast<int64_t>(state.pushed().rows()),
                   .vocab_rows = static_cast<int64_t>(state.pushed().vocab_rows())};
  }
  return head;
}

/// Returns the address that `--admin auto` gives a server of this user on the default port. A
/// socket of another user is not taken, since it could read the token.
std::string AutoAddress() {
  const std::string user = absl::StrCat(geteuid());
  std::vector<std::string> folders;
  if (const char* runtime = std::getenv("XDG_RUNTIME_DIR"); runtime != nullptr && *runtime != 0) {
    folders.emplace_back(runtime);
  }
  folders.push_back(absl::StrCat("/run/user/", user));
  folders.push_back(absl::StrCat("/tmp/logprobd-", user));
  std::string path;
  for (const std::string& folder : folders) {
    path = absl::StrCat(folder, "/logprobd-8470.sock.admin");
    struct stat file = {};
    if (lstat(path.c_str(), &file) == 0 && file.st_uid == geteuid()) break;
  }
  return absl::StrCat("unix:", path);
}

WeightsClient::Options WithAddress(WeightsClient::Options options) {
  if (options.address == "auto") options.address = AutoAddress();
  return options;
}

}  // namespace

struct WeightsClient::Impl {
  Impl(Options client_options, const ChannelSecurity& security)
      : options(WithAddress(std::move(client_options))),
        stub(v1::Weights::NewStub(
            OpenChannel(options.address, security, ChannelArgumentsForServers()))) {}

  /// Converts the status of a failed call and adds advice to its message.
  absl::Status ToStatus(const grpc::Status& status) const {
    std::string message = status.error_message();
    // gRPC's own error for a missing service has no message; the service's errors have one.
    if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED && message.empty()) {
      message = absl::StrCat("there is no Weights service at ", options.address,
                             ": use the address of logprobd --admin");
    } else if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
      const std::string hint = TlsHint(status.error_message());
      absl::StrAppend(
          &message, hint.empty()
                        ? absl::StrCat("; check that logprobd runs with --admin ", options.address)
                        : hint);
    }
    return {static_cast<absl::StatusCode>(status.error_code()), message};
  }

  /// Makes a call whose response contains the versions of one head.
  template <typename Method, typename Request>
  absl::StatusOr<HeadWeights> Change(Method method, const Request& request) {
    grpc::ClientContext context;
    context.set_deadline(GprDeadline(options.timeout));
    AddToken(options.token, context);
    v1::WeightsResponse response;
    const grpc::Status status = ((*stub).*method)(&context, request, &response);
    if (!status.ok()) return ToStatus(status);
    return FromProto(response.head());
  }

  const Options options;
  const std::unique_ptr<v1::Weights::Stub> stub;
};

absl::StatusOr<std::unique_ptr<WeightsClient>> WeightsClient::Create(const Options& options) {
  if (options.address.empty()) {
    return absl::InvalidArgumentError(
        "address is empty: it must be host:port, unix:///path or auto");
  }
  if (options.timeout <= absl::ZeroDuration() || options.load_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("timeout and load_timeout must be above 0");
  }
  const absl::StatusOr<ChannelSecurity> security = ReadTls(options.tls);
  if (!security.ok()) return security.status();
  return std::unique_ptr<WeightsClient>(
      new WeightsClient(std::make_unique<Impl>(options, *security)));
}

WeightsClient::WeightsClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

WeightsClient::~WeightsClient() = default;

absl::StatusOr<WeightsVersion> WeightsClient::Load(
    const LoadWeightsArgs& args, const std::function<bool(const LoadProgress&)>& progress) {
  v1::LoadWeightsRequest request;
  request.set_head(args.head);
  request.set_path(args.path);
  request.set_version(args.version);
  request.set_sha256(args.sha256);
  request.set_commit(args.commit);
  request.set_in_place(args.in_place);
  request.set_allow_nonfinite(args.allow_nonfinite);
  grpc::ClientContext context;
  context.set_deadline(GprDeadline(impl_->options.load_timeout));
  AddToken(impl_->options.token, context);
  const auto reader = impl_->stub->Load(&context, request);
  std::optional<WeightsVersion> done;
  v1::LoadWeightsProgress message;
  while (reader->Read(&message)) {
    if (message.has_done()) {
      done = FromProto(message.done());
    } else if (progress &&
               !progress({.phase = message.phase(),
                          .bytes_done = static_cast<int64_t>(message.bytes_done()),
                          .bytes_total = static_cast<int64_t>(message.bytes_total())})) {
      context.TryCancel();
    }
  }
  const grpc::Status status = reader->Finish();
  if (!status.ok()) return impl_->ToStatus(status);
  if (!done.has_value()) {
    return absl::InternalError("the server ended a load without sending its version");
  }
  return *std::move(done);
}

absl::StatusOr<HeadWeights> WeightsClient::Commit(const std::string& head, uint64_t version) {
  v1::CommitWeightsRequest request;
  request.set_head(head);
  request.set_version(version);
  return impl_->Change(&v1::Weights::Stub::Commit, request);
}

absl::StatusOr<HeadWeights> WeightsClient::Rollback(const std::string& head) {
  v1::RollbackWeightsRequest request;
  request.set_head(head);
  return impl_->Change(&v1::Weights::Stub::Rollback, request);
}

absl::StatusOr<HeadWeights> WeightsClient::Discard(const std::string& head, bool staged,
                                                   bool previous) {
  v1::DiscardWeightsRequest request;
  request.set_head(head);
  request.set_staged(staged);
  request.set_previous(previous);
  return impl_->Change(&v1::Weights::Stub::Discard, request);
}

absl::StatusOr<std::vector<HeadWeights>> WeightsClient::List(const std::string& head) {
  v1::ListWeightsRequest request;
  request.set_head(head);
  grpc::ClientContext context;
  context.set_deadline(GprDeadline(impl_->options.timeout));
  AddToken(impl_->options.token, context);
  v1::ListWeightsResponse response;
  const grpc::Status status = impl_->stub->List(&context, request, &response);
  if (!status.ok()) return impl_->ToStatus(status);
  std::vector<HeadWeights> heads;
  for (const v1::HeadWeightsState& state : response.heads()) heads.push_back(FromProto(state));
  return heads;
}

}  // namespace logprobd::client
