#include "server/engine/cpu_engine.h"

#include <atomic>
#include <chrono>
#include <deque>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cpu/cpu_isa.h"
#include "kernels/cpu/row_scorer.h"
#include "server/base/check.h"
#include "server/base/errors.h"
#include "server/base/start_thread.h"
#include "server/engine/batch_check.h"
#include "server/engine/cpu_count.h"
#include "server/engine/cpu_head.h"
#include "server/engine/host_memory.h"
#include "server/engine/kernel_dtype.h"

namespace logprobd {
namespace {

constexpr absl::string_view kNamePrefix = "cpu/";

int32_t NumThreads(const EngineOptions& options) {
  return options.cpu_threads > 0 ? options.cpu_threads : UsableCpuCount();
}

kernels::RowScorer::Options ScorerOptions(kernels::CpuIsa isa, const EngineOptions& options) {
  return {.isa = isa,
          .num_threads = NumThreads(options),
          .batch_rows_max = options.batch_rows_max,
          .top_k_max = options.top_k_max};
}

template <typename T>
T* DataIf(bool wanted, absl::Span<T> span) {
  return wanted ? span.data() : nullptr;
}

kernels::ScoreRowsParams ParamsOf(ScoreBatch& batch) {
  const OutputSet outputs = batch.outputs;
  kernels::ScoreRowsParams params;
  params.hidden_dtype = KernelDtype(batch.dtype);
  params.hidden = batch.hidden;
  params.num_rows = batch.num_rows;
  params.targets = batch.targets.data();
  params.temperatures = batch.temperatures.data();
  params.entropy_temperatures =
      DataIf(!batch.entropy_temperatures.empty(), batch.entropy_temperatures);
  params.top_k = batch.top_k;
  params.num_candidates = static_cast<int64_t>(batch.candidate_ids.size());
  params.candidate_rows = batch.candidate_rows.data();
  params.candidate_ids = batch.candidate_ids.data();
  params.logprob = DataIf(outputs.Has(Output::kLogprob), batch.logprob);
  params.entropy = DataIf(outputs.Has(Output::kEntropy), batch.entropy);
  params.lse = DataIf(outputs.Has(Output::kLse), batch.lse);
  params.argmax_id =
      DataIf(outputs.Has(Output::kArgmax) || outputs.Has(Output::kGreedy), batch.argmax_id);
  params.argmax_logprob = DataIf(outputs.Has(Output::kArgmax), batch.argmax_logprob);
  params.sum_p_squared = DataIf(outputs.Has(Output::kSumPSquared), batch.sum_p_squared);
  params.max_logit = DataIf(outputs.Has(Output::kMaxLogit), batch.max_logit);
  params.min_logit = DataIf(outputs.Has(Output::kMinLogit), batch.min_logit);
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

/// Batches wait in a queue for one thread, which scores them in order with the scorer's pool.
class CpuEngine : public ScoringEngine {
 public:
  CpuEngine(CpuHead head, HeadInfo info, const EnginePlan& plan, kernels::CpuIsa isa,
            const EngineOptions& options)
      : head_(std::move(head)),
        info_(std::move(info)),
        memory_(plan.memory),
        batch_rows_max_(options.batch_rows_max),
        top_k_max_(options.top_k_max),
        scorer_(head_.view(), ScorerOptions(isa, options)) {}

  /// Once, before the first batch.
  absl::Status StartExecutor() {
    LOGPROBD_ASSIGN_OR_RETURN(executor_, StartThread("engine", [this] { Execute(); }));
    return absl::OkStatus();
  }

  ~CpuEngine() override {
    {
      const absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    if (executor_.joinable()) executor_.join();
  }

  const HeadInfo& info() const override { return info_; }
  int64_t batch_rows_max() const override { return batch_rows_max_; }
  MemoryPlan memory() const override { return memory_; }
  bool healthy() const override { return true; }

  absl::StatusOr<std::unique_ptr<StagingBuffer>> AllocateStaging(int64_t size_bytes) override {
    LOGPROBD_ASSIGN_OR_RETURN(HostMemory memory, HostMemory::Allocate(size_bytes));
    return std::make_unique<HostStaging>(std::move(memory), size_bytes);
  }

  void Start(ScoreBatch& batch, ScoreDone done) override {
    const absl::MutexLock lock(&mutex_);
    LOGPROBD_CHECK(queue_.size() < kBatchesInFlight);
    queue_.push_back({&batch, std::move(done)});
  }

 private:
  struct Job {
    ScoreBatch* batch;
    ScoreDone done;
  };

  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || !queue_.empty();
  }

  /// The next batch, or nothing when the engine stops and none is left.
  std::optional<Job> NextJob() ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &CpuEngine::HasWork));
    if (queue_.empty()) return std::nullopt;
    Job job = std::move(queue_.front());
    queue_.pop_front();
    return job;
  }

  void Execute() {
    while (std::optional<Job> job = NextJob()) {
      absl::Status status = CheckBatchFits(*job->batch, batch_rows_max_, top_k_max_);
      if (!status.ok()) {
        std::move(job->done)(std::move(status));
        continue;
      }
      const auto begin = std::chrono::steady_clock::now();
      scorer_.Score(ParamsOf(*job->batch));
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      job->batch->kernel_seconds = seconds.count();
      std::move(job->done)(absl::OkStatus());
    }
  }

  const CpuHead head_;
  const HeadInfo info_;
  const MemoryPlan memory_;
  const int64_t batch_rows_max_;
  const int32_t top_k_max_;
  kernels::RowScorer scorer_;
  absl::Mutex mutex_;
  std::deque<Job> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread executor_;  // Last: it uses all of the above.
};

}  // namespace

EnginePlan PlanCpuEngine(const HeadInfo& head, const EngineOptions& options, std::string reason) {
  const kernels::CpuIsa isa = kernels::BestCpuIsa();
  const auto name = kernels::CpuIsaName(isa);
  EnginePlan plan;
  plan.device = Device::kCpu;
  plan.engine = absl::StrCat(kNamePrefix, absl::string_view(name.data(), name.size()));
  plan.reason = std::move(reason);
  absl::StrAppend(&plan.reason, "; ", NumThreads(options), " threads");
  const kernels::CpuHead facts = CpuHead::Facts(head);
  plan.memory = {
      {.place = "host", .kind = "weights", .bytes = CpuHead::WeightBytes(head)},
      {.place = "host",
       .kind = "workspace",
       .bytes = kernels::RowScorer::WorkspaceBytes(facts, ScorerOptions(isa, options))},
  };
  return plan;
}

absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateCpuEngine(const HeadWeights& weights,
                                                               const EnginePlan& plan,
                                                               const EngineOptions& options) {
  const absl::string_view name = absl::StripPrefix(plan.engine, kNamePrefix);
  const std::optional<kernels::CpuIsa> isa = kernels::CpuIsaByName({name.data(), name.size()});
  if (!isa.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat("no CPU engine is called ", plan.engine));
  }
  if (!kernels::CpuIsaRuns(*isa)) {
    return absl::FailedPreconditionError(
        absl::StrCat("engine ", plan.engine, ": this CPU does not have these instructions"));
  }
  try {
    LOGPROBD_ASSIGN_OR_RETURN(CpuHead head,
                              CpuHead::Load(weights, NumThreads(options), options.progress));
    HeadInfo info = weights.info();
    info.engine = plan.engine;
    info.engine_reason = plan.reason;
    auto engine =
        std::make_unique<CpuEngine>(std::move(head), std::move(info), plan, *isa, options);
    LOGPROBD_RETURN_IF_ERROR(engine->StartExecutor());
    return engine;
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("no host memory for the CPU engine's workspace");
  }
}

}  // namespace logprobd
