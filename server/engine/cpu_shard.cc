#include "server/engine/cpu_shard.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <utility>

#include "server/base/errors.h"
#include "server/engine/cpu_head.h"
#include "server/engine/kernel_params.h"

namespace logprobd {
namespace {

using kernels::Reduction;

kernels::ScoreRowsParams ParamsOf(ScoreBatch& batch) {
  kernels::ScoreRowsParams params;
  params.hidden_dtype = KernelDtype(batch.dtype);
  params.hidden = batch.hidden;
  params.num_rows = batch.num_rows;
  params.targets = batch.targets.data();
  params.temperatures = batch.temperatures.data();
  if (!batch.entropy_temperatures.empty()) {
    params.entropy_temperatures = batch.entropy_temperatures.data();
  }
  params.top_k = batch.top_k;
  params.num_candidates = static_cast<int64_t>(batch.candidate_ids.size());
  params.candidate_rows = batch.candidate_rows.data();
  params.candidate_ids = batch.candidate_ids.data();
  ForEachRowColumn([&](const auto& column) {
    if (column.IsScored(batch.outputs)) SetRowScore(params, column, (batch.*column.span).data());
  });
  params.top_k_ids = batch.top_k_ids.data();
  params.top_k_logprobs = batch.top_k_logprobs.data();
  params.candidate_logprobs = batch.candidate_logprobs.data();
  params.nonfinite = batch.nonfinite.data();
  return params;
}

class HostStaging : public StagingBuffer {
 public:
  HostStaging(HostMemory memory, int64_t size_bytes)
      : memory_(std::move(memory)), size_bytes_(size_bytes) {}
  std::byte* data() override { return memory_.data(); }
  int64_t size_bytes() const override { return size_bytes_; }

 private:
  HostMemory memory_;
  int64_t size_bytes_;
};

absl::Span<const Reduction> ToAbsl(std::span<const Reduction> items) {
  return {items.data(), items.size()};
}

}  // namespace

void CpuShard::ScorerThreads::ForEach(
    int64_t num_units, const std::function<void(int64_t unit, int32_t worker)>& body) {
  Heartbeat& heartbeat = shard_.heartbeat();
  pool_.ForEach(num_units, [&](int64_t unit, int32_t worker) {
    body(unit, worker);
    heartbeat.Beat();
  });
}

absl::StatusOr<std::unique_ptr<StagingBuffer>> CpuShard::AllocateStaging(int64_t size_bytes) {
  LOGPROBD_ASSIGN_OR_RETURN(HostMemory memory, HostMemory::Allocate(size_bytes));
  return std::make_unique<HostStaging>(std::move(memory), size_bytes);
}

absl::Status CpuShard::Enqueue(ScoreBatch& batch, int32_t slot, RankTeam& team) {
  is_scoring_ = true;
  const auto begin = std::chrono::steady_clock::now();
  absl::Status status = Score(batch, team);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  seconds_[slot] = seconds.count();
  is_scoring_ = false;
  return status;
}

absl::Status CpuShard::Score(ScoreBatch& batch, RankTeam& team) {
  LOGPROBD_RETURN_IF_ERROR(team.Agree(rank_, resources_.TakeMemory(rank_, "batch")));
  const kernels::ScoreRowsParams params = ParamsOf(batch);
  if (team.size() == 1) {
    scorer_.Score(params);
    return absl::OkStatus();
  }
  const absl::Status status = ScoreInShards(params, team.collective());
  if (!status.ok()) {
    team.Abort(status);
    return team.aborted();
  }
  return absl::OkStatus();
}

absl::Status CpuShard::ScoreInShards(const kernels::ScoreRowsParams& params,
                                     Collective& collective) {
  for (int64_t row = 0; row < params.num_rows; row += scorer_.step_rows()) {
    const int64_t num_rows = std::min(scorer_.step_rows(), params.num_rows - row);
    if (params.target_rank != nullptr) {
      LOGPROBD_RETURN_IF_ERROR(collective.AllReduce(
          rank_, ToAbsl(scorer_.ScoreTargets(params, row, num_rows)), /*stream=*/nullptr));
    }
    LOGPROBD_RETURN_IF_ERROR(collective.AllReduce(
        rank_, ToAbsl(scorer_.ScoreTiles(params, row, num_rows)), /*stream=*/nullptr));
    LOGPROBD_RETURN_IF_ERROR(
        collective.AllReduce(rank_, ToAbsl(scorer_.SumTiles()), /*stream=*/nullptr));
    if (params.top_k > 0) {
      const std::span<const uint64_t> keys = scorer_.TopKeys();
      LOGPROBD_RETURN_IF_ERROR(collective.Gather(rank_, keys.data(),
                                                 static_cast<int64_t>(keys.size()),
                                                 scorer_.gathered_top_keys(), /*stream=*/nullptr));
    }
    if (rank_ == 0) scorer_.WriteScores();
  }
  return absl::OkStatus();
}

absl::StatusOr<ShardTimes> CpuShard::Collect(ScoreBatch& /*batch*/, int32_t slot) {
  return ShardTimes{.kernel = seconds_[slot]};
}

}  // namespace logprobd
