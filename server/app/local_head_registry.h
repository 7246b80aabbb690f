#pragma once

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/base/served_head.h"

namespace logprobd {

/// The heads of this process; empty while they are being loaded.
class LocalHeadRegistry final : public HeadRegistry {
 public:
  absl::StatusOr<std::shared_ptr<ServedHead>> Find(absl::string_view name) const override;
  std::vector<std::shared_ptr<ServedHead>> List() const override;

  /// Requests find `head` from now on. Names must differ.
  void Publish(std::shared_ptr<ServedHead> head);
  /// Forgets all heads.
  void Clear();

 private:
  mutable absl::Mutex mutex_;
  std::vector<std::shared_ptr<ServedHead>> heads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd
