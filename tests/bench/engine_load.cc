#include "tests/bench/engine_load.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <thread>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/base/errors.h"

namespace logprobd::testing {
namespace {

/// Scores batches, with all of `batches` in flight, and decrements `num_left` for each until it
/// reaches 0. Returns when all batches have ended.
absl::Status ScoreWhileLeft(ScoringEngine& engine, EngineBatches& batches,
                            std::atomic<int>& num_left) {
  absl::Mutex mutex;
  int running = 0;
  absl::Status status;
  for (size_t i = 0;; ++i) {
    const auto room = [&] { return running < static_cast<int>(batches.size()); };
    absl::MutexLock lock(&mutex);
    mutex.Await(absl::Condition(&room));
    if (num_left.fetch_sub(1) <= 0) break;
    ++running;
    engine.Start(batches[i % batches.size()]->batch, [&](absl::Status ended) {
      absl::MutexLock done_lock(&mutex);
      status.Update(ended);
      --running;
    });
  }
  const auto idle = [&] { return running == 0; };
  absl::MutexLock lock(&mutex);
  mutex.Await(absl::Condition(&idle));
  return status;
}

}  // namespace

absl::StatusOr<std::unique_ptr<EngineBatch>> MakeBatch(ScoringEngine& engine,
                                                       const EngineCase& inputs) {
  auto made = std::make_unique<EngineBatch>();
  const auto rows = static_cast<size_t>(inputs.num_rows());
  const auto bytes = static_cast<int64_t>(inputs.hidden.size());
  LOGPROBD_ASSIGN_OR_RETURN(made->staging, engine.AllocateStaging(bytes));
  std::copy(inputs.hidden.begin(), inputs.hidden.end(), made->staging->data());
  made->inputs = inputs;
  made->logprob.resize(rows);
  made->entropy.resize(rows);
  made->nonfinite.resize(rows);
  made->batch.dtype = inputs.dtype;
  made->batch.num_rows = inputs.num_rows();
  made->batch.hidden = made->staging->data();
  made->batch.targets = made->inputs.targets;
  made->batch.temperatures = made->inputs.temperatures;
  made->batch.outputs = kDefaultOutputs;
  made->batch.logprob = absl::MakeSpan(made->logprob);
  made->batch.entropy = absl::MakeSpan(made->entropy);
  made->batch.nonfinite = absl::MakeSpan(made->nonfinite);
  return made;
}

absl::StatusOr<EngineBatches> MakeBatches(ScoringEngine& engine, const EngineCase& inputs) {
  EngineBatches batches;
  for (int slot = 0; slot < ScoringEngine::kBatchesInFlight; ++slot) {
    LOGPROBD_ASSIGN_OR_RETURN(batches.emplace_back(), MakeBatch(engine, inputs));
  }
  return batches;
}

absl::StatusOr<double> EngineSeconds(ScoringEngine& engine, EngineBatches& batches, int count) {
  std::atomic<int> num_left = count;
  const absl::Time begin = absl::Now();
  LOGPROBD_RETURN_IF_ERROR(ScoreWhileLeft(engine, batches, num_left));
  return absl::ToDoubleSeconds(absl::Now() - begin);
}

absl::StatusOr<double> EngineSeconds(const std::vector<std::unique_ptr<ScoringEngine>>& engines,
                                     std::vector<EngineBatches>& batches, int count) {
  std::atomic<int> num_left = count * static_cast<int>(engines.size());
  std::vector<absl::Status> statuses(engines.size());
  std::vector<std::thread> threads;
  const absl::Time begin = absl::Now();
  for (size_t i = 0; i < engines.size(); ++i) {
    threads.emplace_back(
        [&, i] { statuses[i] = ScoreWhileLeft(*engines[i], batches[i], num_left); });
  }
  for (std::thread& thread : threads) thread.join();
  const double seconds = absl::ToDoubleSeconds(absl::Now() - begin);
  for (const absl::Status& status : statuses) LOGPROBD_RETURN_IF_ERROR(status);
  return seconds;
}

}  // namespace logprobd::testing
