#include "server/base/log_writer.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"

namespace logprobd::testing {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr absl::Duration kShort = absl::Milliseconds(20);
constexpr absl::Duration kLong = absl::Seconds(30);

std::string LostLine(int64_t log, int64_t audit) {
  return absl::StrCat("lost ", log, " and ", audit, "\n");
}

/// A pipe of 4 KiB that nobody reads until the test does.
class LogWriterTest : public ::testing::Test {
 protected:
  explicit LogWriterTest(int flags = O_CLOEXEC) {
    EXPECT_EQ(pipe2(ends_.data(), flags), 0);
    EXPECT_GE(fcntl(ends_[1], F_SETPIPE_SZ, 4'096), 4'096);
  }
  ~LogWriterTest() override {
    CloseReader();
    close(ends_[1]);
  }

  void CloseReader() {
    if (ends_[0] >= 0) close(ends_[0]);
    ends_[0] = -1;
  }

  /// Reads until what was read contains `text`.
  std::string ReadUntil(const std::string& text) {
    std::string read_text;
    std::array<char, 4'096> buffer{};
    while (read_text.find(text) == std::string::npos) {
      pollfd reader = {.fd = ends_[0], .events = POLLIN, .revents = 0};
      if (poll(&reader, 1, static_cast<int>(absl::ToInt64Milliseconds(kLong))) <= 0) break;
      const ssize_t count = read(ends_[0], buffer.data(), buffer.size());
      if (count <= 0) break;
      read_text.append(buffer.data(), static_cast<size_t>(count));
    }
    return read_text;
  }

  /// Fills the pipe and then the queue with lines of the kind, until one is lost. Returns how many
  /// were not. The writer's thread, if it has one, must have nothing to write.
  int FillQueue(LogWriter& writer, LogKind kind) {
    fcntl(ends_[1], F_SETFL, O_NONBLOCK);
    while (write(ends_[1], "y", 1) == 1) {
    }
    fcntl(ends_[1], F_SETFL, 0);
    int count = 0;
    for (const int64_t before = writer.num_lost(kind); writer.num_lost(kind) == before; ++count) {
      writer.Write(std::string(999, 'x') + "\n", kind);
    }
    return count - 1;
  }

  int writer_end() const { return ends_[1]; }

 private:
  std::array<int, 2> ends_ = {-1, -1};
};

TEST_F(LogWriterTest, WritesAsTheCallerWithoutAThread) {
  LogWriter writer(writer_end(), LostLine);

  writer.Write("one\n");

  EXPECT_EQ(ReadUntil("\n"), "one\n");
  EXPECT_TRUE(writer.Flush(absl::ZeroDuration()));
}

TEST_F(LogWriterTest, LosesAndCountsLinesInsteadOfWaitingForAReader) {
  LogWriter writer(writer_end(), LostLine);
  ASSERT_TRUE(writer.StartThread().ok());

  const int written = FillQueue(writer, LogKind::kLog);

  EXPECT_LE(written * 1'000, static_cast<int>(LogWriter::kQueueBytesMax));
  EXPECT_GE(written * 1'000, static_cast<int>(LogWriter::kQueueBytesMax) / 2);
  EXPECT_FALSE(writer.Flush(kShort));
  writer.Write("too late" + std::string(991, 'x') + "\n");
  const std::string log = ReadUntil("lost ");
  EXPECT_THAT(log, HasSubstr("x\nlost "));
  EXPECT_EQ(log.find("too late"), std::string::npos);
  EXPECT_EQ(writer.num_lost(LogKind::kLog), 2);
  EXPECT_TRUE(writer.Flush(kLong));
}

TEST_F(LogWriterTest, TellsHowManyLinesWereLostBehindThoseThatWereNot) {
  LogWriter writer(writer_end(), LostLine);
  ASSERT_TRUE(writer.StartThread().ok());
  FillQueue(writer, LogKind::kLog);
  writer.Write("audit\n", LogKind::kAudit);

  EXPECT_THAT(ReadUntil("lost 1 and 0\n"), EndsWith("x\naudit\nlost 1 and 0\n"));

  writer.Write("next\n");
  EXPECT_THAT(ReadUntil("next\n"), StartsWith("next\n"));
}

TEST_F(LogWriterTest, HasRoomForAuditLinesWhenOtherLinesAreLost) {
  LogWriter writer(writer_end(), LostLine);
  ASSERT_TRUE(writer.StartThread().ok());
  FillQueue(writer, LogKind::kLog);

  const int written = FillQueue(writer, LogKind::kAudit);

  EXPECT_GE(written, 200);
  EXPECT_EQ(writer.num_lost(LogKind::kAudit), 1);
  EXPECT_THAT(ReadUntil("lost 1 and 1\n"), EndsWith("x\nlost 1 and 1\n"));
}

TEST_F(LogWriterTest, SaysWhetherTheSystemHasTakenALine) {
  LogWriter writer(writer_end(), LostLine);
  ASSERT_TRUE(writer.StartThread().ok());
  EXPECT_TRUE(writer.WriteAndWait("taken\n", LogKind::kAudit, kLong));
  FillQueue(writer, LogKind::kLog);

  EXPECT_FALSE(writer.WriteAndWait("waits\n", LogKind::kAudit, kShort));
  FillQueue(writer, LogKind::kAudit);
  EXPECT_FALSE(writer.WriteAndWait("lost\n", LogKind::kAudit, kLong));

  ReadUntil("waits\n");
  CloseReader();  // the thread ends
}

TEST_F(LogWriterTest, CountsLinesThatTheSystemRefuses) {
  const int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
  {
    LogWriter writer(full, LostLine);
    writer.Write("a\n");
    ASSERT_TRUE(writer.StartThread().ok());
    writer.Write("b\n");
    EXPECT_FALSE(writer.WriteAndWait("c\n", LogKind::kAudit, kLong));
    EXPECT_EQ(writer.num_lost(LogKind::kLog), 2);
    EXPECT_EQ(writer.num_lost(LogKind::kAudit), 1);
  }
  close(full);
  CloseReader();
  LogWriter writer(writer_end(), LostLine);
  ASSERT_TRUE(writer.StartThread().ok());  // whose thread takes no SIGPIPE
  EXPECT_FALSE(writer.WriteAndWait("d\n", LogKind::kLog, kLong));
}

TEST_F(LogWriterTest, StopsWaitingForAReaderWhenItEnds) {
  LogWriter writer(writer_end(), LostLine);
  ASSERT_TRUE(writer.StartThread().ok());
  FillQueue(writer, LogKind::kLog);

  writer.StopThread(kShort);
  writer.Write("still does not wait\n");
  ReadUntil("lost ");
  writer.StopThread(kLong);

  writer.Write("as the caller\n");
  EXPECT_THAT(ReadUntil("as the caller\n"), EndsWith("as the caller\n"));
}

TEST_F(LogWriterTest, BeginsANewLineAfterOneThatWasCut) {
  std::signal(SIGXFSZ, SIG_IGN);
  const TempFolder folder;
  const std::string path = folder.path("log");
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  LogWriter writer(file, LostLine);

  const rlimit small = {4, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  writer.Write("longer than the disk has room\n");
  setrlimit(RLIMIT_FSIZE, &before);
  writer.Write("next\n");

  std::ifstream log(path);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(log), {}), "long\nnext\n");
  EXPECT_EQ(writer.num_lost(LogKind::kLog), 1);
  close(file);
}

class NonBlockingLogWriterTest : public LogWriterTest {
 protected:
  NonBlockingLogWriterTest() : LogWriterTest(O_CLOEXEC | O_NONBLOCK) {}
};

TEST_F(NonBlockingLogWriterTest, WaitsForRoomInAFileThatDoesNotBlock) {
  LogWriter writer(writer_end(), LostLine);
  ASSERT_TRUE(writer.StartThread().ok());
  for (int i = 0; i < 100; ++i) writer.Write(std::string(999, 'x') + "\n");
  writer.Write("end\n");

  EXPECT_EQ(ReadUntil("end\n").size(), 100U * 1'000 + 4);
  EXPECT_TRUE(writer.Flush(kLong));
  EXPECT_EQ(writer.num_lost(LogKind::kLog), 0);
}

}  // namespace
}  // namespace logprobd::testing
