#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/command.h"
#include "client/cli/table.h"
#include "nlohmann/json.hpp"

namespace logprobd::client {
namespace {

nlohmann::ordered_json ToJson(const std::vector<Shard>& layout) {
  nlohmann::ordered_json shards = nlohmann::ordered_json::array();
  for (const Shard& shard : layout) {
    shards.push_back({{"replica", shard.replica},
                      {"shard", shard.shard},
                      {"device", shard.device},
                      {"vocab_begin", shard.vocab_begin},
                      {"vocab_end", shard.vocab_end}});
  }
  return shards;
}

nlohmann::ordered_json ToJson(const Head& head) {
  return {{"name", head.name},
          {"model_type", head.model_type},
          {"vocab_size", head.vocab_size},
          {"vocab_rows", head.vocab_rows},
          {"hidden_size", head.hidden_size},
          {"dtype", std::string(DtypeName(head.dtype))},
          {"weights_version", head.weights_version},
          {"ready", head.ready},
          {"tied", head.tied},
          {"scale", head.scale},
          {"softcap", head.softcap},
          {"has_bias", head.has_bias},
          {"tensor", head.tensor},
          {"engine", head.engine},
          {"weight_bytes", head.weight_bytes},
          {"transports", head.transports},
          {"layout", ToJson(head.layout)},
          {"limits",
           {{"message_bytes_max", head.limits.message_bytes_max},
            {"request_rows_max", head.limits.request_rows_max},
            {"top_k_max", head.limits.top_k_max},
            {"candidates_max", head.limits.candidates_max},
            {"segments_max", head.limits.segments_max},
            {"stream_window", head.limits.stream_window}}}};
}

/// What the head does to its logits beside the product, as "scale 0.0625, softcap 30".
std::string TransformText(const Head& head) {
  std::vector<std::string> parts;
  if (head.scale != 1.0F) parts.push_back(absl::StrCat("scale ", head.scale));
  if (head.has_bias) parts.emplace_back("bias");
  if (head.softcap != 0.0F) parts.push_back(absl::StrCat("softcap ", head.softcap));
  return parts.empty() ? "none" : absl::StrJoin(parts, ", ");
}

void PrintTables(const ServerInfo& info, std::ostream& out) {
  Table heads({"head", "model", "vocab", "hidden", "dtype", "weights", "version", "transforms",
               "tensor", "engine", "ready"});
  Table limits({"limits of head", "message", "rows", "top_k", "candidates", "segments", "window",
                "transports"});
  Table layout({"layout of head", "replica", "shard", "device", "ids"});
  bool has_layout = false;
  for (const Head& head : info.heads) {
    const std::string padding =
        head.vocab_rows > head.vocab_size
            ? absl::StrCat(" (+", head.vocab_rows - head.vocab_size, " padding)")
            : "";
    heads.AddRow({head.name, head.model_type, absl::StrCat(CountText(head.vocab_size), padding),
                  CountText(head.hidden_size), std::string(DtypeName(head.dtype)),
                  BytesText(head.weight_bytes), absl::StrCat(head.weights_version),
                  TransformText(head), absl::StrCat(head.tensor, head.tied ? " (tied)" : ""),
                  head.engine, head.ready ? "yes" : "NO"});
    limits.AddRow({head.name, BytesText(head.limits.message_bytes_max),
                   CountText(head.limits.request_rows_max), CountText(head.limits.top_k_max),
                   CountText(head.limits.candidates_max), CountText(head.limits.segments_max),
                   CountText(head.limits.stream_window), absl::StrJoin(head.transports, ",")});
    for (const Shard& shard : head.layout) {
      layout.AddRow({head.name, absl::StrCat(shard.replica), absl::StrCat(shard.shard),
                     shard.device,
                     absl::StrCat("[", shard.vocab_begin, ", ", shard.vocab_end, ")")});
      has_layout = true;
    }
  }
  out << "logprobd " << info.server_version << "\n\n";
  if (info.heads.empty()) {
    out << "no head is loaded\n";
    return;
  }
  heads.Print(out);
  out << '\n';
  limits.Print(out);
  if (has_layout) {
    out << '\n';
    layout.Print(out);
  }
}

int RunInfo(const CommonOptions& options, const CommandStreams& streams) {
  absl::StatusOr<std::unique_ptr<Client>> client = Connect(options);
  if (!client.ok()) return ReportError(streams, options, client.status());
  const absl::StatusOr<ServerInfo> info = (*client)->ListHeads();
  if (!info.ok()) return ReportError(streams, options, info.status());
  if (options.json) {
    nlohmann::ordered_json report = {{"server_version", info->server_version},
                                     {"heads", nlohmann::ordered_json::array()}};
    for (const Head& head : info->heads) report["heads"].push_back(ToJson(head));
    streams.out << report.dump(2) << '\n';
  } else {
    PrintTables(*info, streams.out);
  }
  return kExitOk;
}

}  // namespace

void AddInfoCommand(CLI::App& app, CommandState& state) {
  auto options = std::make_shared<CommonOptions>();
  CLI::App* command = app.add_subcommand("info", "The heads a server has, and its limits");
  AddCommonOptions(*command, *options);
  command->footer(
      "Targets must lie in [0, vocab); hidden states must have `hidden` elements a row. Larger "
      "work than the limits is cut by the client.\n\n"
      "Examples:\n"
      "  logprobctl info\n"
      "  logprobctl info --json | jq '.heads[0].vocab_size'");
  command->callback([options, &state] { state.exit_code = RunInfo(*options, state.streams); });
}

}  // namespace logprobd::client
