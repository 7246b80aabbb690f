#include "server/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace logprobd {
namespace {

constexpr absl::string_view kLevelNames[] = {"debug", "info", "warning", "error"};

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

/// The logger of the process. LineOf formats the lines; spdlog only filters and writes them.
struct LogState {
  LogState()
      : logger(std::make_shared<spdlog::logger>(
            "logprobd", std::make_shared<spdlog::sinks::stderr_sink_mt>())) {
    logger->set_pattern("%v");
    logger->set_level(spdlog::level::info);
    logger->flush_on(spdlog::level::debug);
  }
  std::shared_ptr<spdlog::logger> logger;
  LogFormat format = LogFormat::kText;
};

LogState& State() {
  static auto* const state = new LogState;  // never destroyed, because threads may log during exit
  return *state;
}

/// Escapes `text` as in a JSON string. Text lines use the same escapes, so that no value can start
/// a new line.
std::string Escape(absl::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (byte < 0x20 || byte == 0x7F) {
      absl::StrAppendFormat(&out, "\\u%04x", byte);
    } else {
      out.push_back(c);
    }
  }
  return out;
}

std::string LineOf(LogFormat format, LogLevel level, absl::string_view message,
                   absl::Span<const LogField> fields) {
  const std::string time =
      absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone());
  const absl::string_view name = kLevelNames[static_cast<int>(level)];
  std::string line;
  if (format == LogFormat::kJson) {
    line = absl::StrCat("{\"time\":\"", time, "\",\"level\":\"", name, "\",\"message\":\"",
                        Escape(message), "\"");
    for (const LogField& field : fields) {
      absl::StrAppend(&line, ",\"", Escape(field.key), "\":\"", Escape(field.value), "\"");
    }
    line.push_back('}');
    return line;
  }
  line = absl::StrCat(time, " ", name, " ", Escape(message));
  for (const LogField& field : fields) {
    const bool quote =
        field.value.empty() || field.value.find_first_of(" \"=") != std::string::npos;
    absl::StrAppend(&line, " ", field.key, "=", quote ? "\"" : "", Escape(field.value),
                    quote ? "\"" : "");
  }
  return line;
}

}  // namespace

void ConfigureLog(const LogOptions& options) {
  State().logger->set_level(ToSpdlog(options.level));
  State().format = options.format;
}

void SetLogLevel(LogLevel level) { State().logger->set_level(ToSpdlog(level)); }

void LogAlways(absl::string_view message, std::initializer_list<LogField> fields) {
  LogAlways(LogLevel::kInfo, message, absl::Span<const LogField>(fields));
}

void LogAlways(LogLevel level, absl::string_view message, absl::Span<const LogField> fields) {
  LogState& state = State();
  const std::string line = LineOf(state.format, level, message, fields);
  // The logger drops a line below its level, but the sinks write every line.
  const spdlog::details::log_msg record(state.logger->name(), ToSpdlog(level), line);
  for (const spdlog::sink_ptr& sink : state.logger->sinks()) {
    sink->log(record);
    sink->flush();
  }
}

void Log(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields) {
  Log(level, message, absl::Span<const LogField>(fields));
}

void Log(LogLevel level, absl::string_view message, absl::Span<const LogField> fields) {
  LogState& state = State();
  const spdlog::level::level_enum spdlog_level = ToSpdlog(level);
  if (!state.logger->should_log(spdlog_level)) return;
  state.logger->log(spdlog_level,
                    spdlog::string_view_t(LineOf(state.format, level, message, fields)));
}

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
