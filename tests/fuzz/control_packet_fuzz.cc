// Sends arbitrary packets to a live ControlSocket. If the first byte is odd, a valid Hello comes
// first. Each packet has two bytes for its size, least significant first. The server must answer
// each packet or close the connection, and serve the next client.

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/base/errors.h"
#include "server/transport/control_socket.h"
#include "tests/support/control_client.h"
#include "tests/support/fake_client_memory.h"

namespace logprobd::testing {
namespace {

constexpr int64_t kPage = 4'096;

/// A control socket whose regions are small.
struct Server {
  Server() {
    auto made_regions = SharedRegions::Create({.bytes_max = 64 * kPage,
                                               .region_bytes_max = 8 * kPage,
                                               .lease_bytes_max = 8 * kPage,
                                               .lease_regions_max = 2},
                                              pinning, metrics);
    LOGPROBD_CHECK(made_regions.ok(), made_regions.status().ToString());
    regions = *std::move(made_regions);
    auto made_socket = ControlSocket::Create({.path = path}, *regions);
    LOGPROBD_CHECK(made_socket.ok(), made_socket.status().ToString());
    socket = *std::move(made_socket);
    unlink_at_exit = path;
    std::atexit([] { unlink(unlink_at_exit.c_str()); });
  }

  static inline std::string unlink_at_exit;
  const std::string path =
      absl::StrCat(std::filesystem::temp_directory_path().string(), "/fuzz_", getpid(), ".control");
  FakePinning pinning;
  Metrics metrics{Metrics::Options{}};
  std::unique_ptr<SharedRegions> regions;
  std::unique_ptr<ControlSocket> socket;
};

/// Takes the next packet off `bytes`. The last one may be shorter than its size says.
absl::string_view NextPacket(absl::string_view& bytes) {
  const auto byte = [&](size_t i) { return size_t{static_cast<uint8_t>(bytes[i])}; };
  const size_t size = bytes.size() < 2 ? 0 : byte(0) + 256 * byte(1);
  bytes.remove_prefix(std::min<size_t>(2, bytes.size()));
  const absl::string_view packet = bytes.substr(0, size);
  bytes.remove_prefix(packet.size());
  return packet;
}

}  // namespace
}  // namespace logprobd::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using logprobd::testing::ControlClient;
  // Never destroyed: other threads use it until the process ends.
  static const auto& server = *new logprobd::testing::Server();
  if (size == 0) {
    return 0;
  }
  absl::string_view bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  {
    ControlClient client(server.path);
    if (data[0] % 2 == 1) {
      LOGPROBD_CHECK(client.Hello().status_code() == 0);
    }
    // A reply is never empty, and the client checks that it is valid.
    while (!bytes.empty() && client.Send(logprobd::testing::NextPacket(bytes)) &&
           client.Receive().has_value()) {
    }
  }
  ControlClient next(server.path);
  LOGPROBD_CHECK(next.Hello().status_code() == 0);
  return 0;
}
