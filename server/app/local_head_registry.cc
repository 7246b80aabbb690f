#include "server/app/local_head_registry.h"

#include <string>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "server/base/check.h"
#include "server/base/errors.h"
#include "server/base/utf8.h"

namespace logprobd {
namespace {

/// A head takes seconds to load: a client that asks again each second adds little.
constexpr absl::Duration kLoadingRetry = absl::Seconds(1);
/// Names are the client's; what is repeated to it stays short.
constexpr size_t kNameBytesShown = 64;

absl::Status IsLoading(const std::string& what) {
  return WithRetryAfter(absl::UnavailableError(absl::StrCat(what, " are being loaded")),
                        kLoadingRetry);
}

/// Stands for a head until it is there.
class LoadingHead final : public ServedHead {
 public:
  /// `what` is loaded: "the weights".
  LoadingHead(const HeadInfo& info, const std::string& what)
      : info_(std::make_shared<const HeadInfo>(info)), status_(IsLoading(what)) {}

  std::shared_ptr<const HeadInfo> info() const override { return info_; }
  bool ready() const override { return false; }
  absl::StatusOr<RequestTicket> Submit(ScoreRequest /*request*/, ScoreCallback /*done*/) override {
    return status_;
  }
  void Cancel(RequestTicket /*ticket*/) override {}
  void Verify(const VerifyOptions& /*options*/, VerifyCallback done) override {
    std::move(done)(status_);
  }

  const absl::Status& status() const { return status_; }

 private:
  const std::shared_ptr<const HeadInfo> info_;
  const absl::Status status_;
};

}  // namespace

LocalHeadRegistry::LocalHeadRegistry(const std::vector<HeadInfo>& expected) {
  for (const HeadInfo& info : expected) {
    names_.push_back(info.name);
    heads_.push_back(std::make_shared<LoadingHead>(
        info, expected.size() == 1 ? "the weights"
                                   : absl::StrCat("head \"", info.name, "\": the weights")));
  }
}

absl::StatusOr<std::shared_ptr<ServedHead>> LocalHeadRegistry::Find(absl::string_view name) const {
  if (name.empty() && names_.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat("head: must be named, since there are several: ",
                                                   absl::StrJoin(names_, ", ")));
  }
  if (!name.empty() && !absl::c_linear_search(names_, name)) {
    return absl::NotFoundError(absl::StrCat("head: no \"", CutUtf8(name, kNameBytesShown),
                                            "\" here; there is: ", absl::StrJoin(names_, ", ")));
  }
  const absl::ReaderMutexLock lock(&mutex_);
  for (const std::shared_ptr<ServedHead>& head : heads_) {
    if (name.empty() || head->info()->name == name) {
      const auto* const loading = dynamic_cast<const LoadingHead*>(head.get());
      return loading != nullptr ? absl::StatusOr<std::shared_ptr<ServedHead>>(loading->status())
                                : head;
    }
  }
  return absl::UnavailableError("the server is shutting down");
}

std::vector<std::shared_ptr<ServedHead>> LocalHeadRegistry::List() const {
  const absl::ReaderMutexLock lock(&mutex_);
  return has_any_ ? heads_ : std::vector<std::shared_ptr<ServedHead>>();
}

void LocalHeadRegistry::Publish(std::shared_ptr<ServedHead> head) {
  const std::string name = head->info()->name;
  const absl::MutexLock lock(&mutex_);
  for (std::shared_ptr<ServedHead>& place : heads_) {
    if (place->info()->name == name) {
      place = std::move(head);
      has_any_ = true;
      return;
    }
  }
  LOGPROBD_CHECK(false, "a head that was not expected: ", name);
}

void LocalHeadRegistry::Clear() {
  std::vector<std::shared_ptr<ServedHead>> heads;
  const absl::MutexLock lock(&mutex_);
  heads.swap(heads_);
  has_any_ = false;
}

}  // namespace logprobd
