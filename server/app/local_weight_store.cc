#include "server/app/local_weight_store.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "server/base/errors.h"
#include "server/base/utf8.h"

namespace logprobd {
namespace {

constexpr absl::Duration kLoadingRetry = absl::Seconds(1);
/// Names are the client's; what is repeated to it stays short.
constexpr size_t kNameBytesShown = 64;

}  // namespace

absl::StatusOr<std::shared_ptr<HeadVersions>> LocalWeightStore::Find(absl::string_view name) const {
  const absl::ReaderMutexLock lock(&mutex_);
  if (heads_.empty()) {
    return WithRetryAfter(absl::UnavailableError("the weights are being loaded"), kLoadingRetry);
  }
  if (name.empty() && heads_.size() == 1) {
    return heads_.front();
  }
  for (const std::shared_ptr<HeadVersions>& versions : heads_) {
    if (versions->name() == name) {
      return versions;
    }
  }
  const std::string names =
      absl::StrJoin(heads_, ", ", [](std::string* out, const std::shared_ptr<HeadVersions>& head) {
        absl::StrAppend(out, head->name());
      });
  if (name.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("head: must be named, since there are several: ", names));
  }
  return absl::NotFoundError(
      absl::StrCat("head: no \"", CutUtf8(name, kNameBytesShown), "\" here; there is: ", names));
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
  {
    const absl::ReaderMutexLock lock(&mutex_);
    heads = heads_;
  }
  if (!head.empty() || heads.empty()) {
    LOGPROBD_ASSIGN_OR_RETURN(const std::shared_ptr<HeadVersions> versions, Find(head));
    heads = {versions};
  }
  std::vector<HeadWeightsState> states;
  states.reserve(heads.size());
  for (const std::shared_ptr<HeadVersions>& versions : heads) {
    states.push_back(versions->List());
  }
  return states;
}

void LocalWeightStore::Publish(std::shared_ptr<HeadVersions> versions) {
  const absl::MutexLock lock(&mutex_);
  heads_.push_back(std::move(versions));
}

void LocalWeightStore::Stop() {
  const absl::ReaderMutexLock lock(&mutex_);
  for (const std::shared_ptr<HeadVersions>& versions : heads_) {
    versions->Stop();
  }
}

void LocalWeightStore::Clear() {
  std::vector<std::shared_ptr<HeadVersions>> heads;
  const absl::MutexLock lock(&mutex_);
  heads.swap(heads_);
}

}  // namespace logprobd
