#include "client/cpp/server_messages.h"

#include <grpcpp/support/slice.h>

#include <string>

#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

grpc::ByteBuffer Body(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return {&slice, 1};
}

TEST(HealthTest, EncodesTheServiceAsFieldOne) {
  grpc::Slice slice;

  ASSERT_TRUE(EncodeHealthRequest("ab").DumpToSingleSlice(&slice).ok());

  EXPECT_EQ(std::string(slice.begin(), slice.end()),
            "\x0A\x02"
            "ab");
}

TEST(HealthTest, DistinguishesServingFromOtherStates) {
  EXPECT_EQ(*IsServing(Body("\x08\x01")), true);
  EXPECT_EQ(*IsServing(Body("\x08\x02")), false);
  EXPECT_EQ(*IsServing(Body("")), false);
  EXPECT_EQ(*IsServing(EncodeServing()), true);
}

TEST(HealthTest, RefusesMalformedMessages) {
  EXPECT_EQ(IsServing(Body("\x12\x01")).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(IsServing(Body("\x08\x01\x08\x01")).status().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace logprobd::client
