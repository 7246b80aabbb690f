#include "server/app/local_weight_store.h"

#include <utility>

#include "absl/status/status.h"
#include "server/app/head_lookup.h"
#include "server/base/errors.h"

namespace logprobd {

LocalWeightStore::LocalWeightStore(std::vector<std::string> names)
    : names_(std::move(names)), heads_(names_.size()) {}

absl::StatusOr<std::shared_ptr<HeadVersions>> LocalWeightStore::Find(absl::string_view name) const {
  LOGPROBD_ASSIGN_OR_RETURN(const size_t index, FindHead(names_, name));
  const absl::ReaderMutexLock lock(&mutex_);
  if (heads_[index] == nullptr) {
    return HeadIsLoading(names_, index);
  }
  return heads_[index];
}

std::vector<std::shared_ptr<HeadVersions>> LocalWeightStore::Heads() const {
  std::vector<std::shared_ptr<HeadVersions>> heads;
  const absl::ReaderMutexLock lock(&mutex_);
  for (const std::shared_ptr<HeadVersions>& versions : heads_) {
    if (versions != nullptr) {
      heads.push_back(versions);
    }
  }
  return heads;
}

absl::StatusOr<WeightsVersion> LocalWeightStore::Load(
    const WeightsLoad& load, const std::function<bool(const WeightsProgress&)>& progress) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::shared_ptr<HeadVersions> versions, Find(load.head));
  return versions->Load(load, progress);
}

absl::StatusOr<HeadWeightsState> LocalWeightStore::Commit(absl::string_view head,
                                                          uint64_t version) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::shared_ptr<HeadVersions> versions, Find(head));
  return versions->Commit(version);
}

absl::StatusOr<HeadWeightsState> LocalWeightStore::Rollback(absl::string_view head) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::shared_ptr<HeadVersions> versions, Find(head));
  return versions->Rollback();
}

absl::StatusOr<HeadWeightsState> LocalWeightStore::Discard(absl::string_view head, bool staged,
                                                           bool previous) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::shared_ptr<HeadVersions> versions, Find(head));
  return versions->Discard(staged, previous);
}

absl::StatusOr<std::vector<HeadWeightsState>> LocalWeightStore::List(absl::string_view head) const {
  std::vector<std::shared_ptr<HeadVersions>> heads;
  if (head.empty()) {
    heads = Heads();
  } else {
    LOGPROBD_ASSIGN_OR_RETURN(heads.emplace_back(), Find(head));
  }
  if (heads.empty()) {
    return HeadIsLoading(names_, 0);
  }
  std::vector<HeadWeightsState> states;
  states.reserve(heads.size());
  for (const std::shared_ptr<HeadVersions>& versions : heads) {
    states.push_back(versions->List());
  }
  return states;
}

void LocalWeightStore::Publish(std::shared_ptr<HeadVersions> versions) {
  const absl::StatusOr<size_t> index = FindHead(names_, versions->name());
  LOGPROBD_CHECK(index.ok(), index.status().message());
  const absl::MutexLock lock(&mutex_);
  heads_[*index] = std::move(versions);
}

void LocalWeightStore::Stop() {
  for (const std::shared_ptr<HeadVersions>& versions : Heads()) {
    versions->Stop();
  }
}

void LocalWeightStore::Clear() {
  std::vector<std::shared_ptr<HeadVersions>> heads(names_.size());
  const absl::MutexLock lock(&mutex_);
  heads.swap(heads_);
}

}  // namespace logprobd
