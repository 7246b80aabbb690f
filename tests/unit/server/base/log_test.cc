#include "server/base/log.h"

#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/base/text.h"
#include "tests/support/fake_clock.h"
#include "tests/support/full_stderr.h"

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

// A reader splits a line of text at "key=".
TEST_F(LogTest, QuotesTextThatCouldBeTakenForAField) {
  EXPECT_THAT(Written([] {
                LogInfo("done", {{"request_id", "a=b"}});
              }),
              EndsWith("info done request_id=\"a=b\"\n"));
  EXPECT_THAT(Written([] { LogInfo("rows=7"); }), EndsWith("info \"rows=7\"\n"));
}

TEST_F(LogTest, AFlushHasWrittenTheLinesBeforeIt) {
  const LogThread thread;
  for (int turn = 0; turn < 100; ++turn) {
    const std::string text = Written([] {
      for (int line = 0; line < 10; ++line) LogInfo("done", {{"line", line}});
      FlushLog();
    });
    ASSERT_THAT(text, EndsWith("done line=9\n")) << turn;
  }
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

/// Returns texts of random bytes, in which characters that end lines are frequent.
std::vector<std::string> HostileTexts() {
  const std::vector<std::string> pieces = {
      "\n", "\r", "\x85", "\xC2\x85", "\xE2\x80\xA8", "\xE2\x80\xA9", "\x9B", "\x1B[2J",
      "\"", "\\", "=",    " ",        "\xE2\x80\xAE"};
  std::mt19937 random(7);
  std::vector<std::string> texts;
  for (int i = 0; i < 500; ++i) {
    std::string& text = texts.emplace_back();
    for (auto left = random() % 40; left > 0; --left) {
      if (random() % 2 == 0) {
        text += pieces[random() % pieces.size()];
      } else {
        text.push_back(static_cast<char>(random()));
      }
    }
  }
  return texts;
}

/// Returns whether every reader takes `line` for one line of UTF-8.
bool IsOneLine(absl::string_view line) {
  if (line.empty() || line.back() != '\n' || !IsUtf8(line)) return false;
  line.remove_suffix(1);
  while (!line.empty()) {
    const absl::string_view character = line.substr(0, Utf8SequenceLength(line));
    if (IsUnsafeToShow(character)) return false;
    line.remove_prefix(character.size());
  }
  return true;
}

TEST_F(LogTest, WritesOneLineOfUtf8InBothFormatsWhateverTheTextIs) {
  for (const LogFormat format : {LogFormat::kText, LogFormat::kJson}) {
    ConfigureLog({.format = format});
    for (const std::string& text : HostileTexts()) {
      const std::string line = Written([&] { LogError(text, {{"key", text}, {"last", "x"}}); });

      ASSERT_TRUE(IsOneLine(line)) << line;
      if (format == LogFormat::kText) continue;
      const nlohmann::json read = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
      ASSERT_TRUE(read.is_object()) << line;
      ASSERT_EQ(read["message"], read["key"]);
      ASSERT_EQ(read["last"], "x");
    }
  }
}

TEST_F(LogTest, CutsLongTextAndStatesItsSize) {
  const std::string head(8 << 20, '\x01');

  const std::string line = Written([&] {
    LogInfo(head, {{"head", head}, {"outcome", "INVALID_ARGUMENT"}});
  });

  EXPECT_LE(line.size(), 3 * kLogValueBytesMax);
  EXPECT_THAT(line, HasSubstr("...(8388608 bytes) head=\"\\u0001"));
  EXPECT_THAT(line, EndsWith("...(8388608 bytes)\" outcome=INVALID_ARGUMENT\n"));
}

TEST_F(LogTest, BoundsALineOfManyLongValues) {
  const std::string value(kLogValueBytesMax, '"');
  const std::vector<LogField> fields(40, {"name", value});

  for (const LogFormat format : {LogFormat::kText, LogFormat::kJson}) {
    ConfigureLog({.format = format});
    EXPECT_LE(Written([&] { Log(LogLevel::kInfo, value, fields); }).size(), kLogLineBytesMax);
  }
}

TEST_F(LogTest, QuotesAMessageThatCouldBeTakenForFields) {
  EXPECT_THAT(Written([] {
                LogWarning("key x outcome=OK", {{"head", "a"}});
              }),
              EndsWith(" warning \"key x outcome=OK\" head=a\n"));
}

TEST_F(LogTest, WritesAuditLinesAtEveryLevelAndSaysIfThatFails) {
  ConfigureLog({.level = LogLevel::kError});
  const LogField fields[] = {{"method", "Load"}};

  EXPECT_THAT(Written([&] {
                LogAudit(LogLevel::kInfo, fields);
                EXPECT_TRUE(LogAuditAndWait(LogLevel::kWarning, fields).ok());
              }),
              MatchesRegex(".* info audit method=Load\n.* warning audit method=Load\n"));
  const int64_t lost = LostLogLines(LogKind::kAudit);
  {
    const FullStderr full;
    LogAudit(LogLevel::kInfo, fields);
    EXPECT_EQ(LogAuditAndWait(LogLevel::kWarning, fields).code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_EQ(LostLogLines(LogKind::kAudit), lost + 2);
}

TEST_F(LogTest, WritesInOrderFromAThreadUntilItEnds) {
  // The first thread after another test also tells of the lines that were lost there.
  Written([] {
    const LogThread thread;
    LogInfo("before");
  });

  const std::string log = Written([] {
    const LogThread thread;
    for (int i = 0; i < 3; ++i) LogInfo("line", {{"number", i}});
    WriteToLog("raw\n");
  });

  EXPECT_THAT(log, MatchesRegex(".* number=0\n.* number=1\n.* number=2\nraw\n"));
  EXPECT_THAT(Written([] { LogInfo("later"); }), EndsWith(" later\n"));
}

/// Logs so much that the thread is still writing when the process fails.
void LogMuch() {
  for (int i = 0; i < 3'000; ++i) LogInfo("line", {{"number", i}});
}

TEST(LogDeathTest, ACrashWaitsForTheLinesBeforeIt) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const LogThread thread;
        LogMuch();
        std::abort();
      },
      ::testing::KilledBySignal(SIGABRT), "number=2999\n");
}

TEST(LogDeathTest, ACrashThatASanitizerReportsLeavesTheOthersToTheLog) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        for (const int of_sanitizer : {SIGABRT, SIGBUS, SIGFPE, SIGILL}) {
          signal(of_sanitizer, [](int) {});
        }
        signal(SIGSEGV, SIG_DFL);  // with a sanitizer, too
        const LogThread thread;
        LogMuch();
        raise(SIGSEGV);
      },
      ::testing::KilledBySignal(SIGSEGV), "number=2999\n");
}

TEST(LogDeathTest, ASignalOfAnotherProcessEndsThisOneToo) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        signal(SIGSEGV, SIG_DFL);  // with a sanitizer, too
        const LogThread thread;
        kill(getpid(), SIGSEGV);
        std::_Exit(0);
      },
      ::testing::KilledBySignal(SIGSEGV), "");
}

TEST(LogDeathTest, AnExceptionThatNothingCatchesIsLogged) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const LogThread thread;
        LogMuch();
        std::thread([] { throw std::runtime_error("no room"); }).join();
      },
      ::testing::KilledBySignal(SIGABRT), "nothing caught an exception.* what=\"no room\"");
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
