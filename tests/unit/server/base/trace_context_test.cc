#include "server/base/trace_context.h"

#include <string>

#include "gtest/gtest.h"

namespace logprobd {
namespace {

constexpr char kValid[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// Returns kValid with the text at `position` replaced.
std::string With(size_t position, const std::string& text) {
  return std::string(kValid).replace(position, text.size(), text);
}

TEST(TraceContextTest, ReadsATraceparent) {
  const TraceContext context = TraceContext::Parse(kValid);

  EXPECT_FALSE(context.empty());
  EXPECT_EQ(context.traceparent(), kValid);
  EXPECT_EQ(context.trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
}

TEST(TraceContextTest, IsEmptyAtFirst) {
  EXPECT_TRUE(TraceContext().empty());
  EXPECT_EQ(TraceContext().traceparent(), "");
  EXPECT_EQ(TraceContext().trace_id(), "");
}

TEST(TraceContextTest, AcceptsAllFlags) {
  for (const char* flags : {"00", "01", "03", "ff"}) {
    EXPECT_EQ(TraceContext::Parse(With(53, flags)).traceparent(), With(53, flags));
  }
}

TEST(TraceContextTest, KeepsTheKnownPartOfALaterVersion) {
  for (const char* version : {"01", "cc", "fe"}) {
    const std::string known = With(0, version);
    for (const char* rest : {"", "-", "-what-the-future-will-be-like", "-\n"}) {
      EXPECT_EQ(TraceContext::Parse(known + rest).traceparent(), known) << version << rest;
    }
    EXPECT_TRUE(TraceContext::Parse(known + ".x").empty()) << version;
    EXPECT_TRUE(TraceContext::Parse(known + "0-x").empty()) << version;
    EXPECT_TRUE(TraceContext::Parse(known.substr(0, 54)).empty()) << version;
  }
}

TEST(TraceContextTest, IgnoresTextBehindVersionZero) {
  EXPECT_TRUE(TraceContext::Parse(std::string(kValid) + "-x").empty());
  EXPECT_TRUE(TraceContext::Parse(std::string(kValid) + "-").empty());
  EXPECT_TRUE(TraceContext::Parse(std::string(kValid) + " ").empty());
}

TEST(TraceContextTest, IgnoresTextThatIsTooShort) {
  const std::string valid = kValid;
  for (size_t size = 0; size < valid.size(); ++size) {
    EXPECT_TRUE(TraceContext::Parse(valid.substr(0, size)).empty()) << size;
  }
}

TEST(TraceContextTest, IgnoresWrongCharactersAtEachPlace) {
  const std::string valid = kValid;
  for (size_t i = 0; i < valid.size(); ++i) {
    for (const char wrong : {'g', 'A', 'F', '.', ' ', '/', ':', '`', '\0', '\xC3'}) {
      EXPECT_TRUE(TraceContext::Parse(With(i, std::string(1, wrong))).empty()) << i << wrong;
    }
    EXPECT_TRUE(TraceContext::Parse(With(i, valid[i] == '-' ? "0" : "-")).empty()) << i;
  }
}

TEST(TraceContextTest, IgnoresVersionFf) {
  EXPECT_TRUE(TraceContext::Parse(With(0, "ff")).empty());
  EXPECT_TRUE(TraceContext::Parse(With(0, "ff") + "-x").empty());
}

TEST(TraceContextTest, IgnoresIdsOfZeros) {
  EXPECT_TRUE(TraceContext::Parse(With(3, std::string(32, '0'))).empty());
  EXPECT_TRUE(TraceContext::Parse(With(36, std::string(16, '0'))).empty());
  EXPECT_FALSE(TraceContext::Parse(With(3, std::string(31, '0') + "1")).empty());
  EXPECT_FALSE(TraceContext::Parse(With(36, "1" + std::string(15, '0'))).empty());
}

}  // namespace
}  // namespace logprobd
