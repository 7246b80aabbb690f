#pragma once

#include "kernels/chunked/chunk_plan.h"
#include "server/base/head_info.h"
#include "server/engine/engines.h"

namespace logprobd {

/// The sizes of a CudaEngine for `head` on its first GPU, which must exist.
kernels::ChunkPlan ChunkPlanOf(const HeadInfo& head, const EngineOptions& options);

}  // namespace logprobd
