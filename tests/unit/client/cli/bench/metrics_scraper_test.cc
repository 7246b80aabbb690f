#include "client/cli/bench/metrics_scraper.h"

#include <httplib.h>

#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

using ::testing::HasSubstr;

/// Pages whose counters grow with every reading; the queue is longest at the third.
class FakeServer {
 public:
  MetricsSource Source() {
    return [this]() -> absl::StatusOr<std::string> {
      absl::MutexLock lock(&mutex_);
      ++readings_;
      if (!status_.ok()) return status_;
      return absl::StrCat("process_start_time_seconds 1\nlogprobd_rows_total{head=\"h\",kind=\"",
                          "scored\"} ", readings_, "\nlogprobd_queue_rows{head=\"h\"} ",
                          readings_ == 3 ? 99 : 1, "\n");
    };
  }

  void Fail(absl::Status status) {
    absl::MutexLock lock(&mutex_);
    status_ = std::move(status);
  }

  void AwaitReadings(int count) {
    absl::MutexLock lock(&mutex_);
    const auto is_reached = [this, count]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return readings_ >= count;
    };
    mutex_.Await(absl::Condition(&is_reached));
  }

 private:
  absl::Mutex mutex_;
  int readings_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

TEST(MetricsScraperTest, ReadsBeforeDuringAndAfter) {
  FakeServer server;
  MetricsSource source = server.Source();
  MetricsScraper scraper(source, "h", absl::Milliseconds(1));

  ASSERT_TRUE(scraper.Begin().ok());
  server.AwaitReadings(4);
  const absl::StatusOr<ServerFigures> figures = scraper.End();

  ASSERT_TRUE(figures.ok()) << figures.status();
  EXPECT_GE(figures->rows_scored, 4);
  EXPECT_EQ(figures->queue_rows_peak, 99);
  EXPECT_GT(figures->seconds, 0);
}

TEST(MetricsScraperTest, BeginsAnew) {
  FakeServer server;
  MetricsSource source = server.Source();
  MetricsScraper scraper(source, "h", absl::Hours(1));

  ASSERT_TRUE(scraper.Begin().ok());
  ASSERT_TRUE(scraper.End().ok());
  ASSERT_TRUE(scraper.Begin().ok());  // the third reading
  const absl::StatusOr<ServerFigures> figures = scraper.End();

  ASSERT_TRUE(figures.ok());
  EXPECT_EQ(figures->rows_scored, 1);
  EXPECT_EQ(figures->queue_rows_peak, 99);
}

TEST(MetricsScraperTest, ReportsAServerThatIsGone) {
  FakeServer server;
  MetricsSource source = server.Source();
  MetricsScraper scraper(source, "h", absl::Hours(1));

  ASSERT_TRUE(scraper.Begin().ok());
  server.Fail(absl::UnavailableError("gone"));

  EXPECT_EQ(scraper.End().status(), absl::UnavailableError("gone"));
  EXPECT_EQ(scraper.Begin(), absl::UnavailableError("gone"));
}

TEST(MetricsScraperTest, DoesNotCompareWithThePageOfAnEarlierLoad) {
  // Its figures were those of both loads.
  FakeServer server;
  MetricsSource source = server.Source();
  MetricsScraper scraper(source, "h", absl::Hours(1));
  ASSERT_TRUE(scraper.Begin().ok());
  ASSERT_TRUE(scraper.End().ok());
  server.Fail(absl::UnavailableError("gone"));
  ASSERT_FALSE(scraper.Begin().ok());
  server.Fail(absl::OkStatus());

  EXPECT_EQ(scraper.End().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(HttpMetricsSourceTest, ReadsAPage) {
  httplib::Server server;
  server.Get("/metrics", [](const httplib::Request&, httplib::Response& response) {
    response.set_content("up 1\n", "text/plain");
  });
  const int port = server.bind_to_any_port("127.0.0.1");
  std::thread listener([&server] { server.listen_after_bind(); });

  for (const char* form :
       {"127.0.0.1:%", "http://127.0.0.1:%", "http://127.0.0.1:%/metrics", "127.0.0.1:%/"}) {
    std::string url = form;
    url.replace(url.find('%'), 1, std::to_string(port));
    absl::StatusOr<MetricsSource> source = HttpMetricsSource(url);
    ASSERT_TRUE(source.ok()) << url;
    const absl::StatusOr<std::string> page = (*source)();
    ASSERT_TRUE(page.ok()) << page.status();
    EXPECT_EQ(*page, "up 1\n") << url;
  }
  absl::StatusOr<MetricsSource> absent =
      HttpMetricsSource(absl::StrCat("127.0.0.1:", port, "/absent"));
  EXPECT_THAT(std::string((*absent)().status().message()), HasSubstr("HTTP status 404"));
  server.stop();
  listener.join();
}

TEST(HttpMetricsSourceTest, SaysWhereNobodyAnswered) {
  absl::StatusOr<MetricsSource> source = HttpMetricsSource("127.0.0.1:1");

  ASSERT_TRUE(source.ok());
  EXPECT_THAT(std::string((*source)().status().message()),
              HasSubstr("no metrics from 127.0.0.1:1"));
}

TEST(HttpMetricsSourceTest, RefusesOtherUrls) {
  for (const char* url : {"", "https://host:1", "host:0", "host:port", ":9470", "/metrics"}) {
    EXPECT_EQ(HttpMetricsSource(url).status().code(), absl::StatusCode::kInvalidArgument) << url;
  }
}

}  // namespace
}  // namespace logprobd::client
