#include "server/app/local_sharing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace logprobd {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

TEST(LocalSharingTest, PinsNothingOnACpuAndHasNoGpusMemory) {
  Metrics metrics({});
  ServerOptions options;

  const auto sharing = CreateLocalSharing(options, ServerPlan(), metrics);

  ASSERT_TRUE(sharing.ok()) << sharing.status();
  EXPECT_FALSE(sharing->pinning->pins());
  EXPECT_EQ(sharing->devices, nullptr);
  options.cuda_ipc = true;
  const absl::Status refusal = CreateLocalSharing(options, ServerPlan(), metrics).status();
  EXPECT_EQ(refusal.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refusal.message()), HasSubstr("--cuda-ipc"));
}

TEST(LocalSharingTest, GivesALeaseAClientsShare) {
  ServerOptions options;
  options.local = "/run/logprobd.sock";
  options.shared_memory_bytes = 1'000'000;
  options.region_bytes = 5'000;
  options.client_share = 0.25;
  const LocalSharing sharing;
  GrpcServer::Options grpc;

  SetLocalOptions(options, sharing, grpc);

  EXPECT_EQ(grpc.local, "/run/logprobd.sock");
  EXPECT_FALSE(grpc.unix_socket_is_optional);
  EXPECT_EQ(grpc.shared_memory.bytes_max, 1'000'000);
  EXPECT_EQ(grpc.shared_memory.lease_bytes_max, 250'000);
  EXPECT_EQ(grpc.shared_memory.region_bytes_max, 5'000);
  EXPECT_EQ(grpc.pinning, sharing.pinning.get());
  EXPECT_EQ(SharedMemoryBytesMax(options), 1'000'000);
}

TEST(LocalSharingTest, FindsAPlaceForTheSocketsItself) {
  ServerOptions options;
  options.listen = "127.0.0.1:8499";
  GrpcServer::Options grpc;

  SetLocalOptions(options, LocalSharing(), grpc);

  EXPECT_THAT(grpc.local, EndsWith("/logprobd-8499.sock"));
  EXPECT_TRUE(grpc.unix_socket_is_optional);
}

TEST(LocalSharingTest, PlansNoMemoryWithoutASocket) {
  ServerOptions options;
  options.local = "";

  EXPECT_EQ(SharedMemoryBytesMax(options), 0);
}

}  // namespace
}  // namespace logprobd
