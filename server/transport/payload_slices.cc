#include "server/transport/payload_slices.h"

#include "grpcpp/support/slice.h"

namespace logprobd {

PayloadSlices SlicesOf(const grpc::ByteBuffer& message) {
  // Short slices hold their bytes inside the Slice object: pointers are taken only once the vector
  // has its final place.
  auto slices = std::make_shared<std::vector<grpc::Slice>>();
  PayloadSlices result;
  if (!message.Valid() || !message.Dump(slices.get()).ok()) {
    return result;
  }
  result.pieces.reserve(slices->size());
  for (const grpc::Slice& slice : *slices) {
    result.pieces.emplace_back(reinterpret_cast<const std::byte*>(slice.begin()), slice.size());
    result.bytes += static_cast<int64_t>(slice.size());
  }
  result.owner = std::move(slices);
  return result;
}

}  // namespace logprobd
