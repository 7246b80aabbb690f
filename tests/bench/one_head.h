#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/served_head.h"

namespace logprobd::testing {

/// A registry of one head, whatever the name.
class OneHead final : public HeadRegistry {
 public:
  explicit OneHead(std::shared_ptr<ServedHead> head) : head_(std::move(head)) {}
  absl::StatusOr<std::shared_ptr<ServedHead>> Find(absl::string_view) const override {
    return head_;
  }
  std::vector<std::shared_ptr<ServedHead>> List() const override { return {head_}; }

 private:
  const std::shared_ptr<ServedHead> head_;
};

}  // namespace logprobd::testing
