#include "client/cli/bench/schedule.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace logprobd::client {
namespace {

constexpr int64_t kRowsMax = int64_t{1} << 24;
constexpr size_t kSizesMax = 64;

absl::StatusOr<int64_t> ParseSize(absl::string_view text) {
  int64_t rows = 0;
  if (absl::SimpleAtoi(text, &rows) && rows >= 1 && rows <= kRowsMax) return rows;
  return absl::InvalidArgumentError(
      absl::StrCat("\"", text, "\" is not a number of rows from 1 to ", kRowsMax));
}

absl::StatusOr<RowMix::Size> ParseWeighted(absl::string_view text) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits(':', 1));
  const absl::StatusOr<int64_t> rows = ParseSize(parts.first);
  if (!rows.ok()) return rows.status();
  double weight = 0;
  if (!absl::SimpleAtod(parts.second, &weight) || !std::isfinite(weight) || weight <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", text,
        "\" is not rows:weight with a weight above 0; write a mix as 1:80,256:15,8192:5"));
  }
  return RowMix::Size{.rows = *rows, .weight = weight};
}

}  // namespace

size_t RowMix::Draw(uint64_t seed, int64_t index) const {
  double total = 0;
  for (const Size& size : sizes) total += size.weight;
  // Each request has its own generator, so that the order of the threads does not matter.
  Random random(Random(seed).Next() + static_cast<uint64_t>(index));
  double rest = random.Unit() * total;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) {
    rest -= sizes[i].weight;
    if (rest <= 0) return i;
  }
  return sizes.size() - 1;
}

int64_t RowMix::rows_max() const {
  int64_t most = 0;
  for (const Size& size : sizes) most = std::max(most, size.rows);
  return most;
}

std::string RowMix::Text() const {
  if (sizes.size() == 1) return absl::StrCat(sizes[0].rows);
  return absl::StrJoin(sizes, ",", [](std::string* out, const Size& size) {
    absl::StrAppendFormat(out, "%d:%g", size.rows, size.weight);
  });
}

absl::StatusOr<std::vector<RowMix>> ParseRows(absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ',');
  if (parts.size() > kSizesMax) {
    return absl::InvalidArgumentError(absl::StrCat("there are more than ", kSizesMax, " sizes"));
  }
  std::vector<RowMix> loads;
  if (!absl::StrContains(text, ':')) {
    for (const absl::string_view part : parts) {
      const absl::StatusOr<int64_t> rows = ParseSize(part);
      if (!rows.ok()) return rows.status();
      loads.push_back({.sizes = {{.rows = *rows}}});
    }
    return loads;
  }
  RowMix mix;
  std::set<int64_t> seen;
  for (const absl::string_view part : parts) {
    const absl::StatusOr<RowMix::Size> size = ParseWeighted(part);
    if (!size.ok()) return size.status();
    if (!seen.insert(size->rows).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", text, "\" contains ", size->rows, " rows twice"));
    }
    mix.sizes.push_back(*size);
  }
  loads.push_back(std::move(mix));
  return loads;
}

absl::StatusOr<std::vector<int64_t>> ParseRange(absl::string_view text) {
  constexpr int64_t kValuesMax = 1'000;
  const auto malformed = [text] {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\" is not a range: write 4, 1:8 or 1:16:5 (start:end:step)"));
  };
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ':');
  if (parts.size() > 3) return malformed();
  int64_t numbers[3] = {0, 0, 1};
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!absl::SimpleAtoi(parts[i], &numbers[i]) || numbers[i] < 1) return malformed();
  }
  const int64_t start = numbers[0];
  const int64_t end = parts.size() == 1 ? start : numbers[1];
  const int64_t step = numbers[2];
  if (end < start || (end - start) / step >= kValuesMax) return malformed();
  std::vector<int64_t> values;
  for (int64_t i = 0; i <= (end - start) / step; ++i) values.push_back(start + i * step);
  return values;
}

ArrivalSchedule::ArrivalSchedule(Arrivals arrivals, double rate, uint64_t seed)
    : arrivals_(arrivals), rate_(rate), random_(seed) {}

absl::Duration ArrivalSchedule::Next() {
  if (arrivals_ == Arrivals::kFixed) {
    // Multiplying avoids the drift that adding rounded gaps would cause.
    return absl::Seconds(static_cast<double>(num_planned_++) / rate_);
  }
  seconds_ += random_.Exponential() / rate_;
  return absl::Seconds(seconds_);
}

}  // namespace logprobd::client
