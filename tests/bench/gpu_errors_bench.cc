// Measures the errors of the logprobs and entropies that the fused kernel and its combine step
// compute, against double precision on the same inputs. Each case runs with and without the
// correction of the tensor cores' truncation (kernels/common/logit_transform.h), which the engine
// applies.
//
//   gpu_errors_bench [--out FILE] [--commit ID] [--rounds 1] [--rows 256]
//
// Each round uses different random data, and figures are medians over the rounds. The target id of
// every second row is the row's most likely id, and the other target ids are random. The program
// exits with 1 if a figure exceeds its limit.

#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/reference/row_reference.h"
#include "server/base/errors.h"
#include "server/base/head_info.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/kernel_params.h"
#include "tests/bench/bench_kernels.h"
#include "tests/bench/bench_record.h"
#include "tests/bench/fused_fixture.h"
#include "tests/bench/gpu_bench.h"
#include "tests/bench/synthetic_rows.h"
#include "tests/support/in_memory_head.h"

namespace logprobd::testing {
namespace {

constexpr int64_t kVocabSize = 151'936;
/// Factor by which the limits are larger for fp32 rows.
constexpr double kF32Slack = 1.5;

struct Flags {
  BenchFlags common = {.rounds = 1};
  int rows = 256;
};

/// Upper limits of the errors. An error without a value has no limit.
struct Limits {
  std::optional<double> logprob_max;
  std::optional<double> logprob_p99;
  std::optional<double> logprob_mean;
  std::optional<double> entropy_max;
};

Limits LimitsAtDeviation3(double slack) {
  return {.logprob_max = slack * 1e-4,
          .logprob_p99 = slack * 3e-5,
          .logprob_mean = slack * 5e-6,
          .entropy_max = slack * 1e-4};
}

Limits LimitsAtDeviation20(double slack) {
  return {.logprob_max = slack * 3e-4,
          .logprob_p99 = std::nullopt,
          .logprob_mean = std::nullopt,
          .entropy_max = std::nullopt};
}

/// The hidden rows and the head of a case.
struct Case {
  std::string rows;
  int64_t hidden_size = 0;
  double logit_stddev = 3;
  Dtype dtype = Dtype::kBf16;  ///< Type of the rows.
  RowKind kind = RowKind::kNormal;
  bool near_weight = false;  ///< The rows point along rows of the weight, and `kind` is unused.
  double weight_mean = 0;    ///< Mean of the weight, in standard deviations of the weight.
};

std::vector<Case> AllCases() {
  std::vector<Case> cases;
  for (const int64_t hidden_size : {896, 2'048, 4'096}) {
    for (const double stddev : {3, 20}) {
      cases.push_back({.rows = "bf16 rows", .hidden_size = hidden_size, .logit_stddev = stddev});
    }
  }
  const std::pair<const char*, RowKind> kinds[] = {
      {"six outlier channels, early", RowKind::kOutliersEarly},
      {"six outlier channels, late", RowKind::kOutliersLate},
      {"six outlier channels, spread", RowKind::kOutliersSpread},
      {"rows of rank 32 and noise", RowKind::kLowRank}};
  for (const auto& [name, kind] : kinds) {
    cases.push_back({.rows = name, .hidden_size = 4'096, .kind = kind});
  }
  cases.push_back(
      {.rows = "rows near rows of the weight", .hidden_size = 4'096, .near_weight = true});
  // The mean shifts all logits of a row by 15.
  cases.push_back({.rows = "rows >= 0, weight's mean a tenth of its deviation",
                   .hidden_size = 4'096,
                   .kind = RowKind::kOneSided,
                   .weight_mean = 0.1});
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF16}) {
    for (const int64_t hidden_size : {896, 4'096}) {
      for (const double stddev : {3, 20}) {
        cases.push_back({.rows = dtype == Dtype::kF32 ? "fp32 rows" : "fp16 rows",
                         .hidden_size = hidden_size,
                         .logit_stddev = stddev,
                         .dtype = dtype});
      }
    }
  }
  return cases;
}

/// How a case is scored.
struct Variant {
  std::string name;
  FusedFixture::Ask ask;
  Limits limits;
};

std::vector<Variant> VariantsOf(const Case& c) {
  std::vector<std::pair<std::string, int32_t>> splits = {{"", 1}};
  if (c.dtype != Dtype::kBf16) splits = {{" as two bf16 splits", 2}};
  if (c.dtype == Dtype::kF32) splits.emplace_back(" as three bf16 splits", 3);
  const bool is_normal = c.kind == RowKind::kNormal && !c.near_weight;
  const double slack = c.dtype == Dtype::kF32 ? kF32Slack : 1;
  std::vector<Variant> variants;
  for (const auto& [splits_name, num_splits] : splits) {
    for (const bool is_corrected : {true, false}) {
      Variant variant;
      variant.name =
          absl::StrCat("GPU fused, error, H=", c.hidden_size, ", V=", kVocabSize,
                       c.near_weight ? "" : absl::StrCat(", standard deviation ", c.logit_stddev),
                       ", ", c.rows, splits_name, is_corrected ? "" : ", truncation not corrected");
      variant.ask.dtype = KernelDtype(c.dtype);
      variant.ask.num_splits = num_splits;
      variant.ask.corrected = is_corrected;
      if (is_normal && is_corrected) {
        variant.limits =
            c.logit_stddev == 20 ? LimitsAtDeviation20(slack) : LimitsAtDeviation3(slack);
      }
      variants.push_back(std::move(variant));
    }
  }
  return variants;
}

/// Reads rows of the weight from the device.
absl::StatusOr<std::vector<float>> ReadWeightRows(FusedFixture& fixture,
                                                  const std::vector<int32_t>& ids,
                                                  int64_t hidden_size) {
  const std::byte* const weight = fixture.NextWeight();
  std::vector<uint16_t> bits(static_cast<size_t>(hidden_size));
  std::vector<float> values;
  for (const int32_t id : ids) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemcpy(bits.data(), weight + id * hidden_size * 2,
                                             bits.size() * 2, cudaMemcpyDeviceToHost));
    for (const uint16_t element : bits) {
      values.push_back(std::bit_cast<float>(static_cast<uint32_t>(element) << 16));
    }
  }
  return values;
}

std::vector<int32_t> RandomIds(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    ids.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(kVocabSize)));
  }
  return ids;
}

/// Writes the rows of the case to the fixture.
absl::Status WriteRows(const Case& c, int64_t num_rows, uint64_t seed, FusedFixture& fixture) {
  const RowSizes sizes = {.num_rows = num_rows, .hidden_size = c.hidden_size};
  std::vector<float> rows;
  if (c.near_weight) {
    LOGPROBD_ASSIGN_OR_RETURN(
        const std::vector<float> weight_rows,
        ReadWeightRows(fixture, RandomIds(num_rows, 2 * seed), c.hidden_size));
    rows = MakeRowsNear(weight_rows, sizes, seed);
  } else {
    rows = MakeRows(c.kind, sizes, seed);
  }
  const std::vector<std::byte> bytes = EncodeFloats(rows, c.dtype);
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemcpy(fixture.Rows(KernelDtype(c.dtype)), bytes.data(),
                                           bytes.size(), cudaMemcpyHostToDevice));
  return absl::OkStatus();
}

/// The target and the scores of every row in double precision, and the mean and standard deviation
/// of all logits.
struct Truth {
  std::vector<int32_t> targets;
  std::vector<double> logprob;
  std::vector<double> entropy;
  double logit_mean = 0;
  double logit_stddev = 0;
};

absl::StatusOr<Truth> ComputeTruth(const Case& c, int64_t num_rows, uint64_t seed,
                                   FusedFixture& fixture) {
  LOGPROBD_ASSIGN_OR_RETURN(const DeviceBuffer buffer,
                            AllocateDevice(num_rows * kVocabSize * 8, "logits in double"));
  auto* const logits_device = reinterpret_cast<double*>(buffer.get());
  LOGPROBD_RETURN_IF_CUDA_ERROR(LaunchLogitsReference({.hidden_dtype = KernelDtype(c.dtype),
                                                       .hidden = fixture.Rows(KernelDtype(c.dtype)),
                                                       .weight = fixture.NextWeight(),
                                                       .num_rows = num_rows,
                                                       .vocab_size = kVocabSize,
                                                       .hidden_size = c.hidden_size,
                                                       .logits = logits_device},
                                                      nullptr));
  Truth truth;
  truth.targets = RandomIds(num_rows, 2 * seed + 1);
  std::vector<double> logits(static_cast<size_t>(kVocabSize));
  double sum = 0;
  double sum_squares = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemcpy(logits.data(), logits_device + row * kVocabSize,
                                             logits.size() * 8, cudaMemcpyDeviceToHost));
    int32_t& target = truth.targets[static_cast<size_t>(row)];
    kernels::RowQuestion question;
    question.target = target;
    const kernels::RowReference scores = kernels::ScoreRowReference(logits, question);
    if (row % 2 == 0) target = scores.argmax_id;
    truth.logprob.push_back(row % 2 == 0 ? scores.argmax_logprob : scores.logprob);
    truth.entropy.push_back(scores.entropy);
    for (const double logit : logits) {
      sum += logit;
      sum_squares += logit * logit;
    }
  }
  const auto count = static_cast<double>(num_rows * kVocabSize);
  truth.logit_mean = sum / count;
  truth.logit_stddev = std::sqrt(sum_squares / count - truth.logit_mean * truth.logit_mean);
  return truth;
}

struct Errors {
  double logprob_max = 0;
  double logprob_p99 = 0;
  double logprob_mean = 0;  ///< Mean of the signed errors.
  double entropy_max = 0;
};

/// Returns the errors of the scores, or INTERNAL if a score is NaN or out of its range.
absl::StatusOr<Errors> ErrorsOf(const std::vector<float>& logprob,
                                const std::vector<float>& entropy, const Truth& truth) {
  const auto log_vocab = static_cast<float>(std::log(static_cast<double>(kVocabSize)));
  Errors errors;
  std::vector<double> magnitudes;
  for (size_t row = 0; row < truth.logprob.size(); ++row) {
    if (!(logprob[row] <= 0 && entropy[row] >= 0 && entropy[row] <= log_vocab)) {
      return absl::InternalError(
          absl::StrFormat("row %d: logprob %g, entropy %g", row, logprob[row], entropy[row]));
    }
    const double error = static_cast<double>(logprob[row]) - truth.logprob[row];
    magnitudes.push_back(std::fabs(error));
    errors.logprob_mean += error / static_cast<double>(truth.logprob.size());
    errors.entropy_max = std::max(
        errors.entropy_max, std::fabs(static_cast<double>(entropy[row]) - truth.entropy[row]));
  }
  std::sort(magnitudes.begin(), magnitudes.end());
  errors.logprob_max = magnitudes.back();
  errors.logprob_p99 = magnitudes[(magnitudes.size() * 99 - 1) / 100];
  return errors;
}

absl::StatusOr<Errors> Measure(const Variant& variant, const Truth& truth, FusedFixture& fixture) {
  const size_t num_rows = truth.targets.size();
  std::vector<float> logprob(num_rows, std::numeric_limits<float>::quiet_NaN());
  std::vector<float> entropy = logprob;
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cudaMemcpy(fixture.targets(), truth.targets.data(), num_rows * 4, cudaMemcpyHostToDevice));
  LOGPROBD_RETURN_IF_ERROR(fixture.Score(static_cast<int64_t>(num_rows), variant.ask, nullptr));
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cudaMemcpy(logprob.data(), fixture.logprob(), num_rows * 4, cudaMemcpyDeviceToHost));
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cudaMemcpy(entropy.data(), fixture.entropy(), num_rows * 4, cudaMemcpyDeviceToHost));
  return ErrorsOf(logprob, entropy, truth);
}

struct Results {
  std::vector<BenchRecord> records;
  int num_missed = 0;

  void Add(BenchRecord record, const std::string& note, std::optional<double> limit) {
    record.note = note;
    if (limit.has_value()) absl::StrAppend(&record.note, "; target at most ", *limit);
    if (limit.has_value() && record.figure > *limit) {
      std::fprintf(stderr, "MISSED: %s: %.3g; %s\n", record.what.c_str(), record.figure,
                   record.note.c_str());
      ++num_missed;
    }
    records.push_back(std::move(record));
  }
};

/// Adds the records of a variant. `rounds` holds the errors of each round.
void AddRecords(const Variant& variant, const std::vector<Errors>& rounds, const Truth& truth,
                Results& results) {
  const auto figures_of = [&](auto member) {
    std::vector<double> figures(rounds.size());
    std::transform(rounds.begin(), rounds.end(), figures.begin(), member);
    return figures;
  };
  const double mean = Median(figures_of([](const Errors& e) { return e.logprob_mean; }));
  const std::string note =
      absl::StrFormat("%d rows; logprob's mean %+.2g; logits %.2f with standard deviation %.2f",
                      truth.targets.size(), mean, truth.logit_mean, truth.logit_stddev);
  const auto add = [&](const char* figure, auto member, std::optional<double> limit) {
    results.Add(RecordOf(absl::StrCat(variant.name, ": ", figure), "nats", figures_of(member)),
                note, limit);
  };
  const Limits& limits = variant.limits;
  add(
      "logprob, largest", [](const Errors& e) { return e.logprob_max; }, limits.logprob_max);
  add(
      "logprob, 99th percentile", [](const Errors& e) { return e.logprob_p99; },
      limits.logprob_p99);
  add(
      "logprob, magnitude of the mean", [](const Errors& e) { return std::fabs(e.logprob_mean); },
      limits.logprob_mean);
  add(
      "entropy, largest", [](const Errors& e) { return e.entropy_max; }, limits.entropy_max);
  std::printf("%s: logprob max %.2e p99 %.2e mean %+.2e, entropy max %.2e\n", variant.name.c_str(),
              rounds.back().logprob_max, rounds.back().logprob_p99, rounds.back().logprob_mean,
              rounds.back().entropy_max);
  std::fflush(stdout);
}

absl::Status MeasureCase(const Flags& flags, const Case& c, Results& results) {
  const std::vector<Variant> variants = VariantsOf(c);
  std::vector<std::vector<Errors>> errors(variants.size());
  Truth truth;
  for (int round = 0; round < flags.common.rounds; ++round) {
    const auto seed = static_cast<uint64_t>(round) + 1;
    LOGPROBD_ASSIGN_OR_RETURN(const auto fixture,
                              FusedFixture::Create({.hidden_size = c.hidden_size,
                                                    .vocab_size = kVocabSize,
                                                    .rows_max = flags.rows,
                                                    .logit_stddev = c.logit_stddev,
                                                    .weight_mean = c.weight_mean,
                                                    .seed = seed}));
    LOGPROBD_RETURN_IF_ERROR(WriteRows(c, flags.rows, seed, *fixture));
    LOGPROBD_ASSIGN_OR_RETURN(truth, ComputeTruth(c, flags.rows, seed, *fixture));
    for (size_t i = 0; i < variants.size(); ++i) {
      LOGPROBD_ASSIGN_OR_RETURN(const Errors measured, Measure(variants[i], truth, *fixture));
      errors[i].push_back(measured);
    }
  }
  for (size_t i = 0; i < variants.size(); ++i) AddRecords(variants[i], errors[i], truth, results);
  return absl::OkStatus();
}

/// Returns the number of figures that exceed their limit. If a case fails, the figures of the cases
/// before it are still written.
absl::StatusOr<int> Run(const Flags& flags) {
  Results results;
  absl::Status status;
  for (const Case& c : AllCases()) {
    status = MeasureCase(flags, c, results);
    if (!status.ok()) break;
  }
  status.Update(WriteRecords(flags.common, GpuMachineName(), results.records));
  if (!status.ok()) return status;
  return results.num_missed;
}

}  // namespace
}  // namespace logprobd::testing

int main(int argc, char** argv) {
  logprobd::testing::Flags flags;
  CLI::App app("Measures the errors of the fused kernel against double precision.");
  logprobd::testing::AddBenchFlags(app, flags.common);
  app.add_option("--rows", flags.rows, "Number of rows of each case")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<int> missed = logprobd::testing::Run(flags);
  if (missed.ok()) return *missed == 0 ? 0 : 1;
  return logprobd::testing::ExitCode("gpu_errors_bench", missed.status());
}
