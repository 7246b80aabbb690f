#include "tests/unit/kernels/fused/gradient_case.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"
#include "tests/unit/kernels/fused/sixteen_bits.h"

namespace logprobd::testing {
namespace {

using kernels::kTileColumns;
using kernels::RowGradient;

/// Elements before the first row and after the last, which must not be written.
constexpr int64_t kGuard = 512;
/// Elements after the tiles of a row, which must not be written.
constexpr int64_t kMoreStride = 8;

GradientRowTruth RowTruthOf(const FusedCase& c, int64_t row) {
  std::vector<double> dots;
  std::vector<double> logits;
  std::vector<double> x;
  const float log2_scale = kernels::Log2Scale(c.temperatures[static_cast<size_t>(row)]);
  for (int64_t column = 0; column < c.vocab_size; ++column) {
    dots.push_back(DotOf(c, row, column));
    logits.push_back(LogitOf(c, dots.back(), column));
    x.push_back(logits.back() * static_cast<double>(log2_scale) * kernels::kLn2);
  }
  return {dots, logits, RowSoftmax(x)};
}

double GradientScale(const FusedCase& c, size_t row) {
  return static_cast<double>(c.transform.scale) / static_cast<double>(c.temperatures[row]);
}

/// Pads with NaN beyond the vocabulary, which must not affect results.
std::vector<float> PaddedToTiles(std::vector<float> values, int64_t num_tiles) {
  values.resize(static_cast<size_t>(num_tiles * kTileColumns),
                std::numeric_limits<float>::quiet_NaN());
  return values;
}

/// Returns a bound for the error of a logit before temperature that is computed in fp32 from a dot
/// product with the error `dot_error`.
double LogitError(const FusedCase& c, double dot, int64_t column, double dot_error) {
  if (dot_error == 0) return 0;
  constexpr double kRounding = 0x1p-23;
  const double bias =
      c.bias.empty() ? 0.0 : static_cast<double>(c.bias[static_cast<size_t>(column)]);
  const double scale = static_cast<double>(c.transform.scale);
  const double before_cap =
      std::fabs(scale) * dot_error + kRounding * std::fabs(scale * dot + bias);
  constexpr double kTanhError = 0x1p-21;
  const double cap = static_cast<double>(c.transform.softcap);
  return cap > 0 ? std::fmin(before_cap, cap) + kTanhError * cap : before_cap;
}

}  // namespace

int64_t GradientCase::num_tiles() const { return kernels::NumTiles(head.vocab_size); }

GradientCase MakeGradientCase(const FusedCaseSizes& sizes) {
  GradientCase c = {.head = MakeFusedCase(sizes), .upstream = {}, .mean_logit_weights = {}};
  for (int64_t row = 0; row < sizes.rows; ++row) {
    const auto i = static_cast<double>(row);
    c.upstream.push_back({.lse = 0.25 * std::fmod(i, 3),
                          .logprob = 0.5 * std::fmod(i, 4) - 1,
                          .entropy = 0.1 * std::fmod(i, 5)});
  }
  return c;
}

GradientCase SelectRows(const GradientCase& all, const std::vector<int64_t>& rows) {
  GradientCase chosen = all;
  chosen.head = SelectRows(all.head, rows);
  chosen.upstream.clear();
  for (const int64_t row : rows) chosen.upstream.push_back(all.upstream[static_cast<size_t>(row)]);
  return chosen;
}

std::vector<GradientRowTruth> TruthOf(const GradientCase& c) {
  std::vector<GradientRowTruth> truth;
  for (int64_t row = 0; row < c.head.num_rows; ++row) truth.push_back(RowTruthOf(c.head, row));
  return truth;
}

std::vector<RowGradient> ConstantsOf(const GradientCase& c,
                                     const std::vector<GradientRowTruth>& truth) {
  std::vector<RowGradient> rows;
  for (size_t row = 0; row < truth.size(); ++row) {
    rows.push_back(kernels::RowGradientOf(
        UpstreamOf(c.upstream[row]), truth[row].softmax.lse, truth[row].softmax.entropy,
        kernels::Log2Scale(c.head.temperatures[row]), GradientScale(c.head, row)));
    rows.back().target_column = c.head.targets[row];
  }
  return rows;
}

GradientRun::GradientRun(const GradientCase& c, int64_t rows_of_room)
    : case_(c),
      truth_(TruthOf(c)),
      constants_(ConstantsOf(c, truth_)),
      head_(c.head, rows_of_room),
      rows_(constants_),
      mean_logit_weights_(PaddedToTiles(c.mean_logit_weights, c.num_tiles())) {}

kernels::FusedGradientParams GradientRun::Params(const ShardTiles& tiles) const {
  kernels::FusedGradientParams params;
  params.head = head_.Partials(tiles);
  params.rows = rows_.data();
  if (!case_.mean_logit_weights.empty()) params.mean_logit_weights = mean_logit_weights_.data();
  return params;
}

std::vector<uint16_t> GradientRun::Run(const TileCuts& cuts, const FusedAsk& ask) const {
  const int64_t columns = case_.num_tiles() * kTileColumns;
  const int64_t stride = columns + kMoreStride;
  const int64_t num_rows = case_.head.num_rows;
  const DeviceArray<uint16_t> memory(
      std::vector<uint16_t>(static_cast<size_t>(num_rows * stride + 2 * kGuard), kGradientPoison));
  const DeviceArray<int64_t> row_count(std::vector<int64_t>{ask.row_count.value_or(0)});
  const TileCuts borders = cuts.empty() ? TileCuts{0, case_.num_tiles()} : cuts;
  for (size_t i = 0; i + 1 < borders.size(); ++i) {
    kernels::FusedGradientParams params = Params({borders[i], borders[i + 1]});
    params.gradients = memory.data() + kGuard + borders[i] * kTileColumns;
    params.gradient_stride = stride;
    if (ask.row_count.has_value()) params.head.row_count = row_count.data();
    EXPECT_EQ(LaunchGradient(params, stream(), ask.choice), cudaSuccess);
  }
  EXPECT_EQ(cudaStreamSynchronize(stream()), cudaSuccess);
  const std::vector<uint16_t> all = memory.Read();
  std::vector<uint16_t> gradients;
  int64_t num_stray = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(all.size()); ++i) {
    const int64_t place = i - kGuard;
    const uint16_t bits = all[static_cast<size_t>(i)];
    if (place >= 0 && place < num_rows * stride && place % stride < columns) {
      gradients.push_back(bits);
    } else if (bits != kGradientPoison) {
      ++num_stray;
    }
  }
  EXPECT_EQ(num_stray, 0) << "elements were written outside the gradients";
  return gradients;
}

void ExpectNearTruth(const GradientCase& c, const std::vector<GradientRowTruth>& truth,
                     const std::vector<uint16_t>& gradients) {
  const FusedCase& head = c.head;
  const int64_t columns = c.num_tiles() * kTileColumns;
  ASSERT_EQ(static_cast<int64_t>(gradients.size()), head.num_rows * columns);
  for (size_t row = 0; row < truth.size(); ++row) {
    SCOPED_TRACE(::testing::Message() << "row " << row << " of " << head.num_rows << ", hidden "
                                      << head.hidden_size << ", vocab " << head.vocab_size);
    const GradientRowTruth& t = truth[row];
    double largest = 1;
    for (const double dot : t.dots) largest = std::fmax(largest, std::fabs(dot));
    const double scale = GradientScale(head, row);
    const auto cap = static_cast<double>(head.transform.softcap);
    for (int64_t column = 0; column < columns; ++column) {
      const auto j = static_cast<size_t>(column);
      const double gradient = static_cast<double>(
          FromBits(gradients[row * static_cast<size_t>(columns) + j], head.dtype));
      if (column >= head.vocab_size) {
        ASSERT_EQ(gradient, 0) << "column " << column;
        continue;
      }
      const ColumnPart part = {.is_target = column == head.targets[row],
                               .weight = c.mean_logit_weights.empty()
                                             ? 0.0
                                             : static_cast<double>(c.mean_logit_weights[j])};
      const double logit_error = LogitError(head, t.dots[j], column, c.dot_error * largest);
      double slope = 1;
      double slope_error = 0;
      if (cap > 0) {
        const double share = t.logits[j] / cap;
        const double share_error = logit_error / cap + 0x1p-22;
        slope = 1 - share * share;
        slope_error = share_error * (2 * std::fabs(share) + share_error);
      }
      const double log_error = logit_error / static_cast<double>(head.temperatures[row]);
      const double exact = TextbookGradient(t.softmax, j, c.upstream[row], part);
      const double error = GradientError(t.softmax, j, c.upstream[row], part, log_error);
      const double wanted = scale * slope * exact;
      const double off = std::fabs(scale) * ((std::fabs(slope) + slope_error) * error +
                                             slope_error * std::fabs(exact));
      ASSERT_NEAR(gradient, wanted, off + HalfUlp(std::fabs(wanted) + off, head.dtype))
          << "column " << column << ", p " << t.softmax.p[j];
    }
  }
}

void ExpectTrueGradients(const GradientCase& c) {
  const GradientRun run(c);
  ExpectNearTruth(c, run.truth(), run.Run());
}

}  // namespace logprobd::testing
