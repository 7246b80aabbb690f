// Sends arbitrary bytes to a live GrpcServer as an HTTP/2 client would. If the first byte is odd,
// the connection preface and an empty SETTINGS frame are sent before the other bytes. The server
// must serve the next client.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/base/errors.h"
#include "tests/fuzz/raw_connection.h"
#include "tests/support/transport_server.h"

namespace logprobd::testing {
namespace {

constexpr absl::string_view kPreface("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33);

/// Never destroyed: gRPC's threads use it until the process ends.
TransportServer& Server() {
  static TransportServer& server = *new TransportServer();
  return server;
}

void CheckServing() {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  v1::ScoreResponse response;
  const grpc::Status status = Server().stub->Score(&context, ValidRequest(), &response);
  LOGPROBD_CHECK(status.ok(), status.error_message());
}

}  // namespace
}  // namespace logprobd::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using logprobd::testing::Server;
  if (size == 0) {
    return 0;
  }
  const absl::string_view bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  const absl::string_view preface =
      data[0] % 2 == 1 ? logprobd::testing::kPreface : absl::string_view();

  logprobd::testing::ExchangeRaw(Server().server->port(), absl::StrCat(preface, bytes),
                                 /*patience_ms=*/100);

  logprobd::testing::CheckServing();
  return 0;
}
