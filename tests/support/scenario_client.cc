// Makes the calls of a scenario with the C++ client: see
// tests/integration/test_client_scenarios.py.
//
// Each line of standard input is a command: "meet", "score ROWS PINNED TIMEOUT_MS" or
// "ready TIMEOUT_MS". Each gets a line of JSON with the status and, for a score, the result.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "nlohmann/json.hpp"

namespace {

using logprobd::client::Client;
using logprobd::client::ServerState;

nlohmann::json Describe(const absl::Status& status) {
  return {{"code", absl::StatusCodeToString(status.code())},
          {"message", std::string(status.message())}};
}

/// Asks all servers for their heads until each has answered or failed.
nlohmann::json Meet(Client& client) {
  absl::Status status = client.ListHeads().status();
  while (absl::c_any_of(client.Servers(), [](const ServerState& server) {
    return server.state == ServerState::State::kUnknown;
  })) {
    status = client.ListHeads().status();
  }
  return Describe(status);
}

nlohmann::json Score(Client& client, int64_t rows, uint64_t pinned, absl::Duration timeout,
                     int64_t hidden_size) {
  const std::vector<float> hidden(static_cast<size_t>(rows * hidden_size), 1.0F);
  std::vector<int32_t> targets(static_cast<size_t>(rows));
  for (size_t row = 0; row < targets.size(); ++row) targets[row] = static_cast<int32_t>(row);
  logprobd::client::ScoreArgs args;
  args.hidden = {reinterpret_cast<const std::byte*>(hidden.data()), hidden.size() * sizeof(float)};
  args.dtype = logprobd::client::Dtype::kF32;
  args.rows = rows;
  args.hidden_size = hidden_size;
  args.targets = targets;
  args.weights_version = pinned;
  args.timeout = timeout;
  const absl::StatusOr<logprobd::client::ScoreResult> result = client.Score(args);
  nlohmann::json line = Describe(result.status());
  if (result.ok()) {
    line["logprob"] = result->logprob;
    line["versions"] = result->weights_versions;
  }
  return line;
}

/// Answers the commands. Arguments: the addresses, the hidden size, and the first and the longest
/// wait in ms.
int Run(const std::vector<std::string>& arguments) {
  if (arguments.size() != 4) return 2;
  auto client = Client::Create({.address = arguments[0],
                                .channels = 1,
                                .backoff_initial = absl::Milliseconds(std::stod(arguments[2])),
                                .backoff_max = absl::Milliseconds(std::stod(arguments[3])),
                                .max_inflight = 1});
  if (!client.ok()) {
    std::cerr << client.status() << '\n';
    return 2;
  }
  for (std::string text; std::getline(std::cin, text);) {
    std::istringstream words(text);
    std::string command;
    words >> command;
    nlohmann::json line;
    if (command == "meet") {
      line = Meet(**client);
    } else if (command == "ready") {
      int64_t timeout_ms = 0;
      words >> timeout_ms;
      line = Describe((*client)->WaitReady(absl::Milliseconds(timeout_ms)));
    } else {
      int64_t rows = 0;
      uint64_t pinned = 0;
      int64_t timeout_ms = 0;
      words >> rows >> pinned >> timeout_ms;
      line =
          Score(**client, rows, pinned, absl::Milliseconds(timeout_ms), std::stoll(arguments[1]));
    }
    std::cout << line.dump() << std::endl;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
