#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/engine_resources.h"

namespace logprobd::testing {

/// Refuses memory and replaces the collective as a test wishes. An empty function changes nothing.
struct FaultyResources final : public EngineResources {
  absl::Status TakeMemory(int32_t shard, absl::string_view what) override {
    return memory ? memory(shard, what) : absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<Collective>> TakeCollective(
      std::unique_ptr<Collective> made) override {
    if (collective) return collective(std::move(made));
    return made;
  }

  std::function<absl::Status(int32_t shard, absl::string_view what)> memory;
  std::function<absl::StatusOr<std::unique_ptr<Collective>>(std::unique_ptr<Collective>)>
      collective;
};

}  // namespace logprobd::testing
