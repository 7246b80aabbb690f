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

/// Hooks with which tests make an allocation or a collective fail; empty in a server.
struct FaultPoints {
  /// Called before a shard allocates memory: at start with "weight" and "workspace", then with
  /// "batch" for each batch. An error that it returns becomes the result of the allocation.
  std::function<absl::Status(int32_t shard, absl::string_view what)> memory = {};
  /// Receives the collective of an engine and returns the one to use instead, or an error.
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
