#include <sys/random.h>

#include <CLI/CLI.hpp>
#include <array>
#include <functional>
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

/// The options of an entry of the server's file of tokens.
struct EntryOptions {
  CommonOptions common;
  std::string id;  ///< Id of the token, or name of the certificate.
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

absl::StatusOr<std::string> DigestOf(const std::string& token) {
  Sha256 sha256;
  sha256.Add({reinterpret_cast<const std::byte*>(token.data()), token.size()});
  return sha256.Hex();
}

/// Returns the lines that entries of both kinds have.
std::string CommonLines(const EntryOptions& options) {
  std::string entry =
      absl::StrCat("scopes = [\"", absl::StrJoin(options.scopes, "\", \""), "\"]\n");
  if (!options.tenant.empty()) absl::StrAppend(&entry, "tenant = \"", options.tenant, "\"\n");
  if (options.days > 0) {
    absl::StrAppend(
        &entry, "not_after = ",
        absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now() + options.days * absl::Hours(24),
                         absl::UTCTimeZone()),
        "\n");
  }
  if (options.share > 0) absl::StrAppend(&entry, "share = ", options.share, "\n");
  if (!options.priority_max.empty()) {
    absl::StrAppend(&entry, "priority_max = \"", options.priority_max, "\"\n");
  }
  return entry;
}

int RunNew(const EntryOptions& options, const CommandStreams& streams) {
  const absl::StatusOr<std::string> token = NewToken();
  if (!token.ok()) return ReportError(streams, options.common, token.status());
  const absl::StatusOr<std::string> digest = DigestOf(*token);
  if (!digest.ok()) return ReportError(streams, options.common, digest.status());
  const std::string entry = absl::StrCat("[[token]]\nid = \"", options.id, "\"\nsha256 = \"",
                                         *digest, "\"\n", CommonLines(options));
  if (options.common.json) {
    const nlohmann::ordered_json report = {{"token", *token}, {"entry", entry}};
    streams.out << report.dump(2) << '\n';
    return kExitOk;
  }
  streams.out << entry;
  streams.err << "token " << *token
              << "\nGive the token to the caller, since it is not stored; append the entry to the "
                 "server's --tokens file and send the server SIGHUP.\n";
  return kExitOk;
}

int RunCertificate(const EntryOptions& options, const CommandStreams& streams) {
  const std::string entry =
      absl::StrCat("[[certificate]]\nname = \"", options.id, "\"\n", CommonLines(options));
  if (options.common.json) {
    nlohmann::ordered_json report;
    report["entry"] = entry;
    streams.out << report.dump(2) << '\n';
  } else {
    streams.out << entry;
  }
  return kExitOk;
}

/// Checks a name of at most `bytes_max` bytes as the server does.
std::function<std::string(const std::string&)> NameCheck(size_t bytes_max) {
  return [bytes_max](const std::string& name) -> std::string {
    const bool is_name =
        !name.empty() && name.size() <= bytes_max &&
        name.find_first_not_of(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:@/-") ==
            std::string::npos;
    return is_name ? ""
                   : absl::StrCat("must be 1 to ", bytes_max,
                                  " letters, digits and characters of ._:@/-");
  };
}

constexpr size_t kIdBytesMax = 64;
constexpr size_t kCertificateNameBytesMax = 255;

/// Adds the options that entries of both kinds have. `id` is the name of EntryOptions::id, and
/// `scopes` are those that an entry of this kind may have.
void AddEntryOptions(CLI::App& command, absl::string_view id,
                     const std::vector<std::string>& scopes, EntryOptions& options) {
  command
      .add_option("--tenant", options.tenant,
                  absl::StrCat("Whose work it is; the callers of a tenant share its part of the "
                               "queue. By default the ",
                               id))
      ->type_name("NAME")
      ->check(NameCheck(kIdBytesMax));
  command
      .add_option("--scopes", options.scopes,
                  absl::StrCat("What callers may do: ", absl::StrJoin(scopes, ", "),
                               ", with commas between them"))
      ->type_name("LIST")
      ->delimiter(',')
      ->check(CLI::IsMember(scopes))
      ->capture_default_str();
  command.add_option("--days", options.days, "How long it is valid; by default without an end")
      ->type_name("DAYS")
      ->check(CLI::PositiveNumber);
  command
      .add_option("--share", options.share,
                  "Share of the queue that its tenant may occupy, in (0, 1]; by default the "
                  "server's --client-share")
      ->type_name("RATIO")
      ->check(CLI::Range(1e-6, 1.0));
  command
      .add_option("--priority-max", options.priority_max,
                  "Highest priority of its requests; by default high")
      ->check(CLI::IsMember({"high", "normal", "low"}));
  command.add_flag("--json", options.common.json, "Print as JSON");
}

}  // namespace

void AddTokenCommand(CLI::App& app, CommandState& state) {
  CLI::App* token =
      app.add_subcommand("token", "Make entries of a server's file of tokens (logprobd --tokens)");
  token->require_subcommand(1);
  CLI::App* command = token->add_subcommand("new", "Print a new token and its entry");
  const auto options = std::make_shared<EntryOptions>();
  command->add_option("id", options->id, "Name of the token in the server's logs")
      ->type_name("ID")
      ->required()
      ->check(NameCheck(kIdBytesMax));
  AddEntryOptions(*command, "id", {"score", "verify", "admin", "metrics"}, *options);
  command->footer(
      "The entry goes to the standard output and the token to the standard error, so that only the "
      "entry, which is no secret, reaches the file.\n\n"
      "Examples:\n"
      "  logprobctl token new trainer-7 --tenant team-a --days 90 >> /etc/logprobd/tokens.toml\n"
      "  logprobctl token new operator --scopes score,verify,admin >> /etc/logprobd/tokens.toml\n"
      "  logprobctl token new prometheus --scopes metrics >> /etc/logprobd/tokens.toml");
  command->callback([options, &state] { state.exit_code = RunNew(*options, state.streams); });

  CLI::App* certificate = token->add_subcommand(
      "certificate", "Print an entry for the holders of a client certificate (--tls-client-ca)");
  const auto of_certificate = std::make_shared<EntryOptions>();
  certificate
      ->add_option("name", of_certificate->id,
                   "A DNS name or URI among the certificate's subject alternative names, or its "
                   "common name if it has no alternative name of any kind")
      ->type_name("NAME")
      ->required()
      ->check(NameCheck(kCertificateNameBytesMax));
  AddEntryOptions(*certificate, "name", {"score", "verify", "admin"}, *of_certificate);
  certificate->footer(
      "The pages of HTTP take tokens only, so there is no scope metrics.\n\n"
      "Example:\n"
      "  logprobctl token certificate trainer-8.example --tenant team-a >> "
      "/etc/logprobd/tokens.toml");
  certificate->callback([of_certificate, &state] {
    state.exit_code = RunCertificate(*of_certificate, state.streams);
  });
}

}  // namespace logprobd::client
