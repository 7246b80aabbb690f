#include "client/cli/bench/prometheus_text.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace logprobd::client {
namespace {

/// Takes `name="value"` off the front of `rest`; false when it is not there.
bool TakeLabel(absl::string_view& rest, MetricsPage::Labels& labels) {
  const size_t equals = rest.find("=\"");
  if (equals == absl::string_view::npos || equals == 0) return false;
  const std::string name(absl::StripAsciiWhitespace(rest.substr(0, equals)));
  rest.remove_prefix(equals + 2);
  std::string value;
  while (!rest.empty() && rest.front() != '"') {
    if (rest.front() == '\\' && rest.size() > 1) {
      rest.remove_prefix(1);
      value.push_back(rest.front() == 'n' ? '\n' : rest.front());
    } else {
      value.push_back(rest.front());
    }
    rest.remove_prefix(1);
  }
  labels[name] = value;
  return absl::ConsumePrefix(&rest, "\"");
}

std::optional<MetricsPage::Sample> ParseSample(absl::string_view line) {
  MetricsPage::Sample sample;
  const size_t end_of_name = line.find_first_of("{ \t");
  if (end_of_name == absl::string_view::npos || end_of_name == 0) return std::nullopt;
  sample.name = std::string(line.substr(0, end_of_name));
  line.remove_prefix(end_of_name);
  if (absl::ConsumePrefix(&line, "{")) {
    while (!absl::ConsumePrefix(&line, "}")) {
      if (!TakeLabel(line, sample.labels)) return std::nullopt;
      absl::ConsumePrefix(&line, ",");
    }
  }
  // A time may follow the value.
  const std::vector<absl::string_view> words =
      absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
  if (words.empty() || words.size() > 2 || !absl::SimpleAtod(words[0], &sample.value)) {
    return std::nullopt;
  }
  return sample;
}

bool Includes(const MetricsPage::Labels& all, const MetricsPage::Labels& wanted) {
  return std::all_of(wanted.begin(), wanted.end(), [&all](const auto& label) {
    const auto found = all.find(label.first);
    return found != all.end() && found->second == label.second;
  });
}

}  // namespace

absl::StatusOr<MetricsPage> MetricsPage::Parse(absl::string_view text) {
  MetricsPage page;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line.front() == '#') continue;
    std::optional<Sample> sample = ParseSample(line);
    if (!sample.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("not Prometheus' text format: \"", line.substr(0, 80), "\""));
    }
    page.samples_.push_back(*std::move(sample));
  }
  return page;
}

double MetricsPage::Sum(absl::string_view name, const Labels& labels) const {
  double sum = 0;
  for (const Sample& sample : samples_) {
    if (sample.name == name && Includes(sample.labels, labels)) sum += sample.value;
  }
  return sum;
}

bool MetricsPage::Has(absl::string_view name) const {
  return std::any_of(samples_.begin(), samples_.end(),
                     [name](const Sample& sample) { return sample.name == name; });
}

std::vector<std::string> MetricsPage::LabelValues(absl::string_view name,
                                                  const std::string& label) const {
  std::set<std::string> values;
  for (const Sample& sample : samples_) {
    const auto found = sample.labels.find(label);
    if (sample.name == name && found != sample.labels.end()) values.insert(found->second);
  }
  return {values.begin(), values.end()};
}

}  // namespace logprobd::client
