#include "client/cpp/balance.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/policy.h"

namespace logprobd::client {

namespace {

std::set<std::string> Names(const ServerInfo& info) {
  std::set<std::string> names;
  for (const Head& head : info.heads) names.insert(head.name);
  return names;
}

const Head* FindHead(const ServerInfo& info, const std::string& name) {
  const auto found = std::find_if(info.heads.begin(), info.heads.end(),
                                  [&name](const Head& head) { return head.name == name; });
  return found == info.heads.end() ? nullptr : &*found;
}

/// Lowers `limit` to `other`. A limit of 0 is unknown.
void LowerLimit(int64_t other, int64_t* limit) {
  if (other > 0) *limit = *limit > 0 ? std::min(*limit, other) : other;
}

}  // namespace

std::string DescribeDifference(const ServerInfo& first, const ServerInfo& second) {
  if (Names(first) != Names(second)) {
    return absl::StrCat("their names are \"", absl::StrJoin(Names(first), ", "), "\" and \"",
                        absl::StrJoin(Names(second), ", "), "\"");
  }
  for (const Head& head : first.heads) {
    const Head& other = *FindHead(second, head.name);
    const auto differ = [&head](const char* field, const auto& a, const auto& b) {
      return absl::StrCat(field, " of \"", head.name, "\" is ", a, " and ", b);
    };
    if (head.model_type != other.model_type) {
      return differ("model_type", head.model_type, other.model_type);
    }
    if (head.vocab_size != other.vocab_size) {
      return differ("vocab_size", head.vocab_size, other.vocab_size);
    }
    if (head.hidden_size != other.hidden_size) {
      return differ("hidden_size", head.hidden_size, other.hidden_size);
    }
    if (head.dtype != other.dtype) {
      return differ("dtype", DtypeName(head.dtype), DtypeName(other.dtype));
    }
    if (head.scale != other.scale) return differ("scale", head.scale, other.scale);
    if (head.softcap != other.softcap) return differ("softcap", head.softcap, other.softcap);
    if (head.has_bias != other.has_bias) {
      return differ("has_bias", head.has_bias ? "true" : "false",
                    other.has_bias ? "true" : "false");
    }
  }
  return "";
}

ServerInfo TightestLimits(const std::vector<ServerInfo>& servers) {
  ServerInfo tightest = servers.front();
  for (Head& head : tightest.heads) {
    for (const ServerInfo& server : servers) {
      const Head* const other = FindHead(server, head.name);
      if (other == nullptr) continue;
      LowerLimit(other->limits.message_bytes_max, &head.limits.message_bytes_max);
      LowerLimit(other->limits.request_rows_max, &head.limits.request_rows_max);
      LowerLimit(other->limits.top_k_max, &head.limits.top_k_max);
      LowerLimit(other->limits.candidates_max, &head.limits.candidates_max);
      LowerLimit(other->limits.segments_max, &head.limits.segments_max);
      LowerLimit(other->limits.stream_window, &head.limits.stream_window);
    }
  }
  return tightest;
}

std::string Balance::Server::HeadKey(const std::string& head) const {
  return head.empty() && info.heads.size() == 1 ? info.heads.front().name : head;
}

uint64_t Balance::Server::Version(const std::string& head, absl::Time now) const {
  const auto found = versions.find(HeadKey(head));
  if (found == versions.end() || now - found->second.second >= policy::kVersion) return 0;
  return found->second.first;
}

Balance::Balance(Options options, const std::vector<std::string>& addresses)
    : options_(std::move(options)) {
  SetAddresses(addresses);
}

void Balance::SetAddresses(const std::vector<std::string>& addresses) {
  const absl::MutexLock lock(&mutex_);
  std::vector<Server> servers;
  for (const std::string& address : addresses) {
    Server* const known = Find(address);
    Server& server = servers.emplace_back();
    if (known != nullptr) {
      server = std::move(*known);
    } else {
      server.address = address;
      server.record = ++num_records_;
      server.added_at = options_.now();
    }
  }
  servers_ = std::move(servers);
  CompareHeads();
}

absl::StatusOr<std::optional<Balance::Taken>> Balance::Take(int64_t bytes,
                                                            const ServerPreference& preference) {
  const absl::MutexLock lock(&mutex_);
  if (!conflict_.empty()) return absl::FailedPreconditionError(conflict_);
  const absl::Time now = options_.now();
  std::vector<size_t> choice = Choose(preference, now);
  if (choice.empty()) return std::nullopt;
  // A busy server is avoided while another one is available.
  const auto busy = std::stable_partition(
      choice.begin(), choice.end(),
      [&](size_t i) ABSL_NO_THREAD_SAFETY_ANALYSIS { return servers_[i].busy_until <= now; });
  if (busy != choice.begin()) choice.erase(busy, choice.end());
  const size_t count = servers_.size();
  const size_t next = *std::min_element(
      choice.begin(), choice.end(), [&](size_t a, size_t b) ABSL_NO_THREAD_SAFETY_ANALYSIS {
        if (servers_[a].bytes != servers_[b].bytes) return servers_[a].bytes < servers_[b].bytes;
        return (a + count - turn_) % count < (b + count - turn_) % count;
      });
  turn_ = (next + 1) % count;
  Server& server = servers_[next];
  ++server.requests;
  server.bytes += bytes;
  return Taken{.address = server.address,
               .record = server.record,
               .version = server.Version(preference.head, now)};
}

void Balance::Release(const Taken& taken, int64_t bytes) {
  const absl::MutexLock lock(&mutex_);
  Server* const server = Find(taken.address);
  if (server == nullptr || server->record != taken.record) return;
  --server->requests;
  server->bytes -= bytes;
}

void Balance::SawVersion(const std::string& address, const std::string& head, uint64_t version) {
  const absl::MutexLock lock(&mutex_);
  Server* const server = Find(address);
  if (server == nullptr) return;
  server->versions[server->HeadKey(head)] = {version, options_.now()};
  server->failures = 0;
  if (options_.solo) {
    server->is_ready = true;
    server->is_out = false;
    server->reason.clear();
  }
}

void Balance::Leave(const std::string& address, const std::string& reason) {
  const absl::MutexLock lock(&mutex_);
  Server* const server = Find(address);
  if (server != nullptr && !server->is_out) PutOut(*server, reason);
}

void Balance::Busy(const std::string& address, std::optional<absl::Duration> delay) {
  const absl::MutexLock lock(&mutex_);
  Server* const server = Find(address);
  if (server == nullptr) return;
  // A negative hint forbids a retry, and says nothing about the server.
  const absl::Duration time = std::max(absl::ZeroDuration(), delay.value_or(policy::kBusy));
  server->busy_until = std::max(server->busy_until, options_.now() + time);
}

bool Balance::HasOther(const std::string& address, const ServerPreference& preference) const {
  const absl::MutexLock lock(&mutex_);
  const absl::Time now = options_.now();
  const std::vector<size_t> choice = Choose(preference, now);
  return std::any_of(choice.begin(), choice.end(), [&](size_t i) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return servers_[i].address != address && servers_[i].busy_until <= now;
  });
}

bool Balance::HasReadyExcept(const std::set<std::string>& excluded) const {
  const absl::MutexLock lock(&mutex_);
  return std::any_of(servers_.begin(), servers_.end(),
                     [&](const Server& server) ABSL_NO_THREAD_SAFETY_ANALYSIS {
                       return IsUsable(server) && excluded.count(server.address) == 0;
                     });
}

std::vector<std::string> Balance::ready() const {
  const absl::MutexLock lock(&mutex_);
  std::vector<std::string> addresses;
  for (const Server& server : servers_) {
    if (IsUsable(server)) addresses.push_back(server.address);
  }
  return addresses;
}

std::vector<std::string> Balance::TakeDueChecks(Due due) {
  const absl::MutexLock lock(&mutex_);
  const absl::Time now = options_.now();
  std::vector<std::string> addresses;
  for (Server& server : servers_) {
    const bool is_due =
        due == Due::kAll || server.check_at <= now || (due == Due::kIdle && !server.is_ready);
    if (server.is_checked || !is_due) continue;
    server.is_checked = true;
    addresses.push_back(server.address);
  }
  return addresses;
}

void Balance::Checked(const std::string& address, const absl::StatusOr<ServerInfo>& info,
                      absl::Time began) {
  const absl::MutexLock lock(&mutex_);
  Server* const server = Find(address);
  // An earlier check is of a server that was removed and added again; another one runs, or will.
  if (server == nullptr || began < server->added_at) return;
  server->is_checked = false;
  if (!info.ok()) {
    PutOut(*server, std::string(info.status().message()));
    return;
  }
  // The server failed after the check began, so the result is outdated.
  if (server->is_out && server->left_at > began) return;
  const absl::Time now = options_.now();
  server->is_ready = true;
  server->is_out = false;
  server->reason.clear();
  server->check_at = now + policy::kCheck;
  server->info = *info;
  for (const Head& head : info->heads) server->versions[head.name] = {head.weights_version, now};
  CompareHeads();
}

int64_t Balance::num_checked() const {
  const absl::MutexLock lock(&mutex_);
  return std::count_if(servers_.begin(), servers_.end(),
                       [](const Server& server) { return server.is_checked; });
}

absl::StatusOr<ServerInfo> Balance::Heads(const std::vector<std::string>& notes) const {
  const absl::MutexLock lock(&mutex_);
  if (!conflict_.empty()) return absl::FailedPreconditionError(conflict_);
  std::vector<ServerInfo> infos;
  std::vector<std::string> reasons = notes;
  for (const Server& server : servers_) {
    if (server.is_ready) infos.push_back(server.info);
    reasons.push_back(absl::StrCat(server.address, " (",
                                   server.reason.empty() ? "no answer yet" : server.reason, ")"));
  }
  if (!infos.empty()) return TightestLimits(infos);
  return absl::UnavailableError(
      absl::StrCat("no server is available: ", absl::StrJoin(reasons, "; ")));
}

absl::Time Balance::last_left() const {
  const absl::MutexLock lock(&mutex_);
  return last_left_;
}

std::vector<ServerState> Balance::states() const {
  const absl::MutexLock lock(&mutex_);
  const absl::Time now = options_.now();
  std::vector<ServerState> states;
  for (const Server& server : servers_) {
    ServerState state = {.address = server.address,
                         .reason = server.reason,
                         .requests = server.requests,
                         .bytes = server.bytes};
    if (server.is_out) {
      state.state = ServerState::State::kOut;
      state.retry_in = std::max(absl::ZeroDuration(), server.check_at - now);
    } else if (server.is_ready) {
      state.state =
          server.busy_until > now ? ServerState::State::kBusy : ServerState::State::kReady;
    }
    for (const auto& [head, seen] : server.versions) state.weights_versions[head] = seen.first;
    states.push_back(std::move(state));
  }
  return states;
}

Balance::Server* Balance::Find(const std::string& address) {
  for (Server& server : servers_) {
    if (server.address == address) return &server;
  }
  return nullptr;
}

bool Balance::IsUsable(const Server& server) const { return options_.solo || server.is_ready; }

std::vector<size_t> Balance::Choose(const ServerPreference& preference, absl::Time now) const {
  std::vector<size_t> possible;
  std::vector<size_t> believed;
  for (size_t i = 0; i < servers_.size(); ++i) {
    const Server& server = servers_[i];
    if (!IsUsable(server) || preference.excluded.count(server.address) != 0) continue;
    possible.push_back(i);
    const uint64_t version = server.Version(preference.head, now);
    if (preference.version == 0 || version == 0 || version == preference.version) {
      believed.push_back(i);
    }
  }
  return believed.empty() ? possible : believed;
}

void Balance::PutOut(Server& server, const std::string& reason) {
  const absl::Time now = options_.now();
  server.is_ready = false;
  server.is_out = true;
  server.reason = reason;
  server.left_at = now;
  last_left_ = now;
  const absl::Duration pause = std::min(
      policy::kBackoffMax, policy::kBackoffFirst * std::ldexp(1.0, std::min(server.failures, 20)));
  ++server.failures;
  server.check_at = now + pause / 2 + pause / 2 * options_.unit_random();
  CompareHeads();
}

void Balance::CompareHeads() {
  conflict_.clear();
  const Server* first = nullptr;
  for (const Server& server : servers_) {
    if (!server.is_ready || options_.solo) continue;
    if (first == nullptr) first = &server;
    const std::string difference = DescribeDifference(first->info, server.info);
    if (difference.empty()) continue;
    conflict_ =
        absl::StrCat(first->address, " and ", server.address, " hold different heads: ", difference,
                     ". All servers of a client must hold the same heads: fix one of them, or "
                     "remove it from the addresses");
    return;
  }
}

}  // namespace logprobd::client
