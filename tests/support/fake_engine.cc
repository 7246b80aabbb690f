#include "tests/support/fake_engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/base/errors.h"

namespace logprobd::testing {
namespace {

class HeapStaging final : public StagingBuffer {
 public:
  explicit HeapStaging(int64_t size_bytes) : bytes_(static_cast<size_t>(size_bytes)) {}
  std::byte* data() override { return bytes_.data(); }
  int64_t size_bytes() const override { return static_cast<int64_t>(bytes_.size()); }

 private:
  std::vector<std::byte> bytes_;
};

uint64_t Mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15U;
  return hash ^ (hash >> 29);
}

uint64_t MixFloat(uint64_t hash, float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return Mix(hash, bits);
}

/// Returns a value in [0, 1) that float represents exactly.
float UnitOf(uint64_t hash) { return static_cast<float>(hash >> 40) * 0x1p-24F; }

bool HasNonfinite(absl::Span<const std::byte> row, Dtype dtype) {
  const auto element = static_cast<size_t>(DtypeBytes(dtype));
  for (size_t i = 0; i + element <= row.size(); i += element) {
    uint32_t bits = 0;
    std::memcpy(&bits, row.data() + i, element);
    const uint32_t exponent = dtype == Dtype::kBf16  ? 0x7F80U
                              : dtype == Dtype::kF16 ? 0x7C00U
                                                     : 0x7F800000U;
    if ((bits & exponent) == exponent) {
      return true;
    }
  }
  return false;
}

template <typename T>
std::vector<T> Copy(absl::Span<const T> span) {
  return std::vector<T>(span.begin(), span.end());
}

/// Copies all rows of a batch into one piece of memory.
std::vector<std::byte> HiddenRows(const ScoreBatch& batch, int64_t row_bytes) {
  if (batch.runs.empty()) {
    return {batch.hidden, batch.hidden + batch.num_rows * row_bytes};
  }
  std::vector<std::byte> rows;
  for (const HiddenRun& run : batch.runs) {
    rows.insert(rows.end(), run.data, run.data + run.num_rows * row_bytes);
  }
  return rows;
}

RecordedBatch Record(const ScoreBatch& batch, int64_t row_bytes) {
  return RecordedBatch{
      .dtype = batch.dtype,
      .num_rows = batch.num_rows,
      .hidden = HiddenRows(batch, row_bytes),
      .runs = Copy(batch.runs),
      .targets = Copy(batch.targets),
      .temperatures = Copy(batch.temperatures),
      .entropy_temperatures = Copy(batch.entropy_temperatures),
      .outputs = batch.outputs,
      .top_k = batch.top_k,
      .candidate_rows = Copy(batch.candidate_rows),
      .candidate_ids = Copy(batch.candidate_ids),
  };
}

void CheckContract(const ScoreBatch& batch, const HeadInfo& info,
                   const FakeEngine::Options& options) {
  const auto rows = static_cast<size_t>(batch.num_rows);
  LOGPROBD_CHECK(batch.num_rows >= 1 && batch.num_rows <= options.batch_rows_max, batch.num_rows);
  int64_t rows_in_runs = 0;
  for (const HiddenRun& run : batch.runs) {
    LOGPROBD_CHECK(options.reads_in_place && run.num_rows > 0 && run.data != nullptr);
    rows_in_runs += run.num_rows;
  }
  LOGPROBD_CHECK(batch.runs.empty() || rows_in_runs == batch.num_rows, rows_in_runs);
  LOGPROBD_CHECK(batch.hidden != nullptr);
  LOGPROBD_CHECK(batch.targets.size() == rows && batch.temperatures.size() == rows);
  LOGPROBD_CHECK(batch.entropy_temperatures.empty() || batch.entropy_temperatures.size() == rows);
  LOGPROBD_CHECK(batch.nonfinite.size() == rows);
  LOGPROBD_CHECK(batch.candidate_rows.size() == batch.candidate_ids.size());
  LOGPROBD_CHECK(batch.candidate_logprobs.size() == batch.candidate_ids.size());
  LOGPROBD_CHECK(std::is_sorted(batch.candidate_rows.begin(), batch.candidate_rows.end()));
  for (const int32_t row : batch.candidate_rows) {
    LOGPROBD_CHECK(row >= 0 && row < batch.num_rows, row);
  }
  for (const int32_t target : batch.targets) {
    LOGPROBD_CHECK(target >= 0 && target < info.vocab_size, target);
  }
}

template <typename T>
void Put(absl::Span<T> span, size_t index, T value, bool is_requested = true) {
  if (!is_requested) return;
  LOGPROBD_CHECK(index < span.size(), "the span of a requested output is too small");
  span[index] = value;
}

void Score(ScoreBatch& batch, const HeadInfo& info, float logprob_offset) {
  const auto row_bytes = static_cast<size_t>(info.hidden_size * DtypeBytes(batch.dtype));
  const OutputSet outputs = batch.outputs;
  std::vector<FakeScores> all(static_cast<size_t>(batch.num_rows));
  const std::vector<std::byte> hidden = HiddenRows(batch, static_cast<int64_t>(row_bytes));
  for (size_t row = 0; row < all.size(); ++row) {
    const float temperature = batch.temperatures[row];
    const FakeScores scores = FakeScoresOf(
        absl::MakeConstSpan(hidden).subspan(row * row_bytes, row_bytes), batch.dtype,
        batch.targets[row], temperature,
        batch.entropy_temperatures.empty() ? temperature : batch.entropy_temperatures[row],
        info.vocab_size);
    all[row] = scores;
    Put(batch.logprob, row, scores.logprob + logprob_offset, outputs.Has(Output::kLogprob));
    Put(batch.entropy, row, scores.entropy, outputs.Has(Output::kEntropy));
    Put(batch.lse, row, scores.lse, outputs.Has(Output::kLse));
    Put(batch.argmax_id, row, scores.argmax_id,
        outputs.Has(Output::kArgmax) || outputs.Has(Output::kGreedy));
    Put(batch.argmax_logprob, row, scores.argmax_logprob, outputs.Has(Output::kArgmax));
    Put(batch.sum_p_squared, row, scores.sum_p_squared, outputs.Has(Output::kSumPSquared));
    Put(batch.max_logit, row, scores.max_logit, outputs.Has(Output::kMaxLogit));
    Put(batch.min_logit, row, scores.min_logit, outputs.Has(Output::kMinLogit));
    Put(batch.target_rank, row, scores.target_rank, outputs.Has(Output::kTargetRank));
    Put(batch.nonfinite, row, static_cast<uint8_t>(scores.nonfinite));
    for (int32_t rank = 0; rank < batch.top_k; ++rank) {
      const size_t index = row * static_cast<size_t>(batch.top_k) + static_cast<size_t>(rank);
      Put(batch.top_k_ids, index, FakeTopKId(scores, rank, info.vocab_size));
      Put(batch.top_k_logprobs, index, FakeTopKLogprob(scores, rank));
    }
  }
  for (size_t i = 0; i < batch.candidate_ids.size(); ++i) {
    batch.candidate_logprobs[i] = FakeCandidateLogprob(
        all[static_cast<size_t>(batch.candidate_rows[i])], batch.candidate_ids[i]);
  }
}

}  // namespace

FakeScores FakeScoresOf(absl::Span<const std::byte> row, Dtype dtype, int32_t target,
                        float temperature, float entropy_temperature, int64_t vocab_size) {
  if (HasNonfinite(row, dtype)) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    return FakeScores{.logprob = nan,
                      .entropy = nan,
                      .lse = nan,
                      .argmax_id = -1,
                      .argmax_logprob = nan,
                      .sum_p_squared = nan,
                      .max_logit = nan,
                      .min_logit = nan,
                      .target_rank = -1,
                      .nonfinite = true};
  }
  uint64_t bytes_hash = 1;
  for (const std::byte byte : row) {
    bytes_hash = Mix(bytes_hash, std::to_integer<uint64_t>(byte));
  }
  const uint64_t hash = MixFloat(bytes_hash, temperature);
  uint16_t first = 0;
  std::memcpy(&first, row.data(), std::min(row.size(), sizeof(first)));
  return FakeScores{
      .logprob = -0.5F - 15 * UnitOf(Mix(hash, static_cast<uint32_t>(target))),
      .entropy = 0.5F + 5 * UnitOf(Mix(MixFloat(bytes_hash, entropy_temperature), 2)),
      .lse = 10 + 5 * UnitOf(Mix(hash, 3)),
      .argmax_id = static_cast<int32_t>(first % vocab_size),
      .argmax_logprob = -0.25F * UnitOf(Mix(hash, 4)),
      .sum_p_squared = UnitOf(Mix(hash, 5)),
      .max_logit = 10 + UnitOf(Mix(bytes_hash, 6)),
      .min_logit = -10 - UnitOf(Mix(bytes_hash, 7)),
      .target_rank = static_cast<int32_t>(Mix(bytes_hash, static_cast<uint32_t>(target)) %
                                          static_cast<uint64_t>(vocab_size)),
  };
}

int32_t FakeTopKId(const FakeScores& scores, int32_t rank, int64_t vocab_size) {
  return scores.nonfinite ? -1 : static_cast<int32_t>((scores.argmax_id + rank) % vocab_size);
}

float FakeTopKLogprob(const FakeScores& scores, int32_t rank) {
  return scores.argmax_logprob - static_cast<float>(rank);
}

float FakeCandidateLogprob(const FakeScores& scores, int32_t id) {
  return scores.argmax_logprob - 0.125F * static_cast<float>(id);
}

FakeEngine::FakeEngine(const Options& options)
    : options_(options), fitting_rows_(std::numeric_limits<int64_t>::max()) {
  info_.name = "default";
  info_.model_type = "fake";
  info_.tensor = "lm_head.weight";
  info_.hidden_size = options.hidden_size;
  info_.vocab_size = options.vocab_size;
  info_.vocab_rows = options.vocab_size;
  info_.dtype = options.dtype;
  info_.weights_version = options.weights_version;
  info_.engine = "fake";
  info_.layout = options.layout;
  thread_ = std::thread([this] { Run(); });
}

FakeEngine::~FakeEngine() {
  absl::Notification* end = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    end = destructor_end_;
  }
  thread_.join();
  if (end != nullptr) {
    end->WaitForNotification();
  }
}

absl::StatusOr<std::unique_ptr<StagingBuffer>> FakeEngine::AllocateStaging(int64_t size_bytes) {
  absl::MutexLock lock(&mutex_);
  if (staging_bytes_ + size_bytes > options_.staging_bytes_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat("staging of ", size_bytes, " bytes does not fit"));
  }
  staging_bytes_ += size_bytes;
  return std::make_unique<HeapStaging>(size_bytes);
}

void FakeEngine::Start(ScoreBatch& batch, ScoreDone done) {
  CheckContract(batch, info_, options_);
  RecordedBatch recorded;
  if (options_.record) {
    recorded = Record(batch, info_.hidden_size * DtypeBytes(batch.dtype));
  }
  absl::MutexLock lock(&mutex_);
  LOGPROBD_CHECK(in_flight_ < kBatchesInFlight, in_flight_);
  if (options_.record) {
    batch_rows_.push_back(batch.num_rows);
    recorded_.push_back(std::move(recorded));
  }
  ++started_;
  ++in_flight_;
  pending_.push_back(Pending{&batch, std::move(done)});
}

bool FakeEngine::CanAnswer() const {
  return stopping_ || (!pending_.empty() && (!holding_ || releases_ > 0));
}

void FakeEngine::Run() {
  while (true) {
    Pending next;
    absl::Status status;
    {
      const auto can_answer = [this]()
                                  ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return CanAnswer(); };
      absl::MutexLock lock(&mutex_, absl::Condition(&can_answer));
      if (pending_.empty()) {
        return;
      }
      next = std::move(pending_.front());
      pending_.pop_front();
      releases_ = std::max(releases_ - 1, 0);
      answering_ = true;
      if (!failures_.empty()) {
        status = std::move(failures_.front());
        failures_.pop_front();
      } else if (next.batch->num_rows > fitting_rows_) {
        status = absl::ResourceExhaustedError(
            absl::StrCat(next.batch->num_rows, " rows do not fit in the device's memory"));
      }
    }
    const int64_t rows = next.batch->num_rows;
    if (status.ok()) {
      next.batch->kernel_seconds = options_.kernel_seconds;
    }
    if (status.ok() && options_.score) {
      Score(*next.batch, info_, options_.logprob_offset);
    }
    {
      // Update the counts before `done`, in which the caller may start the next batch.
      absl::MutexLock lock(&mutex_);
      --in_flight_;
      rows_scored_ += status.ok() ? rows : 0;
    }
    std::move(next.done)(std::move(status));
    absl::MutexLock lock(&mutex_);
    answering_ = false;
  }
}

bool FakeEngine::healthy() const {
  absl::MutexLock lock(&mutex_);
  return healthy_;
}

void FakeEngine::Hold() {
  absl::MutexLock lock(&mutex_);
  holding_ = true;
  releases_ = 0;
}

void FakeEngine::Release() {
  absl::MutexLock lock(&mutex_);
  holding_ = false;
  releases_ = 0;
}

void FakeEngine::ReleaseOne() {
  absl::MutexLock lock(&mutex_);
  ++releases_;
}

void FakeEngine::FailNext(absl::Status status, int batches) {
  absl::MutexLock lock(&mutex_);
  failures_.insert(failures_.end(), static_cast<size_t>(batches), status);
}

void FakeEngine::SetFittingRows(int64_t rows) {
  absl::MutexLock lock(&mutex_);
  fitting_rows_ = rows;
}

void FakeEngine::SetHealthy(bool healthy) {
  absl::MutexLock lock(&mutex_);
  healthy_ = healthy;
}

void FakeEngine::BlockDestructor(absl::Notification& end) {
  absl::MutexLock lock(&mutex_);
  destructor_end_ = &end;
}

/// A test that waits longer, in real time, waits for something that does not happen.
constexpr absl::Duration kWaitMax = absl::Minutes(1);

std::vector<int64_t> FakeEngine::WaitForBatches(int count) const {
  const auto started = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return started_ >= count; };
  absl::MutexLock lock(&mutex_);
  LOGPROBD_CHECK(mutex_.AwaitWithTimeout(absl::Condition(&started), kWaitMax), in_flight_);
  return std::vector<int64_t>(batch_rows_.begin(), batch_rows_.begin() + count);
}

void FakeEngine::WaitUntilInFlight(int count) const {
  const auto in_flight = [&]()
                             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return in_flight_ >= count; };
  absl::MutexLock lock(&mutex_);
  LOGPROBD_CHECK(mutex_.AwaitWithTimeout(absl::Condition(&in_flight), kWaitMax), in_flight_);
}

void FakeEngine::WaitUntilIdle() const {
  const auto idle = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return in_flight_ == 0 && !answering_;
  };
  absl::MutexLock lock(&mutex_);
  LOGPROBD_CHECK(mutex_.AwaitWithTimeout(absl::Condition(&idle), kWaitMax), in_flight_);
}

std::vector<RecordedBatch> FakeEngine::batches() const {
  absl::MutexLock lock(&mutex_);
  return recorded_;
}

int64_t FakeEngine::num_batches() const {
  absl::MutexLock lock(&mutex_);
  return started_;
}

int64_t FakeEngine::rows_scored() const {
  absl::MutexLock lock(&mutex_);
  return rows_scored_;
}

int64_t FakeEngine::staging_bytes() const {
  absl::MutexLock lock(&mutex_);
  return staging_bytes_;
}

}  // namespace logprobd::testing
