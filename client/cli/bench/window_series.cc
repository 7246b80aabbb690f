#include "client/cli/bench/window_series.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace logprobd::client {
namespace {

bool Agree(const std::vector<double>& values, double share) {
  double mean = 0;
  for (const double value : values) mean += value / static_cast<double>(values.size());
  return mean > 0 && std::all_of(values.begin(), values.end(), [&](double value) {
           return std::abs(value - mean) <= share * mean;
         });
}

}  // namespace

void WindowSeries::Add(Interval window) {
  const SizeStats total = window.Total();
  figures_.push_back(
      {.begin_seconds = window.begin_seconds,
       .seconds = window.seconds,
       .requests = total.requests(),
       .errors = total.errors,
       .rows_per_second = window.seconds > 0 ? static_cast<double>(total.rows) / window.seconds : 0,
       .latency_seconds = total.latency.Percentile(criterion_.percentile)});
  all_.Append(window);
  last_.push_back(std::move(window));
  if (last_.size() > kWindowsCompared) last_.pop_front();
}

void WindowSeries::AddLateAnswers(Interval answers) {
  answers.seconds = 0;
  for (SizeStats& size : answers.sizes) size.rows = 0;
  all_.Append(answers);
  if (!last_.empty()) last_.back().Append(answers);
}

std::optional<bool> WindowSeries::stable() const {
  if (figures_.size() < kWindowsCompared) return std::nullopt;
  std::vector<double> throughput;
  std::vector<double> latency;
  for (auto window = figures_.end() - kWindowsCompared; window != figures_.end(); ++window) {
    throughput.push_back(window->rows_per_second);
    latency.push_back(window->latency_seconds);
  }
  return Agree(throughput, criterion_.share) && Agree(latency, criterion_.share);
}

Interval WindowSeries::LastWindows() const {
  Interval joined;
  for (const Interval& window : last_) joined.Append(window);
  if (!last_.empty()) joined.begin_seconds = last_.front().begin_seconds;
  return joined;
}

}  // namespace logprobd::client
