#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/base/head_info.h"
#include "server/base/served_head.h"

namespace logprobd {

/// The heads of this process, each there once it is loaded.
class LocalHeadRegistry final : public HeadRegistry {
 public:
  /// All heads that are to come, whose names differ. To ask for one before it is there is
  /// UNAVAILABLE with a retry hint, for any other NOT_FOUND.
  explicit LocalHeadRegistry(const std::vector<HeadInfo>& expected);

  absl::StatusOr<std::shared_ptr<ServedHead>> Find(absl::string_view name) const override;
  /// In the order in which they were expected, those that are loading as not ready; empty until the
  /// first is there.
  std::vector<std::shared_ptr<ServedHead>> List() const override;

  /// Requests find `head`, one of those expected, from now on.
  void Publish(std::shared_ptr<ServedHead> head);
  /// Forgets all heads.
  void Clear();

 private:
  std::vector<std::string> names_;
  mutable absl::Mutex mutex_;
  /// As `names_`, with stand-ins for those that are loading; empty once they are forgotten.
  std::vector<std::shared_ptr<ServedHead>> heads_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> is_loaded_ ABSL_GUARDED_BY(mutex_);  // as `names_`
};

}  // namespace logprobd
