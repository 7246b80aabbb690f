#include "client/cli/bench/arrivals.h"

namespace logprobd::client {

ArrivalSchedule::ArrivalSchedule(Arrivals arrivals, double rate, uint64_t seed)
    : arrivals_(arrivals), rate_(rate), random_(seed) {}

absl::Duration ArrivalSchedule::Next() {
  if (arrivals_ == Arrivals::kFixed) {
    // By multiplication: rounding errors must not add up to a drift of the rate.
    return absl::Seconds(static_cast<double>(planned_++) / rate_);
  }
  seconds_ += random_.Exponential() / rate_;
  return absl::Seconds(seconds_);
}

}  // namespace logprobd::client
