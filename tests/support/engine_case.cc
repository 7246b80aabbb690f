#include "tests/support/engine_case.h"

#include <bit>
#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/base/errors.h"
#include "server/engine/kernel_params.h"

namespace logprobd::testing {

EngineCase MakeRandomCase(const InMemoryHead& head, int64_t num_rows, Dtype dtype, uint64_t seed) {
  EngineCase inputs;
  inputs.dtype = dtype;
  inputs.hidden_size = head.info().hidden_size;
  inputs.hidden = EncodeFloats(NormalValues(num_rows * inputs.hidden_size, seed * 7919 + 3), dtype);
  for (int64_t row = 0; row < num_rows; ++row) {
    // A large odd factor spreads the targets of a few rows over the whole vocabulary.
    const auto hash = static_cast<uint64_t>(row + 1) * 2654435761U + seed;
    inputs.targets.push_back(
        static_cast<int32_t>(hash % static_cast<uint64_t>(head.info().vocab_size)));
  }
  inputs.temperatures.assign(static_cast<size_t>(num_rows), 1.0F);
  return inputs;
}

EngineCase SelectRows(const EngineCase& all, absl::Span<const int64_t> rows) {
  EngineCase chosen = all;
  chosen.hidden.clear();
  chosen.targets.clear();
  chosen.temperatures.clear();
  chosen.entropy_temperatures.clear();
  chosen.candidate_rows.clear();
  chosen.candidate_ids.clear();
  const int64_t row_bytes = all.hidden_size * DtypeBytes(all.dtype);
  for (const int64_t row : rows) {
    const auto index = static_cast<size_t>(row);
    const auto new_row = static_cast<int32_t>(chosen.targets.size());
    chosen.hidden.insert(chosen.hidden.end(), all.hidden.begin() + row * row_bytes,
                         all.hidden.begin() + (row + 1) * row_bytes);
    chosen.targets.push_back(all.targets[index]);
    chosen.temperatures.push_back(all.temperatures[index]);
    if (!all.entropy_temperatures.empty()) {
      chosen.entropy_temperatures.push_back(all.entropy_temperatures[index]);
    }
    for (size_t i = 0; i < all.candidate_ids.size(); ++i) {
      if (all.candidate_rows[i] == row) {
        chosen.candidate_rows.push_back(new_row);
        chosen.candidate_ids.push_back(all.candidate_ids[i]);
      }
    }
  }
  return chosen;
}

struct StartedCase::Impl {
  EngineScores scores;
  std::unique_ptr<StagingBuffer> staging;
  ScoreBatch batch;
  absl::Mutex mutex;
  bool is_done = false;

  void Await() {
    const absl::MutexLock lock(&mutex);
    mutex.Await(absl::Condition(&is_done));
  }
};

StartedCase::StartedCase(ScoringEngine& engine, const EngineCase& inputs)
    : impl_(std::make_unique<Impl>()) {
  EngineScores& scores = impl_->scores;
  auto staging = engine.AllocateStaging(static_cast<int64_t>(inputs.hidden.size()));
  LOGPROBD_CHECK(staging.ok(), staging.status().ToString());
  impl_->staging = *std::move(staging);
  std::memcpy(impl_->staging->data(), inputs.hidden.data(), inputs.hidden.size());

  const auto rows = static_cast<size_t>(inputs.num_rows());
  const ColumnCounts counts = {.rows = inputs.num_rows(),
                               .top_k = inputs.top_k,
                               .candidates = static_cast<int64_t>(inputs.candidate_ids.size())};
  ForEachOutputColumn([&]<typename T>(const OutputColumn<T>& column) {
    if (!column.is_from_engine()) return;
    const T poison = std::is_same_v<T, float> ? static_cast<T>(kPoison) : static_cast<T>(kPoisonId);
    (scores.*column.values).assign(static_cast<size_t>(counts.Of(column.shape)), poison);
  });
  scores.nonfinite.assign(rows, 0xEE);

  ScoreBatch& batch = impl_->batch;
  batch.dtype = inputs.dtype;
  batch.num_rows = inputs.num_rows();
  batch.hidden = impl_->staging->data();
  batch.targets = inputs.targets;
  batch.temperatures = inputs.temperatures;
  batch.entropy_temperatures = inputs.entropy_temperatures;
  batch.outputs = inputs.outputs;
  batch.top_k = inputs.top_k;
  batch.candidate_rows = inputs.candidate_rows;
  batch.candidate_ids = inputs.candidate_ids;
  ForEachOutputColumn([&](const auto& column) {
    if (column.is_from_engine()) batch.*column.span = absl::MakeSpan(scores.*column.values);
  });
  batch.nonfinite = absl::MakeSpan(scores.nonfinite);
  engine.Start(batch, [impl = impl_.get()](absl::Status status) {
    const absl::MutexLock lock(&impl->mutex);
    impl->scores.status = std::move(status);
    impl->is_done = true;
  });
}

StartedCase::~StartedCase() { impl_->Await(); }

EngineScores StartedCase::Wait() {
  impl_->Await();
  return impl_->scores;
}

EngineScores RunCase(ScoringEngine& engine, const EngineCase& inputs) {
  return StartedCase(engine, inputs).Wait();
}

std::vector<double> LogitsOf(const InMemoryHead& head, const EngineCase& inputs, int64_t row) {
  const HeadInfo& info = head.info();
  const kernels::LogitTransform transform{.scale = info.scale, .softcap = info.softcap};
  return kernels::LogitsReference(
      inputs.hidden.data() + row * inputs.hidden_size * DtypeBytes(inputs.dtype),
      KernelDtype(inputs.dtype), head.weight(), KernelDtype(info.dtype), info.vocab_size,
      info.hidden_size, transform, head.bias());
}

kernels::RowReference ReferenceOf(const InMemoryHead& head, const EngineCase& inputs, int64_t row) {
  const auto index = static_cast<size_t>(row);
  const std::vector<double> logits = LogitsOf(head, inputs, row);
  kernels::RowQuestion question;
  question.target = inputs.targets[index];
  question.temperature = static_cast<double>(inputs.temperatures[index]);
  if (!inputs.entropy_temperatures.empty()) {
    question.entropy_temperature = static_cast<double>(inputs.entropy_temperatures[index]);
  }
  question.top_k = inputs.top_k;
  for (size_t i = 0; i < inputs.candidate_ids.size(); ++i) {
    if (inputs.candidate_rows[i] == row) {
      question.candidate_ids.push_back(inputs.candidate_ids[i]);
    }
  }
  return kernels::ScoreRowReference(logits, question);
}

std::string BitsOfRow(const EngineCase& inputs, const EngineScores& scores, int64_t row,
                      OutputSet outputs, bool with_lists) {
  std::string text;
  const auto index = static_cast<size_t>(row);
  const auto add = [&text](auto value) {
    if constexpr (std::is_same_v<decltype(value), float>) {
      absl::StrAppend(&text, absl::Hex(std::bit_cast<uint32_t>(value), absl::kZeroPad8), " ");
    } else {
      absl::StrAppend(&text, value, " ");
    }
  };
  ForEachRowColumn([&](const auto& column) {
    if (column.IsScored(outputs)) add((scores.*column.values)[index]);
  });
  absl::StrAppend(&text, "nonfinite ", scores.nonfinite[index], " ");
  if (with_lists) {
    const auto top_k = static_cast<size_t>(inputs.top_k);
    for (size_t i = index * top_k; i < (index + 1) * top_k; ++i) {
      absl::StrAppend(&text, scores.top_k_ids[i], ":");
      add(scores.top_k_logprobs[i]);
    }
    for (size_t i = 0; i < inputs.candidate_ids.size(); ++i) {
      if (inputs.candidate_rows[i] == row) {
        absl::StrAppend(&text, inputs.candidate_ids[i], ":");
        add(scores.candidate_logprobs[i]);
      }
    }
  }
  return text;
}

}  // namespace logprobd::testing
