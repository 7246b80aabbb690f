#include <sys/random.h>

#include <CLI/CLI.hpp>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "client/cli/command.h"
#include "server/base/errors.h"
#include "server/base/sha256.h"

namespace logprobd::client {
namespace {

struct TokenOptions {
  CommonOptions common;
  std::string id;
  std::string tenant;
  std::vector<std::string> scopes = {"score"};
  double days = 0;
  double share = 0;
  std::string priority_max;
};

/// Returns 256 random bits as text.
absl::StatusOr<std::string> NewToken() {
  std::array<char, 32> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    return absl::InternalError("the system provides no random numbers");
  }
  std::string text;
  absl::WebSafeBase64Escape({bytes.data(), bytes.size()}, &text);
  return text;
}

/// Returns the entry of the server's file of tokens.
absl::StatusOr<std::string> EntryOf(const std::string& token, const TokenOptions& options) {
  Sha256 sha256;
  sha256.Add({reinterpret_cast<const std::byte*>(token.data()), token.size()});
  LOGPROBD_ASSIGN_OR_RETURN(const std::string digest, sha256.Hex());
  std::string entry =
      absl::StrCat("[[token]]\nid = \"", options.id, "\"\nsha256 = \"", digest, "\"\nscopes = [\"",
                   absl::StrJoin(options.scopes, "\", \""), "\"]\n");
  if (!options.tenant.empty()) {
    absl::StrAppend(&entry, "tenant = \"", options.tenant, "\"\n");
  }
  if (options.days > 0) {
    absl::StrAppend(
        &entry, "not_after = ",
        absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now() + options.days * absl::Hours(24),
                         absl::UTCTimeZone()),
        "\n");
  }
  if (options.share > 0) {
    absl::StrAppend(&entry, "share = ", options.share, "\n");
  }
  if (!options.priority_max.empty()) {
    absl::StrAppend(&entry, "priority_max = \"", options.priority_max, "\"\n");
  }
  return entry;
}

int RunNew(const TokenOptions& options, const CommandStreams& streams) {
  const absl::StatusOr<std::string> token = NewToken();
  if (!token.ok()) return ReportError(streams, options.common, token.status());
  const absl::StatusOr<std::string> entry = EntryOf(*token, options);
  if (!entry.ok()) return ReportError(streams, options.common, entry.status());
  if (options.common.json) {
    const nlohmann::ordered_json report = {{"token", *token}, {"entry", *entry}};
    streams.out << report.dump(2) << '\n';
    return kExitOk;
  }
  streams.out << *entry;
  streams.err << "token " << *token
              << "\nGive the token to the caller, since it is not stored; append the entry to the "
                 "server's --tokens file and send the server SIGHUP.\n";
  return kExitOk;
}

std::string CheckName(const std::string& name) {
  const bool is_name =
      !name.empty() && name.size() <= 64 &&
      name.find_first_not_of(
          "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:@/-") ==
          std::string::npos;
  return is_name ? "" : "must be 1 to 64 letters, digits and characters of ._:@/-";
}

}  // namespace

void AddTokenCommand(CLI::App& app, CommandState& state) {
  CLI::App* token = app.add_subcommand("token", "Make tokens for the callers of a server");
  token->require_subcommand(1);
  CLI::App* command = token->add_subcommand(
      "new", "Print a new token and its entry for the server's file of tokens (logprobd --tokens)");
  const auto options = std::make_shared<TokenOptions>();
  command->add_option("id", options->id, "Name of the token in the server's logs")
      ->type_name("ID")
      ->required()
      ->check(CheckName);
  command
      ->add_option("--tenant", options->tenant,
                   "Whose work it is; the tokens of a tenant share its part of the queue. By "
                   "default the id")
      ->type_name("NAME")
      ->check(CheckName);
  command
      ->add_option("--scopes", options->scopes,
                   "What the token allows: score, verify, admin, metrics, with commas between them")
      ->type_name("LIST")
      ->delimiter(',')
      ->check(CLI::IsMember({"score", "verify", "admin", "metrics"}))
      ->capture_default_str();
  command->add_option("--days", options->days, "How long it is valid; by default without an end")
      ->type_name("DAYS")
      ->check(CLI::PositiveNumber);
  command
      ->add_option("--share", options->share,
                   "Share of the queue that its tenant may occupy, in (0, 1]; by default the "
                   "server's --client-share")
      ->type_name("RATIO")
      ->check(CLI::Range(1e-6, 1.0));
  command
      ->add_option("--priority-max", options->priority_max,
                   "Highest priority of its requests; by default high")
      ->check(CLI::IsMember({"high", "normal", "low"}));
  command->add_flag("--json", options->common.json, "Print token and entry as JSON");
  command->footer(
      "The entry goes to the standard output and the token to the standard error, so that only the "
      "entry, which is no secret, reaches the file.\n\n"
      "Examples:\n"
      "  logprobctl token new trainer-7 --tenant team-a --days 90 >> /etc/logprobd/tokens.toml\n"
      "  logprobctl token new operator --scopes score,verify,admin >> /etc/logprobd/tokens.toml\n"
      "  logprobctl token new prometheus --scopes metrics >> /etc/logprobd/tokens.toml");
  command->callback([options, &state] { state.exit_code = RunNew(*options, state.streams); });
}

}  // namespace logprobd::client
