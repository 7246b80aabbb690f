#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/collective.h"

namespace logprobd {

/// What the shards of an engine take from the machine. A fake may refuse it, or replace a
/// collective by one that fails. Thread-safe.
class EngineResources {
 public:
  virtual ~EngineResources() = default;

  /// The resources of a server, which refuse nothing.
  static EngineResources& Real() {
    static EngineResources real;
    return real;
  }

  /// Called before a shard allocates memory: at the start with "weight" and "workspace", then with
  /// "batch" for each batch. An error becomes the result of the allocation.
  virtual absl::Status TakeMemory(int32_t /*shard*/, absl::string_view /*what*/) {
    return absl::OkStatus();
  }

  /// Returns the collective that an engine uses in place of the one made for it.
  virtual absl::StatusOr<std::unique_ptr<Collective>> TakeCollective(
      std::unique_ptr<Collective> made) {
    return made;
  }
};

}  // namespace logprobd
