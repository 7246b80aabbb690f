#include "client/cli/bench/server_metrics.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <set>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"

namespace logprobd::client {
namespace {

std::optional<MetricsPage::Sample> ParseSample(absl::string_view line) {
  const size_t end_of_name = line.find_first_of("{ \t");
  if (end_of_name == absl::string_view::npos || end_of_name == 0) return std::nullopt;
  MetricsPage::Sample sample;
  sample.name = std::string(line.substr(0, end_of_name));
  line.remove_prefix(end_of_name);
  if (absl::ConsumePrefix(&line, "{")) {
    const size_t end_of_labels = line.rfind('}');  // values of labels may contain others
    if (end_of_labels == absl::string_view::npos) return std::nullopt;
    sample.labels = absl::StrCat(",", line.substr(0, end_of_labels));
    line.remove_prefix(end_of_labels + 1);
  }
  // A timestamp may follow the value.
  const std::vector<absl::string_view> words =
      absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
  if (words.empty() || words.size() > 2 || !absl::SimpleAtod(words[0], &sample.value)) {
    return std::nullopt;
  }
  return sample;
}

bool Includes(const std::string& all, const MetricsPage::Labels& subset) {
  return std::all_of(subset.begin(), subset.end(), [&all](const auto& label) {
    const std::string value =
        absl::StrReplaceAll(label.second, {{"\\", "\\\\"}, {"\"", "\\\""}, {"\n", "\\n"}});
    return absl::StrContains(all, absl::StrCat(",", label.first, "=\"", value, "\""));
  });
}

constexpr const char* kStages[] = {"receive", "copy",    "queue", "h2d",
                                   "kernel",  "combine", "d2h",   "reply"};

constexpr absl::Duration kHttpTimeout = absl::Seconds(5);
/// Maximum size of a page. A page of a server with eight heads and GPUs has 0.5 MB.
constexpr size_t kPageBytesMax = size_t{64} << 20;

/// Lets calls of `option`, SO_SNDTIMEO or SO_RCVTIMEO, fail once it is `end`.
void LimitTime(int socket, int option, absl::Time end) {
  // Zero would mean no limit.
  const timeval left = absl::ToTimeval(std::max(end - absl::Now(), absl::Milliseconds(1)));
  setsockopt(socket, SOL_SOCKET, option, &left, sizeof(left));
}

absl::Status SocketError() {
  const bool is_late = errno == EAGAIN || errno == EINPROGRESS;
  return absl::UnavailableError(std::strerror(is_late ? ETIMEDOUT : errno));
}

/// Sends `request` to `address` and returns everything that the server sends until it closes the
/// connection.
absl::StatusOr<std::string> Exchange(const addrinfo& address, absl::string_view request,
                                     absl::Time end) {
  const int socket = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const absl::Cleanup close_socket = [socket] { close(socket); };
  LimitTime(socket, SO_SNDTIMEO, end);  // also of connect
  // A request is small enough to be sent as a whole.
  if (connect(socket, address.ai_addr, address.ai_addrlen) != 0 ||
      send(socket, request.data(), request.size(), MSG_NOSIGNAL) < 0) {
    return SocketError();
  }
  std::string response;
  char buffer[65'536];
  while (true) {
    LimitTime(socket, SO_RCVTIMEO, end);
    const ssize_t got = recv(socket, buffer, sizeof(buffer), 0);
    if (got == 0) return response;
    if (got < 0) return SocketError();
    response.append(buffer, static_cast<size_t>(got));
    if (response.size() > kPageBytesMax) return absl::UnavailableError("the page is too large");
  }
}

/// Returns the body of a response that is complete and has status 200.
absl::StatusOr<std::string> BodyOf(absl::string_view response) {
  const size_t end_of_headers = response.find("\r\n\r\n");
  const std::vector<absl::string_view> lines =
      absl::StrSplit(response.substr(0, end_of_headers), "\r\n");
  const std::vector<absl::string_view> words = absl::StrSplit(lines.front(), ' ');
  if (end_of_headers == absl::string_view::npos || words.size() < 2 ||
      !absl::StartsWith(words[0], "HTTP/1.")) {
    return absl::UnavailableError("the response is not HTTP");
  }
  if (words[1] == "401" || words[1] == "403") {
    return absl::UnavailableError(absl::StrCat(
        "HTTP status ", words[1],
        ": the server wants a token with the scope metrics, which bench sends (--token-file or "
        "LOGPROBD_TOKEN) to loopback addresses only"));
  }
  if (words[1] != "200") return absl::UnavailableError(absl::StrCat("HTTP status ", words[1]));
  const absl::string_view body = response.substr(end_of_headers + 4);
  for (const absl::string_view line : lines) {
    const std::pair<absl::string_view, absl::string_view> header =
        absl::StrSplit(line, absl::MaxSplits(':', 1));
    size_t size = 0;
    if (absl::EqualsIgnoreCase(header.first, "Content-Length") &&
        (!absl::SimpleAtoi(header.second, &size) || size != body.size())) {
      return absl::UnavailableError("the connection was closed before the end of the page");
    }
  }
  return std::string(body);
}

bool IsLoopback(const sockaddr& address) {
  if (address.sa_family == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
  }
  const in_addr& four = reinterpret_cast<const sockaddr_in&>(address).sin_addr;
  return address.sa_family == AF_INET && (ntohl(four.s_addr) >> 24) == IN_LOOPBACKNET;
}

/// Reads a page with HTTP/1.0, which ends with the connection and has no chunks.
absl::StatusOr<std::string> HttpGet(const std::string& host, const std::string& port,
                                    const std::string& authority, const std::string& path,
                                    const std::string& token) {
  const absl::Time end = absl::Now() + kHttpTimeout;
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0) {
    return absl::UnavailableError(gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, freeaddrinfo);
  absl::StatusOr<std::string> response;
  for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
    const std::string authorization = token.empty() || !IsLoopback(*address->ai_addr)
                                          ? ""
                                          : absl::StrCat("Authorization: Bearer ", token, "\r\n");
    response = Exchange(
        *address,
        absl::StrCat("GET ", path, " HTTP/1.0\r\nHost: ", authority, "\r\n", authorization, "\r\n"),
        end);
    if (response.ok()) return BodyOf(*response);
  }
  return response;
}

}  // namespace

absl::StatusOr<MetricsPage> MetricsPage::Parse(absl::string_view text) {
  MetricsPage page;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line.front() == '#') continue;
    std::optional<Sample> sample = ParseSample(line);
    if (!sample.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a line is not in the Prometheus text format: \"", line.substr(0, 80), "\""));
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
    if (sample.name != name) continue;
    const std::vector<std::string> parts =
        absl::StrSplit(sample.labels, absl::StrCat(",", label, "=\""));
    if (parts.size() > 1) values.insert(parts[1].substr(0, parts[1].find('"')));
  }
  return {values.begin(), values.end()};
}

void ServerPeaks::Add(const MetricsPage& page, const std::string& head) {
  queue_rows = std::max(queue_rows, page.Sum("logprobd_queue_rows", {{"head", head}}));
  resident_bytes = std::max(resident_bytes, page.Sum("process_resident_memory_bytes"));
}

absl::StatusOr<ServerFigures> CompareMetrics(const MetricsPage& before, const MetricsPage& after,
                                             const std::string& head, const ServerPeaks& peaks,
                                             double seconds) {
  for (const MetricsPage* page : {&before, &after}) {
    if (!page->Has("logprobd_rows_total")) {
      return absl::InvalidArgumentError(
          "the page has no logprobd_rows_total: --metrics must be the HTTP address of a logprobd");
    }
  }
  constexpr char kStart[] = "process_start_time_seconds";
  if (before.Sum(kStart) != after.Sum(kStart)) {
    return absl::AbortedError("the server restarted during the run: repeat the run");
  }
  const auto delta = [&](absl::string_view name, const MetricsPage::Labels& labels) {
    return after.Sum(name, labels) - before.Sum(name, labels);
  };
  const auto mean = [](double sum, double count) { return count > 0 ? sum / count : 0; };

  ServerFigures figures;
  figures.seconds = seconds;
  figures.rows_scored = delta("logprobd_rows_total", {{"head", head}, {"kind", "scored"}});
  figures.batches = delta("logprobd_batch_rows_count", {{"head", head}});
  figures.batch_rows_mean =
      mean(delta("logprobd_batch_rows_sum", {{"head", head}}), figures.batches);
  for (const char* name : kStages) {
    const MetricsPage::Labels labels = {{"stage", name}};
    const double count = delta("logprobd_stage_duration_seconds_count", labels);
    if (count <= 0) continue;
    figures.stages.push_back(
        {.name = name,
         .count = static_cast<int64_t>(count),
         .mean_seconds = mean(delta("logprobd_stage_duration_seconds_sum", labels), count)});
  }
  figures.queue_rows_peak = peaks.queue_rows;
  for (const std::string& reason : after.LabelValues("logprobd_rejected_total", "reason")) {
    const double count = delta("logprobd_rejected_total", {{"reason", reason}});
    if (count > 0) figures.rejected.emplace_back(reason, count);
  }
  figures.received_bytes = delta("logprobd_received_bytes_total", {});
  figures.cpu_seconds = delta("process_cpu_seconds_total", {});
  figures.cpu_seconds_per_gigabyte = mean(figures.cpu_seconds, figures.received_bytes / 1e9);
  figures.resident_bytes_peak = peaks.resident_bytes;
  for (const std::string& gpu : after.LabelValues("logprobd_gpu_busy_seconds_total", "gpu")) {
    const MetricsPage::Labels labels = {{"gpu", gpu}};
    figures.gpus.push_back(
        {.name = gpu,
         .busy_ratio = mean(delta("logprobd_gpu_busy_seconds_total", labels), seconds),
         .teraflops = mean(delta("logprobd_flops_total", labels) / 1e12, seconds)});
  }
  return figures;
}

absl::StatusOr<MetricsSource> HttpMetricsSource(const std::string& url, const std::string& token) {
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
  return MetricsSource([host, port = std::to_string(port), authority = std::string(authority), path,
                        url, token]() -> absl::StatusOr<std::string> {
    absl::StatusOr<std::string> page = HttpGet(host, port, authority, path, token);
    if (page.ok()) return page;
    return absl::UnavailableError(
        absl::StrCat("cannot read metrics from ", url, ": ", page.status().message()));
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
  begin_time_ = absl::Now();
  peaks_ = {};
  peaks_.Add(*before_, head_);
  ending_.emplace();
  watcher_ = std::thread([this] { Watch(); });
  return absl::OkStatus();
}

absl::StatusOr<ServerFigures> MetricsScraper::End() {
  StopWatching();
  if (!before_.has_value()) {
    return absl::FailedPreconditionError(
        "the server's metrics could not be read at the start of the measurement");
  }
  const absl::StatusOr<MetricsPage> after = Read();
  if (!after.ok()) return after.status();
  peaks_.Add(*after, head_);
  return CompareMetrics(*before_, *after, head_, peaks_,
                        absl::ToDoubleSeconds(absl::Now() - begin_time_));
}

absl::StatusOr<MetricsPage> MetricsScraper::Read() {
  const absl::StatusOr<std::string> text = source_();
  if (!text.ok()) return text.status();
  return MetricsPage::Parse(*text);
}

void MetricsScraper::Watch() {
  while (!ending_->WaitForNotificationWithTimeout(pause_)) {
    // A failed read is ignored here, because it affects only the peaks. End() requires its page.
    if (const absl::StatusOr<MetricsPage> page = Read(); page.ok()) peaks_.Add(*page, head_);
  }
}

void MetricsScraper::StopWatching() {
  if (!watcher_.joinable()) return;
  ending_->Notify();
  watcher_.join();
}

}  // namespace logprobd::client
