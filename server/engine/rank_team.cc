#include "server/engine/rank_team.h"

namespace logprobd {

RankTeam::RankTeam(int32_t size, std::unique_ptr<Collective> collective)
    : size_(size),
      collective_(std::move(collective)),
      barrier_(size),
      next_round_(static_cast<size_t>(size), 0) {
  for (std::vector<absl::Status>& round : rounds_) round.resize(static_cast<size_t>(size));
}

absl::Status RankTeam::Agree(int32_t rank, absl::Status status) {
  if (size_ == 1) return status;
  const auto own = static_cast<size_t>(rank);
  // Two rounds alternate. A rank writes to a round again only after all ranks have met in the other
  // round, which means that they have read this one.
  std::vector<absl::Status>& statuses = rounds_[next_round_[own]];
  next_round_[own] ^= 1;
  statuses[own] = std::move(status);
  if (!barrier_.Meet()) return aborted();
  for (const absl::Status& reported : statuses) {
    if (!reported.ok()) return reported;
  }
  return absl::OkStatus();
}

void RankTeam::Abort(const absl::Status& why) {
  {
    const absl::MutexLock lock(&mutex_);
    aborted_.Update(why);
  }
  barrier_.Break();
  if (collective_ != nullptr) collective_->Abort();
}

absl::Status RankTeam::aborted() const {
  const absl::MutexLock lock(&mutex_);
  return aborted_;
}

}  // namespace logprobd
