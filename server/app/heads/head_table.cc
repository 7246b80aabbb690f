#include "server/app/heads/head_table.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "server/base/errors.h"
#include "server/base/text.h"

namespace logprobd {
namespace {

/// A head takes seconds to load, so a client that retries once a second causes little work.
constexpr absl::Duration kLoadingRetry = absl::Seconds(1);
/// Maximum number of bytes of a name that an error message repeats, because the client chooses the
/// name.
constexpr size_t kNameBytesShown = 64;

/// Placeholder for a head that is not published yet.
class LoadingHead final : public ServedHead {
 public:
  LoadingHead(const HeadInfo& info, absl::Status status)
      : info_(std::make_shared<const HeadInfo>(info)), status_(std::move(status)) {}

  std::shared_ptr<const HeadInfo> info() const override { return info_; }
  bool ready() const override { return false; }
  absl::StatusOr<RequestTicket> Submit(ScoreRequest /*request*/, ScoreCallback /*done*/) override {
    return status_;
  }
  void Cancel(RequestTicket /*ticket*/) override {}
  void Verify(const VerifyOptions& /*options*/, VerifyCallback done) override {
    std::move(done)(status_);
  }

 private:
  const std::shared_ptr<const HeadInfo> info_;
  const absl::Status status_;
};

}  // namespace

HeadTable::HeadTable(const std::vector<HeadInfo>& expected) {
  for (const HeadInfo& info : expected) names_.push_back(info.name);
  for (size_t i = 0; i < expected.size(); ++i) {
    entries_.push_back({std::make_shared<LoadingHead>(expected[i], IsLoading(i))});
  }
}

absl::StatusOr<size_t> HeadTable::IndexOf(absl::string_view name) const {
  if (name.empty() && names_.size() == 1) return 0;
  if (name.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("head: a name is required, because there are several heads: ",
                     absl::StrJoin(names_, ", ")));
  }
  const auto found = absl::c_find(names_, name);
  if (found == names_.end()) {
    return absl::NotFoundError(
        absl::StrCat("head: \"", CutUtf8(name, kNameBytesShown),
                     "\" is not served here; the heads are: ", absl::StrJoin(names_, ", ")));
  }
  return static_cast<size_t>(found - names_.begin());
}

absl::Status HeadTable::IsLoading(size_t index) const {
  const std::string prefix =
      names_.size() == 1 ? "" : absl::StrCat("head \"", names_[index], "\": ");
  return WithRetryAfter(
      absl::UnavailableError(absl::StrCat(prefix, "the weights are being loaded")), kLoadingRetry);
}

template <typename T>
absl::StatusOr<T> HeadTable::Published(absl::string_view name, T Entry::*member) const {
  LOGPROBD_ASSIGN_OR_RETURN(const size_t index, IndexOf(name));
  const absl::ReaderMutexLock lock(&mutex_);
  if (entries_.empty()) return ShuttingDown();
  if (!entries_[index].is_published) return IsLoading(index);
  return entries_[index].*member;
}

absl::StatusOr<std::shared_ptr<ServedHead>> HeadTable::Find(absl::string_view name) const {
  return Published(name, &Entry::head);
}

std::vector<std::shared_ptr<ServedHead>> HeadTable::List() const {
  std::vector<std::shared_ptr<ServedHead>> heads;
  const absl::ReaderMutexLock lock(&mutex_);
  if (absl::c_any_of(entries_, [](const Entry& entry) { return entry.is_published; })) {
    for (const Entry& entry : entries_) heads.push_back(entry.head);
  }
  return heads;
}

absl::StatusOr<std::shared_ptr<HeadVersions>> HeadTable::VersionsOf(absl::string_view name) const {
  return Published(name, &Entry::versions);
}

std::vector<std::shared_ptr<HeadVersions>> HeadTable::AllVersions() const {
  std::vector<std::shared_ptr<HeadVersions>> all;
  const absl::ReaderMutexLock lock(&mutex_);
  for (const Entry& entry : entries_) {
    if (entry.is_published) all.push_back(entry.versions);
  }
  return all;
}

std::string HeadTable::NameOf(absl::string_view head) const {
  return head.empty() && names_.size() == 1 ? names_.front() : std::string(head);
}

absl::StatusOr<WeightsVersion> HeadTable::Load(
    const WeightsLoad& load, const std::function<bool(const WeightsProgress&)>& progress) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::shared_ptr<HeadVersions> versions, VersionsOf(load.head));
  return versions->Load(load, progress);
}

absl::StatusOr<PushedWeightsResult> HeadTable::Push(
    const WeightsPush& push, const NextPushedRows& next,
    const std::function<bool(const WeightsProgress&)>& progress) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::shared_ptr<HeadVersions> versions, VersionsOf(push.head));
  return versions->Push(push, next, progress);
}

absl::StatusOr<HeadWeightsState> HeadTable::Commit(absl::string_view head, uint64_t version) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::shared_ptr<HeadVersions> versions, VersionsOf(head));
  return versions->Commit(version);
}

absl::StatusOr<HeadWeightsState> HeadTable::Rollback(absl::string_view head) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::shared_ptr<HeadVersions> versions, VersionsOf(head));
  return versions->Rollback();
}

absl::StatusOr<HeadWeightsState> HeadTable::Discard(absl::string_view head, bool staged,
                                                    bool previous) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::shared_ptr<HeadVersions> versions, VersionsOf(head));
  return versions->Discard(staged, previous);
}

absl::StatusOr<std::vector<HeadWeightsState>> HeadTable::List(absl::string_view head) const {
  std::vector<std::shared_ptr<HeadVersions>> heads;
  if (head.empty()) {
    heads = AllVersions();
  } else {
    LOGPROBD_ASSIGN_OR_RETURN(heads.emplace_back(), VersionsOf(head));
  }
  if (heads.empty()) return IsLoading(0);
  std::vector<HeadWeightsState> states;
  states.reserve(heads.size());
  for (const std::shared_ptr<HeadVersions>& versions : heads) states.push_back(versions->List());
  return states;
}

void HeadTable::Publish(std::shared_ptr<ServedHead> head, std::shared_ptr<HeadVersions> versions) {
  const absl::StatusOr<size_t> index = IndexOf(head->info()->name);
  LOGPROBD_CHECK(index.ok(), index.status().message());
  const absl::MutexLock lock(&mutex_);
  entries_[*index] = {std::move(head), std::move(versions), /*is_published=*/true};
}

void HeadTable::StopChanges() {
  for (const std::shared_ptr<HeadVersions>& versions : AllVersions()) versions->Stop();
}

void HeadTable::Clear() {
  std::vector<Entry> entries;
  const absl::MutexLock lock(&mutex_);
  entries.swap(entries_);
}

}  // namespace logprobd
