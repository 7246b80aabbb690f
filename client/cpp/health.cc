#include "client/cpp/health.h"

#include <grpcpp/support/slice.h>

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"

namespace logprobd::client {

grpc::ByteBuffer EncodeHealthRequest(absl::string_view service) {
  constexpr char kServiceTag = 0x0A;  // field 1, length-delimited
  const grpc::Slice slice(absl::StrCat(std::string(1, kServiceTag),
                                       std::string(1, static_cast<char>(service.size())), service));
  return {&slice, 1};
}

grpc::ByteBuffer EncodeServing() {
  const grpc::Slice slice(std::string("\x08\x01", 2));  // field 1, a varint: SERVING
  return {&slice, 1};
}

absl::StatusOr<bool> IsServing(const grpc::ByteBuffer& body) {
  grpc::Slice slice;
  if (!body.DumpToSingleSlice(&slice).ok()) {
    return absl::InternalError("the health answer could not be read");
  }
  if (slice.size() == 0) return false;  // the default value, UNKNOWN
  constexpr uint8_t kStatusTag = 0x08;  // field 1, varint
  constexpr uint8_t kServing = 1;
  if (slice.size() != 2 || slice.begin()[0] != kStatusTag) {
    return absl::InternalError("the health answer is not a HealthCheckResponse");
  }
  return slice.begin()[1] == kServing;
}

}  // namespace logprobd::client
