#include "server/http/http_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace logprobd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// The tests use sockets and not the library's client, whose classes change with macros that its
// package sets.
int Connect(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  return fd;
}

void Send(int fd, const std::string& text) { send(fd, text.data(), text.size(), MSG_NOSIGNAL); }

std::string ReadToEnd(int fd) {
  std::string text;
  char buffer[4096];
  for (ssize_t got = 0; (got = recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
    text.append(buffer, static_cast<size_t>(got));
  }
  close(fd);
  return text;
}

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

class HttpServerTest : public ::testing::Test {
 protected:
  HttpServerTest() {
    HttpServer::Options options;
    options.listen = "127.0.0.1:0";
    options.not_ready_reason = [this] { return loading_ ? "loading weights" : ""; };
    options.status_text = [] { return "logprobd, a test\n"; };
    options.status_page = [] {
      StatusPage page;
      page.state_text = "an HTML page, for a test";
      page.stages = {{"queue", 10, 0.001, 0.001, 0.002, 0.004}};
      return page;
    };
    auto server = HttpServer::Create(options, metrics_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  int port() const { return server_->port(); }

  Metrics metrics_{{.heads = {"default"}}};
  std::atomic<bool> loading_ = false;
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

TEST_F(HttpServerTest, TellsAGrpcClientThatThisIsTheHttpPort) {
  const int fd = Connect(port());
  Send(fd, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");

  const std::string answer = ReadToEnd(fd);

  // gRPC reports this answer as "Trying to connect an http1.x server".
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(answer, HasSubstr("This is the --http port"));
}

TEST_F(HttpServerTest, GivesBrowsersAnHtmlStatusPage) {
  const std::string answer =
      GetAccepting(port(), "/", "Accept: text/html,application/xml;q=0.9,*/*;q=0.8\r\n");

  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(answer, HasSubstr("Content-Type: text/html; charset=utf-8"));
  EXPECT_THAT(answer, HasSubstr("Content-Security-Policy: default-src 'none';"));
  EXPECT_THAT(answer, HasSubstr("Cache-Control: no-store"));
  EXPECT_THAT(answer, HasSubstr("Vary: Accept"));
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
  EXPECT_THAT(answer, Not(HasSubstr("logprobd_ready{")));
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
    EXPECT_THAT(ReadToEnd(fd), Not(HasSubstr("HTTP/1.1 200")));
  }

  EXPECT_THAT(Get(port(), "/healthz"), StartsWith("HTTP/1.1 200"));
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
