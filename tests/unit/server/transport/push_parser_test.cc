#include "server/transport/push_parser.h"

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fuzz/push_parser_check.h"
#include "tests/fuzz/wire_parser_check.h"

namespace logprobd::testing {
namespace {

using ::testing::HasSubstr;

v1::PushWeightsRequest Header() {
  v1::PushWeightsRequest message;
  v1::PushHeader& header = *message.mutable_header();
  header.set_head("policy");
  header.set_version(uint64_t{1} << 40);
  header.set_dtype(v1::DTYPE_F16);
  header.set_vocab_rows(300);
  header.set_sha256(std::string(64, 'a'));
  header.set_allow_nonfinite(true);
  return message;
}

v1::PushWeightsRequest Rows(const std::string& data) {
  v1::PushWeightsRequest message;
  v1::PushedRows& rows = *message.mutable_rows();
  rows.set_row_begin(1'000'000);
  rows.set_rows(128);
  rows.set_is_bias(true);
  rows.set_data(data);
  return message;
}

v1::PushWeightsRequest RowsElsewhere() {
  v1::PushWeightsRequest message = Rows("");
  message.mutable_rows()->mutable_shared_memory()->set_region(std::string(16, 'r'));
  message.mutable_rows()->mutable_shared_memory()->set_offset(64);
  return message;
}

std::vector<std::string> Messages() {
  return {"",
          Header().SerializeAsString(),
          Rows("abc").SerializeAsString(),
          Rows("").SerializeAsString(),
          Rows(std::string(1'000, 'x')).SerializeAsString(),
          RowsElsewhere().SerializeAsString()};
}

absl::Status Parse(const std::string& bytes) {
  return ParsePush(CutBytes(bytes, 0).pieces()).status();
}

TEST(PushParserTest, ReadsWhatProtobufReadsHoweverTheMessageIsCut) {
  for (const std::string& bytes : Messages()) {
    for (uint32_t seed = 0; seed < 50; ++seed) {
      ASSERT_EQ(PushParserDifference(bytes, seed), std::nullopt);
      ASSERT_TRUE(Parse(bytes).ok());
    }
  }
}

TEST(PushParserTest, AgreesWithProtobufOnOneHundredThousandMutations) {
  std::mt19937 random(11);
  const std::vector<std::string> messages = Messages();
  for (uint32_t i = 0; i < 100'000; ++i) {
    std::string bytes = messages[random() % messages.size()];
    for (auto changes = random() % 4; changes > 0 && !bytes.empty(); --changes) {
      const size_t place = random() % bytes.size();
      switch (random() % 4) {
        case 0:
          bytes[place] = static_cast<char>(random());
          break;
        case 1:
          bytes.resize(place);
          break;
        case 2:
          bytes.insert(place, 1, static_cast<char>(random()));
          break;
        default:
          bytes += messages[random() % messages.size()];
      }
    }
    ASSERT_EQ(PushParserDifference(bytes, static_cast<uint32_t>(random() % 20)), std::nullopt)
        << "mutation " << i;
  }
}

TEST(PushParserTest, DoesNotCopyTheData) {
  const std::string bytes = Rows(std::string(1'000, 'x')).SerializeAsString();
  const absl::Span<const std::byte> piece(reinterpret_cast<const std::byte*>(bytes.data()),
                                          bytes.size());

  const absl::StatusOr<ParsedPush> parsed = ParsePush({piece});

  ASSERT_TRUE(parsed.ok());
  ASSERT_EQ(parsed->data.size(), 1U);
  EXPECT_EQ(reinterpret_cast<const char*>(parsed->data[0].data()),
            bytes.data() + bytes.find("xxx"));
  EXPECT_EQ(parsed->data[0].size(), 1'000U);
  EXPECT_TRUE(parsed->message.rows().data().empty());
}

TEST(PushParserTest, RefusesWhatItCannotReadWithoutCopying) {
  const std::string header = Header().SerializeAsString();
  const std::string rows = Rows("abc").SerializeAsString();

  EXPECT_THAT(std::string(Parse(header + rows).message()), HasSubstr("more than one is given"));
  EXPECT_THAT(std::string(Parse(rows + rows).message()), HasSubstr("more than one is given"));
  EXPECT_THAT(std::string(Parse(std::string("\x12\x06\x22\x01"
                                            "a\x22\x01"
                                            "b",
                                            8))
                              .message()),
              HasSubstr("data: given twice"));
  for (const char* malformed : {"\xFF\xFF\xFF", "\x12\x05\x22\x04", "\x12", "\x13\x14", "\x07"}) {
    EXPECT_THAT(std::string(Parse(malformed).message()), HasSubstr("PushWeightsRequest"));
  }
}

TEST(PushParserTest, CopiesUpToItsLimitWhereverTheBytesAre) {
  constexpr size_t kMost = 64 << 10;
  const auto expect_limit = [](const std::string& what, const auto& message_of) {
    const absl::Status most = Parse(message_of(kMost));
    EXPECT_TRUE(most.ok()) << what << " " << most;
    EXPECT_EQ(Parse(message_of(kMost + 1)).message(),
              "PushWeightsRequest: 65537 bytes beside data, must be at most 65536")
        << what;
  };

  expect_limit("the header", [](size_t bytes) {
    v1::PushWeightsRequest message;
    message.mutable_header()->set_head(std::string(bytes - 4, 'a'));
    EXPECT_EQ(message.header().ByteSizeLong(), bytes);
    return message.SerializeAsString();
  });
  expect_limit("rows beside data", [](size_t bytes) {
    v1::PushWeightsRequest message = Rows("");
    message.mutable_rows()->mutable_shared_memory();
    const size_t others = message.rows().ByteSizeLong() + 6;  // the lengths
    message.mutable_rows()->mutable_shared_memory()->set_region(std::string(bytes - others, 'a'));
    EXPECT_EQ(message.rows().ByteSizeLong(), bytes);
    message.mutable_rows()->set_data(std::string(100'000, 'x'));  // does not count
    return message.SerializeAsString();
  });
  expect_limit("unknown fields", [](size_t bytes) {
    std::string message;
    while (message.size() + 3 < bytes) message += std::string("\x78\x01", 2);  // field 15
    return message + (bytes % 2 == 0 ? std::string("\x78\x01", 2) : "\x78\x80\x01");
  });
}

TEST(PushParserTest, BoundsWhatItCopies) {
  v1::PushWeightsRequest large = Header();
  large.mutable_header()->set_head(std::string(1 << 20, 'a'));
  EXPECT_THAT(std::string(Parse(large.SerializeAsString()).message()),
              HasSubstr("bytes beside data, must be at most 65536"));

  large = Rows("");
  large.mutable_rows()->mutable_shared_memory()->set_region(std::string(1 << 20, 'a'));
  EXPECT_EQ(Parse(large.SerializeAsString()).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace logprobd::testing
