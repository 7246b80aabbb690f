#include "server/http/http_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "tests/support/cpu_seconds.h"
#include "tests/support/fake_clock.h"
#include "tests/support/few_files.h"
#include "tests/unit/server/http/http_client.h"

namespace logprobd {
namespace {

using ::logprobd::testing::Connect;
using ::logprobd::testing::CountOpenFiles;
using ::logprobd::testing::CpuSecondsWithin;
using ::logprobd::testing::FakeClock;
using ::logprobd::testing::FewFiles;
using ::logprobd::testing::IsCut;
using ::logprobd::testing::kIdleCpuSecondsMax;
using ::logprobd::testing::kIdlePeriod;
using ::logprobd::testing::ReadToEnd;
using ::logprobd::testing::Send;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

/// Returns the whole answer, including status line and headers.
std::string Ask(int port, const std::string& method, const std::string& path,
                const std::string& body = "") {
  const int fd = Connect(port);
  const std::string length =
      body.empty() ? "" : absl::StrCat("Content-Length: ", body.size(), "\r\n");
  Send(fd, absl::StrCat(method, " ", path, " HTTP/1.1\r\nHost: x\r\n", length, "\r\n", body));
  return ReadToEnd(fd);
}

std::string Get(int port, const std::string& path) { return Ask(port, "GET", path); }

/// `accept`: the complete header line, or empty.
std::string GetAccepting(int port, const std::string& path, const std::string& accept) {
  const int fd = Connect(port);
  Send(fd, absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: x\r\n", accept, "\r\n"));
  return ReadToEnd(fd);
}

constexpr char kBegunRequest[] = "GET /healthz HTTP/1.1\r\nHost: x\r\n";

/// Ends kBegunRequest and returns whether it is answered.
bool CanEnd(int fd) {
  Send(fd, "\r\n");
  return absl::StartsWith(ReadToEnd(fd), "HTTP/1.1 200");
}

/// Opens connections from `source` with begun requests.
std::vector<int> Begin(int port, const char* source, size_t count) {
  std::vector<int> begun;
  for (size_t i = 0; i < count; ++i) {
    begun.push_back(Connect(port, source));
    Send(begun.back(), kBegunRequest);
  }
  return begun;
}

/// Returns the number of connections that can still end their requests, and closes all.
size_t CountOpen(const std::vector<int>& begun) {
  return static_cast<size_t>(std::count_if(begun.begin(), begun.end(), CanEnd));
}

class HttpServerTest : public ::testing::Test {
 protected:
  HttpServerTest() {
    HttpServer::Options options;
    options.listen = "127.0.0.1:0";
    options.not_ready_reason = [this] { return loading_ ? "loading weights" : ""; };
    options.status_text = [this] {
      ++num_pages_;
      if (blocks_pages_) {
        release_pages_.WaitForNotification();
      }
      return "logprobd, a test\n";
    };
    options.status_page = [] {
      StatusPage page;
      page.state_text = "an HTML page, for a test";
      page.stages = {{"queue", 10, 0.001, 0.002, 0.004}};
      return page;
    };
    auto server = HttpServer::Create(options, metrics_, clock_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  int port() const { return server_->port(); }

  /// Requests / over new connections, and returns them without waiting for answers.
  std::vector<int> RequestPages(int count) const {
    std::vector<int> connections;
    for (int i = 0; i < count; ++i) {
      connections.push_back(Connect(port()));
      Send(connections.back(), "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    }
    return connections;
  }

  Metrics metrics_{{.heads = {"default"}}};
  std::atomic<bool> loading_ = false;
  std::atomic<bool> blocks_pages_ = false;  ///< Whether / waits for release_pages_.
  std::atomic<int> num_pages_ = 0;          ///< How many times / was computed or begun.
  absl::Notification release_pages_;
  FakeClock clock_;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, ServesMetricsInThePrometheusTextFormat) {
  const std::string answer = Get(port(), "/metrics");

  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(answer, HasSubstr("Content-Type: text/plain; version=0.0.4"));
  EXPECT_THAT(answer, HasSubstr("\nlogprobd_ready{head=\"default\"} 0\n"));
}

TEST_F(HttpServerTest, IsHealthyWhileItIsNotReady) {
  loading_ = true;

  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(Get(port(), "/readyz"), StartsWith("HTTP/1.1 503"));
  EXPECT_THAT(Get(port(), "/readyz"), HasSubstr("loading weights"));
}

TEST_F(HttpServerTest, IsReadyWithoutANotReadyReason) {
  EXPECT_THAT(Get(port(), "/readyz"), StartsWith("HTTP/1.1 200"));
}

TEST(HttpServerReadyTest, NamesFailuresWhileItIsReady) {
  const Metrics metrics{{.heads = {"default"}}};
  HttpServer::Options options;
  options.listen = "127.0.0.1:0";
  options.ready_text = [] { return "ready, but a head has failed"; };
  const auto server = HttpServer::Create(options, metrics);
  ASSERT_TRUE(server.ok()) << server.status();

  const std::string answer = Get((*server)->port(), "/readyz");

  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(answer, HasSubstr("ready, but a head has failed\n"));
}

TEST_F(HttpServerTest, GivesTheStatusAsTextToClientsThatDoNotAcceptHtml) {
  for (const char* const accept : {"", "Accept: */*\r\n", "Accept: text/plain\r\n"}) {
    const std::string answer = GetAccepting(port(), "/", accept);

    EXPECT_THAT(answer, HasSubstr("Content-Type: text/plain")) << accept;
    EXPECT_THAT(answer, HasSubstr("logprobd, a test")) << accept;
  }
}

TEST_F(HttpServerTest, IncludesTheLatenciesInTheTextForm) {
  const std::string answer = Get(port(), "/");

  EXPECT_THAT(answer, HasSubstr("stage queue                       10       1 ms"));
  EXPECT_THAT(answer, HasSubstr("\nSee /metrics, /healthz and /readyz.\n"));
}

TEST_F(HttpServerTest, AnswersAGrpcClientInHttp1) {
  const int fd = Connect(port());
  Send(fd, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");

  const std::string answer = ReadToEnd(fd);

  // gRPC reports every answer of HTTP/1 as "Trying to connect an http1.x server".
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 505"));
}

TEST_F(HttpServerTest, GivesBrowsersAnHtmlStatusPage) {
  const std::string answer =
      GetAccepting(port(), "/", "Accept: text/html,application/xml;q=0.9,*/*;q=0.8\r\n");

  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(answer, HasSubstr("Content-Type: text/html; charset=utf-8"));
  EXPECT_THAT(answer, HasSubstr("Content-Security-Policy: default-src 'none';"));
  EXPECT_THAT(answer, HasSubstr("Cache-Control: no-store"));
  EXPECT_THAT(answer, HasSubstr("Vary: Accept"));
  EXPECT_THAT(answer, HasSubstr("X-Content-Type-Options: nosniff"));
  EXPECT_THAT(answer, HasSubstr("an HTML page, for a test"));
}

TEST_F(HttpServerTest, GivesTheStatusInTheRequestedFormat) {
  EXPECT_THAT(Get(port(), "/?format=html"), HasSubstr("an HTML page, for a test"));
  EXPECT_THAT(GetAccepting(port(), "/?format=text", "Accept: text/html\r\n"),
              HasSubstr("logprobd, a test"));
}

TEST_F(HttpServerTest, ReloadsTheStatusPageAtTheRequestedInterval) {
  EXPECT_THAT(Get(port(), "/?format=html"), HasSubstr("\"refresh\" content=\"5\""));
  EXPECT_THAT(Get(port(), "/?format=html&refresh=60"), HasSubstr("\"refresh\" content=\"60\""));
  EXPECT_THAT(Get(port(), "/?format=html&refresh=0"), Not(HasSubstr("http-equiv")));
  EXPECT_THAT(Get(port(), "/?format=html&refresh=-1"), HasSubstr("\"refresh\" content=\"5\""));
  EXPECT_THAT(Get(port(), "/?format=html&refresh=0x"), HasSubstr("\"refresh\" content=\"5\""));
  EXPECT_THAT(Get(port(), "/?format=html&refresh=3600"), HasSubstr("\"refresh\" content=\"3600\""));
  EXPECT_THAT(Get(port(), "/?format=html&refresh=3601"), HasSubstr("\"refresh\" content=\"5\""));
}

TEST_F(HttpServerTest, GivesEverybodyTextWithoutAnHtmlPage) {
  HttpServer::Options options;
  options.listen = "127.0.0.1:0";
  options.status_text = [] { return "only text\n"; };
  const auto server = HttpServer::Create(options, metrics_);
  ASSERT_TRUE(server.ok());

  EXPECT_THAT(Get((*server)->port(), "/?format=html"), HasSubstr("only text"));
}

TEST_F(HttpServerTest, AnswersHeadWithoutABody) {
  const std::string answer = Ask(port(), "HEAD", "/metrics");

  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(answer, Not(HasSubstr("Content-Length: 0")));
  EXPECT_THAT(answer, HasSubstr("Content-Length: "));
  EXPECT_THAT(answer, EndsWith("\r\n\r\n"));
}

TEST_F(HttpServerTest, ServesNoFilesForAnyPath) {
  for (const char* path : {"/nothing", "/metrics/", "/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd",
                           "/metrics/../../etc/passwd", "//etc/passwd", "/metrics%00"}) {
    const std::string answer = Get(port(), path);
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 404")) << path;
    EXPECT_THAT(answer, Not(HasSubstr("root:"))) << path;
  }
}

TEST_F(HttpServerTest, RefusesOtherMethodsWithoutReadingTheirBody) {
  for (const char* method : {"POST", "PUT", "DELETE", "PATCH", "OPTIONS"}) {
    const std::string answer = Ask(port(), method, "/metrics");
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 405")) << method;
    EXPECT_THAT(answer, HasSubstr("Allow: GET, HEAD")) << method;
  }

  const int fd = Connect(port());
  Send(fd, "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\n");
  EXPECT_THAT(ReadToEnd(fd), StartsWith("HTTP/1.1 405"));
}

TEST_F(HttpServerTest, SurvivesDataThatIsNotHttp) {
  for (const std::string& text :
       {std::string("\0\1\2\3\r\n\r\n", 8), std::string("GET\r\n\r\n"),
        absl::StrCat("GET /", std::string(100'000, 'a'), " HTTP/1.1\r\n\r\n"),
        absl::StrCat("GET / HTTP/1.1\r\nX: ", std::string(100'000, 'a'), "\r\n\r\n")}) {
    const int fd = Connect(port());
    Send(fd, text);
    EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));
    clock_.Advance(HttpServer::kExchangeTimeout);  // a line that begins with a NUL is not answered
    EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));
    EXPECT_THAT(ReadToEnd(fd), Not(HasSubstr("HTTP/1.1 200")));
  }
}

TEST_F(HttpServerTest, AnswersWhileClientsSendNothing) {
  std::vector<int> idle;
  for (int i = 0; i < 20; ++i) {  // These are more clients than threads.
    idle.push_back(Connect(port()));
    Send(idle.back(), "GET /metrics HTTP/1.1\r\n");
  }

  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));

  for (const int fd : idle) {
    close(fd);
  }
}

TEST_F(HttpServerTest, AnswersWhileClientsDoNotRead) {
  std::vector<int> slow;
  for (int i = 0; i < 20; ++i) {
    slow.push_back(Connect(port()));
    Send(slow.back(), "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
  }

  EXPECT_THAT(Get(port(), "/metrics"), HasSubstr("\nlogprobd_ready{head=\"default\"} 0\n"));

  for (const int fd : slow) {
    close(fd);
  }
}

TEST_F(HttpServerTest, ServesManyScrapersAtOnce) {
  constexpr int kScrapers = 16;
  constexpr int kScrapes = 20;
  std::atomic<int> answered = 0;
  std::vector<std::thread> scrapers;
  for (int i = 0; i < kScrapers; ++i) {
    scrapers.emplace_back([&] {
      for (int scrape = 0; scrape < kScrapes; ++scrape) {
        const std::string answer = Get(port(), "/metrics");
        answered += answer.find("process_virtual_memory_bytes ") != std::string::npos ? 1 : 0;
      }
    });
  }
  for (std::thread& scraper : scrapers) {
    scraper.join();
  }

  EXPECT_EQ(answered, kScrapers * kScrapes);
}

TEST_F(HttpServerTest, ServesOneRequestAConnection) {
  const int fd = Connect(port());
  const std::string request = "GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n";
  Send(fd, request + request);

  const std::string answers = ReadToEnd(fd);

  EXPECT_THAT(answers, StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(answers, HasSubstr("Connection: close"));
  EXPECT_EQ(answers.find("HTTP/1.1 200", 1), std::string::npos);
}

TEST_F(HttpServerTest, AcceptsHeadersUpToHalfOfTheMemoryOfAConnection) {
  const std::string headers =
      absl::StrCat("X: ", std::string(HttpServer::kRequestBytesMax / 2, 'a'), "\r\n");

  EXPECT_THAT(GetAccepting(port(), "/metrics", headers), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(GetAccepting(port(), "/metrics", headers + headers), StartsWith("HTTP/1.1 431"));
}

TEST_F(HttpServerTest, CutsHeadersWithoutEnd) {
  const std::string header = absl::StrCat("X: ", std::string(1'000, 'a'), "\r\n");
  const int fd = Connect(port());
  Send(fd, "GET /metrics HTTP/1.1\r\nHost: x\r\n");

  size_t num_sent = 0;
  constexpr size_t kSentMax = 100'000;  // far more than the kernel buffers
  while (num_sent < kSentMax && send(fd, header.data(), header.size(), MSG_NOSIGNAL) > 0) {
    ++num_sent;
  }

  EXPECT_LT(num_sent, kSentMax);
  EXPECT_THAT(ReadToEnd(fd), Not(HasSubstr("HTTP/1.1 200")));
}

TEST_F(HttpServerTest, DoesNotReadBodies) {
  const std::string piece(100'000, 'b');
  const int fd = Connect(port());
  Send(fd, "POST /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n");

  size_t num_sent = 0;
  constexpr size_t kSentMax = 1'000;  // far more than the kernel buffers
  while (num_sent < kSentMax && send(fd, piece.data(), piece.size(), MSG_NOSIGNAL) > 0) {
    ++num_sent;
  }

  EXPECT_LT(num_sent, kSentMax);
  close(fd);
}

TEST_F(HttpServerTest, DropsAClientThatHasNotFinishedInTime) {
  std::vector<int> begun = Begin(port(), "127.0.0.1", 2);
  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));  // both are accepted now

  clock_.Advance(HttpServer::kExchangeTimeout - absl::Milliseconds(1));
  Send(begun[0], "X: y\r\n");  // does not extend the time
  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));
  EXPECT_TRUE(CanEnd(begun[1]));
  clock_.Advance(absl::Milliseconds(1));
  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));  // makes the server look

  EXPECT_FALSE(CanEnd(begun[0]));
}

TEST_F(HttpServerTest, DropsAClientAtItsTimeAlsoIfNothingElseHappens) {
  const int begun = Begin(port(), "127.0.0.1", 1).front();
  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));
  clock_.Advance(HttpServer::kExchangeTimeout - absl::Milliseconds(1));
  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));  // now it waits for 1 ms

  clock_.Advance(absl::Milliseconds(1));

  EXPECT_TRUE(IsCut(begun));
}

TEST_F(HttpServerTest, SpendsNoTimeWhileItsClientsDoNothing) {
  EXPECT_LT(CpuSecondsWithin(kIdlePeriod), kIdleCpuSecondsMax);

  blocks_pages_ = true;
  const std::vector<int> waiting = RequestPages(1);
  const std::vector<int> begun = Begin(port(), "127.0.0.1", 1);
  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));

  EXPECT_LT(CpuSecondsWithin(kIdlePeriod), kIdleCpuSecondsMax);

  release_pages_.Notify();
  EXPECT_THAT(ReadToEnd(waiting[0]), HasSubstr("logprobd, a test"));
  EXPECT_EQ(CountOpen(begun), 1U);
}

TEST_F(HttpServerTest, DropsAClientWhosePageIsNotReadyInTime) {
  blocks_pages_ = true;
  const int fd = Connect(port());
  Send(fd, "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));

  clock_.Advance(HttpServer::kExchangeTimeout);
  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));

  EXPECT_EQ(ReadToEnd(fd), "");
  release_pages_.Notify();
}

TEST_F(HttpServerTest, ComputesNoPageForAClientThatWasDropped) {
  constexpr int kPageThreads = 4;
  blocks_pages_ = true;
  const std::vector<int> waiting = RequestPages(20);
  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));
  clock_.Advance(HttpServer::kExchangeTimeout);
  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));  // makes the server look
  for (const int fd : waiting) {
    EXPECT_EQ(ReadToEnd(fd), "");
  }

  release_pages_.Notify();
  EXPECT_THAT(Get(port(), "/"), HasSubstr("logprobd, a test"));

  EXPECT_LE(num_pages_, kPageThreads + 1);
}

TEST_F(HttpServerTest, AnswersHealthWhileNoPageCanBeComputed) {
  blocks_pages_ = true;
  const std::vector<int> waiting = RequestPages(20);  // These are more clients than page threads.

  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(Get(port(), "/readyz"), StartsWith("HTTP/1.1 200"));

  release_pages_.Notify();  // had they waited for a page, they would not have been answered
  for (const int fd : waiting) {
    EXPECT_THAT(ReadToEnd(fd), HasSubstr("logprobd, a test"));
  }
}

TEST_F(HttpServerTest, ComputesFourPagesAtOnce) {
  blocks_pages_ = true;
  const std::vector<int> waiting = RequestPages(6);

  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (num_pages_ < 4 && absl::Now() < end) {
    EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));
  }

  EXPECT_EQ(num_pages_, 4);
  release_pages_.Notify();
  for (const int fd : waiting) {
    EXPECT_THAT(ReadToEnd(fd), HasSubstr("logprobd, a test"));
  }
  EXPECT_EQ(num_pages_, 6);
}

TEST_F(HttpServerTest, KeepsAsManyConnectionsOfAnAddressAsAreAllowed) {
  constexpr size_t kOthers = HttpServer::kAddressConnectionsMax - 1;
  const std::vector<int> begun = Begin(port(), "127.0.0.1", kOthers);

  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));

  EXPECT_EQ(CountOpen(begun), kOthers);
}

TEST_F(HttpServerTest, ReplacesTheOldestConnectionOfAnAddressWithTooMany) {
  constexpr size_t kOthers = HttpServer::kAddressConnectionsMax;
  const std::vector<int> of_another_address = Begin(port(), "127.0.0.2", 1);
  const std::vector<int> begun = Begin(port(), "127.0.0.1", kOthers);

  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));

  EXPECT_FALSE(CanEnd(begun.front()));
  EXPECT_EQ(CountOpen({begun.begin() + 1, begun.end()}), kOthers - 1);
  EXPECT_TRUE(CanEnd(of_another_address.front()));
}

TEST_F(HttpServerTest, KeepsAsManyConnectionsAsAreAllowed) {
  constexpr size_t kHalf = HttpServer::kConnectionsMax / 2;
  const std::vector<int> older = Begin(port(), "127.0.0.2", kHalf);
  const std::vector<int> newer = Begin(port(), "127.0.0.3", kHalf - 1);

  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));

  EXPECT_EQ(CountOpen(older), kHalf);
  EXPECT_EQ(CountOpen(newer), kHalf - 1);
}

TEST_F(HttpServerTest, ReplacesTheOldestConnectionWhenThereAreTooMany) {
  constexpr size_t kHalf = HttpServer::kConnectionsMax / 2;
  const std::vector<int> older = Begin(port(), "127.0.0.2", kHalf);
  const std::vector<int> newer = Begin(port(), "127.0.0.3", kHalf);

  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));

  EXPECT_FALSE(CanEnd(older.front()));
  EXPECT_EQ(CountOpen({older.begin() + 1, older.end()}), kHalf - 1);
  EXPECT_EQ(CountOpen(newer), kHalf);
}

TEST_F(HttpServerTest, ReplacesConnectionsThatWaitForAPage) {
  blocks_pages_ = true;
  std::vector<int> waiting;
  for (size_t i = 0; i < 3 * HttpServer::kAddressConnectionsMax; ++i) {
    waiting.push_back(Connect(port()));
    Send(waiting.back(), "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));
  }

  EXPECT_EQ(ReadToEnd(waiting.front()), "");
  release_pages_.Notify();
  EXPECT_THAT(ReadToEnd(waiting.back()), HasSubstr("logprobd, a test"));
  for (auto fd = waiting.begin() + 1; fd + 1 != waiting.end(); ++fd) {
    close(*fd);
  }
}

TEST_F(HttpServerTest, EndsWhileClientsWaitForPages) {
  blocks_pages_ = true;
  const std::vector<int> waiting = RequestPages(8);
  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));

  std::thread end([this] { server_.reset(); });
  for (const int fd : waiting) {
    EXPECT_EQ(ReadToEnd(fd), "");
  }
  release_pages_.Notify();
  end.join();
}

TEST_F(HttpServerTest, AnswersWhenFilesAreFreeAgain) {
  const int server_port = port();  // UBSan opens files to check the call of a member
  const std::vector<int> others = Begin(server_port, "127.0.0.1", 1);  // has more time than a pause
  EXPECT_THAT(Get(server_port, "/healthz"), StartsWith("HTTP/1.1 200"));
  int fd = -1;
  {
    const FewFiles few(1);
    fd = Connect(server_port);  // takes the last file
    Send(fd, kBegunRequest);
    EXPECT_LT(CpuSecondsWithin(kIdlePeriod), kIdleCpuSecondsMax);
    pollfd answer{.fd = fd, .events = POLLIN, .revents = 0};
    EXPECT_EQ(poll(&answer, 1, 0), 0);
  }

  const absl::Time begin = absl::Now();
  EXPECT_TRUE(CanEnd(fd));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(5));
  EXPECT_EQ(CountOpen(others), 1U);
}

// The pause for want of files must not go on.
TEST_F(HttpServerTest, AnswersAtOnceAlsoAfterFilesWereShort) {
  constexpr int kRequests = 200;  // with a pause of 50 ms before each they take 10 s
  const int server_port = port();
  const auto expect_no_pauses = [&] {
    const absl::Time begin = absl::Now();
    for (int i = 0; i < kRequests; ++i) {
      EXPECT_THAT(Get(server_port, "/healthz"), StartsWith("HTTP/1.1 200"));
    }
    EXPECT_LT(absl::Now() - begin, absl::Seconds(8));
  };
  expect_no_pauses();
  int fd = -1;
  {
    const FewFiles few(1);
    fd = Connect(server_port);
    Send(fd, kBegunRequest);
    pollfd answer{.fd = fd, .events = POLLIN, .revents = 0};
    EXPECT_EQ(poll(&answer, 1, 100), 0);
  }
  EXPECT_TRUE(CanEnd(fd));

  expect_no_pauses();
}

TEST(HttpServerIpv6Test, CountsTheConnectionsOfANetwork) {
  const Metrics metrics{{.heads = {"default"}}};
  HttpServer::Options options;
  options.listen = "[::1]:0";
  const auto server = HttpServer::Create(options, metrics);
  if (!server.ok()) {
    GTEST_SKIP() << "this host has no IPv6";
  }
  std::vector<int> begun;
  for (size_t i = 0; i < HttpServer::kAddressConnectionsMax + 1; ++i) {
    begun.push_back(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(static_cast<uint16_t>((*server)->port()));
    address.sin6_addr = in6addr_loopback;
    ASSERT_EQ(connect(begun.back(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    Send(begun.back(), kBegunRequest);
  }

  EXPECT_TRUE(CanEnd(begun.back()));  // the server has accepted all
  EXPECT_FALSE(CanEnd(begun.front()));
  EXPECT_EQ(CountOpen({begun.begin() + 1, begun.end() - 1}), begun.size() - 2);
}

TEST_F(HttpServerTest, NamesTheAddressThatIsInUse) {
  HttpServer::Options options;
  options.listen = absl::StrCat("127.0.0.1:", port());

  const auto second = HttpServer::Create(options, metrics_);

  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(options.listen));
}

TEST_F(HttpServerTest, RefusesABadAddress) {
  HttpServer::Options options;
  options.listen = "nowhere";

  EXPECT_EQ(HttpServer::Create(options, metrics_).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// Regression: a client that sent a byte now and then could keep a stopping server alive forever.
TEST_F(HttpServerTest, EndsWhileAClientSendsAByteNowAndThen) {
  const int fd = Connect(port());
  Send(fd, "GET /metrics HTTP/1.1\r\nX: ");
  std::atomic<bool> was_cut = false;
  std::thread dripper([fd, &was_cut] {
    for (int bytes = 0; bytes < 400 && !was_cut; ++bytes) {
      Send(fd, "x");
      pollfd closed{fd, POLLIN, 0};  // poll paces the bytes and detects the end of the connection.
      was_cut = poll(&closed, 1, 20) > 0;
    }
  });
  // The answer shows that the server has accepted the first client, too.
  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));

  server_.reset();

  dripper.join();
  EXPECT_TRUE(was_cut);
  close(fd);
}

TEST_F(HttpServerTest, FreesThePortWhenItEnds) {
  HttpServer::Options options;
  options.listen = absl::StrCat("127.0.0.1:", port());
  server_.reset();

  EXPECT_TRUE(HttpServer::Create(options, metrics_).ok());
}

}  // namespace
}  // namespace logprobd
