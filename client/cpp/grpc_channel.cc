#include "client/cpp/grpc_channel.h"

#include <grpc/impl/codegen/grpc_types.h>

namespace logprobd::client {

grpc::ChannelArguments ChannelArgumentsForServers() {
  grpc::ChannelArguments args;
  // Retries are ours: gRPC's own buffer (256 KiB) is smaller than a request.
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // A proxy of the environment is meant for the web, not for a scoring service.
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // A peer that vanished or stopped reading is noticed, and the caller's memory released.
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  return args;
}

gpr_timespec GprDeadline(absl::Duration delay) {
  if (delay == absl::InfiniteDuration()) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_nanos(absl::ToInt64Nanoseconds(delay), GPR_TIMESPAN));
}

}  // namespace logprobd::client
