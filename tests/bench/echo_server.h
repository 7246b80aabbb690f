#pragma once

#include <memory>
#include <string>

namespace logprobd::testing {

/// A gRPC server that answers any unary call with 8 bytes: the least a round trip can cost.
class EchoServer {
 public:
  EchoServer();
  ~EchoServer();
  std::string address() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd::testing
