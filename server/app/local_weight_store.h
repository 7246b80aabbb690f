#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/app/head_versions.h"
#include "server/base/weight_store.h"

namespace logprobd {

/// The versions of the heads of this process, each there once it is loaded.
class LocalWeightStore final : public WeightStore {
 public:
  /// `names`: of all heads that are to come, which differ. To ask for one before it is there is
  /// UNAVAILABLE with a retry hint, for any other NOT_FOUND.
  explicit LocalWeightStore(std::vector<std::string> names);

  absl::StatusOr<WeightsVersion> Load(
      const WeightsLoad& load,
      const std::function<bool(const WeightsProgress&)>& progress) override;
  absl::StatusOr<HeadWeightsState> Commit(absl::string_view head, uint64_t version) override;
  absl::StatusOr<HeadWeightsState> Rollback(absl::string_view head) override;
  absl::StatusOr<HeadWeightsState> Discard(absl::string_view head, bool staged,
                                           bool previous) override;
  /// Without a name those that are there; UNAVAILABLE as above while none is.
  absl::StatusOr<std::vector<HeadWeightsState>> List(absl::string_view head) const override;

  /// Calls find `versions`, of a head that was to come, from now on.
  void Publish(std::shared_ptr<HeadVersions> versions);
  /// Ends what runs soon and refuses all from now on (UNAVAILABLE).
  void Stop();
  /// Forgets all heads; no call may be running.
  void Clear();

 private:
  absl::StatusOr<std::shared_ptr<HeadVersions>> Find(absl::string_view name) const;

  /// Those that are there.
  std::vector<std::shared_ptr<HeadVersions>> Heads() const;

  const std::vector<std::string> names_;
  mutable absl::Mutex mutex_;
  /// As `names_`; null while it is being loaded.
  std::vector<std::shared_ptr<HeadVersions>> heads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd
