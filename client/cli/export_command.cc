#include <memory>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cli/command.h"
#include "client/cli/terminal.h"
#include "nlohmann/json.hpp"
#include "server/weights/head_export.h"
#include "server/weights/head_weights.h"

namespace logprobd::client {
namespace {

struct ExportOptions {
  CommonOptions common;  ///< Only `json` applies: the command calls no server.
  HeadExportOptions head;
};

int RunExport(const ExportOptions& options, const CommandStreams& streams) {
  ProgressLine line(streams.err, streams.is_terminal);
  const absl::StatusOr<HeadExport> exported = ExportHead(
      options.head, [&line](absl::string_view step, int64_t done_bytes, int64_t total_bytes) {
        line.Update(absl::StrCat(step, " ", done_bytes * 100 / total_bytes, "% (",
                                 BytesText(done_bytes), " of ", BytesText(total_bytes), ")"));
      });
  line.Clear();
  if (!exported.ok()) return ReportError(streams, options.common, exported.status());
  for (const std::string& warning : exported->warnings) {
    streams.err << "logprobctl: warning: " << warning << '\n';
  }
  const HeadInfo& head = exported->head;
  if (options.common.json) {
    const nlohmann::ordered_json report = {{"path", options.head.out},
                                           {"sha256", exported->sha256},
                                           {"model_type", head.model_type},
                                           {"tensor", head.tensor},
                                           {"dtype", std::string(DtypeName(head.dtype))},
                                           {"hidden_size", head.hidden_size},
                                           {"vocab_size", head.vocab_size},
                                           {"vocab_rows", head.vocab_rows},
                                           {"has_bias", head.has_bias},
                                           {"weight_bytes", head.weight_bytes},
                                           {"warnings", exported->warnings}};
    streams.out << report.dump(2) << '\n';
    return kExitOk;
  }
  streams.out << "wrote " << options.head.out << ": " << DescribeHead(head) << "\nsha256 "
              << exported->sha256 << '\n';
  return kExitOk;
}

}  // namespace

void AddExportHeadCommand(CLI::App& app, CommandState& state) {
  CLI::App* command = app.add_subcommand(
      "export-head", "Write the head of a model alone to a folder that logprobd serves");
  const auto options = std::make_shared<ExportOptions>();
  options->head.version = LOGPROBD_VERSION;
  command
      ->add_option("model", options->head.model,
                   "Model folder, .safetensors file, or id of a model in Hugging Face's cache")
      ->type_name("MODEL")
      ->required();
  command->add_option("out", options->head.out, "Folder to write; its parent must exist")
      ->type_name("OUT")
      ->required();
  command
      ->add_option("--head-tensor", options->head.head_tensor,
                   "Name of the head's tensor in the checkpoint, if it is not found by itself")
      ->type_name("NAME");
  command
      ->add_option(
          "--ignore-config-key", options->head.ignored_keys,
          "Key of config.json or name of a tensor that does not change the logits although its "
          "name suggests it; several are separated by colons; model_type exports any model as "
          "a plain head")
      ->delimiter(':')
      ->type_name("NAME");
  command->add_flag("--force", options->head.force,
                    "Replace OUT if an earlier export-head has written it");
  command->add_flag("--json", options->common.json, "Print the result as JSON instead of text");
  command->footer(
      "The folder contains the weight and the bias (model.safetensors), the keys of config.json "
      "that describe the head, and manifest.json with the sha256 of all files. Its scores and the "
      "sha256 of its weights are those of MODEL. It is written under a temporary name next to OUT "
      "(OUT.partial-...) and then renamed. Pickle files are exported by python -m "
      "logprobd.export_head.\n\n"
      "Examples:\n"
      "  logprobctl export-head /models/Qwen3-8B qwen3-8b-head\n"
      "  logprobctl export-head Qwen/Qwen3-8B qwen3-8b-head --force\n"
      "  logprobd --model qwen3-8b-head");
  command->callback([options, &state] { state.exit_code = RunExport(*options, state.streams); });
}

}  // namespace logprobd::client
