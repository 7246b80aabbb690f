// Makes the calls of a scenario or a schedule with the C++ client: see
// tests/integration/test_client_scenarios.py and test_client_schedules.py.
//
// Each line of standard input is a command: "meet", "look", "servers", "ready TIMEOUT_MS",
// "score CALL ROWS PINNED TIMEOUT_MS" or "score_async" with the same arguments. Each gets a line of
// JSON with the status and, for a score, the number of the call and its result. Calls run at the
// same time, and their lines come in the order in which they end.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "nlohmann/json.hpp"

namespace {

using logprobd::client::Client;
using logprobd::client::ScoreResult;
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

/// A call of Score. Each row names the call and the row, as hidden_rows of client_drivers.py does.
struct ScoreCommand {
  ScoreCommand(std::istringstream& words, int64_t hidden_size) {
    int64_t timeout_ms = 0;
    words >> call >> args.rows >> args.weights_version >> timeout_ms;
    constexpr float kNumbersPerUnit = 32;
    hidden.assign(static_cast<size_t>(args.rows * hidden_size), 1.0F);
    for (int64_t row = 0; row < args.rows; ++row) {
      hidden[static_cast<size_t>(row * hidden_size)] = static_cast<float>(call) / kNumbersPerUnit;
      hidden[static_cast<size_t>(row * hidden_size + 1)] =
          static_cast<float>(row) / kNumbersPerUnit;
      targets.push_back(static_cast<int32_t>(row));
    }
    args.hidden = {reinterpret_cast<const std::byte*>(hidden.data()),
                   hidden.size() * sizeof(float)};
    args.dtype = logprobd::client::Dtype::kF32;
    args.hidden_size = hidden_size;
    args.targets = targets;
    args.timeout = absl::Milliseconds(timeout_ms);
  }

  int64_t call = 0;
  std::vector<float> hidden;
  std::vector<int32_t> targets;
  logprobd::client::ScoreArgs args;
};

nlohmann::json Describe(int64_t call, const absl::StatusOr<ScoreResult>& result) {
  nlohmann::json line = Describe(result.status());
  line["call"] = call;
  if (result.ok()) {
    line["logprob"] = result->logprob;
    line["versions"] = result->weights_versions;
  }
  return line;
}

nlohmann::json Servers(const Client& client) {
  nlohmann::json servers = nlohmann::json::array();
  for (const ServerState& server : client.Servers()) {
    constexpr const char* kStates[] = {"unknown", "ready", "busy", "out"};
    servers.push_back({{"address", server.address},
                       {"state", kStates[static_cast<int>(server.state)]},
                       {"requests", server.requests},
                       {"bytes", server.bytes}});
  }
  return {{"servers", std::move(servers)}};
}

void Print(const nlohmann::json& line) {
  static absl::Mutex mutex(absl::kConstInit);
  const absl::MutexLock lock(&mutex);
  std::cout << line.dump() << std::endl;
}

/// Makes a call and prints its result, on a thread of its own.
std::thread ScoreOnThread(Client& client, std::shared_ptr<const ScoreCommand> command) {
  return std::thread([&client, command = std::move(command)] {
    Print(Describe(command->call, client.Score(command->args)));
  });
}

void ScoreAsync(Client& client, const std::shared_ptr<const ScoreCommand>& command) {
  client.ScoreAsync(command->args, [command](const absl::StatusOr<ScoreResult>& result) {
    Print(Describe(command->call, result));
  });
}

/// Answers the commands. Arguments: the addresses, the hidden size, the first and the longest wait
/// in ms, the number of connections to each server, and the requests in flight at each.
int Run(const std::vector<std::string>& arguments) {
  if (arguments.size() != 6) return 2;
  auto client = Client::Create({.address = arguments[0],
                                .channels = std::stoi(arguments[4]),
                                .backoff_initial = absl::Milliseconds(std::stod(arguments[2])),
                                .backoff_max = absl::Milliseconds(std::stod(arguments[3])),
                                .max_inflight = std::stoi(arguments[5])});
  if (!client.ok()) {
    std::cerr << client.status() << '\n';
    return 2;
  }
  std::vector<std::thread> threads;
  for (std::string text; std::getline(std::cin, text);) {
    std::istringstream words(text);
    std::string command;
    words >> command;
    if (command == "meet") {
      Print(Meet(**client));
    } else if (command == "look") {
      Print(Describe((*client)->ListHeads().status()));
    } else if (command == "servers") {
      Print(Servers(**client));
    } else if (command == "ready") {
      int64_t timeout_ms = 0;
      words >> timeout_ms;
      Print(Describe((*client)->WaitReady(absl::Milliseconds(timeout_ms))));
    } else {
      auto score = std::make_shared<const ScoreCommand>(words, std::stoll(arguments[1]));
      if (command == "score_async") {
        ScoreAsync(**client, score);
      } else {
        threads.push_back(ScoreOnThread(**client, std::move(score)));
      }
    }
  }
  for (std::thread& thread : threads) thread.join();
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
