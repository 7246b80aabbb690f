#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/base/clock.h"
#include "server/base/log_writer.h"

namespace logprobd {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
enum class LogFormat { kText, kJson };

struct LogOptions {
  LogLevel level = LogLevel::kInfo;
  LogFormat format = LogFormat::kText;
};

/// Sets the level and the format of the process's log, which is written to standard error. Must be
/// called before other threads start; without a call the defaults apply.
void ConfigureLog(const LogOptions& options);

/// Changes the level. Thread-safe.
void SetLogLevel(LogLevel level);

/// Longest value of a field, or message, that a line has, and longest line, in bytes. Values that
/// are longer are cut, and their size stands behind them.
inline constexpr size_t kLogValueBytesMax = size_t{4} << 10;
inline constexpr size_t kLogLineBytesMax = size_t{32} << 10;

/// A named value of a log line.
struct LogField {
  template <typename T>
  LogField(absl::string_view name, const T& field_value)  // NOLINT: callers write {name, value}
      : key(name), value(absl::StrCat(field_value)) {}
  absl::string_view key;
  std::string value;
};

/// Writes one line with `message` and the fields. Whatever their text is, the line is one line of
/// well-formed UTF-8 (OneLine of text.h) and at most kLogLineBytesMax long. Never pass hidden
/// states, targets or scores. Thread-safe. Does not wait for whoever reads the log while there is a
/// LogThread; a line is then lost and counted (LostLogLines) if too many others wait to be written.
void Log(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields = {});

/// Behaves like the function above, for lines whose fields depend on a condition.
void Log(LogLevel level, absl::string_view message, absl::Span<const LogField> fields);

/// Writes an info line at every log level, for lines that programs wait for.
void LogAlways(absl::string_view message, std::initializer_list<LogField> fields = {});

/// Writes a line of `level` at every log level.
void LogAlways(LogLevel level, absl::string_view message, absl::Span<const LogField> fields);

/// Writes a line `audit` at every log level. It is still written when other lines are lost because
/// too many wait.
void LogAudit(LogLevel level, absl::Span<const LogField> fields);
/// Writes a line `audit` and waits until the system has taken it. Returns UNAVAILABLE if it did not
/// within a second.
absl::Status LogAuditAndWait(LogLevel level, absl::Span<const LogField> fields);

/// Writes `text` as it is, in order with the lines. It is for a terminal, or ends in a newline.
void WriteToLog(std::string text);

/// Returns the number of lines that were lost since the process started.
int64_t LostLogLines(LogKind kind);

/// Waits at most a second until all lines are written. Call it before _exit.
void FlushLog();

/// While it exists, a thread of its own writes the lines, and a crash of the process waits at most
/// a second for that. Otherwise, as in tests, who logs writes. The destructor waits like FlushLog.
class LogThread {
 public:
  LogThread();
  ~LogThread();
  LogThread(const LogThread&) = delete;
  LogThread& operator=(const LogThread&) = delete;
};

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

/// Limits the number of log lines, so that many errors do not flood the log. Thread-safe.
class LogLimiter {
 public:
  /// Admits at most `lines_max` lines in each period of `window`. `clock` must outlive the limiter.
  explicit LogLimiter(const Clock& clock, int64_t lines_max = 20,
                      absl::Duration window = absl::Seconds(10));

  /// Returns nullopt if the line must be suppressed, otherwise the number of lines suppressed since
  /// the last admitted line.
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
