#include "server/metrics/process_stats.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <ctime>

namespace logprobd {
namespace {

TEST(ProcessStatsTest, ReadsPlausibleFigures) {
  const ProcessStats stats = ReadProcessStats();

  EXPECT_GE(stats.cpu_seconds, 0);
  EXPECT_GT(stats.resident_bytes, 1e6);
  EXPECT_GT(stats.virtual_bytes, stats.resident_bytes);
  EXPECT_GE(stats.max_fds, stats.open_fds);
  EXPECT_NEAR(stats.start_time_seconds, static_cast<double>(std::time(nullptr)), 300);
}

TEST(ProcessStatsTest, CountsAFurtherOpenFile) {
  const double before = ReadProcessStats().open_fds;
  const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);

  EXPECT_EQ(ReadProcessStats().open_fds, before + 1);

  close(fd);
}

}  // namespace
}  // namespace logprobd
