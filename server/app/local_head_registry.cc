#include "server/app/local_head_registry.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "server/app/head_lookup.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

/// Stands for a head until it is there.
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

LocalHeadRegistry::LocalHeadRegistry(const std::vector<HeadInfo>& expected) {
  for (const HeadInfo& info : expected) {
    names_.push_back(info.name);
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    heads_.push_back(std::make_shared<LoadingHead>(expected[i], HeadIsLoading(names_, i)));
  }
  is_loaded_.resize(names_.size());
}

absl::StatusOr<std::shared_ptr<ServedHead>> LocalHeadRegistry::Find(absl::string_view name) const {
  LOGPROBD_ASSIGN_OR_RETURN(const size_t index, FindHead(names_, name));
  const absl::ReaderMutexLock lock(&mutex_);
  if (heads_.empty()) {
    return absl::UnavailableError("the server is shutting down");
  }
  if (!is_loaded_[index]) {
    return HeadIsLoading(names_, index);
  }
  return heads_[index];
}

std::vector<std::shared_ptr<ServedHead>> LocalHeadRegistry::List() const {
  const absl::ReaderMutexLock lock(&mutex_);
  return absl::c_linear_search(is_loaded_, true) ? heads_
                                                 : std::vector<std::shared_ptr<ServedHead>>();
}

void LocalHeadRegistry::Publish(std::shared_ptr<ServedHead> head) {
  const absl::StatusOr<size_t> index = FindHead(names_, head->info()->name);
  LOGPROBD_CHECK(index.ok(), index.status().message());
  const absl::MutexLock lock(&mutex_);
  heads_[*index] = std::move(head);
  is_loaded_[*index] = true;
}

void LocalHeadRegistry::Clear() {
  std::vector<std::shared_ptr<ServedHead>> heads;
  const absl::MutexLock lock(&mutex_);
  heads.swap(heads_);
}

}  // namespace logprobd
