#include "client/cli/bench/server_metrics.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;

constexpr char kPage[] = R"(# HELP rows_total Rows.
# TYPE rows_total counter
rows_total{head="a",kind="scored"} 10
rows_total{head="a",kind="ignored"} 2
rows_total{head="b",kind="scored"} 1e3 1700000000000

cpu_seconds 1.5
odd{text="quote \" slash \\ comma , brace }"} 7
)";

TEST(MetricsPageTest, SumsTheSamplesThatHaveTheLabels) {
  const absl::StatusOr<MetricsPage> page = MetricsPage::Parse(kPage);

  ASSERT_TRUE(page.ok()) << page.status();
  EXPECT_EQ(page->Sum("rows_total"), 1'012);
  EXPECT_EQ(page->Sum("rows_total", {{"kind", "scored"}}), 1'010);
  EXPECT_EQ(page->Sum("rows_total", {{"kind", "scored"}, {"head", "a"}}), 10);
  EXPECT_EQ(page->Sum("rows_total", {{"kind", "other"}}), 0);
  EXPECT_EQ(page->Sum("cpu_seconds"), 1.5);
  EXPECT_EQ(page->Sum("odd", {{"text", "quote \" slash \\ comma , brace }"}}), 7);
}

TEST(MetricsPageTest, ReportsNamesAndLabelValues) {
  const absl::StatusOr<MetricsPage> page = MetricsPage::Parse(kPage);

  EXPECT_TRUE(page->Has("cpu_seconds"));
  EXPECT_FALSE(page->Has("cpu"));
  EXPECT_THAT(page->LabelValues("rows_total", "head"), ElementsAre("a", "b"));
  EXPECT_THAT(page->LabelValues("cpu_seconds", "head"), IsEmpty());
}

TEST(MetricsPageTest, NamesALineThatIsMalformed) {
  for (const char* text : {"<html>", "rows_total", "rows_total{head=\"a\" 1", "rows_total ten",
                           "rows_total 1 2 3", "{a=\"b\"} 1"}) {
    EXPECT_THAT(std::string(MetricsPage::Parse(text).status().message()), HasSubstr(text)) << text;
  }
}

MetricsPage Parse(const std::string& text) { return *MetricsPage::Parse(text); }

/// Returns the metrics page of a server after `steps` equal steps.
MetricsPage PageAfter(int steps) {
  return Parse(
      absl::StrCat("process_start_time_seconds 1000\n",                                      //
                   "logprobd_rows_total{head=\"h\",kind=\"scored\"} ", 100 * steps,          //
                   "\nlogprobd_rows_total{head=\"other\",kind=\"scored\"} ", 7 * steps,      //
                   "\nlogprobd_batch_rows_count{head=\"h\"} ", 4 * steps,                    //
                   "\nlogprobd_batch_rows_sum{head=\"h\"} ", 100 * steps,                    //
                   "\nlogprobd_stage_duration_seconds_count{stage=\"queue\"} ", 10 * steps,  //
                   "\nlogprobd_stage_duration_seconds_sum{stage=\"queue\"} ", 0.5 * steps,   //
                   "\nlogprobd_stage_duration_seconds_count{stage=\"kernel\"} ", 4 * steps,  //
                   "\nlogprobd_stage_duration_seconds_sum{stage=\"kernel\"} ", 0.2 * steps,  //
                   "\nlogprobd_stage_duration_seconds_count{stage=\"h2d\"} 0",               //
                   "\nlogprobd_stage_duration_seconds_sum{stage=\"h2d\"} 0",                 //
                   "\nlogprobd_rejected_total{reason=\"queue_rows\"} ", 3 * steps,           //
                   "\nlogprobd_rejected_total{reason=\"invalid\"} 9",                        //
                   "\nlogprobd_received_bytes_total{transport=\"tcp\"} ", 5e8 * steps,       //
                   "\nprocess_cpu_seconds_total ", 2 * steps,                                //
                   "\nlogprobd_gpu_busy_seconds_total{gpu=\"0\"} ", 0.75 * steps,            //
                   "\nlogprobd_flops_total{gpu=\"0\"} ", 4e14 * steps, "\n"));
}

TEST(ServerFiguresTest, AreTheDifferencesOfTwoPages) {
  ServerPeaks peaks;
  peaks.queue_rows = 42;
  peaks.resident_bytes = 1e9;

  const auto figures = CompareMetrics(PageAfter(3), PageAfter(5), "h", peaks, /*seconds=*/2);

  ASSERT_TRUE(figures.ok()) << figures.status();
  EXPECT_EQ(figures->rows_scored, 200);
  EXPECT_EQ(figures->batches, 8);
  EXPECT_EQ(figures->batch_rows_mean, 25);
  ASSERT_EQ(figures->stages.size(), 2U);
  EXPECT_EQ(figures->stages[0].name, "queue");
  EXPECT_EQ(figures->stages[0].count, 20);
  EXPECT_DOUBLE_EQ(figures->stages[0].mean_seconds, 0.05);
  EXPECT_EQ(figures->stages[1].name, "kernel");
  EXPECT_DOUBLE_EQ(figures->stages[1].mean_seconds, 0.05);
  EXPECT_EQ(figures->queue_rows_peak, 42);
  EXPECT_THAT(figures->rejected, ElementsAre(Pair("queue_rows", 6)));
  EXPECT_EQ(figures->cpu_seconds, 4);
  EXPECT_EQ(figures->cpu_seconds_per_gigabyte, 4);
  EXPECT_EQ(figures->resident_bytes_peak, 1e9);
  ASSERT_EQ(figures->gpus.size(), 1U);
  EXPECT_EQ(figures->gpus[0].busy_ratio, 0.75);
  EXPECT_EQ(figures->gpus[0].teraflops, 400);
}

TEST(ServerFiguresTest, AreZeroWithoutWork) {
  const auto figures = CompareMetrics(PageAfter(3), PageAfter(3), "h", {}, 2);

  ASSERT_TRUE(figures.ok());
  EXPECT_EQ(figures->batch_rows_mean, 0);
  EXPECT_EQ(figures->cpu_seconds_per_gigabyte, 0);
  EXPECT_TRUE(figures->stages.empty());
}

TEST(ServerFiguresTest, AreNotTakenAcrossARestart) {
  const MetricsPage restarted =
      Parse("process_start_time_seconds 2000\nlogprobd_rows_total{head=\"h\"} 0\n");

  const auto figures = CompareMetrics(PageAfter(3), restarted, "h", {}, 2);

  EXPECT_EQ(figures.status().code(), absl::StatusCode::kAborted);
}

TEST(ServerFiguresTest, RequireThePagesOfALogprobd) {
  const auto figures = CompareMetrics(Parse("up 1\n"), Parse("up 1\n"), "h", {}, 2);

  EXPECT_THAT(std::string(figures.status().message()), HasSubstr("HTTP address of a logprobd"));
}

TEST(ServerPeaksTest, KeepTheLargestOfEachAndAddPriorities) {
  ServerPeaks peaks;

  peaks.Add(Parse("logprobd_queue_rows{head=\"h\",priority=\"high\"} 5\n"
                  "logprobd_queue_rows{head=\"h\",priority=\"low\"} 6\n"
                  "logprobd_queue_rows{head=\"other\",priority=\"low\"} 100\n"
                  "process_resident_memory_bytes 10\n"),
            "h");
  peaks.Add(Parse("logprobd_queue_rows{head=\"h\",priority=\"low\"} 1\n"
                  "process_resident_memory_bytes 20\n"),
            "h");

  EXPECT_EQ(peaks.queue_rows, 11);
  EXPECT_EQ(peaks.resident_bytes, 20);
}

/// Returns pages whose counters grow with every reading. The third page has the longest queue.
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

TEST(MetricsScraperTest, CanBeginAgain) {
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

TEST(MetricsScraperTest, ReportsAServerThatDoesNotAnswer) {
  FakeServer server;
  MetricsSource source = server.Source();
  MetricsScraper scraper(source, "h", absl::Hours(1));

  ASSERT_TRUE(scraper.Begin().ok());
  server.Fail(absl::UnavailableError("gone"));

  EXPECT_EQ(scraper.End().status(), absl::UnavailableError("gone"));
  EXPECT_EQ(scraper.Begin(), absl::UnavailableError("gone"));
}

TEST(MetricsScraperTest, DoesNotCompareWithThePageOfAnEarlierLoad) {
  // A comparison with that page would add up the figures of both loads.
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

/// Sends `page` to requests for /metrics and status 404 to others, and closes each connection. It
/// listens on all addresses of the host.
class FakeHttpServer {
 public:
  explicit FakeHttpServer(std::string page) : page_(std::move(page)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    socklen_t length = sizeof(address);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(listen(listener_, SOMAXCONN), 0);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Serve(); });
  }
  ~FakeHttpServer() {
    shutdown(listener_, SHUT_RDWR);  // ends accept
    thread_.join();
    close(listener_);
  }

  int port() const { return port_; }
  /// Returns the latest request.
  std::string request() const {
    const absl::MutexLock lock(&mutex_);
    return request_;
  }

 private:
  void Serve() {
    for (int socket = -1; (socket = accept(listener_, nullptr, nullptr)) >= 0;) {
      std::string request;
      char buffer[1024];
      while (!absl::StrContains(request, "\r\n\r\n")) {
        const ssize_t got = recv(socket, buffer, sizeof(buffer), 0);
        if (got <= 0) break;
        request.append(buffer, static_cast<size_t>(got));
      }
      {
        const absl::MutexLock lock(&mutex_);
        request_ = request;
      }
      const std::string response = absl::StartsWith(request, "GET /metrics HTTP/1.0\r\nHost: ")
                                       ? page_
                                       : "HTTP/1.1 404 Not Found\r\n\r\n";
      send(socket, response.data(), response.size(), MSG_NOSIGNAL);
      close(socket);
    }
  }

  const std::string page_;
  const int listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int port_ = 0;
  mutable absl::Mutex mutex_;
  std::string request_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

/// Returns an IPv4 address of this host that is not loopback, or an empty string.
std::string PublicAddress() {
  ifaddrs* all = nullptr;
  getifaddrs(&all);
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owned(all, freeifaddrs);
  for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr != nullptr && each->ifa_addr->sa_family == AF_INET &&
        (each->ifa_flags & IFF_LOOPBACK) == 0) {
      return inet_ntoa(reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr);
    }
  }
  return "";
}

TEST(HttpMetricsSourceTest, PresentsItsTokenToLoopbackAddressesOnly) {
  const FakeHttpServer server("HTTP/1.1 200 OK\r\n\r\nup 1\n");
  const auto request_to = [&](const std::string& host) {
    EXPECT_TRUE((*HttpMetricsSource(absl::StrCat(host, ":", server.port()), "secret"))().ok());
    return server.request();
  };

  EXPECT_THAT(request_to("127.0.0.1"), HasSubstr("\r\nAuthorization: Bearer secret\r\n\r\n"));
  if (const std::string other = PublicAddress(); !other.empty()) {
    EXPECT_THAT(request_to(other), Not(HasSubstr("secret")));
  }
  EXPECT_TRUE((*HttpMetricsSource(absl::StrCat("127.0.0.1:", server.port())))().ok());
  EXPECT_THAT(server.request(), Not(HasSubstr("Authorization")));
}

TEST(HttpMetricsSourceTest, SaysThatATokenIsMissing) {
  for (const std::string code : {"401", "403"}) {
    const FakeHttpServer server(absl::StrCat("HTTP/1.1 ", code, " No\r\n\r\n"));

    const absl::Status status =
        (*HttpMetricsSource(absl::StrCat("127.0.0.1:", server.port())))().status();

    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(code), HasSubstr("scope metrics"), HasSubstr("--token-file")));
  }
}

TEST(HttpMetricsSourceTest, ReadsAPage) {
  const FakeHttpServer server("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nup 1\n");

  for (const char* form :
       {"127.0.0.1:%", "http://127.0.0.1:%", "http://127.0.0.1:%/metrics", "127.0.0.1:%/"}) {
    std::string url = form;
    url.replace(url.find('%'), 1, std::to_string(server.port()));
    absl::StatusOr<MetricsSource> source = HttpMetricsSource(url);
    ASSERT_TRUE(source.ok()) << url;
    const absl::StatusOr<std::string> page = (*source)();
    ASSERT_TRUE(page.ok()) << page.status();
    EXPECT_EQ(*page, "up 1\n") << url;
  }
  absl::StatusOr<MetricsSource> absent =
      HttpMetricsSource(absl::StrCat("127.0.0.1:", server.port(), "/absent"));
  EXPECT_THAT(std::string((*absent)().status().message()), HasSubstr("HTTP status 404"));
}

TEST(HttpMetricsSourceTest, ReadsAPageWithoutALength) {
  const std::string page(1'000'000, '#');
  const FakeHttpServer server("HTTP/1.0 200 OK\r\n\r\n" + page);

  EXPECT_EQ((*HttpMetricsSource(absl::StrCat("127.0.0.1:", server.port())))().value(), page);
}

TEST(HttpMetricsSourceTest, RefusesAnIncompletePage) {
  const FakeHttpServer server("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nup 1\n");

  const absl::StatusOr<std::string> page =
      (*HttpMetricsSource(absl::StrCat("127.0.0.1:", server.port())))();

  EXPECT_EQ(page.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(page.status().message()), HasSubstr("before the end of the page"));
}

TEST(HttpMetricsSourceTest, RefusesAResponseThatIsNotHttp) {
  for (const char* response : {"", "up 1\n", "HTTP/1.1 200 OK\r\n", "SMTP/1.1 200 OK\r\n\r\n"}) {
    const FakeHttpServer server(response);

    const absl::StatusOr<std::string> page =
        (*HttpMetricsSource(absl::StrCat("127.0.0.1:", server.port())))();

    EXPECT_THAT(std::string(page.status().message()), HasSubstr("not HTTP")) << response;
  }
}

TEST(HttpMetricsSourceTest, NamesTheAddressThatDoesNotAnswer) {
  absl::StatusOr<MetricsSource> source = HttpMetricsSource("127.0.0.1:1");

  ASSERT_TRUE(source.ok());
  EXPECT_THAT(std::string((*source)().status().message()),
              HasSubstr("cannot read metrics from 127.0.0.1:1"));
}

TEST(HttpMetricsSourceTest, RefusesOtherUrls) {
  for (const char* url : {"", "https://host:1", "host:0", "host:port", ":9470", "/metrics"}) {
    EXPECT_EQ(HttpMetricsSource(url).status().code(), absl::StatusCode::kInvalidArgument) << url;
  }
}

}  // namespace
}  // namespace logprobd::client
