#include <cuda_runtime_api.h>

#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/common/tile.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/launch.h"
#include "kernels/fused/params.h"
#include "server/base/errors.h"
#include "server/engine/cuda_engine.h"
#include "server/engine/cuda_equal_sums.h"
#include "server/engine/equal_sums.h"
#include "tests/gpu/gpu_engine.h"
#include "tests/support/engine_suite.h"

namespace logprobd::testing {
namespace {

absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateWith(GpuKernel kernel, const HeadWeights& head,
                                                          int64_t batch_rows_max) {
  EngineOptions options;
  options.kernel = kernel;
  options.batch_rows_max = batch_rows_max;
  return CreateGpuEngine(head, options);
}

absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateForTest(const HeadWeights& head,
                                                             int64_t batch_rows_max) {
  return CreateWith(GpuKernel::kAuto, head, batch_rows_max);
}

std::string SkipReason() { return NoGpuReason(); }

bool IsHopper() {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
         major == 9;
}

std::vector<EngineUnderTest> Engines() {
  EngineUnderTest engine;
  engine.name = "Auto";
  engine.create = CreateForTest;
  // Tensor cores truncate sums; the engine corrects this on Hopper only. Products with fp32 heads
  // are accumulated by chains of fp32 additions.
  engine.tolerances.logprob_wide = IsHopper() ? 3e-4 : 1e-3;
  engine.tolerances.logprob_f32 = 2e-5;
  engine.skip_reason = SkipReason();
  EngineUnderTest chunked = engine;
  chunked.name = "Chunked";
  chunked.create = [](const HeadWeights& head, int64_t batch_rows_max) {
    return CreateWith(GpuKernel::kChunked, head, batch_rows_max);
  };
  EngineUnderTest sharded = engine;
  sharded.name = "Sharded";
  sharded.create = [](const HeadWeights& head, int64_t batch_rows_max) {
    EngineOptions options;
    options.batch_rows_max = batch_rows_max;
    const auto tiles = static_cast<int32_t>(kernels::NumTiles(head.info().vocab_size));
    return CreateGpuEngine(head, options, std::min(3, tiles));
  };
  return {engine, chunked, sharded};
}

INSTANTIATE_TEST_SUITE_P(Cuda, EngineSuite, ::testing::ValuesIn(Engines()), EngineName);

TEST(CudaEngineTest, PlanWithoutAGpuSaysWhatIsMissing) {
  HeadInfo head;
  head.vocab_size = head.vocab_rows = 1'000;
  head.hidden_size = 64;
  EngineOptions options;
  options.gpus = {1'000};

  const auto plan = PlanCudaEngine(head, options, "");

  EXPECT_EQ(plan.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(plan.status().message()),
              ::testing::AnyOf(::testing::HasSubstr("no NVIDIA GPU is visible"),
                               ::testing::HasSubstr("GPU 1000 does not exist")));
}

TEST(CudaEngineTest, PlanStatesWeightsAndWorkspace) {
  if (!SkipReason().empty()) GTEST_SKIP() << SkipReason();
  HeadInfo head;
  head.vocab_size = head.vocab_rows = 151'936;
  head.hidden_size = 4'096;

  EngineOptions options;
  options.gpus = {0};

  const auto plan = PlanCudaEngine(head, options, "requested");

  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(plan->engine, ::testing::StartsWith("cuda/"));
  EXPECT_THAT(plan->reason, ::testing::StartsWith("requested; "));
  ASSERT_EQ(plan->memory.size(), 3U);
  EXPECT_EQ(plan->memory[0].kind, "weights");
  EXPECT_GE(plan->memory[0].bytes, int64_t{151'936} * 4'096 * 2);
  EXPECT_EQ(plan->memory[1].kind, "workspace");
  EXPECT_LE(plan->memory[1].bytes, int64_t{512} << 20);
}

TEST(CudaEngineTest, RefusesABatchAboveItsLimitAndStaysHealthy) {
  if (!SkipReason().empty()) GTEST_SKIP() << SkipReason();
  const auto head = MakeRandomHead({});
  auto engine = CreateForTest(*head, 64);
  ASSERT_TRUE(engine.ok()) << engine.status();

  const EngineScores refused = RunCase(**engine, MakeRandomCase(*head, 65));
  const EngineScores scored = RunCase(**engine, MakeRandomCase(*head, 64));

  EXPECT_EQ(refused.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(scored.status.ok()) << scored.status;
  EXPECT_TRUE((*engine)->healthy());
}

TEST(CudaEngineTest, CountsFlopsInTheMetrics) {
  if (!SkipReason().empty()) GTEST_SKIP() << SkipReason();
  Metrics metrics({.heads = {"test"}, .gpus = {0}});
  const auto head = MakeRandomHead({.vocab_size = 1'000, .hidden_size = 64});
  EngineOptions options;
  options.batch_rows_max = 64;
  options.metrics = &metrics;
  const auto engine = CreateGpuEngine(*head, options);
  ASSERT_TRUE(engine.ok()) << engine.status();

  ASSERT_TRUE(RunCase(**engine, MakeRandomCase(*head, 10)).status.ok());

  const std::string text = metrics.Serialize();
  EXPECT_THAT(text, ::testing::HasSubstr("logprobd_flops_total{gpu=\"0\"} 1280000"));
}

/// Returns the inputs without top-k and candidates.
EngineCase WithoutLists(EngineCase inputs) {
  inputs.top_k = 0;
  inputs.candidate_rows.clear();
  inputs.candidate_ids.clear();
  return inputs;
}

template <typename T>
void ExpectSameBits(const std::vector<T>& a, const std::vector<T>& b) {
  ASSERT_EQ(a.size(), b.size());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(T)), 0);
}

void ExpectSameScores(const EngineScores& a, const EngineScores& b) {
  ASSERT_TRUE(a.status.ok()) << a.status;
  ASSERT_TRUE(b.status.ok()) << b.status;
  ExpectSameBits(a.logprob, b.logprob);
  ExpectSameBits(a.entropy, b.entropy);
  ExpectSameBits(a.lse, b.lse);
  ExpectSameBits(a.argmax_id, b.argmax_id);
  ExpectSameBits(a.argmax_logprob, b.argmax_logprob);
  ExpectSameBits(a.sum_p_squared, b.sum_p_squared);
  ExpectSameBits(a.max_logit, b.max_logit);
  ExpectSameBits(a.min_logit, b.min_logit);
  ExpectSameBits(a.target_rank, b.target_rank);
  ExpectSameBits(a.nonfinite, b.nonfinite);
}

TEST(CudaEngineTest, BothPathsGiveTheSameBits) {
  if (!SkipReason().empty()) GTEST_SKIP() << SkipReason();
  for (const RandomHeadOptions& options :
       {RandomHeadOptions{.vocab_size = 1'000, .hidden_size = 896},
        RandomHeadOptions{.vocab_size = 1'152, .hidden_size = 71, .dtype = Dtype::kF16},
        RandomHeadOptions{
            .vocab_size = 777, .hidden_size = 200, .bias = true, .scale = 0.5F, .softcap = 20},
        RandomHeadOptions{.vocab_size = 191, .hidden_size = 33, .dtype = Dtype::kF16, .bias = true},
        RandomHeadOptions{.vocab_size = 400, .hidden_size = 4'096},
        RandomHeadOptions{.vocab_size = 500, .hidden_size = 64, .dtype = Dtype::kF32}}) {
    const auto head = MakeRandomHead(options);
    auto any = CreateWith(GpuKernel::kAuto, *head, 1'200);
    auto chunked = CreateWith(GpuKernel::kChunked, *head, 1'200);
    ASSERT_TRUE(any.ok() && chunked.ok()) << any.status() << chunked.status();
    // Makes sure that the test does not compare the chunked path with itself.
    if (options.dtype != Dtype::kF32) {
      EXPECT_EQ((*any)->info().engine, "cuda/fused");
    }
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      for (const int64_t rows : {1, 64, 65, 129, 600, 1'100}) {
        SCOPED_TRACE(::testing::Message()
                     << "hidden " << options.hidden_size << ", head " << DtypeName(options.dtype)
                     << ", rows of " << DtypeName(dtype) << ": " << rows);
        EngineCase with_lists = MakeRandomCase(*head, rows, dtype);
        with_lists.top_k = 5;
        for (int32_t row = 0; row < rows; row += 3) {
          with_lists.candidate_rows.insert(with_lists.candidate_rows.end(), {row, row});
          with_lists.candidate_ids.insert(with_lists.candidate_ids.end(), {3, row % 190});
        }
        const EngineScores truth = RunCase(**chunked, with_lists);
        ExpectSameScores(RunCase(**any, WithoutLists(with_lists)), truth);
        const EngineScores lists = RunCase(**any, with_lists);
        ExpectSameScores(lists, truth);
        ExpectSameBits(lists.top_k_ids, truth.top_k_ids);
        ExpectSameBits(lists.top_k_logprobs, truth.top_k_logprobs);
        ExpectSameBits(lists.candidate_logprobs, truth.candidate_logprobs);
      }
    }
  }
}

TEST(CudaEngineTest, EightThousandRowsHaveTheSameBitsOnBothPaths) {
  if (!SkipReason().empty()) GTEST_SKIP() << SkipReason();
  constexpr int64_t kRows = 8'192;
  const auto head = MakeRandomHead({.vocab_size = 1'000, .hidden_size = 896});
  auto any = CreateWith(GpuKernel::kAuto, *head, kRows);
  auto chunked = CreateWith(GpuKernel::kChunked, *head, kRows);
  ASSERT_TRUE(any.ok() && chunked.ok()) << any.status() << chunked.status();
  EngineCase inputs = MakeRandomCase(*head, kRows);
  inputs.top_k = 5;

  const EngineScores scores = RunCase(**any, inputs);
  const EngineScores truth = RunCase(**chunked, inputs);

  ExpectSameScores(scores, truth);
  ExpectSameBits(scores.top_k_ids, truth.top_k_ids);
  ExpectSameBits(scores.top_k_logprobs, truth.top_k_logprobs);
}

TEST(CudaEngineTest, RowStepIsTheClusterHeightOfTheFusedKernelAndOneOnTheChunkedPath) {
  if (!SkipReason().empty()) GTEST_SKIP() << SkipReason();
  constexpr int64_t kBatchRowsMax = 8'192;
  // All tiles of the first vocabulary fit on the GPU at once, so small tiles are fastest. The
  // second vocabulary is larger.
  for (const int64_t vocab_size : {1'000, 40 * 192}) {
    for (const int64_t hidden_size : {896, 4'096}) {
      const auto head = MakeRandomHead({.vocab_size = vocab_size, .hidden_size = hidden_size});
      auto fused = CreateWith(GpuKernel::kAuto, *head, kBatchRowsMax);
      auto chunked = CreateWith(GpuKernel::kChunked, *head, kBatchRowsMax);
      ASSERT_TRUE(fused.ok() && chunked.ok()) << fused.status() << chunked.status();

      for (const int64_t num_rows : {int64_t{1}, int64_t{300}, kBatchRowsMax}) {
        SCOPED_TRACE(::testing::Message() << "vocabulary " << vocab_size << ", hidden "
                                          << hidden_size << ", " << num_rows << " rows");
        EXPECT_EQ((*fused)->row_step(num_rows),
                  kernels::RowStepFor(kernels::FusedArchOf(0),
                                      {.num_rows = num_rows,
                                       .num_tiles = kernels::NumTiles(vocab_size),
                                       .depth = hidden_size}));
        EXPECT_EQ((*chunked)->row_step(num_rows), 1);
      }
    }
  }
}

// Regression: with a vocabulary of one tile, the arena had no room for the search in addition to
// the keys.
TEST(CudaEngineTest, SupportsTopKOfAlmostTheWholeVocabulary) {
  if (!SkipReason().empty()) GTEST_SKIP() << SkipReason();
  const auto head = MakeRandomHead({.vocab_size = 192, .hidden_size = 64});
  auto any = CreateWith(GpuKernel::kAuto, *head, 1'200);
  auto chunked = CreateWith(GpuKernel::kChunked, *head, 1'200);
  ASSERT_TRUE(any.ok() && chunked.ok()) << any.status() << chunked.status();
  EngineCase inputs = MakeRandomCase(*head, 1'100);
  inputs.top_k = 128;

  const EngineScores scores = RunCase(**any, inputs);

  ASSERT_TRUE(scores.status.ok()) << scores.status;
  const EngineScores truth = RunCase(**chunked, inputs);
  ExpectSameBits(scores.top_k_ids, truth.top_k_ids);
  ExpectSameBits(scores.top_k_logprobs, truth.top_k_logprobs);
}

// Either the temperature scales or the head's transform contain the correction, never both.
TEST(CudaEngineTest, CorrectsTheTruncationOnce) {
  if (!SkipReason().empty()) GTEST_SKIP() << SkipReason();
  if (!IsHopper()) GTEST_SKIP() << "the truncation was measured on compute capability 9.0 only";
  for (const float scale : {1.0F, 0.5F}) {
    for (const GpuKernel kernel : {GpuKernel::kAuto, GpuKernel::kChunked}) {
      const auto head = MakeRandomHead({.vocab_size = 400, .hidden_size = 4'096, .scale = scale});
      auto engine = CreateWith(kernel, *head, 512);
      ASSERT_TRUE(engine.ok()) << engine.status();
      const EngineCase inputs = MakeRandomCase(*head, 512);
      const EngineScores scores = RunCase(**engine, inputs);
      ASSERT_TRUE(scores.status.ok()) << scores.status;
      // Mean relative error. The correction is 3.8e-6, so the mean reveals if it is applied zero or
      // two times.
      double mean = 0;
      for (int64_t row = 0; row < 512; ++row) {
        const double truth = ReferenceOf(*head, inputs, row).max_logit;
        mean += (scores.max_logit[static_cast<size_t>(row)] / truth - 1) / 512;
      }
      EXPECT_NEAR(mean, 0, 1e-6) << "scale " << scale;
    }
  }
}

// The check of a start. Other tests compare the scores of whole engines.
TEST(CudaEngineTest, ComputesEqualSumsOnEveryPath) {
  if (!SkipReason().empty()) GTEST_SKIP() << SkipReason();
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const int64_t hidden_size : {33, 71, 1'024, 4'096}) {
      SCOPED_TRACE(::testing::Message()
                   << DtypeName(dtype) << " head, hidden size " << hidden_size);

      const auto results = ComputeSums(dtype, hidden_size, GpuKernel::kAuto);

      ASSERT_TRUE(results.ok()) << results.status();
      EXPECT_EQ(DescribeUnequalSums(*results), "");
      // Three ways use cuBLASLt, and two compute single logits. A bf16 head also multiplies the
      // splits of fp32 rows.
      const kernels::FusedArch arch = kernels::FusedArchOf(/*device=*/0);
      const size_t block_tiles = arch == kernels::FusedArch::kSm90 ? 8 : 2;
      const bool has_fused = arch != kernels::FusedArch::kNone && dtype != Dtype::kF32;
      EXPECT_EQ(results->size(),
                (has_fused ? 5 + block_tiles : 3) * (dtype == Dtype::kBf16 ? 2 : 1));
    }
  }
}

TEST(CudaEngineTest, NoticesOneChangedBitOfASumOnAnyPath) {
  if (!SkipReason().empty()) GTEST_SKIP() << SkipReason();
  const auto results = ComputeSums(Dtype::kBf16, 1'024, GpuKernel::kAuto);
  ASSERT_TRUE(results.ok()) << results.status();
  for (size_t i = 0; i < results->size(); ++i) {
    if ((*results)[i].reference == i) continue;
    SCOPED_TRACE((*results)[i].way);
    std::vector<SumResults> changed = *results;
    if (!changed[i].target_logits.empty()) {
      changed[i].target_logits.back() ^= 1;
    } else {
      changed[i].max_keys.back() ^= uint64_t{1} << 32;
    }

    const std::string difference = DescribeUnequalSums(changed);

    EXPECT_THAT(difference, ::testing::HasSubstr(changed[i].way + " differs from "));
    EXPECT_THAT(difference, ::testing::HasSubstr(changed[i].consequence));
  }
}

TEST(CudaEngineTest, RefusesTheFusedKernelWhereItCannotRun) {
  if (!SkipReason().empty()) GTEST_SKIP() << SkipReason();
  HeadInfo head;
  head.vocab_size = head.vocab_rows = head.hidden_size = 64;
  head.dtype = Dtype::kF32;
  EngineOptions options;
  options.kernel = GpuKernel::kFused;

  const auto plan = PlanCudaEngine(head, options, "");

  EXPECT_EQ(plan.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(plan.status().message()), ::testing::HasSubstr("use auto or chunked"));
}

TEST(CudaEngineTest, ReportsTheProgressOfReadingTheWeight) {
  if (!SkipReason().empty()) GTEST_SKIP() << SkipReason();
  const auto head = MakeRandomHead({.vocab_size = 9'000, .hidden_size = 1'024});
  EngineOptions options;
  std::vector<int64_t> done;
  int64_t total = 0;
  options.progress = [&](int64_t done_bytes, int64_t total_bytes) {
    done.push_back(done_bytes);
    total = total_bytes;
  };

  ASSERT_TRUE(CreateGpuEngine(*head, options).ok());

  EXPECT_EQ(total, int64_t{9'000} * 1'024 * 2);
  ASSERT_GE(done.size(), 2U);
  EXPECT_LT(done.front(), total);
  EXPECT_EQ(done.back(), total);
}

}  // namespace
}  // namespace logprobd::testing
