#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>

namespace logprobd::testing {

/// Connects from a loopback address of the client's choice. Reads fail after 20 s.
inline int Connect(int port, const char* source = "127.0.0.1") {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval patience{.tv_sec = 20, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = inet_addr(source);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  return fd;
}

inline void Send(int fd, const std::string& text) {
  send(fd, text.data(), text.size(), MSG_NOSIGNAL);
}

inline std::string ReadToEnd(int fd) {
  std::string text;
  char buffer[4096];
  for (ssize_t got = 0; (got = recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
    text.append(buffer, static_cast<size_t>(got));
  }
  close(fd);
  return text;
}

/// Waits until the server closes the connection, and returns whether it does so without a byte.
inline bool IsCut(int fd) {
  char byte = 0;
  const ssize_t got = recv(fd, &byte, 1, 0);
  const bool is_cut = got == 0 || (got < 0 && errno == ECONNRESET);
  close(fd);
  return is_cut;
}

/// Returns whether the connection is open, and the server has sent nothing.
inline bool IsSilent(int fd) {
  char byte = 0;
  return recv(fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK) < 0 && errno == EAGAIN;
}

}  // namespace logprobd::testing
