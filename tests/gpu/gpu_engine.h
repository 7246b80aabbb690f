#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/engine/cuda_engine.h"

namespace logprobd::testing {

/// A CudaEngine on GPU 0.
inline absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateGpuEngine(const HeadWeights& head,
                                                                      int64_t batch_rows_max) {
  EngineOptions options;
  options.batch_rows_max = batch_rows_max;
  auto plan = PlanCudaEngine(head.info(), options, "test");
  if (!plan.ok()) return plan.status();
  return CreateCudaEngine(head, *plan, options);
}

/// Why this machine cannot run GPU tests; empty where it can.
inline std::string NoGpuReason() {
  HeadInfo head;
  head.vocab_size = head.vocab_rows = head.hidden_size = 1;
  const auto plan = PlanCudaEngine(head, {}, "");
  return plan.ok() ? "" : std::string(plan.status().message());
}

}  // namespace logprobd::testing
