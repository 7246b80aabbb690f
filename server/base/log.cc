#include "server/base/log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/base/text.h"

namespace logprobd {
namespace {

constexpr absl::string_view kLevelNames[] = {"debug", "info", "warning", "error"};

/// Longest time that the end of the process, or an act that needs its audit line, waits for lines.
constexpr absl::Duration kWriteTimeMax = absl::Seconds(1);

/// Part of a line for the names of its fields and the sizes of those that are cut.
constexpr size_t kNamesBytes = size_t{2} << 10;

/// Signals by which the kernel or abort() end a process that has failed.
constexpr int kCrashSignals[] = {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV};

void AppendText(std::string& line, absl::string_view text) {
  constexpr size_t kValuesBytes = kLogLineBytesMax - kNamesBytes;
  const size_t room = kValuesBytes - std::min(kValuesBytes, line.size());
  absl::StrAppend(&line, OneLine(text, std::min(kLogValueBytesMax, room), "\"\\"));
}

/// Returns whether a reader could take `value` for something else than one word.
bool NeedsQuotes(absl::string_view value) {
  return value.empty() || std::any_of(value.begin(), value.end(), [](char c) {
           return c <= ' ' || c > '~' || c == '"' || c == '=';  // bytes above 127 are negative
         });
}

std::string LineOf(LogFormat format, LogLevel level, absl::string_view message,
                   absl::Span<const LogField> fields) {
  const std::string time =
      absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone());
  const absl::string_view name = kLevelNames[static_cast<int>(level)];
  std::string line;
  if (format == LogFormat::kJson) {
    line = absl::StrCat("{\"time\":\"", time, "\",\"level\":\"", name, "\",\"message\":\"");
    AppendText(line, message);
    for (const LogField& field : fields) {
      absl::StrAppend(&line, "\",\"", field.key, "\":\"");
      AppendText(line, field.value);
    }
    absl::StrAppend(&line, "\"}\n");
    return line;
  }
  // A message with "=" could be taken for fields.
  const absl::string_view message_quote = absl::StrContains(message, "=") ? "\"" : "";
  line = absl::StrCat(time, " ", name, " ", message_quote);
  AppendText(line, message);
  absl::StrAppend(&line, message_quote);
  for (const LogField& field : fields) {
    const absl::string_view quote = NeedsQuotes(field.value) ? "\"" : "";
    absl::StrAppend(&line, " ", field.key, "=", quote);
    AppendText(line, field.value);
    absl::StrAppend(&line, quote);
  }
  line.push_back('\n');
  return line;
}

/// The log of the process.
struct LogState {
  LogState();
  std::atomic<LogLevel> level = LogLevel::kInfo;
  std::atomic<LogFormat> format = LogFormat::kText;
  LogWriter writer;
};

LogState& State() {
  static auto* const state = new LogState;  // never destroyed, because threads may log during exit
  return *state;
}

std::string LostLine(int64_t log, int64_t audit) {
  const LogField fields[] = {{"lines", log}, {"audit_lines", audit}};
  return LineOf(State().format, LogLevel::kWarning, "lines of the log were lost", fields);
}

LogState::LogState() : writer(STDERR_FILENO, LostLine) {}

/// Lets the log's thread write what it can, and then lets the signal end the process.
void OnCrash(int signal, siginfo_t* info, void* /*context*/) {
  State().writer.Flush(kWriteTimeMax);
  // A fault occurs again at the same place, now with the default action (SA_RESETHAND).
  if (info->si_code <= 0) raise(signal);
}

/// Writes what the default would write to standard error, which may block there.
[[noreturn]] void OnTerminate() {
  std::string what = "an exception that is no std::exception, or none";
  if (const std::exception_ptr exception = std::current_exception(); exception != nullptr) {
    try {
      std::rethrow_exception(exception);
    } catch (const std::exception& e) {
      what = e.what();
    } catch (...) {
    }
  }
  LogError("nothing caught an exception; the process aborts", {{"what", what}});
  std::abort();
}

void FlushOnCrash() {
  State();  // exists before a handler needs it
  std::set_terminate(OnTerminate);
  for (const int signal : kCrashSignals) {
    struct sigaction before = {};
    if (sigaction(signal, nullptr, &before) != 0 || before.sa_handler != SIG_DFL) {
      continue;  // a sanitizer reports the crash
    }
    struct sigaction flush = {};
    flush.sa_sigaction = OnCrash;
    flush.sa_flags = static_cast<int>(SA_SIGINFO | SA_RESETHAND);
    sigaction(signal, &flush, nullptr);
  }
}

void Write(LogLevel level, absl::string_view message, absl::Span<const LogField> fields,
           LogKind kind = LogKind::kLog) {
  LogState& state = State();
  state.writer.Write(LineOf(state.format, level, message, fields), kind);
}

}  // namespace

void ConfigureLog(const LogOptions& options) {
  State().level = options.level;
  State().format = options.format;
}

void SetLogLevel(LogLevel level) { State().level = level; }

void LogAlways(absl::string_view message, std::initializer_list<LogField> fields) {
  LogAlways(LogLevel::kInfo, message, absl::Span<const LogField>(fields));
}

void LogAlways(LogLevel level, absl::string_view message, absl::Span<const LogField> fields) {
  Write(level, message, fields);
}

void Log(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields) {
  Log(level, message, absl::Span<const LogField>(fields));
}

void Log(LogLevel level, absl::string_view message, absl::Span<const LogField> fields) {
  if (level >= State().level.load()) Write(level, message, fields);
}

void LogAudit(LogLevel level, absl::Span<const LogField> fields) {
  Write(level, "audit", fields, LogKind::kAudit);
}

absl::Status LogAuditAndWait(LogLevel level, absl::Span<const LogField> fields) {
  LogState& state = State();
  const bool is_written = state.writer.WriteAndWait(LineOf(state.format, level, "audit", fields),
                                                    LogKind::kAudit, kWriteTimeMax);
  return is_written ? absl::OkStatus()
                    : absl::UnavailableError("the audit line could not be written");
}

void WriteToLog(std::string text) { State().writer.Write(std::move(text)); }

int64_t LostLogLines(LogKind kind) { return State().writer.num_lost(kind); }

void FlushLog() { State().writer.Flush(kWriteTimeMax); }

LogThread::LogThread() {
  FlushOnCrash();
  // Without the thread, callers write. A system that starts no thread ends the server anyway.
  State().writer.StartThread().IgnoreError();
}

LogThread::~LogThread() { State().writer.StopThread(kWriteTimeMax); }

LogLimiter::LogLimiter(const Clock& clock, int64_t lines_max, absl::Duration window)
    : lines_max_(lines_max), window_(window), clock_(clock) {}

std::optional<int64_t> LogLimiter::Admit() {
  const absl::Time now = clock_.Now();
  const absl::MutexLock lock(&mutex_);
  if (now >= window_end_) {
    window_end_ = now + window_;
    lines_ = 0;
  }
  if (lines_ >= lines_max_) {
    ++suppressed_;
    return std::nullopt;
  }
  ++lines_;
  return std::exchange(suppressed_, 0);
}

}  // namespace logprobd
