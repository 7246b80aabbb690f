#include "server/app/plan_heads.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/app/head_values.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

/// Adds the next head. `reserved`: what those before it will take.
absl::Status PlanNext(const ServerOptions& options, const ServerParts& parts,
                      const MemoryPlan& reserved, PlannedHeads& planned) {
  LOGPROBD_ASSIGN_OR_RETURN(ModelFolderHead found,
                            parts.open_model(options.model, ModelOptionsOf(options)));
  EngineOptions engine_options = EngineOptionsOf(options);
  engine_options.reserved = reserved;
  const absl::StatusOr<EnginePlan> engine =
      parts.plan_engine(found.weights->info(), engine_options);
  LOGPROBD_RETURN_IF_ERROR(WithContext(engine.status(), absl::StrCat("--device ", options.device)));
  planned.plan.heads.push_back(
      MakeServingPlan(options, found.weights->info(), *engine, found.warnings));
  planned.weights.push_back(std::move(found.weights));
  LOGPROBD_ASSIGN_OR_RETURN(planned.roots.emplace_back(), WeightsRootsOf(options));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PlannedHeads> PlanHeads(const ServerOptions& options, const ServerParts& parts) {
  PlannedHeads planned;
  planned.options = HeadOptions(options);
  MemoryPlan reserved;
  for (const ServerOptions& head : planned.options) {
    const absl::Status status = PlanNext(head, parts, reserved, planned);
    if (!status.ok()) {
      return planned.options.size() == 1
                 ? status
                 : WithContext(status, absl::StrCat("head \"", head.head_name, "\""));
    }
    for (const MemoryUse& use : planned.plan.heads.back().memory) {
      AddMemory(reserved, use);
    }
  }
  LOGPROBD_ASSIGN_OR_RETURN(
      planned.plan, MakeServerPlan(options, std::move(planned.plan.heads), parts.host_memory()));
  return planned;
}

}  // namespace logprobd
