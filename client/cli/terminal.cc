#include "client/cli/terminal.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace logprobd::client {

Table::Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }

void Table::AddRow(std::vector<std::string> cells) {
  cells.resize(rows_.front().size());
  rows_.push_back(std::move(cells));
}

void Table::Print(std::ostream& out) const {
  std::vector<size_t> widths(rows_.front().size());
  for (const std::vector<std::string>& row : rows_) {
    for (size_t column = 0; column < row.size(); ++column) {
      widths[column] = std::max(widths[column], row[column].size());
    }
  }
  for (const std::vector<std::string>& row : rows_) {
    std::string line;
    for (size_t column = 0; column < row.size(); ++column) {
      const std::string padding(widths[column] - row[column].size(), ' ');
      if (column > 0) line += "  ";
      line += column == 0 ? absl::StrCat(row[column], padding) : absl::StrCat(padding, row[column]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out << line << '\n';
  }
}

std::string CountText(int64_t count) {
  const std::string digits = absl::StrCat(count);
  const size_t sign = count < 0 ? 1 : 0;
  std::string text;
  for (size_t at = 0; at < digits.size(); ++at) {
    if (at > sign && (digits.size() - at) % 3 == 0) text.push_back(',');
    text.push_back(digits[at]);
  }
  return text;
}

std::string BytesText(int64_t bytes) {
  static constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  const bool is_whole = unit == 0 || value == std::floor(value);
  return is_whole ? absl::StrFormat("%.0f %s", value, kUnits[unit])
                  : absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string MillisecondsText(double seconds) {
  const double milliseconds = seconds * 1e3;
  if (milliseconds < 10) return absl::StrFormat("%.3f", milliseconds);
  if (milliseconds < 100) return absl::StrFormat("%.2f", milliseconds);
  return absl::StrFormat("%.1f", milliseconds);
}

void ProgressLine::Update(absl::string_view text) {
  constexpr std::chrono::milliseconds kPause(100);
  const auto now = std::chrono::steady_clock::now();
  if (!is_terminal_ || now - last_ < kPause) return;
  last_ = now;
  const size_t padding = num_shown_ > text.size() ? num_shown_ - text.size() : 0;
  out_ << '\r' << text << std::string(padding, ' ') << std::flush;
  num_shown_ = text.size();
}

void ProgressLine::Clear() {
  if (num_shown_ == 0) return;
  out_ << '\r' << std::string(num_shown_, ' ') << '\r' << std::flush;
  num_shown_ = 0;
}

DelayedNotice::DelayedNotice(std::ostream& out, std::string text, absl::Duration delay)
    : thread_([this, &out, text = std::move(text), delay] {
        if (!over_.WaitForNotificationWithTimeout(delay)) out << text << std::endl;
      }) {}

DelayedNotice::~DelayedNotice() {
  over_.Notify();
  thread_.join();
}

}  // namespace logprobd::client
