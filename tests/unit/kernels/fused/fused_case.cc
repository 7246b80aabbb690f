#include "tests/unit/kernels/fused/fused_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "gtest/gtest.h"
#include "kernels/chunked/convert_elements.h"
#include "kernels/combine/row_scores.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/launch.h"
#include "kernels/fused/listed_logits.h"
#include "kernels/fused/params.h"
#include "kernels/fused/top_k.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/fused/sixteen_bits.h"

namespace logprobd::testing {
namespace {

using kernels::Dtype;
using kernels::FusedTile;
using kernels::kTileColumns;

constexpr kernels::FusedChoice kMmaOf128 = {FusedTile::kMma128, kernels::FusedRaster::kAlongRows,
                                            1};

int64_t Pitch(int64_t hidden_size) { return (hidden_size + 7) / 8 * 8; }

/// Returns 16-bit elements [rows, pitch] that are zero after the end of a row. Additional rows are
/// NaN.
std::vector<uint16_t> Packed(const std::vector<float>& values, int64_t columns, Dtype dtype,
                             int64_t rows_of_room) {
  const int64_t pitch = Pitch(columns);
  const int64_t rows = static_cast<int64_t>(values.size()) / columns;
  std::vector<uint16_t> packed(static_cast<size_t>(std::max(rows, rows_of_room) * pitch));
  const uint16_t nan = ToBits(std::numeric_limits<float>::quiet_NaN(), dtype);
  std::fill(packed.begin() + rows * pitch, packed.end(), nan);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t k = 0; k < columns; ++k) {
      packed[static_cast<size_t>(row * pitch + k)] =
          ToBits(values[static_cast<size_t>(row * columns + k)], dtype);
    }
  }
  return packed;
}

std::vector<float> Scales(const std::vector<float>& temperatures) {
  std::vector<float> scales(temperatures.size());
  std::transform(temperatures.begin(), temperatures.end(), scales.begin(),
                 [](float temperature) { return kernels::Log2Scale(temperature); });
  return scales;
}

template <typename T>
std::vector<T> Poisoned(int64_t count, T value) {
  return std::vector<T>(static_cast<size_t>(std::max<int64_t>(count, 1)), value);
}

double Logit(const FusedCase& c, int64_t row, int64_t column) {
  return LogitOf(c, DotOf(c, row, column), column);
}

}  // namespace

double DotOf(const FusedCase& c, int64_t row, int64_t column) {
  double dot = 0;
  for (int64_t k = 0; k < c.hidden_size; ++k) {
    dot += static_cast<double>(c.hidden[static_cast<size_t>(row * c.hidden_size + k)]) *
           static_cast<double>(c.weight[static_cast<size_t>(column * c.hidden_size + k)]);
  }
  return dot;
}

double LogitOf(const FusedCase& c, double dot, int64_t column) {
  const double bias = c.bias.empty() ? 0.0 : c.bias[static_cast<size_t>(column)];
  const double z = dot * static_cast<double>(c.transform.scale) + bias;
  const double cap = c.transform.softcap;
  return cap > 0 ? cap * std::tanh(z / cap) : z;
}

void FusedTest::SetUp() {
  const kernels::FusedArch arch =
      HasGpu() ? kernels::FusedArchOfCurrentDevice() : kernels::FusedArch::kNone;
  if (arch == kernels::FusedArch::kNone) {
    GTEST_SKIP() << "no GPU of compute capability 8.0 or later";
  }
  if (kTestedArch == kernels::FusedArch::kSm90 && arch != kTestedArch) {
    GTEST_SKIP() << "no GPU of compute capability 9.0, or a build without its kernels";
  }
}

std::vector<FusedTile> TilesToTest() {
  std::vector<FusedTile> tiles = {FusedTile::kMma64, FusedTile::kMma128};
  if (kernels::FusedArchOfCurrentDevice() == kernels::FusedArch::kSm90) {
    tiles.insert(tiles.end(),
                 {FusedTile::k64PingPong, FusedTile::k64Pair, FusedTile::k128PingPong,
                  FusedTile::k128Columns, FusedTile::k256Cooperative, FusedTile::kSwapped80,
                  FusedTile::kSwapped96, FusedTile::kSwapped112});
  }
  return tiles;
}

std::vector<FusedTile> CachingTilesToTest() {
  std::vector<FusedTile> tiles = {FusedTile::kMma128};
  if (kernels::FusedArchOfCurrentDevice() == kernels::FusedArch::kSm90) {
    tiles.insert(tiles.end(), {FusedTile::k128PingPong, FusedTile::k128Columns,
                               FusedTile::kSwapped80, FusedTile::kSwapped96});
  }
  return tiles;
}

std::vector<FusedTile> GradientTilesToTest() {
  std::vector<FusedTile> tiles = CachingTilesToTest();
  if (kernels::FusedArchOfCurrentDevice() == kernels::FusedArch::kSm90) {
    tiles.push_back(FusedTile::k64Pair);
  }
  return tiles;
}

cudaError_t LaunchPartials(const kernels::FusedPartialsParams& params, cudaStream_t stream,
                           std::optional<kernels::FusedChoice> choice) {
  if (kTestedArch == kernels::FusedArch::kSm80 && !choice.has_value()) {
    choice =
        params.exponentials.values == nullptr ? kernels::ChooseMma(params.num_rows) : kMmaOf128;
  }
  return choice.has_value() ? kernels::LaunchFusedPartialsAs(params, *choice, stream)
                            : kernels::LaunchFusedPartials(params, stream);
}

cudaError_t LaunchGradient(const kernels::FusedGradientParams& params, cudaStream_t stream,
                           std::optional<kernels::FusedChoice> choice) {
  if (kTestedArch == kernels::FusedArch::kSm80 && !choice.has_value()) choice = kMmaOf128;
  return choice.has_value() ? kernels::LaunchFusedGradientAs(params, *choice, stream)
                            : kernels::LaunchFusedGradient(params, stream);
}

cudaError_t LaunchTopK(const kernels::FusedTopKParams& params, cudaStream_t stream) {
  return kernels::LaunchFusedTopKAs(params, kTestedArch, stream);
}

cudaError_t LaunchListed(const kernels::ListedLogitsParams& params, cudaStream_t stream) {
  return kernels::LaunchListedLogits(params, stream);
}

FusedCase MakeFusedCase(const FusedCaseSizes& sizes) {
  FusedCase c;
  c.dtype = sizes.dtype;
  c.is_f32 = sizes.is_f32;
  c.num_rows = sizes.rows;
  c.hidden_size = sizes.hidden;
  c.vocab_size = sizes.vocab;
  std::mt19937 random(static_cast<uint32_t>(sizes.rows * 7 + sizes.hidden * 13 + sizes.vocab));
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < sizes.rows * sizes.hidden; ++i) {
    const float value = normal(random);
    c.hidden.push_back(sizes.is_f32 ? value : FromBits(ToBits(value, c.dtype), c.dtype));
  }
  const auto weight_stddev =
      static_cast<float>(sizes.logit_stddev / std::sqrt(static_cast<double>(sizes.hidden)));
  for (int64_t i = 0; i < sizes.vocab * sizes.hidden; ++i) {
    c.weight.push_back(FromBits(ToBits(normal(random) * weight_stddev, c.dtype), c.dtype));
  }
  c.temperatures.assign(static_cast<size_t>(sizes.rows), 1.0F);
  std::vector<int64_t> edges = {0, sizes.vocab - 1};
  for (int64_t edge = kTileColumns; edge < sizes.vocab; edge += kTileColumns) {
    edges.push_back(edge - 1);
    edges.push_back(edge);
  }
  for (int64_t row = 0; row < sizes.rows; ++row) {
    const auto index = static_cast<size_t>(row);
    c.targets.push_back(
        static_cast<int32_t>(index < edges.size() ? edges[index] : row * 97 % sizes.vocab));
  }
  return c;
}

FusedCase SelectRows(const FusedCase& all, const std::vector<int64_t>& rows) {
  FusedCase chosen = all;
  chosen.num_rows = static_cast<int64_t>(rows.size());
  chosen.hidden.clear();
  chosen.temperatures.clear();
  chosen.entropy_temperatures.clear();
  chosen.targets.clear();
  for (const int64_t row : rows) {
    const auto begin = all.hidden.begin() + row * all.hidden_size;
    chosen.hidden.insert(chosen.hidden.end(), begin, begin + all.hidden_size);
    const auto index = static_cast<size_t>(row);
    chosen.temperatures.push_back(all.temperatures[index]);
    if (!all.entropy_temperatures.empty()) {
      chosen.entropy_temperatures.push_back(all.entropy_temperatures[index]);
    }
    chosen.targets.push_back(all.targets[index]);
  }
  return chosen;
}

struct FusedRun::Memory {
  explicit Memory(const FusedCase& c, int64_t rows_of_room)
      : hidden(c.is_f32 ? std::vector<uint16_t>(1)
                        : Packed(c.hidden, c.hidden_size, c.dtype, rows_of_room)),
        weight(Packed(c.weight, c.hidden_size, c.dtype,
                      kernels::NumTiles(c.vocab_size) * kTileColumns)),
        scales(Scales(c.temperatures)),
        entropy_scales(
            Scales(c.entropy_temperatures.empty() ? c.temperatures : c.entropy_temperatures)),
        row_count(std::vector<int64_t>(1)),
        targets(c.targets.empty() ? std::vector<int32_t>(1) : c.targets),
        sums(Poisoned<kernels::TileSums>(c.num_rows * kernels::NumTiles(c.vocab_size),
                                         {77, 7, 7, 7})),
        entropy_sums(Poisoned<kernels::TileSums>(c.num_rows * kernels::NumTiles(c.vocab_size),
                                                 {77, 7, 7, 7})),
        target_logits(Poisoned(c.num_rows, kPoison)),
        max_keys(Poisoned<uint64_t>(c.num_rows, 0)),
        min_keys(Poisoned<uint32_t>(c.num_rows, 0)),
        normalizers(Poisoned<kernels::RowNormalizer>(c.num_rows, {})),
        nonfinite(Poisoned<uint8_t>(c.num_rows, 77)),
        floats(Poisoned(c.num_rows * 7, kPoison)),
        argmax_id(Poisoned<int32_t>(c.num_rows, -77)) {
    std::vector<float> padded = c.bias;
    padded.resize(static_cast<size_t>(kernels::NumTiles(c.vocab_size) * kTileColumns));
    bias.emplace(padded);
    if (!c.is_f32) return;
    const int64_t pitch = Pitch(c.hidden_size);
    std::vector<float> rows(static_cast<size_t>(c.num_rows * pitch));
    for (int64_t row = 0; row < c.num_rows; ++row) {
      std::copy_n(c.hidden.begin() + row * c.hidden_size, c.hidden_size,
                  rows.begin() + row * pitch);
    }
    source.emplace(rows);
    splits.emplace(
        Poisoned<uint16_t>(c.num_rows * c.num_splits * kernels::SplitPitch(c.hidden_size), 0x7FC0));
    EXPECT_EQ(kernels::LaunchBf16Split({.dtype = Dtype::kF32,
                                        .in = source->data(),
                                        .in_stride = pitch,
                                        .num_rows = c.num_rows,
                                        .hidden_size = c.hidden_size,
                                        .num_splits = c.num_splits,
                                        .out = splits->data()},
                                       nullptr),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  DeviceArray<uint16_t> hidden;
  DeviceArray<uint16_t> weight;
  DeviceArray<float> scales;
  DeviceArray<float> entropy_scales;
  DeviceArray<int64_t> row_count;
  DeviceArray<int32_t> targets;
  DeviceArray<kernels::TileSums> sums;
  DeviceArray<kernels::TileSums> entropy_sums;
  DeviceArray<float> target_logits;
  DeviceArray<uint64_t> max_keys;
  DeviceArray<uint32_t> min_keys;
  DeviceArray<kernels::RowNormalizer> normalizers;
  DeviceArray<uint8_t> nonfinite;
  DeviceArray<float> floats;  ///< [7, num_rows]
  DeviceArray<int32_t> argmax_id;
  std::optional<DeviceArray<float>> bias;
  std::optional<DeviceArray<float>> source;
  std::optional<DeviceArray<uint16_t>> splits;
};

FusedRun::FusedRun(const FusedCase& inputs, int64_t rows_of_room)
    : inputs_(inputs),
      rows_of_room_(inputs.is_f32 ? 0 : rows_of_room),
      memory_(std::make_unique<Memory>(inputs, rows_of_room)) {
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
}

FusedRun::~FusedRun() { EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess); }

kernels::FusedPartialsParams FusedRun::Partials(const ShardTiles& tiles) const {
  const FusedCase& c = inputs_;
  const Memory& m = *memory_;
  kernels::FusedPartialsParams params;
  params.dtype = c.dtype;
  params.num_rows = c.num_rows;
  params.readable_rows = std::max(c.num_rows, rows_of_room_);
  params.hidden_size = c.hidden_size;
  params.hidden = m.hidden.data();
  params.hidden_stride = Pitch(c.hidden_size);
  if (c.is_f32) {
    params.num_splits = c.num_splits;
    params.hidden = m.splits->data();
    params.hidden_stride = c.num_splits * kernels::SplitPitch(c.hidden_size);
  }
  params.weight_stride = Pitch(c.hidden_size);
  params.weight = m.weight.data() + tiles.begin * kTileColumns * params.weight_stride;
  params.vocab_size = c.vocab_size;
  params.tile_begin = tiles.begin;
  params.tile_end = std::min(tiles.end, kernels::NumTiles(c.vocab_size));
  params.transform = c.transform;
  params.bias = c.bias.empty() ? nullptr : m.bias->data();
  params.log2_scales = m.scales.data();
  params.targets = m.targets.data();
  params.layout = kernels::PartialLayoutOf(c.num_rows, params.tile_end - params.tile_begin);
  params.sums = m.sums.data();
  params.target_logits = m.target_logits.data();
  if (!c.entropy_temperatures.empty()) {
    params.entropy_log2_scales = m.entropy_scales.data();
    params.entropy_sums = m.entropy_sums.data();
  }
  return params;
}

std::vector<uint64_t> FusedRun::TopK(int32_t top_k, int64_t workspace_bytes,
                                     const ShardTiles& tiles) {
  kernels::FusedPartialsParams params = Partials(tiles);
  const int64_t num_tiles = params.tile_end - params.tile_begin;
  const DeviceArray<float> tile_max(Poisoned(inputs_.num_rows * num_tiles, kPoison));
  const DeviceArray<uint64_t> keys(Poisoned<uint64_t>(inputs_.num_rows * top_k, ~uint64_t{0}));
  const DeviceArray<uint8_t> workspace(Poisoned<uint8_t>(workspace_bytes, 0xA5));
  params.tile_max = tile_max.data();
  EXPECT_EQ(LaunchPartials(params, stream_), cudaSuccess);
  EXPECT_EQ(LaunchTopK({.partials = params,
                        .top_k = top_k,
                        .keys = keys.data(),
                        .workspace = reinterpret_cast<std::byte*>(workspace.data()),
                        .workspace_bytes = workspace_bytes},
                       stream_),
            cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  return keys.Read();
}

ShardPartials FusedRun::PartialsOf(const ShardTiles& tiles,
                                   const kernels::CachedExponentials& exponentials,
                                   const std::optional<kernels::FusedChoice>& choice) {
  kernels::FusedPartialsParams params = Partials(tiles);
  params.exponentials = exponentials;
  const int64_t num_rows = inputs_.num_rows;
  const int64_t num_partials = num_rows * (params.tile_end - params.tile_begin);
  const kernels::TileSums poison = {77, 7, 7, 7};
  const DeviceArray<kernels::TileSums> sums(Poisoned(num_partials, poison));
  const DeviceArray<kernels::TileSums> entropy_sums(Poisoned(num_partials, poison));
  const DeviceArray<float> tile_max(Poisoned(num_partials, kPoison));
  const DeviceArray<float> target_logits(Poisoned(num_rows, kPoison));
  const DeviceArray<uint64_t> max_keys(Poisoned<uint64_t>(num_rows, 0));
  const DeviceArray<uint32_t> min_keys(Poisoned<uint32_t>(num_rows, 0));
  params.sums = sums.data();
  if (params.entropy_sums != nullptr) params.entropy_sums = entropy_sums.data();
  params.wants_sum_squares = exponentials.values == nullptr;
  params.tile_max = tile_max.data();
  params.target_logits = target_logits.data();
  params.max_keys = max_keys.data();
  params.min_keys = min_keys.data();
  EXPECT_EQ(LaunchPartials(params, stream_, choice), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  return {.layout = params.layout,
          .sums = sums.Read(),
          .entropy_sums = entropy_sums.Read(),
          .tile_max = tile_max.Read(),
          .target_logits = target_logits.Read(),
          .max_keys = max_keys.Read(),
          .min_keys = min_keys.Read()};
}

std::vector<float> FusedRun::ListedLogits(const Listed& listed) {
  const auto count = static_cast<int64_t>(listed.rows.size());
  const DeviceArray<int32_t> rows(listed.rows);
  const DeviceArray<int32_t> ids(listed.ids);
  const DeviceArray<float> logits(Poisoned(count, kPoison));
  EXPECT_EQ(LaunchListed({.partials = Partials(listed.tiles),
                          .rows = rows.data(),
                          .ids = ids.data(),
                          .row_begin = listed.row_begin,
                          .count = count,
                          .logits = logits.data()},
                         stream_),
            cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  return logits.Read();
}

std::vector<int32_t> FusedRun::RankCounts(const ShardTiles& tiles,
                                          std::optional<kernels::FusedChoice> choice) {
  const DeviceArray<int32_t> counts(Poisoned<int32_t>(inputs_.num_rows, 0));
  EXPECT_EQ(LaunchListed({.partials = Partials(),
                          .ids = memory_->targets.data(),
                          .count = inputs_.num_rows,
                          .logits = memory_->target_logits.data()},
                         stream_),
            cudaSuccess);
  kernels::FusedPartialsParams params = Partials(tiles);
  params.rank_counts = counts.data();
  EXPECT_EQ(LaunchPartials(params, stream_, choice), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  return counts.Read();
}

std::vector<float> FusedRun::TargetLogits() {
  EXPECT_EQ(LaunchPartials(Partials(), stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  return memory_->target_logits.Read();
}

void FusedRun::Enqueue(const FusedAsk& ask) {
  const FusedCase& c = inputs_;
  Memory& m = *memory_;
  const int64_t num_tiles = kernels::NumTiles(c.vocab_size);
  const auto rows = static_cast<size_t>(c.num_rows);
  // Poisons the outputs, because results of an earlier run could be mistaken for new ones.
  const size_t sums_bytes = rows * static_cast<size_t>(num_tiles) * sizeof(kernels::TileSums);
  ASSERT_EQ(cudaMemsetAsync(m.sums.data(), 0xA5, sums_bytes, stream_), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(m.entropy_sums.data(), 0xA5, sums_bytes, stream_), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(m.nonfinite.data(), 0xA5, rows, stream_), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(m.argmax_id.data(), 0xA5, rows * 4, stream_), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(m.floats.data(), 0xA5, rows * 7 * 4, stream_), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(m.max_keys.data(), 0, rows * sizeof(uint64_t), stream_), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(m.min_keys.data(), 0, rows * sizeof(uint32_t), stream_), cudaSuccess);
  kernels::FusedPartialsParams params = Partials();
  if (ask.everything) {
    params.wants_sum_squares = true;
    params.max_keys = m.max_keys.data();
    params.min_keys = m.min_keys.data();
  }
  if (ask.row_count.has_value()) {
    ASSERT_EQ(cudaMemcpyAsync(m.row_count.data(), &*ask.row_count, sizeof(int64_t),
                              cudaMemcpyHostToDevice, stream_),
              cudaSuccess);
    params.row_count = m.row_count.data();
  }
  ASSERT_EQ(LaunchPartials(params, stream_, ask.choice), cudaSuccess);
  kernels::RowScoresParams scores;
  scores.num_rows = c.num_rows;
  scores.num_tiles = num_tiles;
  scores.vocab_size = c.vocab_size;
  scores.layout = params.layout;
  scores.sums = params.sums;
  scores.entropy_sums = params.entropy_sums;
  scores.log2_scales = m.scales.data();
  scores.target_logits = m.target_logits.data();
  scores.normalizers = m.normalizers.data();
  scores.nonfinite = m.nonfinite.data();
  scores.logprob = m.floats.data();
  scores.entropy = m.floats.data() + c.num_rows;
  if (ask.everything) {
    scores.max_keys = m.max_keys.data();
    scores.min_keys = m.min_keys.data();
    scores.lse = m.floats.data() + 2 * c.num_rows;
    scores.argmax_logprob = m.floats.data() + 3 * c.num_rows;
    scores.max_logit = m.floats.data() + 4 * c.num_rows;
    scores.min_logit = m.floats.data() + 5 * c.num_rows;
    scores.sum_p_squared = m.floats.data() + 6 * c.num_rows;
    scores.argmax_id = m.argmax_id.data();
  }
  ASSERT_EQ(kernels::LaunchRowScores(scores, stream_), cudaSuccess);
}

FusedScores FusedRun::Read() const {
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  const std::vector<float> floats = memory_->floats.Read();
  const auto part = [&](int64_t index) {
    const auto begin = floats.begin() + index * inputs_.num_rows;
    return std::vector<float>(begin, begin + inputs_.num_rows);
  };
  return {.logprob = part(0),
          .entropy = part(1),
          .lse = part(2),
          .argmax_id = memory_->argmax_id.Read(),
          .argmax_logprob = part(3),
          .max_logit = part(4),
          .min_logit = part(5),
          .sum_p_squared = part(6),
          .nonfinite = memory_->nonfinite.Read()};
}

FusedScores RunFused(const FusedCase& inputs, const FusedAsk& ask) {
  FusedRun run(inputs);
  run.Enqueue(ask);
  return run.Read();
}

RowTruth TruthOf(const FusedCase& c, int64_t row) {
  const auto index = static_cast<size_t>(row);
  std::vector<double> z;
  for (int64_t column = 0; column < c.vocab_size; ++column) z.push_back(Logit(c, row, column));
  const auto [least, best] = std::minmax_element(z.begin(), z.end());
  const auto sums = [&](double temperature) {
    double sum = 0;
    double weighted = 0;
    double squares = 0;
    for (const double logit : z) {
      const double x = (logit - *best) / temperature;
      const double p = std::exp(x);
      sum += p;
      if (p > 0) weighted += x * p;
      squares += p * p;
    }
    return std::tuple(std::log(sum), weighted / sum, squares / (sum * sum));
  };
  const double temperature = c.temperatures[index];
  const auto [log_sum, mean, squares] = sums(temperature);
  RowTruth truth;
  truth.lse = log_sum + *best / temperature;
  truth.logprob = z[static_cast<size_t>(c.targets[index])] / temperature - truth.lse;
  truth.entropy = log_sum - mean;
  if (!c.entropy_temperatures.empty()) {
    const auto [other_log_sum, other_mean, unused] = sums(c.entropy_temperatures[index]);
    truth.entropy = other_log_sum - other_mean;
  }
  truth.argmax_id = static_cast<int32_t>(best - z.begin());
  truth.max_logit = *best;
  truth.min_logit = *least;
  truth.sum_p_squared = squares;
  return truth;
}

void ExpectNearTruth(const FusedCase& c, const FusedScores& scores, const Tolerance& tolerance) {
  const int64_t step = std::max<int64_t>(c.num_rows / 8, 1);
  for (int64_t i = 0; i < c.num_rows + step; i += step) {
    const int64_t row = std::min(i, c.num_rows - 1);
    SCOPED_TRACE(::testing::Message() << "row " << row << " of " << c.num_rows << ", hidden "
                                      << c.hidden_size << ", vocab " << c.vocab_size);
    const auto index = static_cast<size_t>(row);
    const RowTruth truth = TruthOf(c, row);
    ASSERT_NEAR(scores.logprob[index], truth.logprob, tolerance.logprob);
    ASSERT_LE(scores.logprob[index], 0.0F);
    ASSERT_NEAR(scores.entropy[index], truth.entropy, tolerance.entropy);
    ASSERT_GE(scores.entropy[index], 0.0F);
    const double relative = 4e-6 * std::max(1.0, std::abs(truth.max_logit));
    ASSERT_NEAR(scores.max_logit[index], truth.max_logit, relative + tolerance.logprob);
    ASSERT_NEAR(scores.min_logit[index], truth.min_logit,
                4e-6 * std::max(1.0, std::abs(truth.min_logit)) + tolerance.logprob);
    ASSERT_NEAR(scores.lse[index], truth.lse, tolerance.logprob + 4e-6 * std::abs(truth.lse));
    ASSERT_NEAR(scores.sum_p_squared[index], truth.sum_p_squared, tolerance.entropy);
    ASSERT_GE(scores.argmax_id[index], 0);
    ASSERT_LT(scores.argmax_id[index], c.vocab_size);
    // Another id may win if two logits differ by less than the error.
    const double chosen = Logit(c, row, scores.argmax_id[index]);
    ASSERT_NEAR(chosen, truth.max_logit, relative + tolerance.logprob);
    ASSERT_EQ(scores.nonfinite[index], 0);
  }
}

void ExpectSameBits(const FusedScores& a, const FusedScores& b, bool everything) {
  const auto same = [](const auto& x, const auto& y) {
    return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])) == 0;
  };
  EXPECT_TRUE(same(a.logprob, b.logprob));
  EXPECT_TRUE(same(a.entropy, b.entropy));
  EXPECT_TRUE(same(a.nonfinite, b.nonfinite));
  if (!everything) return;
  EXPECT_TRUE(same(a.lse, b.lse));
  EXPECT_TRUE(same(a.argmax_id, b.argmax_id));
  EXPECT_TRUE(same(a.argmax_logprob, b.argmax_logprob));
  EXPECT_TRUE(same(a.max_logit, b.max_logit));
  EXPECT_TRUE(same(a.min_logit, b.min_logit));
  EXPECT_TRUE(same(a.sum_p_squared, b.sum_p_squared));
}

}  // namespace logprobd::testing
