// Measures the largest differences between the CPU engine's scores and double precision, on heads
// of real size. Prints one line of JSON per case, which cpu_bench.py turns into records.
//
//   cpu_accuracy [rows] [hidden] [vocab] [instruction set]

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/reference/row_reference.h"
#include "server/base/errors.h"
#include "server/engine/cpu_engine.h"
#include "server/engine/kernel_params.h"
#include "tests/support/engine_case.h"
#include "tests/support/in_memory_head.h"

namespace logprobd {
namespace {

constexpr int64_t kCandidatesOfRow = 64;

struct AccuracyCase {
  std::string name;
  double logit_stddev;
  Dtype dtype = Dtype::kBf16;
  bool peaked = false;
};

/// Returns the logits of every row, [rows, vocab], computed in double precision from the stored
/// (rounded) values.
std::vector<std::vector<double>> LogitsOf(const testing::InMemoryHead& head,
                                          const testing::EngineCase& inputs) {
  const HeadInfo& info = head.info();
  const int64_t row_bytes = info.hidden_size * DtypeBytes(inputs.dtype);
  const auto num_rows = static_cast<size_t>(inputs.num_rows());
  std::vector<std::vector<double>> logits(num_rows);
  const auto num_threads = static_cast<size_t>(UsableCpuCount());
  std::vector<std::thread> threads;
  for (size_t thread = 0; thread < num_threads; ++thread) {
    threads.emplace_back([&, thread] {
      for (size_t row = thread; row < num_rows; row += num_threads) {
        logits[row] = kernels::LogitsReference(
            inputs.hidden.data() + static_cast<int64_t>(row) * row_bytes, KernelDtype(inputs.dtype),
            head.weight(), KernelDtype(info.dtype), info.vocab_size, info.hidden_size, {}, {});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return logits;
}

/// Gives each row one column whose weight points along the row, with a logit of 10 to 50, so that
/// the distributions of the rows range from flat to certain. The column is the row's target.
std::unique_ptr<testing::InMemoryHead> WithPeaks(const testing::InMemoryHead& head,
                                                 testing::EngineCase& inputs) {
  const int64_t hidden_size = inputs.hidden_size;
  std::vector<std::byte> weight(head.weight(), head.weight() + head.info().weight_bytes);
  const int64_t row_bytes = hidden_size * DtypeBytes(inputs.dtype);
  for (int64_t row = 0; row < inputs.num_rows(); ++row) {
    std::vector<float> along;
    double norm = 0;
    for (int64_t k = 0; k < hidden_size; ++k) {
      const double value = kernels::ElementReference(inputs.hidden.data(), row * hidden_size + k,
                                                     KernelDtype(inputs.dtype));
      along.push_back(static_cast<float>(value));
      norm += value * value;
    }
    const double height =
        10 + 40.0 * static_cast<double>(row) / static_cast<double>(inputs.num_rows());
    for (float& value : along) value *= static_cast<float>(height / norm);
    const std::vector<std::byte> encoded = testing::EncodeFloats(along, head.info().dtype);
    const int64_t column = inputs.targets[static_cast<size_t>(row)];
    std::copy(encoded.begin(), encoded.end(), weight.begin() + column * row_bytes);
  }
  return std::make_unique<testing::InMemoryHead>(head.info(), std::move(weight));
}

void Measure(const AccuracyCase& c, int64_t rows, int64_t hidden_size, int64_t vocab_size,
             const std::string& isa) {
  auto head = testing::MakeRandomHead({.vocab_size = vocab_size,
                                       .hidden_size = hidden_size,
                                       .dtype = c.dtype,
                                       .logit_stddev = c.logit_stddev});
  testing::EngineCase inputs = testing::MakeRandomCase(*head, rows, c.dtype);
  if (c.peaked) head = WithPeaks(*head, inputs);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < kCandidatesOfRow; ++i) {
      inputs.candidate_rows.push_back(static_cast<int32_t>(row));
      inputs.candidate_ids.push_back(
          static_cast<int32_t>((row * 104'729 + i * 7919 + 17) % vocab_size));
    }
  }
  const EngineOptions options{.device = Device::kCpu, .batch_rows_max = rows};
  auto plan = PlanCpuEngine(head->info(), options, "benchmark");
  LOGPROBD_CHECK(plan.ok(), plan.status().ToString());
  if (!isa.empty()) plan->engine = absl::StrCat("cpu/", isa);
  const auto engines = CreateCpuEngines(*head, *plan, options);
  LOGPROBD_CHECK(engines.ok(), engines.status().ToString());
  const testing::EngineScores scores = testing::RunCase(*engines->front(), inputs);
  LOGPROBD_CHECK(scores.status.ok(), scores.status.ToString());

  const std::vector<std::vector<double>> logits = LogitsOf(*head, inputs);
  std::vector<double> logprob_errors;
  double entropy_error_max = 0;
  int64_t out_of_range = 0;
  const auto log_vocab = static_cast<float>(std::log(static_cast<double>(vocab_size)));
  for (size_t row = 0; row < logits.size(); ++row) {
    kernels::RowQuestion question;
    question.target = inputs.targets[row];
    const size_t first = row * kCandidatesOfRow;
    question.candidate_ids.assign(
        inputs.candidate_ids.begin() + static_cast<int64_t>(first),
        inputs.candidate_ids.begin() + static_cast<int64_t>(first + kCandidatesOfRow));
    const kernels::RowReference truth = kernels::ScoreRowReference(logits[row], question);
    logprob_errors.push_back(std::fabs(static_cast<double>(scores.logprob[row]) - truth.logprob));
    out_of_range += scores.logprob[row] > 0 ? 1 : 0;
    for (size_t i = 0; i < kCandidatesOfRow; ++i) {
      const float logprob = scores.candidate_logprobs[first + i];
      logprob_errors.push_back(
          std::fabs(static_cast<double>(logprob) - truth.candidate_logprobs[i]));
      out_of_range += logprob > 0 ? 1 : 0;
    }
    entropy_error_max = std::max(
        entropy_error_max, std::fabs(static_cast<double>(scores.entropy[row]) - truth.entropy));
    out_of_range += scores.entropy[row] < 0 || scores.entropy[row] > log_vocab ? 1 : 0;
  }
  std::sort(logprob_errors.begin(), logprob_errors.end());
  const size_t p99 = logprob_errors.size() * 99 / 100;
  std::printf(
      "{\"case\": \"%s\", \"engine\": \"%s\", \"rows\": %lld, \"samples\": %zu, "
      "\"logprob_max\": %.3g, \"logprob_p99\": %.3g, \"entropy_max\": %.3g, "
      "\"out_of_range\": %lld}\n",
      c.name.c_str(), plan->engine.c_str(), static_cast<long long>(rows), logprob_errors.size(),
      logprob_errors.back(), logprob_errors[p99], entropy_error_max,
      static_cast<long long>(out_of_range));
  std::fflush(stdout);
}

}  // namespace
}  // namespace logprobd

int main(int argc, char** argv) {
  using logprobd::AccuracyCase;
  const int64_t rows = argc > 1 ? std::atoll(argv[1]) : 64;
  const int64_t hidden = argc > 2 ? std::atoll(argv[2]) : 1024;
  const int64_t vocab = argc > 3 ? std::atoll(argv[3]) : 151'936;
  const std::string isa = argc > 4 ? argv[4] : "";
  const std::vector<AccuracyCase> cases = {
      {"bf16, standard deviation 1", 1},
      {"bf16, standard deviation 3", 3},
      {"bf16, standard deviation 10", 10},
      {"bf16, standard deviation 20", 20},
      {"bf16, peaked rows", 3, logprobd::Dtype::kBf16, true},
      {"fp32 hidden and head, standard deviation 3", 3, logprobd::Dtype::kF32},
  };
  for (const AccuracyCase& c : cases) logprobd::Measure(c, rows, hidden, vocab, isa);
  return 0;
}
