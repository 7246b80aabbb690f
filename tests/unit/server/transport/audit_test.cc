#include "server/transport/audit.h"

#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/clock.h"
#include "server/base/log.h"
#include "tests/support/full_stderr.h"

namespace logprobd::testing {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

/// Returns the lines that `write` writes while the log has errors only.
template <typename Write>
std::string LinesOf(Write write) {
  SetLogLevel(LogLevel::kError);
  ::testing::internal::CaptureStderr();
  write();
  std::string lines = ::testing::internal::GetCapturedStderr();
  SetLogLevel(LogLevel::kInfo);
  return lines;
}

ChangeAudit Audit(bool is_required) {
  return {{.token = "t", .certificate = "c.example", .peer = "unix:"}, "Load", is_required};
}

TEST(AuditTest, AConnectionHasItsProcess) {
  EXPECT_THAT(LinesOf([] { AuditConnection("--admin", {.user = 7, .process = 42}); }),
              EndsWith(" info audit connection=--admin user=7 process=42\n"));
}

TEST(AuditTest, ARefusedConnectionHasItsProcessIfTheSystemKnowsIt) {
  LogLimiter limiter(Clock::Steady());
  const auto refuse = [&](const std::optional<SocketPeer>& process) {
    return LinesOf([&] { AuditRefusedConnection("--local", process, limiter); });
  };

  EXPECT_THAT(refuse(SocketPeer{.user = 7, .process = 42}),
              EndsWith(" warning audit connection=--local user=7 process=42 "
                       "outcome=PERMISSION_DENIED lines_suppressed=0\n"));
  EXPECT_THAT(refuse(std::nullopt), HasSubstr(" user=-1 process=-1 outcome=PERMISSION_DENIED"));
  for (int i = 0; i < 18; ++i) refuse(std::nullopt);
  EXPECT_EQ(refuse(std::nullopt), "");
}

TEST(AuditTest, AChangeHasOneLineWithWhatIsKnown) {
  ChangeAudit audit = Audit(/*is_required=*/false);

  EXPECT_EQ(LinesOf([&] { EXPECT_TRUE(audit.Begin().ok()); }), "");
  EXPECT_THAT(LinesOf([&] { audit.End(absl::OkStatus()); }),
              EndsWith(" info audit method=Load token=t certificate=c.example peer=unix: "
                       "outcome=OK\n"));
  audit.change() = {.head = "policy", .version = 3, .path = "/m/3", .sha256 = "abc"};
  EXPECT_THAT(LinesOf([&] { audit.End(absl::NotFoundError("no such folder")); }),
              EndsWith(" warning audit method=Load token=t certificate=c.example peer=unix: "
                       "head=policy version=3 path=/m/3 sha256=abc outcome=NOT_FOUND "
                       "reason=\"no such folder\"\n"));
}

TEST(AuditTest, AChangeWhoseLinesAreRequiredHasOneBeforeItOrDoesNotBegin) {
  const ChangeAudit audit = Audit(/*is_required=*/true);

  EXPECT_THAT(LinesOf([&] { EXPECT_TRUE(audit.Begin().ok()); }),
              EndsWith(" info audit method=Load token=t certificate=c.example peer=unix: "
                       "outcome=ASKED\n"));
  absl::Status begun;
  {
    const FullStderr full;
    begun = audit.Begin();
  }
  EXPECT_EQ(begun.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(begun.message()),
              EndsWith(", so nothing was changed (--audit-required)"));
}

}  // namespace
}  // namespace logprobd::testing
