#include "server/engine/cuda_shard.h"

#include <algorithm>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "kernels/common/dtype.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/launch.h"
#include "kernels/fused/params.h"
#include "server/base/errors.h"
#include "server/engine/cuda_head.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/kernel_params.h"

namespace logprobd {
namespace {

/// From this size on, each shard copies a part of a block from the host and the other parts from
/// its peers. Smaller blocks go from the host to every GPU, which is faster than an exchange
/// between GPUs.
constexpr int64_t kSpreadBytes = int64_t{2} << 20;

/// Candidates of a warm-up batch. Few candidates are scored by another kernel.
constexpr int64_t kWarmUpCandidates = 16'384;

/// Returns numbers of rows that together use every block tile of the fused kernel that batches of
/// this dtype use, the largest number of rows of a block last.
std::vector<int64_t> RowsOfEveryTile(kernels::FusedArch arch, const WorkspacePlan& plan,
                                     kernels::Dtype dtype) {
  const int64_t rows_max = plan.FusedRows(dtype, 1, 0);
  const int64_t depth =
      plan.padded_hidden *
      (plan.ProductFormOf(dtype) == ProductForm::kBf16Split ? kernels::kHiddenSplits : 1);
  std::set<kernels::FusedTile> tiles;
  std::vector<int64_t> row_counts;
  for (int64_t rows = 1; rows <= rows_max; ++rows) {
    const kernels::FusedShape shape = {
        .num_rows = rows, .num_tiles = plan.num_tiles, .depth = depth};
    if (tiles.insert(kernels::ChooseFor(arch, shape).tile).second) row_counts.push_back(rows);
  }
  if (row_counts.back() != rows_max) row_counts.push_back(rows_max);
  return row_counts;
}

class PinnedStaging : public StagingBuffer {
 public:
  PinnedStaging(PinnedBuffer memory, int64_t size_bytes)
      : memory_(std::move(memory)), size_bytes_(size_bytes) {}
  std::byte* data() override { return memory_.get(); }
  int64_t size_bytes() const override { return size_bytes_; }

 private:
  PinnedBuffer memory_;
  int64_t size_bytes_;
};

/// A collective of one rank, for the warm-up. Each shard warms up alone to avoid a deadlock:
/// loading a kernel could wait for a running kernel, which itself waits for a peer.
class SingleRankCollective final : public Collective {
 public:
  absl::string_view name() const override { return "none"; }
  absl::Status AllReduce(int32_t /*rank*/, absl::Span<const kernels::Reduction> /*items*/,
                         ShardStream /*stream*/) override {
    return absl::OkStatus();
  }
  absl::Status Gather(int32_t /*rank*/, const uint64_t* /*mine*/, int64_t /*count*/,
                      uint64_t* /*all*/, ShardStream /*stream*/) override {
    return absl::OkStatus();
  }
  absl::Status Check() override { return absl::OkStatus(); }
  void Abort() override {}
};

double SecondsBetween(cudaEvent_t begin, cudaEvent_t end) {
  float milliseconds = 0;
  return cudaEventElapsedTime(&milliseconds, begin, end) == cudaSuccess ? milliseconds * 1e-3 : 0.0;
}

/// Status of enqueuing a copy from a client's mapped memory. A copy that CUDA refuses has touched
/// nothing and fails only its batch.
absl::Status ClientCopyStatus(cudaError_t error) {
  if (error == cudaErrorInvalidValue || error == cudaErrorInvalidResourceHandle) {
    (void)cudaGetLastError();
    return WithDetailsForLog(absl::InvalidArgumentError(
        absl::StrCat("rows in GPU memory could not be copied: ", cudaGetErrorString(error))));
  }
  LOGPROBD_RETURN_IF_CUDA_ERROR(error);
  return absl::OkStatus();
}

/// Turns a failure that the ranks have not agreed on into the status of the whole team. Other ranks
/// may already be waiting for this rank, so the team is aborted. The code of the status becomes
/// INTERNAL, whatever it was.
absl::Status AllReduceStatus(const absl::Status& status, RankTeam& team) {
  if (status.ok() || team.size() == 1) return status;
  absl::Status why = absl::InternalError(status.message());
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { why.SetPayload(url, payload); });
  team.Abort(why);
  return team.aborted();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaShard>> CudaShard::Create(const HeadWeights& weights,
                                                             Options options, LoadMeter& meter) {
  std::unique_ptr<CudaShard> shard(new CudaShard(std::move(options)));
  const absl::Status status = shard->Initialize(weights, meter);
  if (!status.ok()) {
    meter.Fail(status);
    return status;
  }
  return shard;
}

CudaShard::~CudaShard() { (void)cudaSetDevice(options_.gpu); }

absl::Status CudaShard::Initialize(const HeadWeights& weights, LoadMeter& meter) {
  const WorkspacePlan& plan = options_.plan;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(options_.gpu));
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free_bytes, &total_bytes));
  const int64_t needed_bytes = CudaHeadBytes(plan, weights.info().has_bias) + plan.workspace_bytes;
  if (needed_bytes > static_cast<int64_t>(free_bytes)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "GPU ", options_.gpu, " has ", free_bytes >> 20,
        " MiB of free memory, but its part of the head needs ", needed_bytes >> 20, " MiB (weight ",
        plan.weight_bytes() >> 20, ", workspace ", plan.workspace_bytes >> 20, ")"));
  }
  LOGPROBD_RETURN_IF_ERROR(options_.resources->TakeMemory(options_.rank, "weight"));
  LOGPROBD_ASSIGN_OR_RETURN(CudaHead head, LoadCudaHead(weights, plan, meter));
  LOGPROBD_RETURN_IF_ERROR(options_.resources->TakeMemory(options_.rank, "workspace"));
  LOGPROBD_ASSIGN_OR_RETURN(
      scorer_, CudaScorer::Create(plan, std::make_shared<const CudaHead>(std::move(head))));
  LOGPROBD_ASSIGN_OR_RETURN(copy_in_, CreateStream());
  LOGPROBD_ASSIGN_OR_RETURN(compute_, CreateStream());
  LOGPROBD_ASSIGN_OR_RETURN(copy_out_, CreateStream());
  for (HiddenBuffer& buffer : hidden_) {
    LOGPROBD_ASSIGN_OR_RETURN(buffer.memory, AllocateDevice(plan.hidden_bytes, "hidden rows"));
    LOGPROBD_ASSIGN_OR_RETURN(buffer.own, CreateEvent());
    LOGPROBD_ASSIGN_OR_RETURN(buffer.filled, CreateEvent());
    LOGPROBD_ASSIGN_OR_RETURN(buffer.read, CreateEvent());
  }
  for (const std::shared_ptr<PinnedBuffer>& host : options_.host_slots) {
    LOGPROBD_ASSIGN_OR_RETURN(CudaSlot slot, CudaSlot::Create(plan, host));
    jobs_.push_back({.slot = std::move(slot)});
  }
  return absl::OkStatus();
}

/// CUDA loads a kernel at its first launch, which takes milliseconds. The warm-up loads the kernels
/// so that the first request does not have this delay.
absl::Status CudaShard::WarmUp(const HeadInfo& head) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    // The chunked path runs the same kernels for any number of rows.
    const bool is_fused = scorer_->IsFused(KernelDtype(dtype));
    const kernels::FusedArch arch = kernels::FusedArchOf(options_.gpu);
    for (const int64_t num_rows : RowsOfEveryTile(arch, options_.plan, KernelDtype(dtype))) {
      LOGPROBD_RETURN_IF_ERROR(WarmUpRows(head, dtype, num_rows, 0));
      if (dtype == head.dtype && options_.plan.top_k_max > 0) {
        LOGPROBD_RETURN_IF_ERROR(WarmUpRows(head, dtype, num_rows, options_.plan.top_k_max));
      }
      if (!is_fused) break;
    }
  }
  // Shards of different sizes use different tiles, but must agree on the buffer of each block.
  next_hidden_ = 0;
  return absl::OkStatus();
}

absl::Status CudaShard::WarmUpRows(const HeadInfo& head, Dtype dtype, int64_t num_rows,
                                   int32_t top_k) {
  num_rows = std::min(num_rows, options_.plan.batch_rows_max);
  const auto rows = static_cast<size_t>(num_rows);
  const std::vector<std::byte> hidden(rows *
                                      static_cast<size_t>(head.hidden_size * DtypeBytes(dtype)));
  const int64_t num_candidates =
      num_rows == 1 ? 1 : std::min(kWarmUpCandidates, options_.plan.candidates_per_pass);
  const std::vector<int32_t> zeros(std::max(rows, static_cast<size_t>(num_candidates)), 0);
  const std::vector<float> temperatures(rows, 1.0F);
  ScoreBatch batch;
  batch.dtype = dtype;
  batch.num_rows = num_rows;
  batch.hidden = hidden.data();
  batch.targets = absl::MakeConstSpan(zeros).first(rows);
  batch.temperatures = temperatures;
  batch.outputs = OutputSet(kAllOutputBits);
  batch.top_k = top_k;
  batch.candidate_rows = absl::MakeConstSpan(zeros).first(static_cast<size_t>(num_candidates));
  batch.candidate_ids = batch.candidate_rows;
  RankTeam alone(1, std::make_unique<SingleRankCollective>());
  Job& job = jobs_.front();
  job.slot.Prepare(batch, 0);
  job.slot.FillHost(batch, 1.0);
  absl::Status status = EnqueuePass(batch, job, alone);
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());  // the GPU reads `hidden` until then
  return status;
}

absl::StatusOr<std::unique_ptr<StagingBuffer>> CudaShard::AllocateStaging(int64_t size_bytes) {
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(options_.gpu));
  const PreferNodeOfGpu prefer(options_.gpu);
  LOGPROBD_ASSIGN_OR_RETURN(PinnedBuffer memory, AllocatePinned(size_bytes, "staged hidden rows"));
  return std::make_unique<PinnedStaging>(std::move(memory), size_bytes);
}

absl::Status CudaShard::Enqueue(ScoreBatch& batch, int32_t slot, RankTeam& team) {
  Job& job = jobs_[static_cast<size_t>(slot)];
  absl::Status status = EnqueuePasses(batch, job, team);
  if (!status.ok()) {
    // Enqueued work still reads the caller's memory, so the slot is done only after it.
    (void)EnqueueEnd(job.slot);
  }
  return status;
}

absl::Status CudaShard::EnqueuePasses(ScoreBatch& batch, Job& job, RankTeam& team) {
  job.times = {};
  job.num_blocks = 0;
  const int64_t num_passes = job.slot.NumPasses(batch);
  for (int64_t pass = 0; pass < num_passes; ++pass) {
    job.slot.Prepare(batch, pass);
    if (options_.rank == 0) job.slot.FillHost(batch, scorer_->Correction(KernelDtype(batch.dtype)));
    LOGPROBD_RETURN_IF_ERROR(EnqueuePass(batch, job, team));
    if (pass + 1 < num_passes) {  // the next pass reuses the slots of all shards
      LOGPROBD_RETURN_IF_ERROR(AllReduceStatus(AwaitPass(job.slot, team), team));
      LOGPROBD_RETURN_IF_ERROR(team.Agree(options_.rank, absl::OkStatus()));
      if (options_.rank == 0) job.slot.CopyOut(batch);
      AddTimes(job);
    }
  }
  return absl::OkStatus();
}

absl::Status CudaShard::EnqueuePass(const ScoreBatch& batch, Job& job, RankTeam& team) {
  CudaSlot& slot = job.slot;
  const kernels::Dtype dtype = KernelDtype(batch.dtype);
  const int64_t block_rows =
      EvenBlockRows(slot.row_end() - slot.row_begin(),
                    scorer_->BlockRows(dtype, slot.has_entropy_scales(), slot.top_k()));
  const int64_t row_bytes = options_.plan.hidden_size * DtypeBytes(batch.dtype);
  job.num_blocks = 0;
  for (int64_t row = slot.row_begin(); row < slot.row_end(); row += block_rows) {
    RowBlock block;
    block.begin = row;
    block.count = std::min(block_rows, slot.row_end() - row);
    block.buffer = next_hidden_;
    block.is_spread = team.size() > 1 && block.count * row_bytes >= kSpreadBytes;
    block.is_first = row == slot.row_begin();
    block.events = &slot.blocks()[static_cast<size_t>(job.num_blocks)];
    block.events->is_spread = block.is_spread;
    next_hidden_ = (next_hidden_ + 1) % hidden_.size();
    // From here on shards wait for each other: on the host for the agreement, then on the GPUs for
    // rows and sums of their peers.
    LOGPROBD_RETURN_IF_ERROR(team.Agree(options_.rank, EnqueueOwnRows(batch, block)));
    const absl::Status joint = [&]() -> absl::Status {
      if (block.is_first) {
        LOGPROBD_RETURN_IF_ERROR(slot.EnqueueInputs(copy_in_.get()));
      }
      LOGPROBD_RETURN_IF_CUDA_ERROR(
          cudaEventRecord(block.events->gather_begin.get(), copy_in_.get()));
      LOGPROBD_RETURN_IF_ERROR(EnqueuePeerRows(batch, block));
      LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(block.events->copy_end.get(), copy_in_.get()));
      return EnqueueScores(batch, slot, block, team);
    }();
    LOGPROBD_RETURN_IF_ERROR(AllReduceStatus(joint, team));
    ++job.num_blocks;
  }
  const absl::Status ended = [&]() -> absl::Status {
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(slot.output_begin(), copy_out_.get()));
    if (options_.rank == 0) {
      LOGPROBD_RETURN_IF_ERROR(slot.EnqueueOutputs(copy_out_.get()));
    }
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(slot.output_end(), copy_out_.get()));
    return absl::OkStatus();
  }();
  return AllReduceStatus(ended, team);
}

absl::Status CudaShard::AwaitPass(CudaSlot& slot, RankTeam& team) const {
  while (true) {
    const cudaError_t error = cudaEventQuery(slot.output_end());
    if (error != cudaErrorNotReady) {
      LOGPROBD_RETURN_IF_CUDA_ERROR(error);
      return absl::OkStatus();
    }
    LOGPROBD_RETURN_IF_ERROR(team.aborted());
    if (team.size() > 1) {
      LOGPROBD_RETURN_IF_ERROR(team.collective().Check());
    }
    heartbeat().Beat();
    std::this_thread::yield();
  }
}

absl::Status CudaShard::EnqueueOwnRows(const ScoreBatch& batch, const RowBlock& block) {
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(options_.gpu));
  if (block.is_first) {
    LOGPROBD_RETURN_IF_ERROR(options_.resources->TakeMemory(options_.rank, "batch"));
  }
  const HiddenBuffer& buffer = hidden_[block.buffer];
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(copy_in_.get(), buffer.read.get()));
  for (const CudaShard* peer : peers_) {  // peers must have copied the buffer's previous rows
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        cudaStreamWaitEvent(copy_in_.get(), peer->hidden_[block.buffer].filled.get()));
  }
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(block.events->copy_begin.get(), copy_in_.get()));
  if (!block.is_spread) return EnqueueHidden(batch, block, 0, block.count);
  LOGPROBD_RETURN_IF_ERROR(EnqueueHidden(batch, block, PartBegin(block.count, options_.rank),
                                         PartBegin(block.count, options_.rank + 1)));
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(buffer.own.get(), copy_in_.get()));
  return absl::OkStatus();
}

absl::Status CudaShard::EnqueueHidden(const ScoreBatch& batch, const RowBlock& block, int64_t begin,
                                      int64_t end) {
  const int64_t element_bytes = DtypeBytes(batch.dtype);
  const auto row_bytes = static_cast<size_t>(options_.plan.hidden_size * element_bytes);
  const auto pitch = static_cast<size_t>(options_.plan.padded_hidden * element_bytes);
  std::byte* const out = hidden_[block.buffer].memory.get() +
                         options_.plan.HiddenOffset(KernelDtype(batch.dtype)) +
                         static_cast<size_t>(begin) * pitch;
  if (pitch != row_bytes) {
    // A batch of another dtype may have left NaN in the padding, and 0 * NaN is NaN.
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemset2DAsync(out + row_bytes, pitch, 0, pitch - row_bytes,
                                                    static_cast<size_t>(end - begin),
                                                    copy_in_.get()));
  }
  const int64_t first = block.begin + begin;
  const int64_t last = block.begin + end;
  const HiddenRun staged = {.data = batch.hidden, .num_rows = batch.num_rows};
  int64_t run_begin = 0;
  for (const HiddenRun& run : batch.runs.empty() ? absl::MakeConstSpan(&staged, 1) : batch.runs) {
    const int64_t from = std::max(run_begin, first);
    const int64_t to = std::min(run_begin + run.num_rows, last);
    if (from < to) {
      const HiddenRun part = {.data = run.data + static_cast<size_t>(from - run_begin) * row_bytes,
                              .num_rows = to - from,
                              .gpu = run.gpu};
      LOGPROBD_RETURN_IF_ERROR(
          EnqueueRun(part, row_bytes, out + static_cast<size_t>(from - first) * pitch, pitch));
    }
    run_begin += run.num_rows;
    if (run_begin >= last) break;
  }
  return absl::OkStatus();
}

absl::Status CudaShard::EnqueueRun(const HiddenRun& run, size_t row_bytes, std::byte* out,
                                   size_t pitch) {
  const auto rows = static_cast<size_t>(run.num_rows);
  const bool is_packed = pitch == row_bytes;
  if (run.gpu < 0) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        is_packed ? cudaMemcpyAsync(out, run.data, rows * row_bytes, cudaMemcpyHostToDevice,
                                    copy_in_.get())
                  : cudaMemcpy2DAsync(out, pitch, run.data, row_bytes, row_bytes, rows,
                                      cudaMemcpyHostToDevice, copy_in_.get()));
    return absl::OkStatus();
  }
  if (run.gpu == options_.gpu) {
    return ClientCopyStatus(is_packed ? cudaMemcpyAsync(out, run.data, rows * row_bytes,
                                                        cudaMemcpyDeviceToDevice, copy_in_.get())
                                      : cudaMemcpy2DAsync(out, pitch, run.data, row_bytes,
                                                          row_bytes, rows, cudaMemcpyDeviceToDevice,
                                                          copy_in_.get()));
  }
  if (is_packed) {
    return ClientCopyStatus(cudaMemcpyPeerAsync(out, options_.gpu, run.data, run.gpu,
                                                rows * row_bytes, copy_in_.get()));
  }
  cudaMemcpy3DPeerParms copy = {};
  copy.srcPtr = {const_cast<std::byte*>(run.data), row_bytes, row_bytes, rows};
  copy.srcDevice = run.gpu;
  copy.dstPtr = {out, pitch, row_bytes, rows};
  copy.dstDevice = options_.gpu;
  copy.extent = {row_bytes, rows, 1};
  return ClientCopyStatus(cudaMemcpy3DPeerAsync(&copy, copy_in_.get()));
}

absl::Status CudaShard::EnqueuePeerRows(const ScoreBatch& batch, const RowBlock& block) {
  if (!block.is_spread) return absl::OkStatus();
  const HiddenBuffer& buffer = hidden_[block.buffer];
  const int64_t pitch = options_.plan.padded_hidden * DtypeBytes(batch.dtype);
  const int64_t offset = options_.plan.HiddenOffset(KernelDtype(batch.dtype));
  // Ranks start with different peers, which spreads the load over the links.
  for (int64_t i = 1; i < num_shards(); ++i) {
    const int64_t rank = (options_.rank + i) % num_shards();
    const CudaShard& peer = *peers_[static_cast<size_t>(rank)];
    const HiddenBuffer& source = peer.hidden_[block.buffer];
    const int64_t begin = PartBegin(block.count, rank);
    const int64_t bytes = (PartBegin(block.count, rank + 1) - begin) * pitch;
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(copy_in_.get(), source.own.get()));
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        cudaMemcpyPeerAsync(buffer.memory.get() + offset + begin * pitch, options_.gpu,
                            source.memory.get() + offset + begin * pitch, peer.options_.gpu,
                            static_cast<size_t>(bytes), copy_in_.get()));
  }
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(buffer.filled.get(), copy_in_.get()));
  return absl::OkStatus();
}

absl::Status CudaShard::EnqueueScores(const ScoreBatch& batch, CudaSlot& slot, const RowBlock& rows,
                                      RankTeam& team) {
  const CudaSlot::BlockEvents& events = *rows.events;
  const HiddenBuffer& buffer = hidden_[rows.buffer];
  CudaBlock block = slot.Block(rows.begin, rows.count);
  block.hidden_dtype = KernelDtype(batch.dtype);
  block.hidden = buffer.memory.get();
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(compute_.get(), events.copy_end.get()));
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(events.kernel_begin.get(), compute_.get()));
  LOGPROBD_RETURN_IF_ERROR(
      num_shards() == 1
          ? scorer_->EnqueuePartials(block, compute_.get())
          : scorer_->EnqueueShardPartials(block, options_.rank, team.collective(), compute_.get()));
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(events.kernel_end.get(), compute_.get()));
  LOGPROBD_RETURN_IF_ERROR(
      num_shards() == 1
          ? scorer_->EnqueueScores(block, compute_.get())
          : scorer_->EnqueueShardScores(block, options_.rank, team.collective(), compute_.get()));
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(events.combine_end.get(), compute_.get()));
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(buffer.read.get(), compute_.get()));
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(copy_out_.get(), events.combine_end.get()));
  return absl::OkStatus();
}

absl::Status CudaShard::EnqueueEnd(CudaSlot& slot) {
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(options_.gpu));
  for (cudaStream_t stream : {copy_in_.get(), compute_.get()}) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(slot.output_begin(), stream));
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(copy_out_.get(), slot.output_begin()));
  }
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(slot.output_end(), copy_out_.get()));
  return absl::OkStatus();
}

absl::StatusOr<bool> CudaShard::IsDone(int32_t slot) {
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(options_.gpu));
  const cudaError_t error = cudaEventQuery(jobs_[static_cast<size_t>(slot)].slot.output_end());
  if (error == cudaErrorNotReady) return false;
  LOGPROBD_RETURN_IF_CUDA_ERROR(error);
  return true;
}

absl::StatusOr<ShardTimes> CudaShard::Collect(ScoreBatch& batch, int32_t slot) {
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(options_.gpu));
  Job& job = jobs_[static_cast<size_t>(slot)];
  if (options_.rank == 0) job.slot.CopyOut(batch);
  AddTimes(job);
  return job.times;
}

void CudaShard::AddTimes(Job& job) const {
  for (int64_t i = 0; i < job.num_blocks; ++i) {
    const CudaSlot::BlockEvents& events = job.slot.blocks()[static_cast<size_t>(i)];
    job.times.h2d += SecondsBetween(events.copy_begin.get(), events.copy_end.get());
    if (events.is_spread) {
      job.times.gather += SecondsBetween(events.gather_begin.get(), events.copy_end.get());
    }
    job.times.kernel += SecondsBetween(events.kernel_begin.get(), events.kernel_end.get());
    job.times.combine += SecondsBetween(events.kernel_end.get(), events.combine_end.get());
  }
  job.times.d2h += SecondsBetween(job.slot.output_begin(), job.slot.output_end());
}

bool CudaShard::IsIdle() {
  (void)cudaSetDevice(options_.gpu);  // a device that cannot be set runs nothing any more
  for (cudaStream_t stream : {copy_in_.get(), compute_.get(), copy_out_.get()}) {
    if (cudaStreamQuery(stream) == cudaErrorNotReady) return false;
  }
  return true;
}

}  // namespace logprobd
