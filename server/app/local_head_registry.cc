#include "server/app/local_head_registry.h"

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "server/base/errors.h"
#include "server/base/utf8.h"

namespace logprobd {
namespace {

/// A head takes seconds to load: a client that asks again each second adds little.
constexpr absl::Duration kLoadingRetry = absl::Seconds(1);
/// Names are the client's; what is repeated to it stays short.
constexpr size_t kNameBytesShown = 64;

}  // namespace

absl::StatusOr<std::shared_ptr<ServedHead>> LocalHeadRegistry::Find(absl::string_view name) const {
  const absl::ReaderMutexLock lock(&mutex_);
  if (heads_.empty()) {
    return WithRetryAfter(absl::UnavailableError("the weights are being loaded"), kLoadingRetry);
  }
  if (name.empty() && heads_.size() == 1) {
    return heads_.front();
  }
  for (const std::shared_ptr<ServedHead>& head : heads_) {
    if (head->info().name == name) {
      return head;
    }
  }
  const std::string names =
      absl::StrJoin(heads_, ", ", [](std::string* out, const std::shared_ptr<ServedHead>& head) {
        absl::StrAppend(out, head->info().name);
      });
  if (name.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("head: must be named, since there are several: ", names));
  }
  return absl::NotFoundError(
      absl::StrCat("head: no \"", CutUtf8(name, kNameBytesShown), "\" here; there is: ", names));
}

std::vector<std::shared_ptr<ServedHead>> LocalHeadRegistry::List() const {
  const absl::ReaderMutexLock lock(&mutex_);
  return heads_;
}

void LocalHeadRegistry::Publish(std::shared_ptr<ServedHead> head) {
  const absl::MutexLock lock(&mutex_);
  heads_.push_back(std::move(head));
}

void LocalHeadRegistry::Clear() {
  std::vector<std::shared_ptr<ServedHead>> heads;
  const absl::MutexLock lock(&mutex_);
  heads.swap(heads_);
}

}  // namespace logprobd
