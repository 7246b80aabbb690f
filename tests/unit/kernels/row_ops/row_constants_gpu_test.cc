#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/common/logit_key.h"
#include "kernels/common/row_gradient.h"
#include "kernels/row_ops/row_constants.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/chunked/device_array.h"
#include "tests/unit/kernels/common/gradient_truth.h"

namespace logprobd::kernels {
namespace {

using logprobd::testing::DeviceArray;

constexpr double kCorrection = 1.000001;

class RowOperandsTest : public testing::GpuTest {};

TEST_F(RowOperandsTest, ComputesTheScaleAndTheTargetColumnOfEachRow) {
  const std::vector<float> temperature_values = {1.0F, 0.7F, 2.0F, 1e-3F, 0.1F};
  const DeviceArray<float> temperatures(temperature_values);
  const DeviceArray<int64_t> targets(std::vector<int64_t>{99, 100, 149, 150, -100});
  const std::vector<int64_t> row_index_values = {4, 2, 0, 3, 1};
  const DeviceArray<int64_t> row_indices(row_index_values);
  const DeviceArray<float> log2_scales(std::vector<float>(5, -1.0F));
  const DeviceArray<int32_t> columns(std::vector<int32_t>(5, -7));
  const DeviceArray<float> target_logits(std::vector<float>(5, 3.0F));
  const DeviceArray<uint64_t> max_keys(std::vector<uint64_t>(5, 9));
  RowOperandsParams params;
  params.num_rows = 5;
  params.source = {
      row_indices.data(), targets.data(), temperatures.data(), 1.0F, kCorrection, 100, 50};
  params.log2_scales = log2_scales.data();
  params.target_columns = columns.data();
  params.target_logits = target_logits.data();
  params.max_keys = max_keys.data();

  ASSERT_EQ(LaunchRowOperands(params, nullptr), cudaSuccess);

  const std::vector<float> scales = log2_scales.Read();
  for (size_t i = 0; i < scales.size(); ++i) {
    const float temperature = temperature_values[static_cast<size_t>(row_index_values[i])];
    EXPECT_EQ(scales[i], CorrectedLog2Scale(temperature, kCorrection)) << i;
  }
  EXPECT_EQ(columns.Read(), (std::vector<int32_t>{-1, 49, -1, -1, 0}));
  EXPECT_EQ(target_logits.Read(), std::vector<float>(5, 0.0F));
  EXPECT_EQ(max_keys.Read(), std::vector<uint64_t>(5, 0));
}

TEST_F(RowOperandsTest, AppliesOneTemperatureToAllRowsWithoutRowIndices) {
  const DeviceArray<int64_t> targets(std::vector<int64_t>(300, 7));
  const DeviceArray<float> log2_scales(std::vector<float>(300));
  const DeviceArray<int32_t> columns(std::vector<int32_t>(300));
  const DeviceArray<float> target_logits(std::vector<float>(300));
  RowOperandsParams params;
  params.num_rows = 300;
  params.source = {nullptr, targets.data(), nullptr, 0.5F, 1.0, 0, 10};
  params.log2_scales = log2_scales.data();
  params.target_columns = columns.data();
  params.target_logits = target_logits.data();

  ASSERT_EQ(LaunchRowOperands(params, nullptr), cudaSuccess);

  EXPECT_EQ(log2_scales.Read(), std::vector<float>(300, CorrectedLog2Scale(0.5F, 1.0)));
  EXPECT_EQ(columns.Read(), std::vector<int32_t>(300, 7));
}

TEST_F(RowOperandsTest, RefusesBrokenBoundsAndDoesNothingForNoRows) {
  RowOperandsParams params;
  EXPECT_EQ(LaunchRowOperands(params, nullptr), cudaSuccess);
  params.num_rows = 1;
  EXPECT_EQ(LaunchRowOperands(params, nullptr), cudaErrorInvalidValue);
}

constexpr double kGradientPerLog2Scale = 0.75;
constexpr float kTemperature = 0.7F;
constexpr int64_t kFirstId = 1'920;  // first id of the shard
constexpr int64_t kShardColumns = 500;
constexpr int64_t kIgnoreIndex = -100;
constexpr int32_t kPoison = -77;

/// Upstream gradients and scores of all rows, and the cached values of the computed rows.
struct RowsCase {
  std::vector<float> d_logprob;
  std::vector<float> d_entropy;
  std::vector<float> d_lse;
  std::vector<float> d_mean_logit;
  std::vector<double> exact_lse;
  std::vector<float> entropy;
  std::vector<float> temperatures;
  std::vector<int64_t> targets;
  std::vector<int64_t> row_indices;  ///< [computed rows]: index among all rows.
  std::vector<int64_t> cached_rows;  ///< [computed rows]: index in the cache, in reverse order.
  std::vector<float> target_logits;  ///< [cached rows]
  std::vector<uint64_t> max_keys;    ///< [cached rows]

  size_t size() const { return row_indices.size(); }
};

/// Makes 2 * num_rows rows, of which every second one is computed.
RowsCase MakeRows(size_t num_rows) {
  std::mt19937 random(static_cast<uint32_t>(num_rows));
  std::normal_distribution<float> normal;
  RowsCase c;
  for (size_t row = 0; row < 2 * num_rows; ++row) {
    c.d_logprob.push_back(normal(random));
    c.d_entropy.push_back(normal(random));
    c.d_lse.push_back(normal(random));
    c.d_mean_logit.push_back(normal(random));
    c.exact_lse.push_back((row % 3 == 0 ? 7e4 : 12.0) * static_cast<double>(normal(random)));
    c.entropy.push_back(std::fabs(normal(random)));
    c.temperatures.push_back(0.25F * static_cast<float>(1 + row % 8));
    c.targets.push_back(kFirstId - 3 + static_cast<int64_t>(row * 97) % (kShardColumns + 6));
  }
  for (size_t row = 0; row < num_rows; ++row) {
    c.row_indices.push_back(static_cast<int64_t>(2 * row + 1));
    c.cached_rows.push_back(static_cast<int64_t>(num_rows - 1 - row));
    c.target_logits.push_back(normal(random));
    c.max_keys.push_back(LogitKey(3 + normal(random), static_cast<int32_t>(row * 31)));
  }
  return c;
}

/// Optional inputs that are passed to the kernel.
struct Ask {
  bool upstream = true;
  bool cached = true;
  bool cached_max = true;
  bool cached_rows = true;
  bool temperatures = true;
};

std::vector<float> Rounded(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

std::vector<float> Rests(const std::vector<double>& values) {
  std::vector<float> rests;
  for (const double value : values) {
    rests.push_back(static_cast<float>(value - static_cast<double>(static_cast<float>(value))));
  }
  return rests;
}

class RowGradientsRun {
 public:
  explicit RowGradientsRun(const RowsCase& c)
      : num_rows_(c.size()),
        d_logprob_(c.d_logprob),
        d_entropy_(c.d_entropy),
        d_lse_(c.d_lse),
        d_mean_logit_(c.d_mean_logit),
        lse_(Rounded(c.exact_lse)),
        lse_rest_(Rests(c.exact_lse)),
        entropy_(c.entropy),
        temperatures_(c.temperatures),
        targets_(c.targets),
        row_indices_(c.row_indices),
        cached_rows_(c.cached_rows),
        target_logits_(c.target_logits),
        max_keys_(c.max_keys),
        rows_(Poisoned(c.size() + 1)) {}

  RowGradientsParams Params(const Ask& ask = {}) const {
    RowGradientsParams params;
    params.num_rows = static_cast<int64_t>(num_rows_);
    params.source.row_indices = row_indices_.data();
    params.source.targets = targets_.data();
    if (ask.temperatures) params.source.temperatures = temperatures_.data();
    params.source.temperature = kTemperature;
    params.source.correction = kCorrection;
    params.source.first_id = kFirstId;
    params.source.num_columns = kShardColumns;
    params.ignore_index = kIgnoreIndex;
    if (ask.upstream) {
      params.d_logprob.values = d_logprob_.data();
      params.d_entropy.values = d_entropy_.data();
      params.d_lse.values = d_lse_.data();
      params.d_mean_logit.values = d_mean_logit_.data();
      params.entropy = entropy_.data();
    }
    params.lse = lse_.data();
    params.lse_rest = lse_rest_.data();
    params.gradient_per_log2_scale = kGradientPerLog2Scale;
    if (ask.cached) {
      params.target_logits = target_logits_.data();
      if (ask.cached_max) params.max_keys = max_keys_.data();
      if (ask.cached_rows) params.cached_rows = cached_rows_.data();
    }
    params.rows = rows_.data();
    return params;
  }

  /// Launches the kernel, waits, and returns the rows and one more row, which must not be written.
  std::vector<RowGradient> Run(const RowGradientsParams& params) const {
    EXPECT_EQ(LaunchRowGradients(params, nullptr), cudaSuccess);
    return rows_.Read();
  }
  std::vector<RowGradient> Run(const Ask& ask = {}) const { return Run(Params(ask)); }

 private:
  static std::vector<RowGradient> Poisoned(size_t count) {
    RowGradient poison{};
    poison.target_column = kPoison;
    return std::vector<RowGradient>(count, poison);
  }

  size_t num_rows_;
  DeviceArray<float> d_logprob_;
  DeviceArray<float> d_entropy_;
  DeviceArray<float> d_lse_;
  DeviceArray<float> d_mean_logit_;
  DeviceArray<float> lse_;
  DeviceArray<float> lse_rest_;
  DeviceArray<float> entropy_;
  DeviceArray<float> temperatures_;
  DeviceArray<int64_t> targets_;
  DeviceArray<int64_t> row_indices_;
  DeviceArray<int64_t> cached_rows_;
  DeviceArray<float> target_logits_;
  DeviceArray<uint64_t> max_keys_;
  DeviceArray<RowGradient> rows_;
};

/// Returns the constants of a computed row as the host computes them, without the largest logit.
RowGradient HostRow(const RowsCase& c, size_t row, const Ask& ask = {}) {
  const auto index = static_cast<size_t>(c.row_indices[row]);
  const float log2_scale =
      CorrectedLog2Scale(ask.temperatures ? c.temperatures[index] : kTemperature, kCorrection);
  testing::ScoreGradients d;
  if (ask.upstream) {
    d = {.lse = c.d_lse[index],
         .logprob = c.d_logprob[index],
         .entropy = c.d_entropy[index],
         .mean_logit = c.d_mean_logit[index]};
  }
  RowGradient host = RowGradientOf(testing::UpstreamOf(d), c.exact_lse[index],
                                   static_cast<double>(c.entropy[index]), log2_scale,
                                   static_cast<double>(log2_scale) * kGradientPerLog2Scale);
  const int64_t column = c.targets[index] - kFirstId;
  host.target_column = column >= 0 && column < kShardColumns ? static_cast<int32_t>(column) : -1;
  return host;
}

/// Compares with a tolerance where the device may differ: it gets the exact lse as two floats, and
/// its 2^x in double may differ in the last place.
void ExpectHostRow(const RowGradient& row, const RowGradient& host) {
  EXPECT_EQ(row.log2_scale, host.log2_scale);
  EXPECT_EQ(row.log2_sum, host.log2_sum);
  EXPECT_FLOAT_EQ(row.free, host.free);
  EXPECT_FLOAT_EQ(row.weighted, host.weighted);
  EXPECT_EQ(row.target, host.target);
  EXPECT_EQ(row.mean, host.mean);
  EXPECT_EQ(row.target_column, host.target_column);
}

class RowGradientsTest : public testing::GpuTest {};

TEST_F(RowGradientsTest, MatchTheHostForAnyNumberOfRows) {
  for (const size_t num_rows : {1, 127, 128, 129, 1'000}) {
    const RowsCase c = MakeRows(num_rows);

    const std::vector<RowGradient> rows = RowGradientsRun(c).Run();

    for (size_t i = 0; i < num_rows; ++i) ExpectHostRow(rows[i], HostRow(c, i));
    EXPECT_EQ(rows[num_rows].target_column, kPoison);
  }
}

TEST_F(RowGradientsTest, MissingUpstreamGradientsCountAsZero) {
  const RowsCase c = MakeRows(10);
  const Ask ask = {.upstream = false};

  const std::vector<RowGradient> rows = RowGradientsRun(c).Run(ask);

  for (size_t i = 0; i < c.size(); ++i) {
    ExpectHostRow(rows[i], HostRow(c, i, ask));
    EXPECT_EQ(rows[i].free, 0.0F);
    EXPECT_EQ(rows[i].target, 0.0F);
  }
}

TEST_F(RowGradientsTest, BroadcastsOneUpstreamGradientAndOneTemperature) {
  RowsCase c = MakeRows(10);
  const RowGradientsRun run(c);
  RowGradientsParams params = run.Params({.temperatures = false});
  params.d_logprob.stride = 0;
  std::fill(c.d_logprob.begin(), c.d_logprob.end(), c.d_logprob.front());

  const std::vector<RowGradient> rows = run.Run(params);

  for (size_t i = 0; i < c.size(); ++i) {
    ExpectHostRow(rows[i], HostRow(c, i, {.temperatures = false}));
  }
}

TEST_F(RowGradientsTest, TargetAndLargestLogitComeFromTheirCachedRows) {
  const RowsCase c = MakeRows(300);
  const RowGradientsRun run(c);
  for (const bool cached_rows : {false, true}) {
    const std::vector<RowGradient> rows = run.Run({.cached_rows = cached_rows});

    for (size_t i = 0; i < c.size(); ++i) {
      const size_t cached = cached_rows ? static_cast<size_t>(c.cached_rows[i]) : i;
      const LogitEntry largest = LogitEntryOf(c.max_keys[cached]);
      EXPECT_EQ(rows[i].max_column, largest.id);
      EXPECT_EQ(rows[i].max_exponent,
                std::fma(largest.logit, rows[i].log2_scale, -rows[i].log2_sum));
      EXPECT_EQ(rows[i].target_exponent,
                std::fma(c.target_logits[cached], rows[i].log2_scale, -rows[i].log2_sum));
    }
  }
}

TEST_F(RowGradientsTest, WithoutCachedLogitsThereIsNoLargestLogit) {
  const RowsCase c = MakeRows(3);

  const std::vector<RowGradient> rows = RowGradientsRun(c).Run({.cached = false});

  for (size_t i = 0; i < c.size(); ++i) EXPECT_EQ(rows[i].max_column, -1);
}

TEST_F(RowGradientsTest, TheTargetIsUsedWithoutACachedLargestLogit) {
  const RowsCase c = MakeRows(3);
  const RowGradientsRun run(c);
  const std::vector<RowGradient> both = run.Run();

  const std::vector<RowGradient> rows = run.Run({.cached_max = false});

  for (size_t i = 0; i < c.size(); ++i) {
    EXPECT_EQ(rows[i].max_column, -1);
    EXPECT_EQ(rows[i].target_exponent, both[i].target_exponent);
  }
}

// The scores of an ignored row are zeros and do not match its logits, which may be all -inf or far
// above 0.
TEST_F(RowGradientsTest, AnIgnoredRowHasNoGradientForAnyLogits) {
  RowsCase c = MakeRows(3);
  const auto ignored = static_cast<size_t>(c.row_indices[1]);
  c.targets[ignored] = kIgnoreIndex;
  c.exact_lse[ignored] = 0;

  const std::vector<RowGradient> rows = RowGradientsRun(c).Run();

  const RowGradient& row = rows[1];
  EXPECT_EQ(row.target_column, -1);
  EXPECT_EQ(row.max_column, -1);
  for (const float logit : {-INFINITY, -1e9F, 0.0F, 1e9F}) {
    const float exponent = std::fmax(std::fma(logit, row.log2_scale, -row.log2_sum), -200.0F);
    EXPECT_EQ(exponent, -200.0F);
    EXPECT_EQ(std::exp2(exponent) * std::fma(row.weighted, exponent, row.free), 0.0F);
  }
  for (const float cached_exponent : {-1e5F, 0.0F, 1e5F}) {
    EXPECT_EQ(std::exp2(cached_exponent - row.log2_sum), 0.0F);
  }
  ExpectHostRow(rows[0], HostRow(c, 0));
  ExpectHostRow(rows[2], HostRow(c, 2));
}

TEST_F(RowGradientsTest, ANonfiniteRowDoesNotAffectOthers) {
  RowsCase c = MakeRows(5);
  c.exact_lse[static_cast<size_t>(c.row_indices[2])] = NAN;
  c.max_keys[static_cast<size_t>(c.cached_rows[2])] = 0;

  const std::vector<RowGradient> rows = RowGradientsRun(c).Run();

  EXPECT_TRUE(std::isnan(rows[2].log2_sum));
  EXPECT_EQ(rows[2].max_column, -1);
  for (const size_t i : {0, 1, 3, 4}) ExpectHostRow(rows[i], HostRow(c, i));
}

TEST_F(RowGradientsTest, RefusesBrokenBounds) {
  const RowsCase c = MakeRows(2);
  const RowGradientsRun run(c);
  const auto launch_with = [&](const auto& change) {
    RowGradientsParams params = run.Params();
    change(params);
    return LaunchRowGradients(params, nullptr);
  };
  using Params = RowGradientsParams;
  EXPECT_EQ(launch_with([](Params&) {}), cudaSuccess);
  EXPECT_EQ(LaunchRowGradients({}, nullptr), cudaSuccess);  // no rows
  EXPECT_EQ(launch_with([](Params& p) { p.num_rows = -1; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.num_rows = int64_t{1} << 31; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.source.targets = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.lse = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.lse_rest = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.entropy = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.target_logits = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.max_keys = nullptr; }), cudaSuccess);
  EXPECT_EQ(launch_with([](Params& p) { p.rows = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

}  // namespace
}  // namespace logprobd::kernels
