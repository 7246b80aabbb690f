#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/rpc_transport.h"

namespace logprobd::client {

/// Opens streams without a network. A test reads the messages and sends answers. Not thread-safe.
class FakeStreams final : public StreamOpener {
 public:
  struct Stream final : MessageStream {
    void Start() override { is_started = true; }
    void Write(grpc::ByteBuffer message) override { messages.push_back(message); }
    bool Withdraw(int64_t index) override {
      if (index <= written())
        return false;  // the connection is sending the first unwritten message
      messages.at(static_cast<size_t>(index)).Clear();
      withdrawn.push_back(index);
      return true;
    }
    void CloseWrites() override { is_closed = true; }
    void Cancel() override { is_cancelled = true; }
    int64_t written() const override { return static_cast<int64_t>(messages.size()) - unwritten; }

    /// Ends the stream. Must be called at most once.
    void End(const absl::Status& status) {
      messages.clear();
      auto ended = std::move(events.ended);  // leaves events.ended empty
      std::move(ended)(status);
    }

    StreamEvents events;
    std::vector<grpc::ByteBuffer> messages;
    int64_t unwritten = 0;  ///< Number of messages at the end that the connection has not taken.
    std::vector<int64_t> withdrawn;
    bool is_started = false;
    bool is_closed = false;
    bool is_cancelled = false;
  };

  std::shared_ptr<MessageStream> OpenStream(const std::string& method,
                                            StreamEvents events) override {
    if (is_shut_down) return nullptr;
    methods.push_back(method);
    auto stream = std::make_shared<Stream>();
    stream->events = std::move(events);
    streams.push_back(stream);
    return stream;
  }

  bool is_shut_down = false;
  std::vector<std::string> methods;
  std::vector<std::shared_ptr<Stream>> streams;  ///< All streams opened so far.
};

}  // namespace logprobd::client
