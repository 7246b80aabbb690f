#pragma once

#include <grpc/support/time.h>
#include <grpcpp/support/channel_arguments.h>

#include "absl/time/time.h"

namespace logprobd::client {

/// What all channels to a server are made with.
grpc::ChannelArguments ChannelArgumentsForServers();

/// `delay` from now, on gRPC's monotonic clock.
gpr_timespec GprDeadline(absl::Duration delay);

}  // namespace logprobd::client
