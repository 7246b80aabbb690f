#include "server/engine/equal_sums.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "server/base/errors.h"
#include "server/base/log.h"
#include "server/base/text.h"

namespace logprobd {
namespace {

/// Name of the file. Its first line is the title; each further line is an environment in which all
/// sums were equal.
constexpr const char* kFileName = "equal_sums";
constexpr absl::string_view kTitle = "logprobd found equal sums in these environments (format 1)";
/// A longer file counts as malformed, so its size stays bounded.
constexpr size_t kFileBytesMax = size_t{64} << 10;

template <typename T>
bool Differ(const std::vector<T>& a, const std::vector<T>& b) {
  return !a.empty() && !b.empty() && a != b;
}

/// Closes a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) (void)close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int number() const { return number_; }

 private:
  const int number_;
};

absl::Status ErrorOf(absl::string_view call, const std::string& path) {
  const int error = errno;
  const std::string message = absl::StrCat(call, " ", path, ": ", std::strerror(error));
  return error == ENOENT ? absl::NotFoundError(message) : absl::UnavailableError(message);
}

/// Returns the content of a file, or its first kFileBytesMax + 1 bytes. Never waits on a FIFO.
absl::StatusOr<std::string> ReadStart(const std::string& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.number() < 0) return ErrorOf("open", path);
  std::string content(kFileBytesMax + 1, '\0');
  size_t size = 0;
  while (size < content.size()) {
    const ssize_t count = read(file.number(), content.data() + size, content.size() - size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return ErrorOf("read", path);
    if (count == 0) break;
    size += static_cast<size_t>(count);
  }
  content.resize(size);
  return content;
}

/// Returns the environments of a file's content, or INVALID_ARGUMENT that says what is wrong.
absl::StatusOr<std::vector<std::string>> Parse(absl::string_view content) {
  if (content.size() > kFileBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("it is longer than ", kFileBytesMax, " bytes"));
  }
  std::vector<std::string> lines = absl::StrSplit(content, '\n');
  if (lines.front() != kTitle) {
    return absl::InvalidArgumentError(absl::StrCat("its first line is not \"", kTitle, "\""));
  }
  if (!lines.back().empty()) return absl::InvalidArgumentError("its last line is incomplete");
  lines.erase(lines.begin());
  lines.pop_back();
  for (const std::string& line : lines) {
    if (line.empty() || !IsUtf8(line) || HasControlCharacters(line)) {
      return absl::InvalidArgumentError("it has an empty line or characters that are not text");
    }
  }
  return lines;
}

/// Returns the environments that the file lists. Logs why it cannot be used, unless it does not
/// exist.
std::vector<std::string> ReadEnvironments(const std::string& path) {
  const absl::StatusOr<std::string> content = ReadStart(path);
  if (absl::IsNotFound(content.status())) return {};
  const absl::StatusOr<std::vector<std::string>> environments =
      content.ok() ? Parse(*content) : content.status();
  if (environments.ok()) return *environments;
  LogWarning("the file that remembers checks of sums is ignored",
             {{"file", path}, {"reason", environments.status().message()}});
  return {};
}

/// Replaces the file in one step, so that a reader sees the old or the new content. If the machine
/// loses power, the file may be malformed, and the next start repeats the check.
absl::Status WriteEnvironments(const std::string& path,
                               const std::vector<std::string>& environments) {
  const std::string content = absl::StrCat(kTitle, "\n", absl::StrJoin(environments, "\n"), "\n");
  std::string temporary = absl::StrCat(path, ".XXXXXX");
  const Descriptor file(mkostemp(temporary.data(), O_CLOEXEC));
  if (file.number() < 0) return ErrorOf("create", temporary);
  ssize_t written = 0;
  do {
    written = write(file.number(), content.data(), content.size());
  } while (written < 0 && errno == EINTR);
  if (written >= 0 && written < static_cast<ssize_t>(content.size())) errno = ENOSPC;
  if (written != static_cast<ssize_t>(content.size()) ||
      std::rename(temporary.c_str(), path.c_str()) != 0) {
    absl::Status error = ErrorOf("write", path);
    (void)unlink(temporary.c_str());
    return error;
  }
  return absl::OkStatus();
}

}  // namespace

std::string DescribeUnequalSums(absl::Span<const SumResults> results) {
  std::vector<std::string> differences;
  for (const SumResults& result : results) {
    const SumResults& reference = results[result.reference];
    if (Differ(result.target_logits, reference.target_logits) ||
        Differ(result.max_keys, reference.max_keys) || Differ(result.sums, reference.sums)) {
      differences.push_back(
          absl::StrCat(result.way, " differs from ", reference.way, ": ", result.consequence));
    }
  }
  return absl::StrJoin(differences, "; ");
}

absl::StatusOr<std::string> CheckUnlessKnown(
    const std::string& state_dir, const std::string& environment,
    absl::FunctionRef<absl::StatusOr<std::string>()> check) {
  if (state_dir.empty()) return check();
  const std::string path = absl::StrCat(state_dir, "/", kFileName);
  std::vector<std::string> environments = ReadEnvironments(path);
  if (absl::c_linear_search(environments, environment)) return "";
  LOGPROBD_ASSIGN_OR_RETURN(std::string difference, check());
  if (!difference.empty()) return difference;
  environments.push_back(environment);
  if (const absl::Status written = WriteEnvironments(path, environments); !written.ok()) {
    LogWarning("the check of sums cannot be remembered, so the next start repeats it",
               {{"reason", written.message()}});
  }
  return "";
}

}  // namespace logprobd
