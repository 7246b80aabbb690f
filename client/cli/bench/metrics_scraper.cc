#include "client/cli/bench/metrics_scraper.h"

#include <httplib.h>

#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"

namespace logprobd::client {
namespace {

constexpr std::chrono::seconds kHttpTimeout(5);

}  // namespace

absl::StatusOr<MetricsSource> HttpMetricsSource(const std::string& url) {
  absl::string_view rest = url;
  absl::ConsumePrefix(&rest, "http://");
  const size_t slash = rest.find('/');
  std::string path =
      slash == absl::string_view::npos ? std::string("/metrics") : std::string(rest.substr(slash));
  if (path == "/") path = "/metrics";
  const absl::string_view authority = rest.substr(0, slash);
  const size_t colon = authority.rfind(':');
  int port = 80;
  if (absl::StrContains(url, "https://") || authority.empty() || colon == 0 ||
      (colon != absl::string_view::npos &&
       (!absl::SimpleAtoi(authority.substr(colon + 1), &port) || port < 1 || port > 65'535))) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", url, "\" is not host:port or http://host:port/path"));
  }
  std::string host(authority.substr(0, colon));
  if (absl::StartsWith(host, "[") && absl::EndsWith(host, "]")) {
    host = host.substr(1, host.size() - 2);
  }
  auto client = std::make_shared<httplib::Client>(host, port);
  client->set_connection_timeout(kHttpTimeout);
  client->set_read_timeout(kHttpTimeout);
  return MetricsSource([client, path, url]() -> absl::StatusOr<std::string> {
    const httplib::Result result = client->Get(path);
    if (!result) {
      return absl::UnavailableError(
          absl::StrCat("no metrics from ", url, ": ", httplib::to_string(result.error())));
    }
    if (result->status != 200) {
      return absl::UnavailableError(
          absl::StrCat("no metrics from ", url, ": HTTP status ", result->status));
    }
    return result->body;
  });
}

MetricsScraper::MetricsScraper(MetricsSource& source, std::string head, absl::Duration pause)
    : source_(source), head_(std::move(head)), pause_(pause) {}

MetricsScraper::~MetricsScraper() { StopWatching(); }

absl::Status MetricsScraper::Begin() {
  before_.reset();
  absl::StatusOr<MetricsPage> page = Read();
  if (!page.ok()) return page.status();
  before_ = *std::move(page);
  begun_ = absl::Now();
  peaks_ = {};
  peaks_.Add(*before_, head_);
  {
    absl::MutexLock lock(&mutex_);
    is_ending_ = false;
  }
  watcher_ = std::thread([this] { Watch(); });
  return absl::OkStatus();
}

absl::StatusOr<ServerFigures> MetricsScraper::End() {
  StopWatching();
  if (!before_.has_value()) {
    return absl::FailedPreconditionError(
        "no figures of the server: its metrics could not be read when measuring began");
  }
  const absl::StatusOr<MetricsPage> after = Read();
  if (!after.ok()) return after.status();
  peaks_.Add(*after, head_);
  return CompareMetrics(*before_, *after, head_, peaks_,
                        absl::ToDoubleSeconds(absl::Now() - begun_));
}

absl::StatusOr<MetricsPage> MetricsScraper::Read() {
  const absl::StatusOr<std::string> text = source_();
  if (!text.ok()) return text.status();
  return MetricsPage::Parse(*text);
}

void MetricsScraper::Watch() {
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (mutex_.AwaitWithTimeout(absl::Condition(&is_ending_), pause_)) return;
    }
    // A page that is missed lacks in the peaks only; the last one must be had.
    if (const absl::StatusOr<MetricsPage> page = Read(); page.ok()) peaks_.Add(*page, head_);
  }
}

void MetricsScraper::StopWatching() {
  if (!watcher_.joinable()) return;
  {
    absl::MutexLock lock(&mutex_);
    is_ending_ = true;
  }
  watcher_.join();
}

}  // namespace logprobd::client
