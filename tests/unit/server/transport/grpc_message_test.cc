#include "server/transport/grpc_message.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "google/protobuf/wrappers.pb.h"
#include "gtest/gtest.h"
#include "tests/support/transport_server.h"

namespace logprobd::testing {
namespace {

using Text = google::protobuf::StringValue;

TEST(GrpcMessageTest, ACallWithoutAMessageHasNoSlices) {
  const PayloadSlices slices = SlicesOf(grpc::ByteBuffer());

  EXPECT_EQ(slices.bytes, 0);
  EXPECT_TRUE(slices.pieces.empty());
}

TEST(GrpcMessageTest, ParsesMessagesUpToItsLimit) {
  // The tag and the length of the text take four bytes.
  const auto parse = [](size_t bytes) {
    Text written;
    written.set_value(std::string(bytes - 4, 'x'));
    Text read;
    const absl::Status status =
        ParseSmallMessage(BufferOf(written.SerializeAsString(), 1'000), read);
    EXPECT_EQ(status.ok(), read.value().size() == bytes - 4);
    return status;
  };

  EXPECT_TRUE(parse(kSmallMessageBytesMax).ok());
  EXPECT_EQ(parse(kSmallMessageBytesMax + 1),
            absl::InvalidArgumentError(
                "google.protobuf.StringValue: 65537 bytes, must be at most 65536"));
}

TEST(GrpcMessageTest, SaysWhatIsWrongWithAMessage) {
  Text read;

  EXPECT_EQ(ParseSmallMessage(grpc::ByteBuffer(), read),
            absl::InvalidArgumentError("google.protobuf.StringValue: the call has no message"));
  EXPECT_EQ(ParseSmallMessage(BufferOf("\xFF\xFF"), read),
            absl::InvalidArgumentError(
                "google.protobuf.StringValue: the bytes are not a well-formed message"));
}

TEST(GrpcMessageTest, WritesWhatItReads) {
  Text written;
  written.set_value("text");
  Text read;

  EXPECT_TRUE(ParseSmallMessage(SerializeMessage(written), read).ok());

  EXPECT_EQ(read.value(), "text");
}

}  // namespace
}  // namespace logprobd::testing
