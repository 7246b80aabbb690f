#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/app/heads/head_versions.h"
#include "server/base/head_info.h"
#include "server/base/served_head.h"
#include "server/base/weight_store.h"

namespace logprobd {

/// Finds the heads of this process by name, for requests (HeadRegistry) and the Weights service
/// (WeightStore). Each head is available once it is published. Thread-safe.
///
/// Every lookup returns INVALID_ARGUMENT if the name is empty and there are several heads,
/// NOT_FOUND for an unknown name (both messages list the names), and UNAVAILABLE with a retry hint
/// while the head is loading.
class HeadTable final : public HeadRegistry, public WeightStore {
 public:
  /// `expected` contains all heads that will be published, with different names.
  explicit HeadTable(const std::vector<HeadInfo>& expected);

  // HeadRegistry.
  absl::StatusOr<std::shared_ptr<ServedHead>> Find(absl::string_view name) const override;
  /// Returns the heads in the order of `expected`. Heads that are loading are not ready. Returns an
  /// empty vector until the first head is published.
  std::vector<std::shared_ptr<ServedHead>> List() const override;

  // WeightStore.
  std::string NameOf(absl::string_view head) const override;
  absl::StatusOr<WeightsVersion> Load(
      const WeightsLoad& load,
      const std::function<bool(const WeightsProgress&)>& progress) override;
  absl::StatusOr<PushedWeightsResult> Push(
      const WeightsPush& push, const NextPushedRows& next,
      const std::function<bool(const WeightsProgress&)>& progress) override;
  absl::StatusOr<HeadWeightsState> Commit(absl::string_view head, uint64_t version) override;
  absl::StatusOr<HeadWeightsState> Rollback(absl::string_view head) override;
  absl::StatusOr<HeadWeightsState> Discard(absl::string_view head, bool staged,
                                           bool previous) override;
  /// If the name is empty, returns the state of all published heads, or UNAVAILABLE while there are
  /// none.
  absl::StatusOr<std::vector<HeadWeightsState>> List(absl::string_view head) const override;

  /// Makes `head`, which is one of the expected heads, and its `versions` available.
  void Publish(std::shared_ptr<ServedHead> head, std::shared_ptr<HeadVersions> versions);
  /// Makes running changes of weights end soon, and refuses all later ones with UNAVAILABLE.
  void StopChanges();
  /// Removes all heads; no change of weights may be running.
  void Clear();

 private:
  struct Entry {
    /// The head, or a placeholder that is not ready while `is_published` is false.
    std::shared_ptr<ServedHead> head;
    std::shared_ptr<HeadVersions> versions = nullptr;
    bool is_published = false;
  };

  absl::StatusOr<size_t> IndexOf(absl::string_view name) const;
  absl::Status IsLoading(size_t index) const;
  /// Returns a member of the entry of a head that is published.
  template <typename T>
  absl::StatusOr<T> Published(absl::string_view name, T Entry::*member) const;
  absl::StatusOr<std::shared_ptr<HeadVersions>> VersionsOf(absl::string_view name) const;
  /// Returns the versions of all published heads.
  std::vector<std::shared_ptr<HeadVersions>> AllVersions() const;

  std::vector<std::string> names_;
  mutable absl::Mutex mutex_;
  std::vector<Entry> entries_
      ABSL_GUARDED_BY(mutex_);  ///< In the order of `names_`; empty after Clear.
};

}  // namespace logprobd
