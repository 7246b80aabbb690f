#include "server/transport/grpc_message.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "grpcpp/support/slice.h"

namespace logprobd {

PayloadSlices SlicesOf(const grpc::ByteBuffer& message) {
  // A short slice holds its bytes inside the Slice object, so pointers are valid only after the
  // vector has its final size.
  auto slices = std::make_shared<std::vector<grpc::Slice>>();
  PayloadSlices result;
  if (!message.Valid() || !message.Dump(slices.get()).ok()) return result;
  result.pieces.reserve(slices->size());
  for (const grpc::Slice& slice : *slices) {
    result.pieces.emplace_back(reinterpret_cast<const std::byte*>(slice.begin()), slice.size());
    result.bytes += static_cast<int64_t>(slice.size());
  }
  result.owner = std::move(slices);
  return result;
}

absl::Status ParseSmallMessage(const grpc::ByteBuffer& bytes,
                               google::protobuf::MessageLite& message) {
  if (!bytes.Valid()) {
    return absl::InvalidArgumentError(
        absl::StrCat(message.GetTypeName(), ": the call has no message"));
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
        absl::StrCat(message.GetTypeName(), ": the bytes are not a well-formed message"));
  }
  return absl::OkStatus();
}

grpc::ByteBuffer SerializeMessage(const google::protobuf::MessageLite& message) {
  const std::string text = message.SerializeAsString();
  const grpc::Slice slice(text);
  return {&slice, 1};
}

}  // namespace logprobd
