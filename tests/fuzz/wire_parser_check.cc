#include "tests/fuzz/wire_parser_check.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "logprobd/v1/scoring.pb.h"
#include "server/transport/wire_parser.h"

namespace logprobd::testing {
namespace {

/// Returns whether `message` is one of the errors, listed in wire_parser.h, for which
/// ParseScoreRequest may refuse a message that Protobuf accepts.
bool IsStricterRule(absl::string_view message) {
  for (const absl::string_view reason :
       {"given twice", ": wire type ", "must be less than 2^32", "must fit into 32 bits",
        "more than 64 bits", "must be a multiple of ", "bytes of unknown fields",
        "control characters", "must be at most", "no valid field tag", "must be the only payload",
        "must be exactly", "must be less than 2^63", "must end before 2^63"}) {
    if (absl::StrContains(message, reason)) {
      return true;
    }
  }
  return false;
}

template <typename T>
bool SameArray(const std::vector<T>& ours, const std::string& theirs) {
  return ours.size() * sizeof(T) == theirs.size() &&
         (ours.empty() || std::memcmp(ours.data(), theirs.data(), theirs.size()) == 0);
}

bool SameFloat(std::optional<float> ours, bool has, float theirs) {
  return ours.has_value() == has && (!has || std::memcmp(&*ours, &theirs, sizeof(float)) == 0);
}

std::string Gather(const HiddenPayload& hidden) {
  std::string bytes;
  for (const auto piece : hidden.pieces) {
    bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  return bytes;
}

template <size_t kSize>
bool SameBytes(const std::array<uint8_t, kSize>& ours, const std::string& theirs) {
  return theirs.size() == kSize && std::memcmp(ours.data(), theirs.data(), kSize) == 0;
}

bool SameSlice(const SharedMemorySlice& ours, const v1::SharedMemorySlice& theirs) {
  return SameBytes(ours.region, theirs.region()) &&
         static_cast<uint64_t>(ours.offset) == theirs.offset() &&
         static_cast<uint64_t>(ours.bytes) == theirs.bytes();
}

bool SameSlice(const CudaIpcSlice& ours, const v1::CudaIpcSlice& theirs) {
  return SameBytes(ours.lease, theirs.lease()) &&
         SameBytes(ours.memory.device_uuid, theirs.device_uuid()) &&
         SameBytes(ours.memory.handle, theirs.handle()) &&
         static_cast<uint64_t>(ours.memory.offset) == theirs.offset() &&
         static_cast<uint64_t>(ours.memory.bytes) == theirs.bytes();
}

template <typename Ours, typename Theirs>
bool SameSlice(const std::optional<Ours>& ours, bool has, const Theirs& theirs) {
  return ours.has_value() == has && (!has || SameSlice(*ours, theirs));
}

/// Returns a description of the first field in which the two differ, or nullopt if none does.
std::optional<std::string> Difference(const ScoreRequest& ours, const v1::ScoreRequest& theirs) {
  const std::pair<const char*, bool> fields[] = {
      {"request_id", ours.request_id == theirs.request_id()},
      {"head", ours.head == theirs.head()},
      {"weights_version", ours.weights_version == theirs.weights_version()},
      {"dtype", ours.dtype_number == static_cast<int32_t>(theirs.dtype())},
      {"rows", ours.rows == theirs.rows()},
      {"hidden_size", ours.hidden_size == theirs.hidden_size()},
      {"targets", SameArray(ours.targets, theirs.targets())},
      {"temperature", SameFloat(ours.temperature, theirs.has_temperature(), theirs.temperature())},
      {"row_temperatures", SameArray(ours.row_temperatures, theirs.row_temperatures())},
      {"entropy_temperature", SameFloat(ours.entropy_temperature, theirs.has_entropy_temperature(),
                                        theirs.entropy_temperature())},
      {"ignore_index", ours.ignore_index == (theirs.has_ignore_index() ? theirs.ignore_index()
                                                                       : kDefaultIgnoreIndex)},
      {"outputs", ours.output_bits == theirs.outputs()},
      {"top_k", ours.top_k == theirs.top_k()},
      {"candidate_ids", SameArray(ours.candidate_ids, theirs.candidate_ids())},
      {"candidate_offsets", SameArray(ours.candidate_offsets, theirs.candidate_offsets())},
      {"segment_offsets", SameArray(ours.segment_offsets, theirs.segment_offsets())},
      {"priority", ours.priority_number == static_cast<int32_t>(theirs.priority())},
      {"reject_nonfinite", ours.reject_nonfinite == theirs.reject_nonfinite()},
      {"chunk_id", ours.chunk_id == theirs.chunk_id()},
      {"traceparent",
       ours.trace_context.traceparent() == TraceContext::Parse(theirs.traceparent()).traceparent()},
      {"trace", ours.trace == theirs.trace()},
      {"hidden", Gather(ours.hidden) == theirs.hidden()},
      {"hidden.bytes", ours.hidden.bytes == static_cast<int64_t>(theirs.hidden().size())},
      {"shared_memory",
       SameSlice(ours.shared_memory, theirs.has_shared_memory(), theirs.shared_memory())},
      {"cuda_ipc", SameSlice(ours.cuda_ipc, theirs.has_cuda_ipc(), theirs.cuda_ipc())}};
  for (const auto& [name, is_same] : fields) {
    if (!is_same) {
      return absl::StrCat(name, " differs");
    }
  }
  return std::nullopt;
}

}  // namespace

CutBytes::CutBytes(absl::string_view bytes, uint32_t seed) {
  std::minstd_rand random(seed + 1);
  const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
  for (size_t begin = 0; begin < bytes.size();) {
    size_t size = seed == 0 ? bytes.size() : (seed == 1 ? 1 : random() % 40);
    size = std::min(size, bytes.size() - begin);
    storage_.emplace_back(data + begin, data + begin + size);
    begin += size;
  }
  pieces_.assign(storage_.begin(), storage_.end());
}

std::optional<std::string> WireParserDifference(absl::string_view bytes, uint32_t seed) {
  const CutBytes cut(bytes, seed);
  const ParsedScoreRequest ours = ParseScoreRequest(cut.pieces(), nullptr);
  v1::ScoreRequest theirs;
  const bool accepted = theirs.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  if (ours.status.ok()) {
    return accepted ? Difference(ours.request, theirs)
                    : std::optional<std::string>("accepted a message that Protobuf refuses");
  }
  if (ours.status.code() != absl::StatusCode::kInvalidArgument) {
    return absl::StrCat("not INVALID_ARGUMENT: ", ours.status.ToString());
  }
  if (accepted && !IsStricterRule(ours.status.message())) {
    return absl::StrCat("refused a message that Protobuf accepts: ", ours.status.message());
  }
  return std::nullopt;
}

}  // namespace logprobd::testing
