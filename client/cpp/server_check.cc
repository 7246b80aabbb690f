#include "client/cpp/server_check.h"

#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/policy.h"
#include "client/cpp/server_messages.h"

namespace logprobd::client {
namespace {

/// Returns OK if the health service's answer allows requests, otherwise UNAVAILABLE.
absl::Status Health(const RpcReply& reply) {
  // A server without a health service answers UNIMPLEMENTED and can be used.
  if (absl::IsUnimplemented(reply.status)) return absl::OkStatus();
  if (!reply.status.ok()) return absl::UnavailableError(ReasonOf(reply.status));
  const absl::StatusOr<bool> is_serving = IsServing(reply.body);
  if (!is_serving.ok()) return absl::UnavailableError(is_serving.status().message());
  if (*is_serving) return absl::OkStatus();
  return absl::UnavailableError("health says NOT_SERVING: the server is starting or stopping");
}

absl::StatusOr<ServerInfo> Heads(const RpcReply& reply) {
  if (!reply.status.ok()) return absl::UnavailableError(ReasonOf(reply.status));
  absl::StatusOr<ServerInfo> info = ParseListHeads(reply.body);
  if (!info.ok()) return absl::UnavailableError(info.status().message());
  if (info->heads.empty()) return absl::UnavailableError("it holds no head");
  return info;
}

class ServerCheck : public std::enable_shared_from_this<ServerCheck> {
 public:
  ServerCheck(RpcTransport& transport, std::string server, int32_t connections,
              ServerCheckDone done)
      : transport_(transport),
        server_(std::move(server)),
        scope_(transport.NewScope()),
        done_(std::move(done)),
        left_(connections) {}

  void Start(int32_t connections) {
    for (int32_t i = 0; i < connections; ++i) {
      Ask(kHealthMethod, EncodeHealthRequest(kScoringService),
          [self = shared_from_this()](const RpcReply& reply) { self->TakeHealth(reply); });
    }
  }

 private:
  void Ask(const char* method, const grpc::ByteBuffer& body, RpcDone done) {
    transport_.Call({.method = method,
                     .body = body,
                     .deadline = transport_.Now() + policy::kCheckTimeout,
                     .scope = scope_,
                     .server = server_},
                    std::move(done));
  }

  void TakeHealth(const RpcReply& reply) {
    absl::Status status;
    {
      const absl::MutexLock lock(&mutex_);
      status_.Update(Health(reply));
      if (--left_ > 0) return;
      status = status_;
    }
    if (!status.ok()) {
      std::move(done_)(status, {});
      return;
    }
    Ask(kListHeadsMethod, EncodeListHeads(), [self = shared_from_this()](const RpcReply& reply) {
      const absl::StatusOr<ServerInfo> info = Heads(reply);
      std::move(self->done_)(info, info.ok() ? reply.body : grpc::ByteBuffer());
    });
  }

  RpcTransport& transport_;
  const std::string server_;
  const std::shared_ptr<CancelScope> scope_;
  ServerCheckDone done_;

  absl::Mutex mutex_;
  int32_t left_ ABSL_GUARDED_BY(mutex_);  // health answers that are still outstanding
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::string ReasonOf(const absl::Status& status) {
  return absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message());
}

void StartServerCheck(RpcTransport& transport, const std::string& server, int32_t connections,
                      ServerCheckDone done) {
  std::make_shared<ServerCheck>(transport, server, connections, std::move(done))
      ->Start(connections);
}

}  // namespace logprobd::client
