#include "server/batching/admission.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

/// Weight of the newest batch in the running mean.
constexpr double kNewest = 0.2;

/// Returns the smaller of two values in seconds per row. 0 means "not measured" and is ignored.
double Faster(double a, double b) { return a == 0 || b == 0 ? a + b : std::min(a, b); }

}  // namespace

void DrainRate::AddBatch(int64_t rows, absl::Time started, absl::Time ended, int replica) {
  const auto index = static_cast<size_t>(replica);
  if (index >= last_ends_.size()) last_ends_.resize(index + 1, absl::InfinitePast());
  absl::Time& last_end = last_ends_[index];
  const absl::Duration alone = ended - std::max(started, last_end);
  last_end = std::max(last_end, ended);
  if (rows <= 0 || alone <= absl::ZeroDuration()) return;
  const double measured = absl::ToDoubleSeconds(alone) / static_cast<double>(rows);
  const bool is_representative = rows >= representative_rows_;
  if (is_representative) mean_ = mean_ == 0 ? measured : (1 - kNewest) * mean_ + kNewest * measured;
  // A small batch can show that the rate is faster, but never that it is slower.
  if (is_representative || measured < Fastest(ended)) NoteFastest(measured, ended);
}

void DrainRate::NoteFastest(double seconds_per_row, absl::Time now) {
  const absl::Duration age = now - period_begin_;
  if (age >= kMemory) {
    earlier_fastest_ = age < 2 * kMemory ? fastest_ : 0;
    fastest_ = 0;
    period_begin_ = now;
  }
  fastest_ = Faster(fastest_, seconds_per_row);
}

std::optional<absl::Duration> DrainRate::TimeFor(double rows) const {
  if (mean_ == 0) return std::nullopt;
  return absl::Seconds(rows * mean_ / num_replicas_);
}

std::optional<absl::Duration> DrainRate::LeastTimeFor(double rows, absl::Time now) const {
  const double fastest = Fastest(now);
  if (fastest == 0) return std::nullopt;
  return absl::Seconds(rows * fastest / num_replicas_);
}

double DrainRate::Fastest(absl::Time now) const {
  const absl::Duration age = now - period_begin_;
  return age >= 2 * kMemory ? 0 : age < kMemory ? Faster(fastest_, earlier_fastest_) : fastest_;
}

absl::Duration DrainRate::RetryAfter(double rows) const {
  return std::clamp(TimeFor(rows).value_or(kRetryAfterUnmeasured), kRetryAfterMin, kRetryAfterMax);
}

namespace {

int64_t Share(int64_t limit, double share) {
  return std::clamp<int64_t>(static_cast<int64_t>(static_cast<double>(limit) * share), 1, limit);
}

}  // namespace

QueueLoad& QueueLoad::operator+=(const QueueLoad& other) {
  rows += other.rows;
  bytes += other.bytes;
  requests += other.requests;
  return *this;
}

QueueLoad& QueueLoad::operator-=(const QueueLoad& other) {
  rows -= other.rows;
  bytes -= other.bytes;
  requests -= other.requests;
  return *this;
}

Admission::Admission(const Limits& limits)
    : limit_(limits.total), client_limit_(ClientLimits(limits)) {}

void Admission::SetLimits(const Limits& limits) {
  limit_ = limits.total;
  client_limit_ = ClientLimits(limits);
}

QueueLoad Admission::ClientLimits(const Limits& limits) {
  return {.rows = Share(limits.total.rows, limits.client_share),
          .bytes = Share(limits.total.bytes, limits.client_share),
          .requests = Share(limits.total.requests, limits.client_share)};
}

QueueLoad Admission::LimitOf(double client_share) const {
  return client_share == 0 ? client_limit_
                           : ClientLimits({.total = limit_, .client_share = client_share});
}

absl::Status Admission::CheckPossible(const QueueLoad& load, double client_share) const {
  const QueueLoad client_limit = LimitOf(client_share);
  if (load.rows > client_limit.rows) {
    return WithRejection(absl::InvalidArgumentError(absl::StrCat(
                             "rows: ", load.rows, " rows exceed the limit of ", client_limit.rows,
                             " waiting rows per client: send fewer rows per request")),
                         Rejection::kInvalid);
  }
  if (load.bytes > client_limit.bytes) {
    return WithRejection(absl::InvalidArgumentError(absl::StrCat(
                             "request: ", load.bytes, " bytes with its answer exceed the limit of ",
                             client_limit.bytes,
                             " bytes per client: ask for fewer rows, candidates or top_k at once")),
                         Rejection::kInvalid);
  }
  return absl::OkStatus();
}

absl::Status Admission::Admit(const std::string& client_id, Priority priority,
                              const QueueLoad& load, const DrainRate& rate, double client_share) {
  const QueueLoad client_limit = LimitOf(client_share);
  QueueLoad after = total_;
  after += load;
  const auto refuse = [&](absl::string_view what, int64_t waiting, int64_t more, int64_t limit,
                          const QueueLoad& excess, Rejection reason) {
    absl::Status status =
        absl::ResourceExhaustedError(absl::StrCat(what, ": ", waiting, " are waiting, and ", more,
                                                  " more would exceed the limit of ", limit));
    return WithRejection(WithRetryAfter(std::move(status), RetryAfter(excess, rate)), reason);
  };
  if (after.rows > limit_.rows) {
    return refuse("queue rows", total_.rows, load.rows, limit_.rows,
                  QueueLoad{.rows = after.rows - limit_.rows}, Rejection::kQueueRows);
  }
  if (after.bytes > limit_.bytes) {
    return refuse("queue bytes", total_.bytes, load.bytes, limit_.bytes,
                  QueueLoad{.bytes = after.bytes - limit_.bytes}, Rejection::kQueueBytes);
  }
  if (after.requests > limit_.requests) {
    return refuse("queue requests", total_.requests, load.requests, limit_.requests,
                  QueueLoad{.requests = after.requests - limit_.requests},
                  Rejection::kQueueRequests);
  }

  const auto found = by_client_.find(client_id);
  const QueueLoad client = found == by_client_.end() ? QueueLoad() : found->second;
  QueueLoad client_after = client;
  client_after += load;
  const auto share = Rejection::kClientShare;
  if (client_after.rows > client_limit.rows) {
    return refuse("this client's queue rows", client.rows, load.rows, client_limit.rows,
                  QueueLoad{.rows = client_after.rows - client_limit.rows}, share);
  }
  if (client_after.bytes > client_limit.bytes) {
    return refuse("this client's queue bytes", client.bytes, load.bytes, client_limit.bytes,
                  QueueLoad{.bytes = client_after.bytes - client_limit.bytes}, share);
  }
  if (client_after.requests > client_limit.requests) {
    return refuse("this client's queue requests", client.requests, load.requests,
                  client_limit.requests,
                  QueueLoad{.requests = client_after.requests - client_limit.requests}, share);
  }

  total_ = after;
  by_priority_[static_cast<size_t>(priority)] += load;
  by_client_[client_id] = client_after;
  return absl::OkStatus();
}

void Admission::Release(const std::string& client_id, Priority priority, const QueueLoad& load) {
  total_ -= load;
  by_priority_[static_cast<size_t>(priority)] -= load;
  const auto found = by_client_.find(client_id);
  LOGPROBD_CHECK(found != by_client_.end());
  QueueLoad& client = found->second;
  client -= load;
  LOGPROBD_CHECK(client.rows >= 0 && client.bytes >= 0 && client.requests >= 0, client.rows, " ",
                 client.bytes, " ", client.requests);
  if (client.rows == 0 && client.bytes == 0 && client.requests == 0) by_client_.erase(found);
}

absl::Duration Admission::RetryAfter(const QueueLoad& excess, const DrainRate& rate) const {
  // Bytes and requests leave with their rows, so they are converted into rows at the mean amount
  // per waiting row.
  if (total_.rows == 0 && excess.rows == 0) {
    // Requests that the engine already has use up the limit, so the excess cannot be
    // converted to rows.
    return DrainRate::kRetryAfterUnmeasured;
  }
  const auto rows = static_cast<double>(std::max<int64_t>(total_.rows, 1));
  const auto per_row = [&](int64_t amount) {
    return std::max(static_cast<double>(amount) / rows, 1e-9);
  };
  const double excess_rows = static_cast<double>(excess.rows) +
                             static_cast<double>(excess.bytes) / per_row(total_.bytes) +
                             static_cast<double>(excess.requests) / per_row(total_.requests);
  return rate.RetryAfter(excess_rows);
}

}  // namespace logprobd
