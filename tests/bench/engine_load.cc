#include "tests/bench/engine_load.h"

#include <algorithm>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/base/errors.h"

namespace logprobd::testing {

absl::StatusOr<std::unique_ptr<EngineBatch>> MakeBatch(ScoringEngine& engine,
                                                       const EngineCase& inputs) {
  auto started = std::make_unique<EngineBatch>();
  const auto rows = static_cast<size_t>(inputs.num_rows());
  const auto bytes = static_cast<int64_t>(inputs.hidden.size());
  LOGPROBD_ASSIGN_OR_RETURN(started->staging, engine.AllocateStaging(bytes));
  std::copy(inputs.hidden.begin(), inputs.hidden.end(), started->staging->data());
  started->inputs = inputs;
  started->logprob.resize(rows);
  started->entropy.resize(rows);
  started->nonfinite.resize(rows);
  started->batch.dtype = inputs.dtype;
  started->batch.num_rows = inputs.num_rows();
  started->batch.hidden = started->staging->data();
  started->batch.targets = started->inputs.targets;
  started->batch.temperatures = started->inputs.temperatures;
  started->batch.outputs = kDefaultOutputs;
  started->batch.logprob = absl::MakeSpan(started->logprob);
  started->batch.entropy = absl::MakeSpan(started->entropy);
  started->batch.nonfinite = absl::MakeSpan(started->nonfinite);
  return started;
}

absl::Status ScoreWhileLeft(ScoringEngine& engine,
                            std::vector<std::unique_ptr<EngineBatch>>& batches,
                            std::atomic<int>& left) {
  absl::Mutex mutex;
  int running = 0;
  absl::Status status;
  for (size_t i = 0;; ++i) {
    const auto room = [&] { return running < static_cast<int>(batches.size()); };
    absl::MutexLock lock(&mutex);
    mutex.Await(absl::Condition(&room));
    if (left.fetch_sub(1) <= 0) break;
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

absl::StatusOr<double> EngineMilliseconds(ScoringEngine& engine,
                                          std::vector<std::unique_ptr<EngineBatch>>& batches,
                                          int count) {
  std::atomic<int> left = count;
  const absl::Time begin = absl::Now();
  LOGPROBD_RETURN_IF_ERROR(ScoreWhileLeft(engine, batches, left));
  return absl::ToDoubleMilliseconds(absl::Now() - begin) / count;
}

}  // namespace logprobd::testing
