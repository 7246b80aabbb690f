#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/weight_store.h"

namespace logprobd::testing {

using TellProgress = std::function<bool(const WeightsProgress&)>;

/// Returns what a test specifies, and records the calls.
class FakeWeightStore final : public WeightStore {
 public:
  std::string NameOf(absl::string_view head) const override {
    return head.empty() ? state.head : std::string(head);
  }
  absl::StatusOr<WeightsVersion> Load(const WeightsLoad& load,
                                      const TellProgress& progress) override {
    return on_load(load, progress);
  }
  absl::StatusOr<PushedWeightsResult> Push(const WeightsPush& push, const NextPushedRows& next,
                                           const TellProgress& progress) override {
    return on_push(push, next, progress);
  }
  absl::StatusOr<HeadWeightsState> Commit(absl::string_view head, uint64_t version) override {
    return Answer(absl::StrCat("commit ", head, " ", version));
  }
  absl::StatusOr<HeadWeightsState> Rollback(absl::string_view head) override {
    return Answer(absl::StrCat("rollback ", head));
  }
  absl::StatusOr<HeadWeightsState> Discard(absl::string_view head, bool staged,
                                           bool previous) override {
    return Answer(
        absl::StrCat("discard ", head, staged ? " staged" : "", previous ? " previous" : ""));
  }
  absl::StatusOr<std::vector<HeadWeightsState>> List(absl::string_view head) const override {
    if (!status.ok()) {
      return status;
    }
    HeadWeightsState named = state;
    named.head = std::string(head);
    return std::vector<HeadWeightsState>{named, state};
  }

  std::function<absl::StatusOr<WeightsVersion>(const WeightsLoad&, const TellProgress&)> on_load;
  std::function<absl::StatusOr<PushedWeightsResult>(const WeightsPush&, const NextPushedRows&,
                                                    const TellProgress&)>
      on_push;
  HeadWeightsState state;
  absl::Status status;
  std::vector<std::string> calls;

 private:
  absl::StatusOr<HeadWeightsState> Answer(std::string call) {
    calls.push_back(std::move(call));
    if (!status.ok()) {
      return status;
    }
    return state;
  }
};

}  // namespace logprobd::testing
