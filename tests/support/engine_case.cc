#include "tests/support/engine_case.h"

#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/base/check.h"
#include "server/engine/kernel_params.h"

namespace logprobd::testing {

EngineCase MakeRandomCase(const InMemoryHead& head, int64_t num_rows, Dtype dtype, uint64_t seed) {
  EngineCase inputs;
  inputs.dtype = dtype;
  inputs.hidden_size = head.info().hidden_size;
  inputs.hidden = EncodeFloats(NormalValues(num_rows * inputs.hidden_size, seed * 7919 + 3), dtype);
  for (int64_t row = 0; row < num_rows; ++row) {
    // A large odd step, so that few rows reach every part of the vocabulary.
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
  for (std::vector<float>* array :
       {&scores.logprob, &scores.entropy, &scores.lse, &scores.argmax_logprob,
        &scores.sum_p_squared, &scores.max_logit, &scores.min_logit}) {
    array->assign(rows, kPoison);
  }
  scores.argmax_id.assign(rows, kPoisonId);
  scores.top_k_ids.assign(rows * static_cast<size_t>(inputs.top_k), kPoisonId);
  scores.top_k_logprobs.assign(rows * static_cast<size_t>(inputs.top_k), kPoison);
  scores.candidate_logprobs.assign(inputs.candidate_ids.size(), kPoison);
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
  batch.logprob = absl::MakeSpan(scores.logprob);
  batch.entropy = absl::MakeSpan(scores.entropy);
  batch.lse = absl::MakeSpan(scores.lse);
  batch.argmax_id = absl::MakeSpan(scores.argmax_id);
  batch.argmax_logprob = absl::MakeSpan(scores.argmax_logprob);
  batch.sum_p_squared = absl::MakeSpan(scores.sum_p_squared);
  batch.max_logit = absl::MakeSpan(scores.max_logit);
  batch.min_logit = absl::MakeSpan(scores.min_logit);
  batch.top_k_ids = absl::MakeSpan(scores.top_k_ids);
  batch.top_k_logprobs = absl::MakeSpan(scores.top_k_logprobs);
  batch.candidate_logprobs = absl::MakeSpan(scores.candidate_logprobs);
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

kernels::RowReference ReferenceOf(const InMemoryHead& head, const EngineCase& inputs, int64_t row) {
  const HeadInfo& info = head.info();
  const auto index = static_cast<size_t>(row);
  const kernels::LogitTransform transform{.scale = info.scale, .softcap = info.softcap};
  const std::vector<double> logits = kernels::LogitsReference(
      inputs.hidden.data() + row * inputs.hidden_size * DtypeBytes(inputs.dtype),
      KernelDtype(inputs.dtype), head.weight(), KernelDtype(info.dtype), info.vocab_size,
      info.hidden_size, transform, head.bias());
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
  const auto add = [&text](float value) {
    absl::StrAppend(&text, absl::Hex(std::bit_cast<uint32_t>(value), absl::kZeroPad8), " ");
  };
  if (outputs.Has(Output::kLogprob)) add(scores.logprob[index]);
  if (outputs.Has(Output::kEntropy)) add(scores.entropy[index]);
  if (outputs.Has(Output::kLse)) add(scores.lse[index]);
  if (outputs.Has(Output::kArgmax) || outputs.Has(Output::kGreedy)) {
    absl::StrAppend(&text, scores.argmax_id[index], " ");
  }
  if (outputs.Has(Output::kArgmax)) add(scores.argmax_logprob[index]);
  if (outputs.Has(Output::kSumPSquared)) add(scores.sum_p_squared[index]);
  if (outputs.Has(Output::kMaxLogit)) add(scores.max_logit[index]);
  if (outputs.Has(Output::kMinLogit)) add(scores.min_logit[index]);
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
