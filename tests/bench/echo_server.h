#pragma once

#include <memory>
#include <string>

namespace logprobd::testing {

/// A gRPC server that answers any unary call with 8 bytes: the least a round trip can cost. One
/// that copies puts each message into one piece of memory first: the least a bulk transfer can.
class EchoServer {
 public:
  explicit EchoServer(bool copies = false);
  ~EchoServer();
  std::string address() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd::testing
