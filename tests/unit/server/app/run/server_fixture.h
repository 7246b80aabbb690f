#pragma once

#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "logprobd/v1/scoring.grpc.pb.h"
#include "server/app/run/server.h"
#include "tests/support/fake_engine.h"
#include "tests/support/in_memory_head.h"

namespace logprobd::testing {

inline constexpr int64_t kHidden = 4;
inline constexpr int64_t kVocab = 1'000;

/// Returns the answer to a GET, including status line and headers.
inline std::string HttpGet(int port, const std::string& path) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const std::string request = absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: x\r\n\r\n");
  send(fd, request.data(), request.size(), MSG_NOSIGNAL);
  std::string answer;
  char buffer[4096];
  for (ssize_t got = 0; (got = recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
    answer.append(buffer, static_cast<size_t>(got));
  }
  close(fd);
  return answer;
}

inline v1::ScoreRequest OneRow() {
  v1::ScoreRequest request;
  request.set_dtype(v1::DTYPE_BF16);
  request.set_rows(1);
  request.set_hidden_size(kHidden);
  request.set_targets(std::string(4, '\0'));
  request.set_hidden(std::string(kHidden * 2, '\0'));
  return request;
}

/// A server of FakeEngines on free loopback ports; its only head is called "default".
class ServerTest : public ::testing::Test {
 protected:
  ServerTest() {
    options_.model = "/models/fake";
    options_.listen = "127.0.0.1:0";
    options_.http = "127.0.0.1:0";
    options_.batch_rows = 64;
    options_.batch_wait_us = 0;
    parts_.open_model = [](const std::string&,
                           const ModelFolderOptions& options) -> absl::StatusOr<ModelFolderHead> {
      ModelFolderHead head;
      auto weights = MakeRandomHead({.vocab_size = kVocab, .hidden_size = kHidden});
      HeadInfo info = weights->info();
      info.name = options.head_name;
      info.weights_version = options.weights_version;
      head.weights = std::make_unique<InMemoryHead>(
          info, std::vector<std::byte>(static_cast<size_t>(kVocab * kHidden * 2)));
      return head;
    };
    parts_.plan_engine = [this](const HeadInfo&,
                                const EngineOptions&) -> absl::StatusOr<EnginePlan> {
      return EnginePlan{Device::kCpu, "fake", "a test", layout_, {{"host", "weights", 8'000}}};
    };
    parts_.create_engines =
        [this](
            const HeadWeights& weights, const EnginePlan&,
            const EngineOptions&) -> absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> {
      if (before_load_) {
        before_load_();
      }
      if (!refusal_.ok()) {
        return refusal_;
      }
      std::vector<std::byte> row(kHidden * 2);
      const absl::Status read = weights.ReadRows(0, 1, row.data(), kHidden * 2);
      if (!read.ok()) {
        return read;
      }
      std::vector<std::unique_ptr<ScoringEngine>> engines;
      for (int i = 0; i < num_replicas_; ++i) {
        auto engine = std::make_unique<FakeEngine>(
            FakeEngine::Options{.weights_version = weights.info().weights_version});
        engines_.push_back(engine.get());
        engines.push_back(std::move(engine));
      }
      engine_ = engines_.front();
      return engines;
    };
  }

  std::unique_ptr<Server> Create() {
    auto server = Server::Create(options_, parts_);
    EXPECT_TRUE(server.ok()) << server.status();
    return server.ok() ? *std::move(server) : nullptr;
  }

  /// Sends a row on another thread and returns the future status of the call.
  static std::future<grpc::Status> ScoreSoon(const Server& server, const std::string& head = "") {
    return std::async(std::launch::async, [port = server.grpc_port(), head] {
      const auto stub = v1::Scoring::NewStub(grpc::CreateChannel(
          absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials()));
      grpc::ClientContext context;
      context.set_wait_for_ready(false);
      v1::ScoreResponse response;
      v1::ScoreRequest request = OneRow();
      request.set_head(head);
      return stub->Score(&context, request, &response);
    });
  }

  /// Returns the limits of each head as "rows:bytes ".
  static std::string LimitsOfHeads(const Server& server) {
    std::string text;
    for (const ServingPlan& plan : server.plan().heads) {
      absl::StrAppend(&text, plan.head.limits.request_rows_max, ":",
                      plan.head.limits.message_bytes_max, " ");
    }
    return text;
  }

  /// Configures two heads, "a" and "b", instead of the head "default".
  void NameTwoHeads() {
    options_.model = "";
    options_.head_values = {{"model", "a", "/models/a"}, {"model", "b", "/models/b"}};
  }

  ServerOptions options_;
  ServerParts parts_;
  std::function<void()> before_load_;
  absl::Status refusal_;  // if not OK, the next engines cannot be made
  int num_replicas_ = 1;
  std::vector<ShardPlace> layout_;
  std::vector<FakeEngine*> engines_;
  FakeEngine* engine_ = nullptr;  // engine of the first replica
};

}  // namespace logprobd::testing
