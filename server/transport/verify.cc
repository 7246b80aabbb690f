#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "logprobd/v1/scoring.pb.h"
#include "server/base/errors.h"
#include "server/transport/grpc_status.h"
#include "server/transport/info_calls.h"
#include "server/transport/proto_message.h"

namespace logprobd {
namespace {

constexpr uint32_t kProbeRowsMax = 64;

v1::VerifyResponse ToProto(const VerifyReport& report, const HeadInfo& info) {
  v1::VerifyResponse out;
  out.set_passed(report.passed);
  out.set_rows(static_cast<uint32_t>(report.rows));
  out.set_logprob_difference_max(report.logprob_difference_max);
  out.set_entropy_difference_max(report.entropy_difference_max);
  out.set_logprob_tolerance(report.logprob_tolerance);
  out.set_entropy_tolerance(report.entropy_tolerance);
  out.set_logit_stddev(report.logit_stddev);
  out.set_weights_version(info.weights_version);
  out.set_engine(info.engine);
  out.set_seconds(report.seconds);
  return out;
}

class VerifyCall final : public grpc::ServerUnaryReactor {
 public:
  VerifyCall(Metrics& metrics, const Clock& clock, grpc::CallbackServerContext& context,
             grpc::ByteBuffer& response)
      : metrics_(metrics),
        clock_(clock),
        context_(context),
        response_(response),
        received_(clock.Now()) {}

  void Start(const HeadRegistry& heads, const grpc::ByteBuffer& request) {
    if (const absl::Status status = Run(heads, request); !status.ok()) {
      Reply(status);
    }
  }

  void OnDone() override { delete this; }

 private:
  absl::Status Run(const HeadRegistry& heads, const grpc::ByteBuffer& request) {
    v1::VerifyRequest message;
    LOGPROBD_RETURN_IF_ERROR(ParseSmallMessage(request, message));
    if (message.rows() > kProbeRowsMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("rows: ", message.rows(), ", must be in [0, ", kProbeRowsMax, "]"));
    }
    LOGPROBD_ASSIGN_OR_RETURN(head_, heads.Find(message.head()));
    if (!head_->ready()) {
      return absl::UnavailableError(absl::StrCat("head \"", head_->info().name, "\" is not ready"));
    }
    VerifyOptions options;
    if (message.rows() != 0) {
      options.rows = static_cast<int32_t>(message.rows());
    }
    if (message.seed() != 0) {
      options.seed = message.seed();
    }
    head_->Verify(options, [this](absl::StatusOr<VerifyReport> report) {
      if (report.ok()) {
        response_ = SerializeMessage(ToProto(*report, head_->info()));
      }
      Reply(report.status());
    });
    return absl::OkStatus();
  }

  void Reply(const absl::Status& status) {
    metrics_.RecordRequest(Metrics::Method::kVerify, head_ == nullptr ? "" : head_->info().name,
                           status.code(), absl::ToDoubleSeconds(clock_.Now() - received_),
                           Metrics::Transport::kTcp);
    AddRetryHint(status, context_);
    Finish(ToGrpcStatus(status));
  }

  Metrics& metrics_;
  const Clock& clock_;
  grpc::CallbackServerContext& context_;
  grpc::ByteBuffer& response_;
  const absl::Time received_;
  std::shared_ptr<ServedHead> head_;
};

}  // namespace

grpc::ServerUnaryReactor* StartVerify(const HeadRegistry& heads, Metrics& metrics,
                                      const Clock& clock, grpc::CallbackServerContext& context,
                                      const grpc::ByteBuffer& request, grpc::ByteBuffer& response) {
  auto* call = new VerifyCall(metrics, clock, context, response);
  call->Start(heads, request);
  return call;
}

}  // namespace logprobd
