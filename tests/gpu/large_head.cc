#include "tests/gpu/large_head.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "tests/support/in_memory_head.h"

namespace logprobd::testing {
namespace {

constexpr size_t kNumValues = 65'536;

uint64_t Mix(uint64_t x) {  // the finalizer of SplitMix64
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

double FromBf16(uint16_t bits) {
  return static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(bits) << 16));
}

std::vector<uint16_t> NormalTable(double stddev, uint64_t seed) {
  std::vector<float> values = NormalValues(static_cast<int64_t>(kNumValues), seed);
  for (float& value : values) value *= static_cast<float>(stddev);
  const std::vector<std::byte> bytes = EncodeFloats(values, Dtype::kBf16);
  std::vector<uint16_t> table(kNumValues);
  std::memcpy(table.data(), bytes.data(), bytes.size());
  return table;
}

/// Fills `out` with values of the table. One hash picks four consecutive elements.
void Fill(const std::vector<uint16_t>& table, uint64_t seed, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; i += 4) {
    uint64_t picks = Mix(seed + static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15ULL);
    for (int64_t j = i; j < std::min(i + 4, count); ++j, picks >>= 16) {
      out[j] = table[picks & 0xFFFF];
    }
  }
}

/// Computes the dot products of one column with all rows in double precision.
void DotAll(const std::vector<std::vector<double>>& rows, const std::vector<double>& weight,
            size_t column, std::vector<std::vector<double>>& logits) {
  for (size_t row = 0; row < rows.size(); ++row) {
    const double* const hidden = rows[row].data();
    double sums[4] = {0, 0, 0, 0};
    size_t i = 0;
    for (; i + 4 <= weight.size(); i += 4) {
      for (size_t lane = 0; lane < 4; ++lane) sums[lane] += hidden[i + lane] * weight[i + lane];
    }
    for (; i < weight.size(); ++i) sums[0] += hidden[i] * weight[i];
    logits[row][column] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
}

}  // namespace

LargeHead::LargeHead(int64_t vocab_size, int64_t hidden_size, double logit_stddev)
    : values_(NormalTable(logit_stddev / std::sqrt(static_cast<double>(hidden_size)), 11)) {
  info_.name = "large";
  info_.vocab_size = info_.vocab_rows = vocab_size;
  info_.hidden_size = hidden_size;
  info_.weight_bytes = vocab_size * hidden_size * 2;
}

absl::Status LargeHead::ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                                 int64_t row_pitch_bytes) const {
  for (int64_t row = row_begin; row < row_end; ++row) {
    Fill(values_, Mix(static_cast<uint64_t>(row) + 1), info_.hidden_size,
         reinterpret_cast<uint16_t*>(out + (row - row_begin) * row_pitch_bytes));
  }
  return absl::OkStatus();
}

EngineCase MakeLargeCase(const LargeHead& head, int64_t num_rows, uint64_t seed) {
  const int64_t hidden_size = head.info().hidden_size;
  EngineCase inputs;
  inputs.hidden_size = hidden_size;
  inputs.hidden.resize(static_cast<size_t>(num_rows * hidden_size * 2));
  Fill(NormalTable(1.0, seed + 100), Mix(seed), num_rows * hidden_size,
       reinterpret_cast<uint16_t*>(inputs.hidden.data()));
  std::mt19937_64 random(seed);
  for (int64_t row = 0; row < num_rows; ++row) {
    inputs.targets.push_back(
        static_cast<int32_t>(random() % static_cast<uint64_t>(head.info().vocab_size)));
    inputs.temperatures.push_back(1.0F);
  }
  inputs.outputs = kDefaultOutputs;
  return inputs;
}

std::vector<std::vector<double>> LargeLogitsReference(const LargeHead& head,
                                                      const EngineCase& inputs,
                                                      const std::vector<int64_t>& rows) {
  const auto hidden_size = static_cast<size_t>(head.info().hidden_size);
  const auto vocab_size = static_cast<size_t>(head.info().vocab_size);
  const auto* const hidden_bits = reinterpret_cast<const uint16_t*>(inputs.hidden.data());
  std::vector<std::vector<double>> hidden;
  for (const int64_t row : rows) {
    const uint16_t* const begin = hidden_bits + static_cast<size_t>(row) * hidden_size;
    hidden.emplace_back(hidden_size);
    std::transform(begin, begin + hidden_size, hidden.back().begin(), FromBf16);
  }
  std::vector<std::vector<double>> logits(rows.size(), std::vector<double>(vocab_size));
  const size_t num_threads = std::max(1U, std::thread::hardware_concurrency());
  std::vector<std::thread> threads;
  for (size_t thread = 0; thread < num_threads; ++thread) {
    threads.emplace_back([&, thread] {
      std::vector<uint16_t> bits(hidden_size);
      std::vector<double> weight(hidden_size);
      for (size_t column = thread; column < vocab_size; column += num_threads) {
        const auto row = static_cast<int64_t>(column);
        head.ReadRows(row, row + 1, reinterpret_cast<std::byte*>(bits.data()), 0).IgnoreError();
        std::transform(bits.begin(), bits.end(), weight.begin(), FromBf16);
        DotAll(hidden, weight, column, logits);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return logits;
}

}  // namespace logprobd::testing
