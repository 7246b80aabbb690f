#include "server/transport/wire_parser.h"

#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/transport/slice_parser.h"
#include "tests/fuzz/wire_parser_check.h"
#include "tests/support/transport_server.h"

namespace logprobd::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kTraceparent[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// Encodes the tag of a field.
std::string Tag(uint32_t number, uint32_t type) {
  std::string out;
  uint32_t tag = number << 3 | type;
  while (tag >= 0x80) {
    out.push_back(static_cast<char>(tag | 0x80));
    tag >>= 7;
  }
  out.push_back(static_cast<char>(tag));
  return out;
}

std::string BytesField(uint32_t number, const std::string& bytes) {
  std::string out = Tag(number, 2);
  for (size_t length = bytes.size();;) {
    if (length < 0x80) {
      out.push_back(static_cast<char>(length));
      return out + bytes;
    }
    out.push_back(static_cast<char>(length | 0x80));
    length >>= 7;
  }
}

ParsedScoreRequest Parse(const std::string& bytes, uint32_t seed = 0) {
  const CutBytes cut(bytes, seed);
  ParsedScoreRequest parsed = ParseScoreRequest(cut.pieces(), nullptr);
  parsed.request.hidden.pieces.clear();  // they point into `cut`
  return parsed;
}

/// Returns a request whose fields are set at random, also to extreme values.
v1::ScoreRequest RandomRequest(std::mt19937& random) {
  const auto chance = [&random](int of) { return random() % static_cast<uint32_t>(of) == 0; };
  const auto number = [&random] { return static_cast<uint32_t>(random() >> (random() % 32)); };
  const auto array = [&random] {
    std::string bytes(4 * (random() % 9), '\0');
    for (char& c : bytes) {
      c = static_cast<char>(random());
    }
    return bytes;
  };
  v1::ScoreRequest request;
  if (!chance(4)) request.set_request_id("request \xE2\x82\xAC " + std::to_string(number()));
  if (chance(2)) request.set_head("head");
  if (chance(2)) request.set_weights_version((uint64_t{number()} << 32) | number());
  if (!chance(4)) request.set_dtype(static_cast<v1::Dtype>(static_cast<int>(number())));
  if (!chance(4)) request.set_rows(number());
  if (!chance(4)) request.set_hidden_size(number());
  if (!chance(4)) request.set_targets(array());
  if (chance(2)) request.set_temperature(static_cast<float>(number()) / 7);
  if (chance(2)) request.set_row_temperatures(array());
  if (chance(2)) request.set_entropy_temperature(-static_cast<float>(number()));
  if (chance(2)) request.set_ignore_index(static_cast<int32_t>(number()) * (chance(2) ? -1 : 1));
  if (chance(2)) request.set_outputs(number());
  if (chance(2)) request.set_top_k(number());
  if (chance(2)) request.set_candidate_ids(array());
  if (chance(2)) request.set_candidate_offsets(array());
  if (chance(2)) request.set_segment_offsets(array());
  if (chance(2)) request.set_priority(static_cast<v1::Priority>(random() % 5));
  if (chance(2)) request.set_reject_nonfinite(true);
  if (chance(2)) request.set_chunk_id((uint64_t{number()} << 32) | number());
  if (chance(2)) request.set_traceparent(chance(2) ? kTraceparent : "00-\n");
  if (chance(2)) request.set_trace(true);
  const auto bytes = [&random](size_t size) {
    std::string text(size, '\0');
    for (char& c : text) {
      c = static_cast<char>(random());
    }
    return text;
  };
  switch (random() % 6) {
    case 0:
      break;
    case 1: {
      v1::SharedMemorySlice& slice = *request.mutable_shared_memory();
      slice.set_region(bytes(16));
      if (!chance(4)) slice.set_offset(uint64_t{number()} * 64);
      if (!chance(4)) slice.set_bytes(number());
      break;
    }
    case 2: {
      v1::CudaIpcSlice& slice = *request.mutable_cuda_ipc();
      slice.set_lease(bytes(16));
      slice.set_device_uuid(bytes(16));
      slice.set_handle(bytes(64));
      if (!chance(4)) slice.set_offset(uint64_t{number()} * 16);
      if (!chance(4)) slice.set_bytes(number());
      break;
    }
    default:
      request.set_hidden(array() + array() + array());
  }
  return request;
}

/// Returns a valid slice, changed by `change`, in serialised form.
std::string SharedSlice(const std::function<void(v1::SharedMemorySlice&)>& change) {
  v1::SharedMemorySlice slice;
  slice.set_region(std::string(16, 'r'));
  slice.set_offset(128);
  slice.set_bytes(32);
  change(slice);
  return slice.SerializeAsString();
}

std::string CudaSlice(const std::function<void(v1::CudaIpcSlice&)>& change) {
  v1::CudaIpcSlice slice;
  slice.set_lease(std::string(16, 'l'));
  slice.set_device_uuid(std::string(16, 'u'));
  slice.set_handle(std::string(64, 'h'));
  slice.set_offset(48);
  slice.set_bytes(32);
  change(slice);
  return slice.SerializeAsString();
}

/// Makes one random change of a kind that often breaks parsers.
void Mutate(std::string& bytes, std::mt19937& random) {
  const auto place = [&] { return bytes.empty() ? 0 : random() % bytes.size(); };
  switch (random() % 8) {
    case 0:
      if (!bytes.empty()) bytes[place()] ^= static_cast<char>(1U << (random() % 8));
      break;
    case 1:
      if (!bytes.empty()) bytes[place()] = static_cast<char>(random());
      break;
    case 2:
      bytes.insert(place(), 1 + random() % 3, static_cast<char>(random()));
      break;
    case 3:
      if (!bytes.empty()) bytes.erase(place(), 1 + random() % 3);
      break;
    case 4:
      bytes.resize(place());
      break;
    case 5: {
      const size_t begin = place();
      bytes += bytes.substr(begin, random() % 40);
      break;
    }
    case 6:
      bytes.insert(place(), 1 + random() % 11, '\xFF');
      break;
    default:
      bytes += Tag(static_cast<uint32_t>(random() % 40), static_cast<uint32_t>(random() % 8)) +
               static_cast<char>(random() % 6);
      break;
  }
}

TEST(WireParserTest, ReadsWhatProtobufWrites) {
  std::mt19937 random(1);
  for (uint32_t i = 0; i < 5'000; ++i) {
    const std::string bytes = RandomRequest(random).SerializeAsString();
    const auto parsed = Parse(bytes, i % 50);
    ASSERT_TRUE(parsed.status.ok()) << parsed.status << " in round " << i;
    ASSERT_EQ(WireParserDifference(bytes, i % 50), std::nullopt) << "round " << i;
  }
}

TEST(WireParserTest, AgreesWithProtobufOnBrokenMessages) {
  std::mt19937 random(2);
  int accepted = 0;
  for (uint32_t i = 0; i < 50'000; ++i) {
    std::string bytes = RandomRequest(random).SerializeAsString();
    for (uint32_t change = 0; change <= i % 3; ++change) {
      Mutate(bytes, random);
    }
    ASSERT_EQ(WireParserDifference(bytes, i % 50), std::nullopt) << "round " << i;
    accepted += Parse(bytes).status.ok() ? 1 : 0;
  }
  EXPECT_GT(accepted, 5'000);  // some mutations are accepted and some rejected
  EXPECT_LT(accepted, 45'000);
}

TEST(WireParserTest, AgreesWithProtobufOnRandomBytes) {
  std::mt19937 random(3);
  for (uint32_t i = 0; i < 20'000; ++i) {
    std::string bytes(random() % 60, '\0');
    for (char& c : bytes) {
      c = static_cast<char>(random());
    }
    ASSERT_EQ(WireParserDifference(bytes, i % 50), std::nullopt) << "round " << i;
  }
}

TEST(WireParserTest, HiddenPointsIntoTheSlicesAndKeepsThemAlive) {
  v1::ScoreRequest message = ValidRequest(2);
  const std::string bytes = message.SerializeAsString();
  auto owner = std::make_shared<CutBytes>(bytes, 1);
  const std::weak_ptr<CutBytes> alive = owner;

  ParsedScoreRequest parsed = ParseScoreRequest(owner->pieces(), owner);
  const std::byte* last = owner->pieces().back().data();
  owner.reset();

  ASSERT_TRUE(parsed.status.ok()) << parsed.status;
  EXPECT_EQ(parsed.request.hidden.pieces.size(), 32U);
  EXPECT_EQ(parsed.request.hidden.pieces.back().data(), last);
  EXPECT_FALSE(alive.expired());
  parsed = ParsedScoreRequest();
  EXPECT_TRUE(alive.expired());
}

TEST(WireParserTest, AcceptsTheLargestNumberOfEachType) {
  v1::ScoreRequest message;
  message.set_rows(4'294'967'295);
  message.set_outputs(4'294'967'295);
  message.set_weights_version(~uint64_t{0});
  message.set_ignore_index(std::numeric_limits<int32_t>::min());
  message.set_dtype(static_cast<v1::Dtype>(std::numeric_limits<int32_t>::max()));
  message.set_priority(static_cast<v1::Priority>(std::numeric_limits<int32_t>::min()));

  const ParsedScoreRequest parsed = Parse(message.SerializeAsString());

  ASSERT_TRUE(parsed.status.ok()) << parsed.status;
  EXPECT_EQ(parsed.request.rows, 4'294'967'295);
  EXPECT_EQ(parsed.request.output_bits, 4'294'967'295U);
  EXPECT_EQ(parsed.request.weights_version, ~uint64_t{0});
  EXPECT_EQ(parsed.request.ignore_index, std::numeric_limits<int32_t>::min());
  EXPECT_EQ(parsed.request.dtype_number, std::numeric_limits<int32_t>::max());
  EXPECT_EQ(parsed.request.priority_number, std::numeric_limits<int32_t>::min());
}

TEST(WireParserTest, KeepsOnlyTextThatBreaksNoRule) {
  EXPECT_EQ(Parse(BytesField(1, "a\nb")).request.request_id, "");
  EXPECT_EQ(Parse(BytesField(1, "a\xFF")).request.request_id, "");
  EXPECT_EQ(Parse(BytesField(2, "\x1B[31m")).request.head, "");
}

TEST(WireParserTest, KeepsTheFirstError) {
  const std::string rows = Tag(5, 2) + std::string(1, '\0');
  const std::string id = BytesField(1, "a\nb");

  EXPECT_EQ(Parse(rows + id).status.message(), "rows: wire type 2, must be 0");
  EXPECT_EQ(Parse(id + rows).status.message(),
            "request_id: holds control characters, must hold none");
}

TEST(WireParserTest, SkipsUnknownFieldsAroundTheNumbersThatItKnows) {
  for (const uint32_t number : {35U, 63U, 64U, 65U, 536'870'911U}) {
    const ParsedScoreRequest parsed = Parse(Tag(number, 0) + "\x05" + Tag(5, 0) + "\x07");
    EXPECT_TRUE(parsed.status.ok()) << parsed.status;
    EXPECT_EQ(parsed.request.rows, 7) << number;
  }
}

TEST(WireParserTest, TakesFieldsInAnyOrder) {
  v1::ScoreRequest head;
  head.set_rows(1);
  head.set_hidden_size(8);
  const std::string bytes = BytesField(32, std::string(16, 'h')) +
                            BytesField(7, BytesOf<int32_t>({5})) + head.SerializeAsString();

  const ParsedScoreRequest parsed = Parse(bytes);

  ASSERT_TRUE(parsed.status.ok()) << parsed.status;
  EXPECT_EQ(parsed.request.hidden.bytes, 16);
  EXPECT_EQ(parsed.request.rows, 1);
  EXPECT_THAT(parsed.request.targets, ElementsAre(5));
}

TEST(WireParserTest, SkipsUnknownFieldsUpToALimit) {
  const auto unknown = [](size_t size) {
    return Tag(100, 0) + "\x05" + Tag(101, 1) + "12345678" + Tag(102, 5) + "1234" +
           BytesField(103, std::string(size, 'x')) + Tag(5, 0) + "\x07";
  };

  const ParsedScoreRequest small = Parse(unknown(60'000));
  EXPECT_TRUE(small.status.ok()) << small.status;
  EXPECT_EQ(small.request.rows, 7);

  EXPECT_THAT(std::string(Parse(unknown(65'536)).status.message()),
              HasSubstr("bytes of unknown fields, must be at most 65536"));
}

TEST(WireParserTest, CountsTheBytesOfAllUnknownFieldsTogether) {
  std::string unknown;
  while (unknown.size() < static_cast<size_t>(kUnknownBytesMax)) {
    unknown += Tag(100, 0) + std::string("\x80\x00", 2);  // four bytes
  }
  ASSERT_EQ(unknown.size(), static_cast<size_t>(kUnknownBytesMax));

  EXPECT_TRUE(Parse(unknown).status.ok()) << Parse(unknown).status;
  EXPECT_THAT(std::string(Parse(unknown + Tag(100, 0) + "\x01").status.message()),
              HasSubstr("65539 bytes of unknown fields, must be at most 65536"));
}

TEST(WireParserTest, AcceptsTextUpToItsLimit) {
  for (const auto& [field, limit] : {std::pair{1U, kRequestIdBytesMax}, {2U, kHeadNameBytesMax}}) {
    const auto parse = [field = field](int64_t length) {
      return Parse(BytesField(field, std::string(static_cast<size_t>(length), 'x')));
    };
    const ParsedScoreRequest longest = parse(limit);
    const ParsedScoreRequest longer = parse(limit + 1);

    EXPECT_TRUE(longest.status.ok()) << longest.status;
    EXPECT_EQ(longest.request.request_id.size() + longest.request.head.size(),
              static_cast<size_t>(limit));
    EXPECT_THAT(std::string(longer.status.message()),
                HasSubstr(absl::StrCat(limit + 1, " bytes, must be at most ", limit)));
    EXPECT_EQ(longer.request.request_id + longer.request.head, "");
  }
}

TEST(WireParserTest, ReadsATraceparentUpToItsLimitAndIgnoresOneThatIsNotValid) {
  const std::string later = absl::StrCat("01", absl::string_view(kTraceparent).substr(2));
  std::string longest = later + "-";
  longest.resize(static_cast<size_t>(kTraceparentBytesMax), '\n');

  for (const auto& [text, expected] :
       {std::pair<std::string, std::string>{kTraceparent, kTraceparent},
        {longest, later},
        {"", ""},
        {std::string(kTraceparent) + "\n", ""},
        {std::string(256, 'a'), ""}}) {
    const ParsedScoreRequest parsed = Parse(BytesField(20, text));

    EXPECT_TRUE(parsed.status.ok()) << parsed.status;
    EXPECT_EQ(parsed.request.trace_context.traceparent(), expected);
  }
  EXPECT_FALSE(Parse(BytesField(20, longest + "x")).status.ok());
}

TEST(WireParserTest, TakesTheLastOfSeveralTraceparents) {
  const std::string valid = BytesField(20, kTraceparent);
  const std::string other = BytesField(20, "00-");

  EXPECT_EQ(Parse(other + valid).request.trace_context.traceparent(), kTraceparent);
  EXPECT_TRUE(Parse(valid + other).request.trace_context.empty());
}

TEST(WireParserTest, ReadsTrace) {
  EXPECT_TRUE(Parse(Tag(21, 0) + "\x01").request.trace);
  EXPECT_FALSE(Parse(Tag(21, 0) + std::string(1, '\0')).request.trace);
  EXPECT_FALSE(Parse("").request.trace);
}

TEST(WireParserTest, KeepsTheIdsOfAMessageWithAnErrorElsewhere) {
  const ParsedScoreRequest parsed =
      Parse(BytesField(1, "id") + Tag(5, 2) + std::string(1, '\0') + Tag(19, 0) + "\x2A");
  EXPECT_EQ(parsed.status.message(), "rows: wire type 2, must be 0");
  EXPECT_EQ(parsed.request.request_id, "id");
  EXPECT_EQ(parsed.request.chunk_id, 42U);
}

struct Case {
  std::string name;
  std::string bytes;
  std::string message;
};

void PrintTo(const Case& test, std::ostream* out) { *out << test.name; }

class WireParserErrorTest : public ::testing::TestWithParam<Case> {};

TEST_P(WireParserErrorTest, NamesTheFieldAndTheError) {
  for (const uint32_t seed : {0U, 1U, 7U}) {
    const absl::Status status = Parse(GetParam().bytes, seed).status;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().message));
    EXPECT_EQ(WireParserDifference(GetParam().bytes, seed), std::nullopt);
  }
}

std::string TwiceField(uint32_t number) {
  return BytesField(number, "1234") + BytesField(number, "1234");
}

INSTANTIATE_TEST_SUITE_P(
    Cases, WireParserErrorTest,
    ::testing::Values(
        Case{"TruncatedTag", "\x80", "no valid field tag at byte 0"},
        Case{"LongTag", "\xFF\xFF\xFF\xFF\xFF\x01", "no valid field tag at byte 0"},
        Case{"FieldZero", std::string("\x02\x00", 2), "field number 0 at byte 0"},
        Case{"TruncatedNumber", Tag(5, 0) + "\x80", "rows: the number is truncated"},
        Case{"NoNumber", Tag(5, 0), "rows: the number is truncated"},
        Case{"ElevenByteNumber", Tag(3, 0) + std::string(10, '\xFF') + "\x01",
             "weights_version: the number is truncated or has more than 64 bits"},
        Case{"NumberOf65Bits", Tag(3, 0) + std::string(9, '\xFF') + "\x02",
             "weights_version: the number is truncated or has more than 64 bits"},
        Case{"RowsBeyond32Bits", Tag(5, 0) + std::string(9, '\xFF') + "\x01",
             "rows: 18446744073709551615, must be less than 2^32"},
        Case{"DtypeBeyond32Bits", Tag(4, 0) + std::string(5, '\xFF') + "\x01",
             "dtype: 68719476735, must fit into 32 bits"},
        Case{"TruncatedBytes", Tag(32, 2) + "\x05" + "1234",
             "hidden: length 5, but 4 bytes are left"},
        Case{"LongLength", Tag(32, 2) + std::string(5, '\xFF') + "\x01", "hidden: the length is"},
        Case{"HugeLength", Tag(32, 2) + std::string(4, '\xFF') + "\x0F",
             "hidden: length 4294967295, but 0 bytes are left"},
        Case{"TruncatedFloat", Tag(8, 5) + "123", "temperature: truncated"},
        Case{"TruncatedFixed64", Tag(50, 1) + "1234567", "an unknown field: truncated"},
        Case{"WrongTypeOfHidden", Tag(32, 0) + "\x01", "hidden: wire type 0, must be 2"},
        Case{"WrongTypeOfRows", Tag(5, 5) + "1234", "rows: wire type 5, must be 0"},
        Case{"WrongTypeOfTemperature", Tag(8, 1) + "12345678",
             "temperature: wire type 1, must be 5"},
        Case{"Group", Tag(40, 3) + Tag(40, 4), "groups are not supported"},
        Case{"NestedGroups",
             [] {
               std::string bytes;
               for (int i = 0; i < 200; ++i) {
                 bytes += Tag(40, 3);
               }
               return bytes;
             }(),
             "groups are not supported"},
        Case{"GroupEnd", Tag(40, 4), "groups are not supported"},
        Case{"TagBeyond32Bits", std::string("\xA8\x80\x80\x80\x10\x07"),
             "no valid field tag at byte 0"},
        Case{"WireTypeSeven", Tag(40, 7), "wire type 7"},
        Case{"HiddenTwice", TwiceField(32), "hidden: given twice"},
        Case{"TargetsTwice", TwiceField(7), "targets: given twice"},
        Case{"RowTemperaturesTwice", TwiceField(9), "row_temperatures: given twice"},
        Case{"CandidateIdsTwice", TwiceField(14), "candidate_ids: given twice"},
        Case{"CandidateOffsetsTwice", TwiceField(15), "candidate_offsets: given twice"},
        Case{"SegmentOffsetsTwice", TwiceField(16), "segment_offsets: given twice"},
        Case{"EmptyHiddenTwice", BytesField(32, "") + BytesField(32, ""), "hidden: given twice"},
        Case{"OddTargets", BytesField(7, "12345"), "targets: 5 bytes, must be a multiple of 4"},
        Case{"IdNotUtf8", BytesField(1, "a\xFF"), "request_id: not valid UTF-8"},
        Case{"HeadNotUtf8", BytesField(2, "\xC3"), "head: not valid UTF-8"},
        Case{"IdWithNewline", BytesField(1, "a\nb"), "request_id: holds control characters"},
        Case{"IdWithEscape", BytesField(1, "\x1B[31m"), "request_id: holds control characters"},
        Case{"IdTooLong", BytesField(1, std::string(129, 'a')),
             "request_id: 129 bytes, must be at most 128"},
        Case{"HeadTooLong", BytesField(2, std::string(257, 'a')),
             "head: 257 bytes, must be at most 256"},
        Case{"TraceparentNotUtf8", BytesField(20, "00-\xFF"), "traceparent: not valid UTF-8"},
        Case{"TraceparentTooLong", BytesField(20, std::string(257, 'a')),
             "traceparent: 257 bytes, must be at most 256"},
        Case{"WrongTypeOfTraceparent", Tag(20, 0) + "\x01", "traceparent: wire type 0, must be 2"},
        Case{"WrongTypeOfTrace", BytesField(21, "1"), "trace: wire type 2, must be 0"}),
    [](const ::testing::TestParamInfo<Case>& test) { return test.param.name; });

constexpr auto kUnchanged = [](auto&) {};

TEST(WireParserTest, ReadsASliceOfSharedMemory) {
  const ParsedScoreRequest parsed = Parse(BytesField(33, SharedSlice(kUnchanged)));

  ASSERT_TRUE(parsed.status.ok()) << parsed.status;
  ASSERT_TRUE(parsed.request.shared_memory.has_value());
  EXPECT_THAT(parsed.request.shared_memory->region, Each('r'));
  EXPECT_EQ(parsed.request.shared_memory->offset, 128);
  EXPECT_EQ(parsed.request.shared_memory->bytes, 32);
  EXPECT_FALSE(parsed.request.cuda_ipc.has_value());
}

TEST(WireParserTest, ReadsASliceOfGpuMemory) {
  const ParsedScoreRequest parsed = Parse(BytesField(34, CudaSlice(kUnchanged)));

  ASSERT_TRUE(parsed.status.ok()) << parsed.status;
  ASSERT_TRUE(parsed.request.cuda_ipc.has_value());
  EXPECT_THAT(parsed.request.cuda_ipc->lease, Each('l'));
  EXPECT_THAT(parsed.request.cuda_ipc->memory.device_uuid, Each('u'));
  EXPECT_THAT(parsed.request.cuda_ipc->memory.handle, Each('h'));
  EXPECT_EQ(parsed.request.cuda_ipc->memory.offset, 48);
  EXPECT_EQ(parsed.request.cuda_ipc->memory.bytes, 32);
}

TEST(WireParserTest, ASliceMayEndJustBefore63Bits) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const int64_t offset : {int64_t{0}, int64_t{64}}) {
    const auto parse = [&](int64_t bytes) {
      return Parse(BytesField(33, SharedSlice([&](v1::SharedMemorySlice& slice) {
                                slice.set_offset(static_cast<uint64_t>(offset));
                                slice.set_bytes(static_cast<uint64_t>(bytes));
                              })));
    };
    const ParsedScoreRequest longest = parse(kMost - offset);
    ASSERT_TRUE(longest.status.ok()) << longest.status;
    EXPECT_EQ(longest.request.shared_memory->bytes, kMost - offset);
    if (offset > 0) {
      EXPECT_FALSE(parse(kMost - offset + 1).status.ok());
    }
  }
}

TEST(WireParserTest, SkipsUnknownFieldsOfASlice) {
  const std::string unknown = Tag(100, 0) + "\x05" + Tag(101, 1) + "12345678" + Tag(102, 5) +
                              "1234" + BytesField(103, "text");

  const ParsedScoreRequest parsed = Parse(BytesField(33, SharedSlice(kUnchanged) + unknown));

  ASSERT_TRUE(parsed.status.ok()) << parsed.status;
  EXPECT_EQ(parsed.request.shared_memory->bytes, 32);
}

TEST(WireParserTest, AcceptsASliceUpToItsLimit) {
  const std::string slice = SharedSlice(kUnchanged);
  const auto padded = [&slice](int64_t size) {
    const size_t header = BytesField(100, std::string(200, 'x')).size() - 200;
    const auto rest = static_cast<size_t>(size) - slice.size() - header;
    return BytesField(33, slice + BytesField(100, std::string(rest, 'x')));
  };

  const ParsedScoreRequest parsed = Parse(padded(kSliceBytesMax));
  ASSERT_TRUE(parsed.status.ok()) << parsed.status;
  EXPECT_EQ(parsed.request.shared_memory->bytes, 32);

  EXPECT_THAT(std::string(Parse(padded(kSliceBytesMax + 1)).status.message()),
              HasSubstr("shared_memory: 513 bytes, must be at most 512"));
}

std::string Shared(const std::function<void(v1::SharedMemorySlice&)>& change) {
  return BytesField(33, SharedSlice(change));
}

std::string Cuda(const std::function<void(v1::CudaIpcSlice&)>& change) {
  return BytesField(34, CudaSlice(change));
}

INSTANTIATE_TEST_SUITE_P(
    Slices, WireParserErrorTest,
    ::testing::Values(
        Case{"BothSlices", Shared(kUnchanged) + Cuda(kUnchanged),
             "cuda_ipc: given together with shared_memory, must be the only payload"},
        Case{"SliceAfterHidden", BytesField(32, "1234") + Shared(kUnchanged),
             "shared_memory: given together with hidden, must be the only payload"},
        Case{"HiddenAfterSlice", Cuda(kUnchanged) + BytesField(32, ""),
             "hidden: given together with cuda_ipc, must be the only payload"},
        Case{"SharedMemoryTwice", Shared(kUnchanged) + Shared(kUnchanged),
             "shared_memory: given twice"},
        Case{"CudaIpcTwice", Cuda(kUnchanged) + Cuda(kUnchanged), "cuda_ipc: given twice"},
        Case{"SharedMemoryAsNumber", Tag(33, 0) + "\x01", "shared_memory: wire type 0, must be 2"},
        Case{"EmptySharedMemory", BytesField(33, ""),
             "shared_memory.region: 0 bytes, must be exactly 16"},
        Case{"EmptyCudaIpc", BytesField(34, ""), "cuda_ipc.lease: 0 bytes, must be exactly 16"},
        Case{"ShortRegion", Shared([](auto& slice) { slice.set_region("short"); }),
             "shared_memory.region: 5 bytes, must be exactly 16"},
        Case{"LongRegion", Shared([](auto& slice) { slice.set_region(std::string(17, 'r')); }),
             "shared_memory.region: 17 bytes, must be exactly 16"},
        Case{"ShortUuid", Cuda([](auto& slice) { slice.set_device_uuid("GPU-0"); }),
             "cuda_ipc.device_uuid: 5 bytes, must be exactly 16"},
        Case{"ShortHandle", Cuda([](auto& slice) { slice.set_handle(std::string(63, 'h')); }),
             "cuda_ipc.handle: 63 bytes, must be exactly 64"},
        Case{"LongHandle", Cuda([](auto& slice) { slice.set_handle(std::string(65, 'h')); }),
             "cuda_ipc.handle: 65 bytes, must be exactly 64"},
        Case{"MisalignedRegionOffset", Shared([](auto& slice) { slice.set_offset(32); }),
             "shared_memory.offset: 32, must be a multiple of 64"},
        Case{"MisalignedDeviceOffset", Cuda([](auto& slice) { slice.set_offset(8); }),
             "cuda_ipc.offset: 8, must be a multiple of 16"},
        Case{"OffsetBeyond63Bits", Shared([](auto& slice) { slice.set_offset(uint64_t{1} << 63); }),
             "shared_memory.offset: 9223372036854775808, must be less than 2^63"},
        Case{"BytesBeyond63Bits", Cuda([](auto& slice) { slice.set_bytes(~uint64_t{0}); }),
             "cuda_ipc.bytes: 18446744073709551615, must be less than 2^63"},
        Case{"EndBeyond63Bits",
             Shared([](auto& slice) { slice.set_bytes((uint64_t{1} << 63) - 1); }),
             "shared_memory.bytes: 9223372036854775807 from offset 128, must end before 2^63"},
        Case{"OffsetTwice", BytesField(33, SharedSlice(kUnchanged) + Tag(2, 0) + "\x40"),
             "shared_memory.offset: given twice"},
        Case{"OffsetAsBytes", BytesField(33, Tag(2, 2) + "\x01x"),
             "shared_memory.offset: wire type 2, must be 0"},
        Case{"TruncatedOffset", BytesField(33, Tag(2, 0) + "\x80"),
             "shared_memory.offset: the number is truncated"},
        Case{"TruncatedRegion", BytesField(33, Tag(1, 2) + "\x10shrt"),
             "shared_memory.region: the length is truncated or too large"},
        Case{"NoTagInSlice", BytesField(34, "\x80"), "cuda_ipc: no valid field tag"},
        Case{"FieldZeroInSlice", BytesField(34, std::string("\x02\x00", 2)),
             "cuda_ipc: no valid field tag"},
        Case{"GroupInSlice", BytesField(34, Tag(40, 3) + Tag(40, 4)), "groups are not supported"},
        Case{"TruncatedUnknownNumber", BytesField(33, Tag(40, 0)), "the number is truncated"},
        Case{"TruncatedUnknownFixed", BytesField(33, Tag(40, 1) + "1234567"), "truncated"},
        Case{"TruncatedUnknownBytes", BytesField(33, Tag(40, 2) + "\x05" + "1234"),
             "the length is truncated"},
        Case{"LongSlice", BytesField(33, BytesField(40, std::string(600, 'x'))),
             "shared_memory: 604 bytes, must be at most 512"}),
    [](const ::testing::TestParamInfo<Case>& test) { return test.param.name; });

}  // namespace
}  // namespace logprobd::testing
