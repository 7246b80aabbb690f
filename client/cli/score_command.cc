#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "client/cli/command.h"
#include "client/cli/score_files.h"
#include "client/cli/terminal.h"
#include "nlohmann/json.hpp"

namespace logprobd::client {
namespace {

struct ScoreOptions {
  CommonOptions common;
  ScoreFiles files;
  std::vector<std::string> outputs = {"logprob", "entropy"};
  ScoreArgs args;  ///< Holds the scalar options; the arrays come from `files`.
  std::optional<float> entropy_temperature;
  std::string priority = "normal";
  std::string format = "jsonl";
  std::string output;
  int32_t max_inflight = Client::Options().max_inflight;
  std::optional<int32_t> retries;  ///< Absent: the policy of the library.
};

/// Returns the priority with this name, which the parser has accepted.
Priority ToPriority(const std::string& name) {
  if (name == "high") return Priority::kHigh;
  return name == "low" ? Priority::kLow : Priority::kNormal;
}

void PrintSummary(const ScoreOptions& options, const ScoreResult& result, double seconds,
                  std::ostream& out) {
  const double rows_per_second = static_cast<double>(result.rows) / seconds;
  if (options.common.json) {
    const nlohmann::ordered_json summary = {{"rows", result.rows},
                                            {"ignored_rows", result.ignored_rows},
                                            {"nonfinite_rows", result.nonfinite_rows},
                                            {"weights_version", result.weights_version},
                                            {"requests", result.requests},
                                            {"retries", result.retries},
                                            {"seconds", seconds},
                                            {"rows_per_second", rows_per_second}};
    out << summary.dump() << '\n';
    return;
  }
  out << "scored " << CountText(result.rows) << " rows (" << CountText(result.ignored_rows)
      << " ignored, " << CountText(result.nonfinite_rows) << " with NaN or Inf) in "
      << absl::StrFormat("%.2f s, %s rows/s", seconds,
                         CountText(static_cast<int64_t>(rows_per_second)))
      << ", " << result.requests << " requests, " << result.retries << " retries, weights version "
      << result.weights_version << '\n';
}

absl::Status WriteOutput(const ScoreOptions& options, const ScoreArgs& args,
                         const ScoreResult& result, std::ostream& standard_output) {
  if (options.format == "npy") return WriteNpyFiles(args, result, options.output);
  if (options.output.empty()) {
    WriteJsonLines(args, result, standard_output);
    standard_output.flush();
    return standard_output ? absl::OkStatus()
                           : absl::DataLossError("cannot write to standard output");
  }
  std::ofstream file(options.output, std::ios::trunc);
  if (!file) return absl::InvalidArgumentError(absl::StrCat("cannot write ", options.output));
  WriteJsonLines(args, result, file);
  file.close();
  if (!file) {
    return absl::DataLossError(
        absl::StrCat("cannot write ", options.output, ": is the disk full?"));
  }
  return absl::OkStatus();
}

/// Returns the problem of an --output whose name promises arrays in one file, which no format
/// writes, or an empty string.
std::string OutputProblem(const ScoreOptions& options) {
  constexpr absl::string_view kArraySuffixes[] = {".npy", ".npz", ".safetensors", ".pt", ".pth"};
  const std::string suffix =
      absl::AsciiStrToLower(std::filesystem::path(options.output).extension().string());
  if (!absl::c_linear_search(kArraySuffixes, suffix)) return "";
  return absl::StrCat(options.output,
                      options.format == "npy"
                          ? " names a file, but --format npy writes one file per output to a folder"
                          : " would hold lines of JSON: name it .jsonl, or give --format npy and a "
                            "folder");
}

int RunScore(const ScoreOptions& options, const CommandStreams& streams) {
  const absl::StatusOr<uint32_t> outputs = ParseOutputs(options.outputs);
  if (!outputs.ok()) {
    ReportError(streams, options.common, outputs.status());
    return kExitUsage;
  }
  absl::StatusOr<std::unique_ptr<ScoreInput>> input = ScoreInput::Load(options.files);
  if (!input.ok()) return ReportError(streams, options.common, input.status());
  absl::StatusOr<std::unique_ptr<Client>> client =
      Connect(options.common, WithRetries(options.retries, {.max_inflight = options.max_inflight}));
  if (!client.ok()) return ReportError(streams, options.common, client.status());

  if (absl::Status status = ListHeads(**client, options.common, streams).status(); !status.ok()) {
    return ReportError(streams, options.common, status);
  }

  ScoreArgs& args = (*input)->args();
  args.outputs = *outputs;
  args.temperature = options.args.temperature;
  args.entropy_temperature = options.entropy_temperature;
  args.ignore_index = options.args.ignore_index;
  args.top_k = options.args.top_k;
  args.head = options.args.head;
  args.weights_version = options.args.weights_version;
  args.priority = ToPriority(options.priority);
  args.reject_nonfinite = options.args.reject_nonfinite;
  args.request_id = options.args.request_id;
  args.traceparent = options.args.traceparent;
  args.trace = options.args.trace;
  ProgressLine progress(streams.err, streams.is_terminal);
  args.on_progress = [&](int64_t rows) {
    progress.Update(absl::StrFormat("scored %s of %s rows (%d%%)", CountText(rows),
                                    CountText(args.rows),
                                    rows * 100 / std::max<int64_t>(args.rows, 1)));
  };
  const auto start = std::chrono::steady_clock::now();
  const absl::StatusOr<ScoreResult> result = (*client)->Score(args);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  progress.Clear();
  if (!result.ok()) return ReportError(streams, options.common, result.status());

  if (absl::Status status = WriteOutput(options, args, *result, streams.out); !status.ok()) {
    return ReportError(streams, options.common, status);
  }
  const bool is_output_free = !options.output.empty();
  PrintSummary(options, *result, seconds, is_output_free ? streams.out : streams.err);
  return kExitOk;
}

void AddInputOptions(CLI::App& command, ScoreFiles& files) {
  command.option_defaults()->group("Input")->always_capture_default();
  CLI::Option* input = command.add_option("input", files.input,
                                          "A .safetensors file with hidden states and targets");
  CLI::Option* hidden = command.add_option(
      "--hidden", files.hidden, "Hidden states, [..., hidden_size]: .npy or .safetensors");
  CLI::Option* targets = command.add_option(
      "--targets", files.targets, "Token ids (int32 or int64), one per row: .npy or .safetensors");
  hidden->needs(targets);
  targets->needs(hidden);
  hidden->excludes(input);
  command.add_option("--hidden-name", files.hidden_name,
                     "Name of the tensor with the hidden states");
  command.add_option("--targets-name", files.targets_name, "Name of the tensor with the targets");
  command
      .add_option("--dtype", files.dtype,
                  "Type of the hidden states if the file stores them as uint16")
      ->check(CLI::IsMember({"bf16", "f16", "f32"}));
  command.add_option("--segments", files.segments,
                     "Row offsets [segments + 1] of the segments whose logprobs are summed: .npy, "
                     ".safetensors or text");
  command.add_option("--row-temperatures", files.row_temperatures,
                     "Temperatures [rows], one per row: .npy, .safetensors or text");
  CLI::Option* candidates = command
                                .add_option("--candidates", files.candidates,
                                            "Token ids to score on every row, for example 1,2,3")
                                ->delimiter(',')
                                ->allow_extra_args(false)
                                ->default_str("");
  CLI::Option* candidate_ids =
      command
          .add_option(
              "--candidate-ids", files.candidate_ids,
              "Token ids to score per row: [rows, k], or a flat list with --candidate-offsets")
          ->excludes(candidates);
  command
      .add_option("--candidate-offsets", files.candidate_offsets,
                  "Offsets [rows + 1] of each row's ids in the flat list")
      ->needs(candidate_ids);
}

void AddRequestOptions(CLI::App& command, ScoreOptions& options) {
  command.option_defaults()->group("Scoring")->always_capture_default();
  command
      .add_option(
          "--outputs", options.outputs,
          absl::StrCat("Scores to return: any of ", absl::StrJoin(OutputNames(), ", "), ", all"))
      ->delimiter(',')
      ->allow_extra_args(false);
  command.add_option("--temperature", options.args.temperature,
                     "Temperature by which the logits are divided");
  command.add_option("--entropy-temperature", options.entropy_temperature,
                     "Temperature of the entropy; by default the temperature of the row");
  command.add_option("--ignore-index", options.args.ignore_index,
                     "Target id that marks a row as ignored: it is not scored");
  command.add_option("--top-k", options.args.top_k, "Number of most likely ids to return per row")
      ->check(CLI::NonNegativeNumber);
  command.add_option("--head", options.args.head,
                     "Name of the head; optional if the server has only one head");
  command.add_option("--weights-version", options.args.weights_version,
                     "Version of the weights that must be live; 0 accepts any version");
  command
      .add_option("--priority", options.priority, "Priority of the request in the server's queue")
      ->check(CLI::IsMember({"high", "normal", "low"}));
  command.add_flag("--reject-nonfinite", options.args.reject_nonfinite,
                   "Fail if the scores of a row are NaN or Inf");
  command.add_option("--request-id", options.args.request_id, "Request id for the server's log");
  command.add_option("--traceparent", options.args.traceparent,
                     "W3C traceparent of the span to which the call belongs");
  command.option_defaults()->group("Connection");
  command
      .add_option("--max-inflight", options.max_inflight, "Maximum number of requests in flight")
      ->check(CLI::Range(1, 1024));
  command
      .add_option("--retries", options.retries,
                  "Maximum number of times that a request is sent again. By default 7, and until "
                  "the timeout while the server is overloaded")
      ->check(CLI::Range(0, 100));
}

}  // namespace

void AddScoreCommand(CLI::App& app, CommandState& state) {
  auto options = std::make_shared<ScoreOptions>();
  CLI::App* command = app.add_subcommand("score", "Score hidden states and targets from files");
  AddCommonOptions(*command, options->common);
  AddInputOptions(*command, options->files);
  AddRequestOptions(*command, *options);
  command->option_defaults()->group("Output");
  command
      ->add_option("--format", options->format,
                   "Output format: jsonl, or npy with one file per output")
      ->check(CLI::IsMember({"jsonl", "npy"}));
  command->add_option("--output", options->output,
                      "File for jsonl (default: standard output) or folder for npy");
  command->add_flag("--trace", options->args.trace,
                    "Add a line for each request with the times of the server's stages, for jsonl");
  command->footer(
      "The hidden states are the input of the head, that is the output of the final norm: "
      "last_hidden_state (hidden_states[-1]) of Hugging Face models. The target of row i is the "
      "token to score on that row; the command does not shift targets. Store bf16 in .npy files as "
      "uint16 and give --dtype bf16.\n\n"
      "Examples:\n"
      "  logprobctl score rows.safetensors > scores.jsonl\n"
      "  logprobctl score --hidden h.npy --targets t.npy --dtype bf16 --format npy --output out/\n"
      "  logprobctl score rows.safetensors --outputs logprob,greedy --segments offsets.txt\n"
      "  logprobctl score rows.safetensors --top-k 5 --candidates 319,350,315,360\n"
      "  logprobctl score --hidden a.safetensors:states --targets a.safetensors:ids --temperature "
      "0.7");
  command->callback([options, &state] {
    if (options->files.input.empty() && options->files.hidden.empty()) {
      throw CLI::RequiredError("a .safetensors file, or --hidden and --targets,");
    }
    if (options->format == "npy" && options->output.empty()) {
      throw CLI::RequiredError("--output FOLDER, for --format npy,");
    }
    if (options->format == "npy" && options->args.trace) {
      throw CLI::ValidationError("--trace", "needs --format jsonl");
    }
    if (const std::string problem = OutputProblem(*options); !problem.empty()) {
      throw CLI::ValidationError("--output", problem);
    }
    state.exit_code = RunScore(*options, state.streams);
  });
}

}  // namespace logprobd::client
