// Sends arbitrary bytes to a live HttpServer. It must answer with HTTP or close the connection, and
// serve the next client.

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "server/http/http_server.h"
#include "tests/fuzz/raw_connection.h"

namespace logprobd::testing {
namespace {

/// A request without an end is dropped after 10 s; nobody waits for that here.
constexpr int kPatienceMs = 5;
constexpr int kHealthPatienceMs = 5'000;
constexpr absl::string_view kHealth = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";

/// Never destroyed: other threads use it until the process ends.
const HttpServer& Server() {
  static const HttpServer& server = []() -> const HttpServer& {
    HttpServer::Options options;
    options.listen = "127.0.0.1:0";
    options.not_ready_reason = [] { return "fuzzing"; };
    options.status_text = [] { return "logprobd, fuzzed\n"; };
    options.status_page = [] { return StatusPage(); };
    static const Metrics& metrics = *new Metrics(Metrics::Options{});
    auto created = HttpServer::Create(options, metrics);
    LOGPROBD_CHECK(created.ok(), created.status().ToString());
    return *created->release();
  }();
  return server;
}

}  // namespace
}  // namespace logprobd::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace logprobd::testing;
  const int port = Server().port();

  const std::string answer =
      ExchangeRaw(port, {reinterpret_cast<const char*>(data), size}, kPatienceMs);

  LOGPROBD_CHECK(answer.empty() || absl::StartsWith(answer, "HTTP/1."), answer);
  const std::string health = ExchangeRaw(port, kHealth, kHealthPatienceMs);
  LOGPROBD_CHECK(absl::StartsWith(health, "HTTP/1.1 200 "), health);
  return 0;
}
