#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/strings/string_view.h"
#include "server/base/errors.h"
#include "server/base/file_descriptor.h"

namespace logprobd::testing {

/// Sends `bytes` to a loopback port, half-closes the connection, and returns what the server sends
/// until it closes the connection or sends nothing for `patience_ms`. Aborts if the server refuses
/// the connection. A server may close it before it has read everything.
inline std::string ExchangeRaw(int port, absl::string_view bytes, int patience_ms) {
  const FileDescriptor connection(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval patience{.tv_sec = patience_ms / 1'000, .tv_usec = patience_ms % 1'000 * 1'000};
  setsockopt(connection.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  setsockopt(connection.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  // libFuzzer's timer interrupts calls.
  while (connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) !=
             0 &&
         errno != EISCONN) {
    LOGPROBD_CHECK(errno == EINTR || errno == EALREADY, std::strerror(errno));
  }
  while (!bytes.empty()) {
    const ssize_t sent = send(connection.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) {
      continue;
    }
    if (sent < 0) {
      LOGPROBD_CHECK(errno == EPIPE || errno == ECONNRESET || errno == EAGAIN,
                     std::strerror(errno));
      break;
    }
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  shutdown(connection.get(), SHUT_WR);
  std::string answer;
  std::array<char, 4'096> buffer = {};
  ssize_t received = 0;
  while ((received = recv(connection.get(), buffer.data(), buffer.size(), 0)) > 0 ||
         (received < 0 && errno == EINTR)) {
    answer.append(buffer.data(), static_cast<size_t>(std::max<ssize_t>(received, 0)));
  }
  LOGPROBD_CHECK(received == 0 || errno == ECONNRESET || errno == EAGAIN, std::strerror(errno));
  return answer;
}

}  // namespace logprobd::testing
