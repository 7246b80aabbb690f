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

constexpr double kGradientPerLog2Scale = 0.75;
constexpr double kLog2Factor = 1.4426950408889634 * 1.000001;
constexpr double kTemperature = 0.7;
constexpr int64_t kFirstId = 1'920;  // of the shard
constexpr int64_t kShardColumns = 500;
constexpr int64_t kIgnoreIndex = -100;
constexpr int32_t kPoison = -77;

/// Upstream gradients and scores of all rows, and what was kept of those that are computed.
struct RowsCase {
  std::vector<float> d_logprob;
  std::vector<float> d_entropy;
  std::vector<float> d_lse;
  std::vector<float> d_mean_logit;
  std::vector<double> exact_lse;
  std::vector<float> entropy;
  std::vector<double> temperatures;
  std::vector<int64_t> targets;
  std::vector<int64_t> row_indices;  ///< Of the rows that are computed, among all.
  std::vector<int64_t> cached_rows;  ///< The last computed row's first.
  std::vector<float> target_logits;  ///< Of kept rows, as the next.
  std::vector<uint64_t> max_keys;

  size_t size() const { return row_indices.size(); }
};

/// Every second of twice as many rows is computed.
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
    c.temperatures.push_back(0.25 * static_cast<double>(1 + row % 8));
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

/// What of that which may be left out is given.
struct Ask {
  bool upstream = true;
  bool kept = true;
  bool kept_largest = true;
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
        places_(c.row_indices),
        cached_rows_(c.cached_rows),
        target_logits_(c.target_logits),
        max_keys_(c.max_keys),
        rows_(Poisoned(c.size() + 1)) {}

  RowGradientsParams Params(const Ask& ask = {}) const {
    RowGradientsParams params;
    params.num_rows = static_cast<int64_t>(num_rows_);
    params.source.row_indices = places_.data();
    params.source.targets = targets_.data();
    if (ask.temperatures) params.source.temperatures = temperatures_.data();
    params.source.temperature = kTemperature;
    params.source.log2_factor = kLog2Factor;
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
    if (ask.kept) {
      params.target_logits = target_logits_.data();
      if (ask.kept_largest) params.max_keys = max_keys_.data();
      if (ask.cached_rows) params.cached_rows = cached_rows_.data();
    }
    params.rows = rows_.data();
    return params;
  }

  /// The rows, and one behind them that is not to be written; waits.
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
  DeviceArray<double> temperatures_;
  DeviceArray<int64_t> targets_;
  DeviceArray<int64_t> places_;
  DeviceArray<int64_t> cached_rows_;
  DeviceArray<float> target_logits_;
  DeviceArray<uint64_t> max_keys_;
  DeviceArray<RowGradient> rows_;
};

/// The host's constants of a computed row, but for its largest logit.
RowGradient HostRow(const RowsCase& c, size_t row, const Ask& ask = {}) {
  const auto place = static_cast<size_t>(c.row_indices[row]);
  const double temperature = ask.temperatures ? c.temperatures[place] : kTemperature;
  const auto log2_scale = static_cast<float>(kLog2Factor / temperature);
  testing::ScoreGradients d;
  if (ask.upstream) {
    d = {.lse = c.d_lse[place],
         .logprob = c.d_logprob[place],
         .entropy = c.d_entropy[place],
         .mean_logit = c.d_mean_logit[place]};
  }
  RowGradient host = RowGradientOf(testing::UpstreamOf(d), c.exact_lse[place],
                                   static_cast<double>(c.entropy[place]), log2_scale,
                                   static_cast<double>(log2_scale) * kGradientPerLog2Scale);
  const int64_t column = c.targets[place] - kFirstId;
  host.target_column = column >= 0 && column < kShardColumns ? static_cast<int32_t>(column) : -1;
  return host;
}

/// The exact lse comes as two floats, and 2^x in double may differ by its last place.
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

TEST_F(RowGradientsTest, AreThoseOfTheHostAtEveryCountOfRows) {
  for (const size_t num_rows : {1, 127, 128, 129, 1'000}) {
    const RowsCase c = MakeRows(num_rows);

    const std::vector<RowGradient> rows = RowGradientsRun(c).Run();

    for (size_t i = 0; i < num_rows; ++i) ExpectHostRow(rows[i], HostRow(c, i));
    EXPECT_EQ(rows[num_rows].target_column, kPoison);
  }
}

TEST_F(RowGradientsTest, UpstreamGradientsThatAreNotThereAreZero) {
  const RowsCase c = MakeRows(10);
  const Ask ask = {.upstream = false};

  const std::vector<RowGradient> rows = RowGradientsRun(c).Run(ask);

  for (size_t i = 0; i < c.size(); ++i) {
    ExpectHostRow(rows[i], HostRow(c, i, ask));
    EXPECT_EQ(rows[i].free, 0.0F);
    EXPECT_EQ(rows[i].target, 0.0F);
  }
}

TEST_F(RowGradientsTest, OneUpstreamGradientAndOneTemperatureMayServeAllRows) {
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

TEST_F(RowGradientsTest, TargetAndLargestLogitAreTakenFromTheirKeptPlaces) {
  const RowsCase c = MakeRows(300);
  const RowGradientsRun run(c);
  for (const bool cached_rows : {false, true}) {
    const std::vector<RowGradient> rows = run.Run({.cached_rows = cached_rows});

    for (size_t i = 0; i < c.size(); ++i) {
      const size_t kept = cached_rows ? static_cast<size_t>(c.cached_rows[i]) : i;
      const LogitEntry largest = LogitEntryOf(c.max_keys[kept]);
      EXPECT_EQ(rows[i].max_column, largest.id);
      EXPECT_EQ(rows[i].max_exponent,
                std::fma(largest.logit, rows[i].log2_scale, -rows[i].log2_sum));
      EXPECT_EQ(rows[i].target_exponent,
                std::fma(c.target_logits[kept], rows[i].log2_scale, -rows[i].log2_sum));
    }
  }
}

TEST_F(RowGradientsTest, WithoutKeptLogitsThereIsNoLargest) {
  const RowsCase c = MakeRows(3);

  const std::vector<RowGradient> rows = RowGradientsRun(c).Run({.kept = false});

  for (size_t i = 0; i < c.size(); ++i) EXPECT_EQ(rows[i].max_column, -1);
}

TEST_F(RowGradientsTest, TheTargetIsTakenThoughNoLargestLogitWasKept) {
  const RowsCase c = MakeRows(3);
  const RowGradientsRun run(c);
  const std::vector<RowGradient> both = run.Run();

  const std::vector<RowGradient> rows = run.Run({.kept_largest = false});

  for (size_t i = 0; i < c.size(); ++i) {
    EXPECT_EQ(rows[i].max_column, -1);
    EXPECT_EQ(rows[i].target_exponent, both[i].target_exponent);
  }
}

// Its scores are zeros, not those of its logits, which may be anything: all -inf, or far above 0.
TEST_F(RowGradientsTest, AnIgnoredRowHasNoGradientWhateverItsLogits) {
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
  for (const float kept_exponent : {-1e5F, 0.0F, 1e5F}) {
    EXPECT_EQ(std::exp2(kept_exponent - row.log2_sum), 0.0F);
  }
  ExpectHostRow(rows[0], HostRow(c, 0));
  ExpectHostRow(rows[2], HostRow(c, 2));
}

TEST_F(RowGradientsTest, ARowThatIsNotFiniteStaysAlone) {
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
