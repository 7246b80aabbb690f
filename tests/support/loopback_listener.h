#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace logprobd::testing {

/// A TCP port of 127.0.0.1 that takes connections, for servers that do not answer as one should. A
/// client that nobody accepts is connected and hears nothing.
class LoopbackListener {
 public:
  LoopbackListener() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(socket_, generic, size), 0);
    EXPECT_EQ(listen(socket_, 16), 0);
    EXPECT_EQ(getsockname(socket_, generic, &size), 0);
    address_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  }
  ~LoopbackListener() { close(socket_); }
  LoopbackListener(const LoopbackListener&) = delete;
  LoopbackListener& operator=(const LoopbackListener&) = delete;

  /// Returns the socket of the next connection, or -1 once the listener is shut down.
  int Accept() const { return accept(socket_, nullptr, nullptr); }
  /// Ends a thread that is in Accept.
  void ShutDown() const { shutdown(socket_, SHUT_RDWR); }

  const std::string& address() const { return address_; }

 private:
  const int socket_;
  std::string address_;
};

}  // namespace logprobd::testing
