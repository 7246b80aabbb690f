#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/collective.h"

namespace logprobd {

/// Where tests make an engine's surroundings fail; empty otherwise.
struct FaultPoints {
  /// Asked before a shard takes memory: at start for "weight" and "workspace", then for each
  /// "batch".
  std::function<absl::Status(int32_t shard, absl::string_view what)> memory = {};
  /// Given the collective of an engine, returns the one to use, or why there is none.
  std::function<absl::StatusOr<std::unique_ptr<Collective>>(std::unique_ptr<Collective>)>
      collective = {};

  absl::Status CheckMemory(int32_t shard, absl::string_view what) const {
    return memory ? memory(shard, what) : absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<Collective>> Wrap(std::unique_ptr<Collective> real) const {
    if (!collective) return real;
    return collective(std::move(real));
  }
};

}  // namespace logprobd
