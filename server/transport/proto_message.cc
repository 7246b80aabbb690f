#include "server/transport/proto_message.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "grpcpp/support/slice.h"

namespace logprobd {

absl::Status ParseSmallMessage(const grpc::ByteBuffer& bytes,
                               google::protobuf::MessageLite& message) {
  if (!bytes.Valid()) {
    return absl::InvalidArgumentError(absl::StrCat(message.GetTypeName(), ": no message"));
  }
  if (bytes.Length() > kSmallMessageBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(message.GetTypeName(), ": ", bytes.Length(),
                                                   " bytes, must be at most ",
                                                   kSmallMessageBytesMax));
  }
  grpc::Slice slice;
  if (!bytes.DumpToSingleSlice(&slice).ok() ||
      !message.ParseFromArray(slice.begin(), static_cast<int>(slice.size()))) {
    return absl::InvalidArgumentError(
        absl::StrCat(message.GetTypeName(), ": not a well-formed message"));
  }
  return absl::OkStatus();
}

grpc::ByteBuffer SerializeMessage(const google::protobuf::MessageLite& message) {
  const std::string text = message.SerializeAsString();
  const grpc::Slice slice(text);
  return {&slice, 1};
}

}  // namespace logprobd
