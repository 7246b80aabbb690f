#include "server/base/log.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_clock.h"

namespace logprobd::testing {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::StartsWith;

class LogTest : public ::testing::Test {
 protected:
  void TearDown() override { ConfigureLog(LogOptions()); }

  template <typename Function>
  static std::string Written(Function function) {
    ::testing::internal::CaptureStderr();
    function();
    return ::testing::internal::GetCapturedStderr();
  }
};

TEST_F(LogTest, WritesTimeLevelMessageAndFields) {
  const std::string line = Written([] {
    LogWarning("head is loaded", {{"rows", 12}, {"name", "a b"}, {"empty", ""}});
  });

  EXPECT_THAT(line, MatchesRegex("....-..-..T..:..:......Z warning head is loaded rows=12 "
                                 "name=\"a b\" empty=\"\"\n"));
}

TEST_F(LogTest, TakesFieldsFromAList) {
  std::vector<LogField> fields = {{"rows", 12}};
  fields.emplace_back("trace_id", "ab");

  EXPECT_THAT(Written([&] { Log(LogLevel::kInfo, "done", fields); }),
              EndsWith("info done rows=12 trace_id=ab\n"));
}

TEST_F(LogTest, StaysOneLineWhateverAClientSends) {
  const std::string line = Written([] {
    LogInfo("bad id", {{"request_id", "x\n2026 error forged=\"yes\"\r\x01\x7f\\"}});
  });

  EXPECT_THAT(line, EndsWith("request_id=\"x\\u000a2026 error "
                             "forged=\\\"yes\\\"\\u000d\\u0001\\u007f\\\\\"\n"));
  EXPECT_EQ(line.find('\n'), line.size() - 1);
}

TEST_F(LogTest, EscapesTheMessageToo) {
  const std::string line = Written([] { LogInfo("one\ntwo"); });

  EXPECT_THAT(line, EndsWith("one\\u000atwo\n"));
}

TEST_F(LogTest, WritesJsonWithEscapes) {
  ConfigureLog({.format = LogFormat::kJson});

  const std::string line = Written([] { LogError("say \"no\"", {{"key", "a\tb"}}); });

  EXPECT_THAT(line, StartsWith("{\"time\":\""));
  EXPECT_THAT(line, EndsWith("\"level\":\"error\",\"message\":\"say \\\"no\\\"\","
                             "\"key\":\"a\\u0009b\"}\n"));
}

TEST_F(LogTest, DropsLinesBelowItsLevel) {
  ConfigureLog({.level = LogLevel::kWarning});

  EXPECT_THAT(Written([] {
                LogDebug("a");
                LogInfo("b");
              }),
              IsEmpty());
  EXPECT_THAT(Written([] { LogError("c"); }), HasSubstr(" error c"));
}

TEST_F(LogTest, WritesLinesForProgramsAtEveryLevel) {
  ConfigureLog({.level = LogLevel::kError});

  EXPECT_THAT(Written([] { LogAlways("ready", {{"port", 1}}); }), EndsWith(" info ready port=1\n"));
}

TEST_F(LogTest, WritesDebugLinesWhenAsked) {
  EXPECT_THAT(Written([] { LogDebug("a"); }), IsEmpty());
  ConfigureLog({.level = LogLevel::kDebug});
  EXPECT_THAT(Written([] { LogDebug("a"); }), HasSubstr(" debug a"));
}

TEST_F(LogTest, ChangesItsLevelAndKeepsItsFormat) {
  ConfigureLog({.level = LogLevel::kError, .format = LogFormat::kJson});

  SetLogLevel(LogLevel::kInfo);

  EXPECT_THAT(Written([] { LogInfo("a"); }), HasSubstr("\"message\":\"a\""));
}

TEST(LogLimiterTest, AdmitsABoundedNumberOfLinesPerWindow) {
  FakeClock clock;
  LogLimiter limiter(clock, 2, absl::Seconds(1));

  EXPECT_EQ(limiter.Admit(), 0);
  EXPECT_EQ(limiter.Admit(), 0);
  EXPECT_FALSE(limiter.Admit().has_value());
  EXPECT_FALSE(limiter.Admit().has_value());
}

TEST(LogLimiterTest, ReportsHowManyLinesItSuppressed) {
  FakeClock clock;
  LogLimiter limiter(clock, 1, absl::Seconds(1));
  EXPECT_EQ(limiter.Admit(), 0);
  EXPECT_FALSE(limiter.Admit().has_value());
  EXPECT_FALSE(limiter.Admit().has_value());

  clock.Advance(absl::Seconds(1));

  EXPECT_EQ(limiter.Admit(), 2);
  clock.Advance(absl::Seconds(1));
  EXPECT_EQ(limiter.Admit(), 0);
}

}  // namespace

}  // namespace logprobd::testing
