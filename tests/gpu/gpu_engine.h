#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/common/tile.h"
#include "server/base/errors.h"
#include "server/engine/cuda_engine.h"
#include "server/engine/layout.h"

namespace logprobd::testing {

/// The initialisation of this constant sets the environment variable before CUDA starts. Shards
/// that share a GPU need separate hardware queues: in a common queue, a kernel that waits for
/// another shard would block that shard's work.
inline const int kSetConnections = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);

/// Loads all kernels when CUDA starts. Loading a kernel at its first launch waits for the kernels
/// that run on the GPU and blocks other launches; if one of the running kernels waits for a shard
/// on the same GPU, neither ends.
inline const int kSetLoading = setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);

inline int32_t NumGpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

/// Creates a CUDA engine of one replica in `shards` shards, which are assigned to the machine's
/// GPUs in turn. With fewer GPUs, several shards share one; a server never does that, but the
/// shards exchange the same data as on several GPUs.
inline absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateGpuEngine(const HeadWeights& head,
                                                                      EngineOptions options,
                                                                      int32_t shards = 1) {
  options.gpus = {0};
  LOGPROBD_ASSIGN_OR_RETURN(EnginePlan plan, PlanCudaEngine(head.info(), options, "test"));
  LOGPROBD_ASSIGN_OR_RETURN(const std::vector<TileRange> tiles,
                            PartitionTiles(head.info().vocab_size, shards));
  plan.exchange = options.exchange;
  plan.layout.clear();
  for (int32_t shard = 0; shard < shards; ++shard) {
    const TileRange& range = tiles[static_cast<size_t>(shard)];
    plan.layout.push_back({0, shard, absl::StrCat("gpu", shard % NumGpus()),
                           range.begin * kernels::kTileColumns,
                           std::min(range.end * kernels::kTileColumns, head.info().vocab_size)});
  }
  LOGPROBD_ASSIGN_OR_RETURN(auto engines, CreateCudaEngines(head, plan, options));
  return std::move(engines.front());
}

/// Creates a CUDA engine with one shard on GPU 0.
inline absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateGpuEngine(const HeadWeights& head,
                                                                      int64_t batch_rows_max) {
  EngineOptions options;
  options.batch_rows_max = batch_rows_max;
  return CreateGpuEngine(head, std::move(options));
}

/// Why this machine cannot run GPU tests; empty if it can.
inline std::string NoGpuReason() { return std::string(CheckCudaUsable().message()); }

}  // namespace logprobd::testing
