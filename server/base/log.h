#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/clock.h"

namespace logprobd {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
enum class LogFormat { kText, kJson };

struct LogOptions {
  LogLevel level = LogLevel::kInfo;
  LogFormat format = LogFormat::kText;
};

/// Sets level and format of the process's log, which goes to standard error. Before the first
/// thread; without it the defaults hold.
void ConfigureLog(const LogOptions& options);

/// Changes the level alone, at any time.
void SetLogLevel(LogLevel level);

/// INVALID_ARGUMENT lists the names.
absl::StatusOr<LogLevel> ParseLogLevel(absl::string_view name);
absl::StatusOr<LogFormat> ParseLogFormat(absl::string_view name);

/// A named value of a log line.
struct LogField {
  template <typename T>
  LogField(absl::string_view name, const T& field_value)  // NOLINT: made in braces at each call
      : key(name), value(absl::StrCat(field_value)) {}
  absl::string_view key;
  std::string value;
};

/// Writes one line: `message` and the fields. Control characters in either are escaped, so a line
/// stays a line whatever a client sent. Never pass hidden states, targets or scores. Thread-safe.
void Log(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields = {});

/// As an info line, whatever the level: for what programs wait for.
void LogAlways(absl::string_view message, std::initializer_list<LogField> fields = {});

inline void LogDebug(absl::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kDebug, message, fields);
}
inline void LogInfo(absl::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kInfo, message, fields);
}
inline void LogWarning(absl::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kWarning, message, fields);
}
inline void LogError(absl::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kError, message, fields);
}

/// Lets a bounded number of log lines through, so that a storm of errors does not become a storm of
/// lines. Thread-safe.
class LogLimiter {
 public:
  /// At most `lines_max` lines in each window of `window`. `clock` must outlive the limiter.
  LogLimiter(int64_t lines_max, absl::Duration window, const Clock& clock);

  /// The number of lines held back since the last one that was let through, or nothing when this
  /// one is to be held back too.
  std::optional<int64_t> Admit();

 private:
  const int64_t lines_max_;
  const absl::Duration window_;
  const Clock& clock_;
  absl::Mutex mutex_;
  absl::Time window_end_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int64_t lines_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t suppressed_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace logprobd
