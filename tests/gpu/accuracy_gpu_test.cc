// Compares the CUDA engine with double precision at the size of a real head. With
// LOGPROBD_RESULTS=FILE and LOGPROBD_COMMIT set, it writes the measured errors as JSON
// (tests/bench/README.md).

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/reference/row_reference.h"
#include "tests/bench/bench_record.h"
#include "tests/bench/gpu_bench.h"
#include "tests/gpu/gpu_engine.h"
#include "tests/gpu/large_head.h"

namespace logprobd::testing {
namespace {

std::string Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// Collects the records of this run and writes them when all tests are done.
class Results : public ::testing::Environment {
 public:
  void Add(const std::string& what, double figure, double tolerance) {
    BenchRecord record = RecordOf(what, "nats", {figure});
    record.note = absl::StrCat("target: at most ", tolerance);
    records_.push_back(std::move(record));
  }

  void TearDown() override {
    const std::string path = Variable("LOGPROBD_RESULTS");
    if (path.empty()) return;
    const absl::Status status = WriteRecords(
        path, {.machine = GpuMachineName(), .commit = Variable("LOGPROBD_COMMIT")}, records_);
    EXPECT_TRUE(status.ok()) << status;
  }

 private:
  std::vector<BenchRecord> records_;
};

/// GoogleTest owns this object.
Results* const results = static_cast<Results*>(::testing::AddGlobalTestEnvironment(new Results));

struct Errors {
  std::vector<double> logprob;
  std::vector<double> entropy;

  double LogprobMax() const { return *std::max_element(logprob.begin(), logprob.end()); }
  double EntropyMax() const { return *std::max_element(entropy.begin(), entropy.end()); }
  double LogprobP99() const {
    std::vector<double> sorted = logprob;
    std::sort(sorted.begin(), sorted.end());
    return sorted[(sorted.size() * 99 - 1) / 100];
  }
};

/// Scores `num_rows` rows and compares `num_checked` of them, spread over the batch, with double
/// precision. Every second checked target is the row's most likely id.
Errors Measure(const LargeHead& head, int64_t num_rows, int64_t num_checked) {
  Errors errors;
  auto engine = CreateGpuEngine(head, num_rows);
  EXPECT_TRUE(engine.ok()) << engine.status();
  if (!engine.ok()) return errors;
  EngineCase inputs = MakeLargeCase(head, num_rows, 21);
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < num_checked; ++i) rows.push_back(i * num_rows / num_checked);
  const auto logits = LargeLogitsReference(head, inputs, rows);
  for (size_t i = 0; i < rows.size(); i += 2) {
    inputs.targets[static_cast<size_t>(rows[i])] = static_cast<int32_t>(
        std::max_element(logits[i].begin(), logits[i].end()) - logits[i].begin());
  }
  const EngineScores scores = RunCase(**engine, inputs);
  EXPECT_TRUE(scores.status.ok()) << scores.status;
  const double entropy_max = std::log(static_cast<double>(head.info().vocab_size));
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto row = static_cast<size_t>(rows[i]);
    kernels::RowQuestion question;
    question.target = inputs.targets[row];
    const kernels::RowReference truth = kernels::ScoreRowReference(logits[i], question);
    errors.logprob.push_back(std::fabs(scores.logprob[row] - truth.logprob));
    errors.entropy.push_back(std::fabs(scores.entropy[row] - truth.entropy));
    EXPECT_LE(scores.logprob[row], 0.0F);
    EXPECT_GE(scores.entropy[row], 0.0F);
    EXPECT_LE(scores.entropy[row], entropy_max);
  }
  return errors;
}

class GpuAccuracyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!NoGpuReason().empty()) GTEST_SKIP() << NoGpuReason();
  }

  static void ExpectWithin(const std::string& what, const Errors& errors, double logprob_tolerance,
                           double logprob_p99_tolerance, double entropy_tolerance) {
    ASSERT_FALSE(errors.logprob.empty());
    results->Add(absl::StrCat(what, ": logprob, largest"), errors.LogprobMax(), logprob_tolerance);
    results->Add(absl::StrCat(what, ": logprob, 99th percentile"), errors.LogprobP99(),
                 logprob_p99_tolerance);
    results->Add(absl::StrCat(what, ": entropy, largest"), errors.EntropyMax(), entropy_tolerance);
    std::printf("%s: logprob max %.2e p99 %.2e, entropy max %.2e\n", what.c_str(),
                errors.LogprobMax(), errors.LogprobP99(), errors.EntropyMax());
    EXPECT_LE(errors.LogprobMax(), logprob_tolerance);
    EXPECT_LE(errors.LogprobP99(), logprob_p99_tolerance);
    EXPECT_LE(errors.EntropyMax(), entropy_tolerance);
  }
};

TEST_F(GpuAccuracyTest, IsAccurateForLogitsOfStandardDeviation1) {
  ExpectWithin("GPU, error against double, H=4096, V=151936, logits of standard deviation 1",
               Measure(LargeHead(151'936, 4'096, 1.0), 1'024, 128), 1e-4, 3e-5, 1e-4);
}

TEST_F(GpuAccuracyTest, IsAccurateForLogitsOfStandardDeviation3) {
  ExpectWithin("GPU, error against double, H=4096, V=151936, logits of standard deviation 3",
               Measure(LargeHead(151'936, 4'096, 3.0), 1'024, 128), 1e-4, 3e-5, 1e-4);
}

TEST_F(GpuAccuracyTest, IsAccurateForLogitsOfStandardDeviation20) {
  ExpectWithin("GPU, error against double, H=4096, V=151936, logits of standard deviation 20",
               Measure(LargeHead(151'936, 4'096, 20.0), 1'024, 128), 3e-4, 3e-4, 2e-4);
}

TEST_F(GpuAccuracyTest, IsAccurateForAWeightOfMoreThan2To31Elements) {
  const Errors errors = Measure(LargeHead(151'936, 14'208, 3.0), 70, 8);  // 2.16e9

  ASSERT_FALSE(errors.logprob.empty());
  EXPECT_LE(errors.LogprobMax(), 1e-4);
  EXPECT_LE(errors.EntropyMax(), 2e-4);
}

}  // namespace
}  // namespace logprobd::testing
