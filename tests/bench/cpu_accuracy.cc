// Largest differences between the CPU engine's scores and double precision, on heads of real size.
// Prints one line of JSON a case; cpu_bench.py turns them into records.
//
//   cpu_accuracy [rows] [hidden] [vocab] [instruction set]

#include <algorithm>
#include <array>
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

/// Sum of products in double, in eight chains so that the compiler may use vectors.
double Dot(const double* a, const float* b, int64_t count) {
  std::array<double, 8> sums{};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (size_t j = 0; j < 8; ++j) {
      sums[j] +=
          a[i + static_cast<int64_t>(j)] * static_cast<double>(b[i + static_cast<int64_t>(j)]);
    }
  }
  for (; i < count; ++i) sums[0] += a[i] * static_cast<double>(b[i]);
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

/// Logits of every row, [rows, vocab], in double on the stored values.
std::vector<std::vector<double>> LogitsOf(const testing::InMemoryHead& head,
                                          const testing::EngineCase& inputs) {
  const int64_t hidden_size = head.info().hidden_size;
  const int64_t vocab_size = head.info().vocab_size;
  std::vector<double> hidden(static_cast<size_t>(inputs.num_rows() * hidden_size));
  for (size_t i = 0; i < hidden.size(); ++i) {
    hidden[i] = kernels::ElementReference(inputs.hidden.data(), static_cast<int64_t>(i),
                                          KernelDtype(inputs.dtype));
  }
  std::vector<std::vector<double>> logits(static_cast<size_t>(inputs.num_rows()),
                                          std::vector<double>(static_cast<size_t>(vocab_size)));
  const int32_t num_threads = UsableCpuCount();
  std::vector<std::thread> threads;
  for (int32_t t = 0; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      std::vector<float> mean_logit_weights(static_cast<size_t>(hidden_size));
      for (int64_t column = t; column < vocab_size; column += num_threads) {
        for (int64_t k = 0; k < hidden_size; ++k) {
          mean_logit_weights[static_cast<size_t>(k)] = static_cast<float>(kernels::ElementReference(
              head.weight(), column * hidden_size + k, KernelDtype(head.info().dtype)));
        }
        for (int64_t row = 0; row < inputs.num_rows(); ++row) {
          logits[static_cast<size_t>(row)][static_cast<size_t>(column)] =
              Dot(&hidden[static_cast<size_t>(row * hidden_size)], mean_logit_weights.data(),
                  hidden_size);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return logits;
}

/// Gives each row one column whose weight points along the row: its logit stands 10 to 50 above 0,
/// so that the row lies anywhere between flat and certain. The column becomes the row's target.
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
