#include "server/engine/cuda_engine.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/chunked/chunk_plan.h"
#include "server/base/errors.h"
#include "server/base/log.h"
#include "server/base/start_thread.h"
#include "server/engine/batch_check.h"
#include "server/engine/cuda_head.h"
#include "server/engine/cuda_memory.h"
#include "server/engine/cuda_plan.h"
#include "server/engine/cuda_scorer.h"
#include "server/engine/cuda_slot.h"
#include "server/engine/cuda_status.h"
#include "server/engine/kernel_dtype.h"

namespace logprobd {
namespace {

using kernels::ChunkPlan;

/// How long a finished batch is looked for before the thread sleeps.
constexpr absl::Duration kLookFor = absl::Milliseconds(2);

/// Batches that use every block tile of the fused kernel once.
constexpr int64_t kWarmUpRows[] = {1, 65, 129, 2'048};

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

double SecondsBetween(cudaEvent_t begin, cudaEvent_t end) {
  float milliseconds = 0;
  return cudaEventElapsedTime(&milliseconds, begin, end) == cudaSuccess ? milliseconds * 1e-3 : 0.0;
}

/// Waits for `event`: at first by looking, since waking up a sleeping thread takes as long as a
/// small batch, then asleep.
cudaError_t WaitFor(cudaEvent_t event) {
  const absl::Time asleep_from = absl::Now() + kLookFor;
  cudaError_t error = cudaErrorNotReady;
  while (error == cudaErrorNotReady && absl::Now() < asleep_from) {
    error = cudaEventQuery(event);
    if (error == cudaErrorNotReady) std::this_thread::yield();
  }
  return error == cudaErrorNotReady ? cudaEventSynchronize(event) : error;
}

/// One GPU.
///
///   Start -> submit thread (enqueues copies and kernels) -> finish thread (waits, copies out,
///   done)
///
/// Streams: copies in, kernels, copies out. Hidden rows pass through a ring of two device buffers,
/// so that the copy of a block runs beside the kernels of the one before, of the same batch or not.
class CudaEngine : public ScoringEngine {
 public:
  static absl::StatusOr<std::unique_ptr<ScoringEngine>> Create(const HeadWeights& weights,
                                                               const EnginePlan& plan,
                                                               const EngineOptions& options);
  ~CudaEngine() override;

  const HeadInfo& info() const override { return info_; }
  int64_t batch_rows_max() const override { return plan_.batch_rows_max; }
  MemoryPlan memory() const override { return memory_; }
  absl::StatusOr<std::unique_ptr<StagingBuffer>> AllocateStaging(int64_t size_bytes) override;
  void Start(ScoreBatch& batch, ScoreDone done) override;
  bool healthy() const override { return healthy_.load(std::memory_order_acquire); }

 private:
  /// A batch between Start and `done`.
  struct Job {
    ScoreBatch* batch = nullptr;
    ScoreDone done = {};
    CudaSlot* slot = nullptr;
    absl::Status status = {};  ///< Of enqueuing.
    int64_t num_blocks = 0;    ///< Of the last pass.
  };
  using JobQueue = std::deque<Job>;

  struct HiddenBuffer {
    DeviceBuffer memory;
    CudaEvent read;  ///< The kernels have read the rows.
  };

  CudaEngine(HeadInfo info, const EnginePlan& plan, const EngineOptions& options)
      : info_(std::move(info)),
        memory_(plan.memory),
        gpu_(options.gpus.empty() ? 0 : options.gpus.front()),
        metrics_(options.metrics),
        plan_(ChunkPlanOf(info_, options)) {}

  absl::Status Initialize(const HeadWeights& weights, const EngineOptions& options);
  absl::Status WarmUp();
  absl::Status WarmUpRows(int64_t num_rows, Dtype dtype, int32_t top_k);

  void RunSubmitThread();
  void RunFinishThread();
  std::optional<Job> Take(JobQueue& queue, const bool& no_more);

  absl::Status CheckBatch(const ScoreBatch& batch) const;
  absl::Status Enqueue(Job& job);
  absl::Status EnqueuePass(Job& job);
  absl::Status EnqueueHidden(const ScoreBatch& batch, const HiddenBuffer& buffer, int64_t row_begin,
                             int64_t num_rows);
  absl::Status Finish(Job& job);
  void AddTimes(Job& job);
  void RecordWork(const ScoreBatch& batch);

  HeadInfo info_;
  const MemoryPlan memory_;
  const int gpu_;
  Metrics* const metrics_;
  const ChunkPlan plan_;
  std::atomic<bool> healthy_{true};

  std::unique_ptr<CudaScorer> scorer_;
  CudaStream copy_in_;
  CudaStream compute_;
  CudaStream copy_out_;
  std::array<HiddenBuffer, kernels::kChunkSlots> hidden_;
  std::vector<CudaSlot> slots_;
  size_t next_hidden_ = 0;  ///< Submit thread only, as the next.
  size_t next_slot_ = 0;

  absl::Mutex mutex_;
  JobQueue started_ ABSL_GUARDED_BY(mutex_);
  JobQueue enqueued_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;      ///< Nothing more joins started_.
  bool submit_ended_ ABSL_GUARDED_BY(mutex_) = false;  ///< Nothing more joins enqueued_.
  std::thread submit_thread_;
  std::thread finish_thread_;
};

static_assert(kernels::kChunkSlots == ScoringEngine::kBatchesInFlight);

absl::StatusOr<std::unique_ptr<ScoringEngine>> CudaEngine::Create(const HeadWeights& weights,
                                                                  const EnginePlan& plan,
                                                                  const EngineOptions& options) {
  HeadInfo info = weights.info();
  info.engine = plan.engine;
  info.engine_reason = plan.reason;
  std::unique_ptr<CudaEngine> engine(new CudaEngine(std::move(info), plan, options));
  LOGPROBD_RETURN_IF_ERROR(engine->Initialize(weights, options));
  return engine;
}

absl::Status CudaEngine::Initialize(const HeadWeights& weights, const EngineOptions& options) {
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(gpu_));
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free_bytes, &total_bytes));
  const int64_t needed_bytes = CudaHeadBytes(plan_, info_.has_bias) + plan_.workspace_bytes;
  if (needed_bytes > static_cast<int64_t>(free_bytes)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("GPU ", gpu_, " has ", free_bytes >> 20,
                     " MiB of memory free, the head needs ", needed_bytes >> 20, " MiB (weight ",
                     plan_.weight_bytes() >> 20, ", workspace ", plan_.workspace_bytes >> 20, ")"));
  }
  LOGPROBD_ASSIGN_OR_RETURN(CudaHead head, LoadCudaHead(weights, plan_, options.progress));
  LOGPROBD_ASSIGN_OR_RETURN(
      scorer_, CudaScorer::Create(plan_, std::make_shared<const CudaHead>(std::move(head))));
  LogInfo("CUDA engine ready to score", {{"gpu", gpu_},
                                         {"gemm", scorer_->algorithm()},
                                         {"fused", plan_.with_fused},
                                         {"block_rows", plan_.block_rows},
                                         {"workspace_bytes", plan_.workspace_bytes}});
  LOGPROBD_ASSIGN_OR_RETURN(copy_in_, CreateStream());
  LOGPROBD_ASSIGN_OR_RETURN(compute_, CreateStream());
  LOGPROBD_ASSIGN_OR_RETURN(copy_out_, CreateStream());
  for (HiddenBuffer& buffer : hidden_) {
    LOGPROBD_ASSIGN_OR_RETURN(buffer.memory, AllocateDevice(plan_.hidden_bytes, "hidden rows"));
    LOGPROBD_ASSIGN_OR_RETURN(buffer.read, CreateEvent());
  }
  for (int64_t i = 0; i < kernels::kChunkSlots; ++i) {
    LOGPROBD_ASSIGN_OR_RETURN(CudaSlot slot, CudaSlot::Create(plan_));
    slots_.push_back(std::move(slot));
  }
  LOGPROBD_RETURN_IF_ERROR(WarmUp());
  LOGPROBD_ASSIGN_OR_RETURN(submit_thread_,
                            StartThread("cuda-submit", [this] { RunSubmitThread(); }));
  LOGPROBD_ASSIGN_OR_RETURN(finish_thread_,
                            StartThread("cuda-finish", [this] { RunFinishThread(); }));
  return absl::OkStatus();
}

/// CUDA loads a kernel when it is first launched, which takes milliseconds that would be a
/// client's. Before the threads start, and in no metric.
absl::Status CudaEngine::WarmUp() {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    // The chunked way runs the same kernels for any number of rows.
    const bool is_fused = scorer_->PathOf(KernelDtype(dtype)) == ScorePath::kFused;
    for (const int64_t num_rows : kWarmUpRows) {
      LOGPROBD_RETURN_IF_ERROR(WarmUpRows(num_rows, dtype, 0));
      if (dtype == info_.dtype && plan_.top_k_max > 0) {
        LOGPROBD_RETURN_IF_ERROR(WarmUpRows(num_rows, dtype, plan_.top_k_max));
      }
      if (!is_fused) break;
    }
  }
  return absl::OkStatus();
}

absl::Status CudaEngine::WarmUpRows(int64_t num_rows, Dtype dtype, int32_t top_k) {
  num_rows = std::min(num_rows, plan_.batch_rows_max);
  const auto rows = static_cast<size_t>(num_rows);
  const std::vector<std::byte> hidden(rows *
                                      static_cast<size_t>(info_.hidden_size * DtypeBytes(dtype)));
  const std::vector<int32_t> zeros(rows, 0);
  const std::vector<float> temperatures(rows, 1.0F);
  ScoreBatch batch;
  batch.dtype = dtype;
  batch.num_rows = num_rows;
  batch.hidden = hidden.data();
  batch.targets = zeros;
  batch.temperatures = temperatures;
  batch.outputs = OutputSet(OutputSet::kAllBits);
  batch.top_k = top_k;
  batch.candidate_rows = absl::MakeConstSpan(zeros).first(1);
  batch.candidate_ids = absl::MakeConstSpan(zeros).first(1);
  Job job;
  job.batch = &batch;
  job.slot = &slots_.front();
  absl::Status status = Enqueue(job);
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());  // the rows are read until then
  return status;
}

CudaEngine::~CudaEngine() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (submit_thread_.joinable()) submit_thread_.join();
  if (finish_thread_.joinable()) finish_thread_.join();
}

absl::StatusOr<std::unique_ptr<StagingBuffer>> CudaEngine::AllocateStaging(int64_t size_bytes) {
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(gpu_));
  LOGPROBD_ASSIGN_OR_RETURN(PinnedBuffer memory, AllocatePinned(size_bytes, "staged hidden rows"));
  return std::make_unique<PinnedStaging>(std::move(memory), size_bytes);
}

void CudaEngine::Start(ScoreBatch& batch, ScoreDone done) {
  absl::MutexLock lock(&mutex_);
  started_.push_back({.batch = &batch, .done = std::move(done)});
}

/// The oldest job, or none when the queue is empty and stays so.
std::optional<CudaEngine::Job> CudaEngine::Take(JobQueue& queue, const bool& no_more) {
  absl::MutexLock lock(&mutex_);
  const auto has_news = [&] { return !queue.empty() || no_more; };
  mutex_.Await(absl::Condition(&has_news));
  if (queue.empty()) return std::nullopt;
  Job job = std::move(queue.front());
  queue.pop_front();
  return job;
}

void CudaEngine::RunSubmitThread() {
  (void)cudaSetDevice(gpu_);  // a failure shows at the first call that uses it
  while (std::optional<Job> job = Take(started_, stopping_)) {
    job->slot = &slots_[next_slot_];
    next_slot_ = (next_slot_ + 1) % slots_.size();
    job->status = CheckBatch(*job->batch);
    if (job->status.ok()) job->status = Enqueue(*job);
    absl::MutexLock lock(&mutex_);
    enqueued_.push_back(*std::move(job));
  }
  absl::MutexLock lock(&mutex_);
  submit_ended_ = true;
}

void CudaEngine::RunFinishThread() {
  (void)cudaSetDevice(gpu_);
  while (std::optional<Job> job = Take(enqueued_, submit_ended_)) {
    absl::Status status = Finish(*job);
    if (absl::IsInternal(status) && healthy_.exchange(false)) {
      LogError("CUDA engine failed", {{"gpu", gpu_}, {"error", status.message()}});
      if (metrics_ != nullptr) metrics_->RecordGpuError(gpu_, "cuda");
    } else if (absl::IsResourceExhausted(status) && metrics_ != nullptr) {
      metrics_->RecordGpuError(gpu_, "out_of_memory");
    }
    std::move(job->done)(std::move(status));
  }
}

absl::Status CudaEngine::CheckBatch(const ScoreBatch& batch) const {
  if (!healthy()) return absl::InternalError("the GPU failed earlier");
  return CheckBatchFits(batch, plan_.batch_rows_max, plan_.top_k_max);
}

absl::Status CudaEngine::Enqueue(Job& job) {
  ScoreBatch& batch = *job.batch;
  batch.h2d_seconds = batch.kernel_seconds = batch.combine_seconds = batch.d2h_seconds = 0;
  const int64_t num_passes = job.slot->NumPasses(batch);
  for (int64_t pass = 0; pass < num_passes; ++pass) {
    job.slot->Prepare(batch, pass, scorer_->Correction(KernelDtype(batch.dtype)));
    LOGPROBD_RETURN_IF_ERROR(EnqueuePass(job));
    if (pass + 1 < num_passes) {  // the slot is needed again
      LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(job.slot->output_end()));
      job.slot->CopyOut(*job.batch);
      AddTimes(job);
    }
  }
  return absl::OkStatus();
}

absl::Status CudaEngine::EnqueuePass(Job& job) {
  CudaSlot& slot = *job.slot;
  const ScoreBatch& batch = *job.batch;
  const kernels::Dtype dtype = KernelDtype(batch.dtype);
  const ScorePath path = scorer_->PathOf(dtype);
  const int64_t block_rows =
      scorer_->BlockRows(path, dtype, slot.has_entropy_scales(), slot.top_k());
  job.num_blocks = 0;
  for (int64_t row = slot.row_begin(); row < slot.row_end(); row += block_rows) {
    const int64_t num_rows = std::min(block_rows, slot.row_end() - row);
    const CudaSlot::BlockEvents& events = slot.blocks()[static_cast<size_t>(job.num_blocks)];
    const HiddenBuffer& buffer = hidden_[next_hidden_];
    next_hidden_ = (next_hidden_ + 1) % hidden_.size();
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(copy_in_.get(), buffer.read.get()));
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(events.copy_begin.get(), copy_in_.get()));
    if (job.num_blocks == 0) LOGPROBD_RETURN_IF_ERROR(slot.EnqueueInputs(copy_in_.get()));
    LOGPROBD_RETURN_IF_ERROR(EnqueueHidden(batch, buffer, row, num_rows));
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(events.copy_end.get(), copy_in_.get()));

    CudaBlock block = slot.Block(row, num_rows);
    block.hidden_dtype = dtype;
    block.path = path;
    block.hidden = buffer.memory.get();
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(compute_.get(), events.copy_end.get()));
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(events.kernel_begin.get(), compute_.get()));
    LOGPROBD_RETURN_IF_ERROR(scorer_->EnqueuePartials(block, compute_.get()));
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(events.kernel_end.get(), compute_.get()));
    LOGPROBD_RETURN_IF_ERROR(scorer_->EnqueueScores(block, compute_.get()));
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(events.combine_end.get(), compute_.get()));
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(buffer.read.get(), compute_.get()));
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(copy_out_.get(), events.combine_end.get()));
    ++job.num_blocks;
  }
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(slot.output_begin(), copy_out_.get()));
  LOGPROBD_RETURN_IF_ERROR(slot.EnqueueOutputs(copy_out_.get()));
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(slot.output_end(), copy_out_.get()));
  return absl::OkStatus();
}

absl::Status CudaEngine::EnqueueHidden(const ScoreBatch& batch, const HiddenBuffer& buffer,
                                       int64_t row_begin, int64_t num_rows) {
  const int64_t element_bytes = DtypeBytes(batch.dtype);
  const auto row_bytes = static_cast<size_t>(info_.hidden_size * element_bytes);
  const auto pitch = static_cast<size_t>(plan_.padded_hidden * element_bytes);
  const auto rows = static_cast<size_t>(num_rows);
  std::byte* const out = buffer.memory.get() + scorer_->HiddenOffset(KernelDtype(batch.dtype));
  const std::byte* const in = batch.hidden + static_cast<size_t>(row_begin) * row_bytes;
  if (pitch == row_bytes) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(out, in, rows * row_bytes, cudaMemcpyHostToDevice, copy_in_.get()));
    return absl::OkStatus();
  }
  // What an earlier batch of another dtype left in the padding could be NaN, and 0 * NaN is NaN.
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cudaMemset2DAsync(out + row_bytes, pitch, 0, pitch - row_bytes, rows, copy_in_.get()));
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemcpy2DAsync(out, pitch, in, row_bytes, row_bytes, rows,
                                                  cudaMemcpyHostToDevice, copy_in_.get()));
  return absl::OkStatus();
}

absl::Status CudaEngine::Finish(Job& job) {
  if (!job.status.ok()) {
    // What was enqueued before the failure still reads the caller's memory.
    for (cudaStream_t stream : {copy_in_.get(), compute_.get(), copy_out_.get()}) {
      (void)cudaStreamSynchronize(stream);
    }
    return job.status;
  }
  LOGPROBD_RETURN_IF_CUDA_ERROR(WaitFor(job.slot->output_end()));
  job.slot->CopyOut(*job.batch);
  AddTimes(job);
  RecordWork(*job.batch);
  return absl::OkStatus();
}

/// Those of the last pass.
void CudaEngine::AddTimes(Job& job) {
  ScoreBatch& batch = *job.batch;
  for (int64_t i = 0; i < job.num_blocks; ++i) {
    const CudaSlot::BlockEvents& events = job.slot->blocks()[static_cast<size_t>(i)];
    batch.h2d_seconds += SecondsBetween(events.copy_begin.get(), events.copy_end.get());
    batch.kernel_seconds += SecondsBetween(events.kernel_begin.get(), events.kernel_end.get());
    batch.combine_seconds += SecondsBetween(events.kernel_end.get(), events.combine_end.get());
  }
  batch.d2h_seconds += SecondsBetween(job.slot->output_begin(), job.slot->output_end());
}

void CudaEngine::RecordWork(const ScoreBatch& batch) {
  if (metrics_ == nullptr) return;
  const double flops = 2.0 * static_cast<double>(batch.num_rows) *
                       static_cast<double>(info_.vocab_size) *
                       static_cast<double>(info_.hidden_size);
  metrics_->RecordFlops(gpu_, flops, batch.kernel_seconds + batch.combine_seconds);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateCudaEngine(const HeadWeights& weights,
                                                                const EnginePlan& plan,
                                                                const EngineOptions& options) {
  return CudaEngine::Create(weights, plan, options);
}

}  // namespace logprobd
