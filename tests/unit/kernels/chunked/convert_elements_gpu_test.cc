#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/chunked/convert_elements.h"
#include "kernels/common/dtype.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/chunked/device_array.h"
#include "tests/unit/kernels/fused/sixteen_bits.h"

namespace logprobd::kernels {
namespace {

using logprobd::testing::DeviceArray;
using logprobd::testing::FromBits;
using logprobd::testing::ToBits;

constexpr uint16_t kPoison = 0x7FC0;  // NaN
constexpr int64_t kRows = 3;

/// Splits in the memory layout [rows + 1, num_splits, pitch]; the last row must not be written.
struct Splits {
  int64_t hidden_size;
  int32_t num_splits;
  std::vector<uint16_t> bits;

  uint16_t Bits(int64_t row, int32_t split, int64_t k) const {
    return bits[static_cast<size_t>((row * num_splits + split) * SplitPitch(hidden_size) + k)];
  }
  double Value(int64_t row, int32_t split, int64_t k) const {
    return FromBits(Bits(row, split, k), Dtype::kBf16);
  }
  double Sum(int64_t row, int64_t k) const {
    double sum = 0;
    for (int32_t split = 0; split < num_splits; ++split) sum += Value(row, split, k);
    return sum;
  }
};

int64_t StrideOf(int64_t hidden_size) { return (hidden_size + 3) / 4 * 4 + 4; }

/// Splits rows [rows, StrideOf(hidden_size)] of fp32 values or of the bits of fp16 values.
template <typename T>
Splits Split(const std::vector<T>& rows, int64_t hidden_size, int32_t num_splits) {
  const int64_t num_rows = static_cast<int64_t>(rows.size()) / StrideOf(hidden_size);
  const DeviceArray<T> in(rows);
  const DeviceArray<uint16_t> out(std::vector<uint16_t>(
      static_cast<size_t>((num_rows + 1) * num_splits * SplitPitch(hidden_size)), kPoison));
  EXPECT_EQ(LaunchBf16Split({.dtype = sizeof(T) == 4 ? Dtype::kF32 : Dtype::kF16,
                             .in = in.data(),
                             .in_stride = StrideOf(hidden_size),
                             .num_rows = num_rows,
                             .hidden_size = hidden_size,
                             .num_splits = num_splits,
                             .out = out.data()},
                            nullptr),
            cudaSuccess);
  return {hidden_size, num_splits, out.Read()};
}

/// Makes values of both signs with magnitudes from 2^-100 to 2^100, and NaN after the end of a row.
std::vector<float> MakeRows(int64_t hidden_size) {
  std::vector<float> rows(static_cast<size_t>(kRows * StrideOf(hidden_size)),
                          std::numeric_limits<float>::quiet_NaN());
  std::mt19937 random(static_cast<uint32_t>(hidden_size));
  std::uniform_real_distribution<float> significand(-2.0F, 2.0F);
  std::uniform_int_distribution<int> exponent(-100, 99);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t k = 0; k < hidden_size; ++k) {
      rows[static_cast<size_t>(row * StrideOf(hidden_size) + k)] =
          std::ldexp(significand(random), exponent(random));
    }
  }
  return rows;
}

float At(const std::vector<float>& rows, int64_t hidden_size, int64_t row, int64_t k) {
  return rows[static_cast<size_t>(row * StrideOf(hidden_size) + k)];
}

class Bf16SplitTest : public testing::GpuTest {};

// Sizes around multiples of a pair, of a split's alignment and of the number of threads of a block.
constexpr int64_t kHiddenSizes[] = {1, 2, 63, 64, 65, 511, 512, 513, 896};

TEST_F(Bf16SplitTest, OneSplitIsTheNearestBf16) {
  for (const int64_t hidden_size : kHiddenSizes) {
    const std::vector<float> rows = MakeRows(hidden_size);
    const Splits splits = Split(rows, hidden_size, 1);
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t k = 0; k < hidden_size; ++k) {
        ASSERT_EQ(splits.Bits(row, 0, k), ToBits(At(rows, hidden_size, row, k), Dtype::kBf16));
      }
    }
  }
}

TEST_F(Bf16SplitTest, TwoSplitsRepresentFp32To17Bits) {
  for (const int64_t hidden_size : kHiddenSizes) {
    const std::vector<float> rows = MakeRows(hidden_size);
    const Splits splits = Split(rows, hidden_size, 2);
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t k = 0; k < hidden_size; ++k) {
        const double x = At(rows, hidden_size, row, k);
        ASSERT_NEAR(splits.Sum(row, k), x, std::ldexp(std::fabs(x), -17));
      }
    }
  }
}

TEST_F(Bf16SplitTest, ThreeSplitsRepresentFp32Exactly) {
  for (const int64_t hidden_size : kHiddenSizes) {
    const std::vector<float> rows = MakeRows(hidden_size);
    const Splits splits = Split(rows, hidden_size, 3);
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t k = 0; k < hidden_size; ++k) {
        ASSERT_EQ(splits.Sum(row, k), static_cast<double>(At(rows, hidden_size, row, k)));
      }
    }
  }
}

TEST_F(Bf16SplitTest, TwoAndThreeSplitsRepresentEveryFp16Exactly) {
  std::vector<uint16_t> values;
  for (uint32_t bits = 0; bits < 0x10000U; ++bits) {
    if ((bits & 0x7C00U) != 0x7C00U) values.push_back(static_cast<uint16_t>(bits));
  }
  const auto hidden_size = static_cast<int64_t>(values.size());
  std::vector<uint16_t> row = values;
  row.resize(static_cast<size_t>(StrideOf(hidden_size)), 0x7E00);
  for (const int32_t num_splits : {2, 3}) {
    const Splits splits = Split(row, hidden_size, num_splits);
    for (int64_t k = 0; k < hidden_size; ++k) {
      ASSERT_EQ(splits.Sum(0, k),
                static_cast<double>(FromBits(values[static_cast<size_t>(k)], Dtype::kF16)));
    }
  }
}

TEST_F(Bf16SplitTest, TheSmallestSplitComesFirstAndMoreSplitsDoNotChangeLargerOnes) {
  for (const int64_t hidden_size : kHiddenSizes) {
    const std::vector<float> rows = MakeRows(hidden_size);
    const Splits one = Split(rows, hidden_size, 1);
    const Splits two = Split(rows, hidden_size, 2);
    const Splits three = Split(rows, hidden_size, 3);
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t k = 0; k < hidden_size; ++k) {
        ASSERT_EQ(two.Bits(row, 1, k), one.Bits(row, 0, k));
        ASSERT_EQ(three.Bits(row, 2, k), two.Bits(row, 1, k));
        ASSERT_EQ(three.Bits(row, 1, k), two.Bits(row, 0, k));
        // The remainder of a value is at most half a unit in the last of its 8 bits.
        ASSERT_LE(std::fabs(three.Value(row, 1, k)), std::fabs(three.Value(row, 2, k)) / 256);
        ASSERT_LE(std::fabs(three.Value(row, 0, k)), std::fabs(three.Value(row, 1, k)) / 256);
      }
    }
  }
}

TEST_F(Bf16SplitTest, ZerosPadTheSplitsAndNothingIsWrittenBeyondTheLastRow) {
  for (const int64_t hidden_size : kHiddenSizes) {
    const std::vector<float> rows = MakeRows(hidden_size);
    for (const int32_t num_splits : {1, 2, 3}) {
      const Splits splits = Split(rows, hidden_size, num_splits);
      for (int32_t split = 0; split < num_splits; ++split) {
        for (int64_t row = 0; row < kRows; ++row) {
          for (int64_t k = hidden_size; k < SplitPitch(hidden_size); ++k) {
            ASSERT_EQ(splits.Bits(row, split, k), 0);
          }
        }
        for (int64_t k = 0; k < SplitPitch(hidden_size); ++k) {
          ASSERT_EQ(splits.Bits(kRows, split, k), kPoison);
        }
      }
    }
  }
}

TEST_F(Bf16SplitTest, NanAndInfinityStayNotFinite) {
  constexpr int64_t kHidden = 4;
  std::vector<float> row(static_cast<size_t>(StrideOf(kHidden)), 1.0F);
  row[0] = std::numeric_limits<float>::quiet_NaN();
  row[1] = std::numeric_limits<float>::infinity();
  row[2] = -std::numeric_limits<float>::max();  // larger in magnitude than every bf16
  for (const int32_t num_splits : {1, 2, 3}) {
    const Splits splits = Split(row, kHidden, num_splits);
    for (int64_t k = 0; k < 3; ++k) EXPECT_FALSE(std::isfinite(splits.Sum(0, k))) << k;
    EXPECT_EQ(splits.Sum(0, 3), 1.0);
  }
}

TEST_F(Bf16SplitTest, DoesNothingForNoRows) {
  const DeviceArray<float> in(std::vector<float>(8, 1.0F));
  const DeviceArray<uint16_t> out(std::vector<uint16_t>(2 * kSplitAlignment, kPoison));

  EXPECT_EQ(LaunchBf16Split({.in = in.data(), .in_stride = 8, .hidden_size = 8, .out = out.data()},
                            nullptr),
            cudaSuccess);

  EXPECT_EQ(out.Read()[0], kPoison);
}

TEST_F(Bf16SplitTest, RefusesBrokenBounds) {
  const DeviceArray<float> in(std::vector<float>(8, 1.0F));
  const DeviceArray<uint16_t> out(std::vector<uint16_t>(4 * kSplitAlignment, kPoison));
  const Bf16SplitParams good = {
      .in = in.data(), .in_stride = 8, .num_rows = 1, .hidden_size = 8, .out = out.data()};
  ASSERT_EQ(LaunchBf16Split(good, nullptr), cudaSuccess);
  const auto refuses = [&](auto change) {
    Bf16SplitParams params = good;
    change(params);
    return LaunchBf16Split(params, nullptr) == cudaErrorInvalidValue;
  };

  EXPECT_TRUE(refuses([](Bf16SplitParams& p) { p.num_splits = 0; }));
  EXPECT_TRUE(refuses([](Bf16SplitParams& p) { p.num_splits = kHiddenSplitsMax + 1; }));
  EXPECT_TRUE(refuses([](Bf16SplitParams& p) { p.dtype = Dtype::kBf16; }));
  EXPECT_TRUE(refuses([](Bf16SplitParams& p) { p.in = nullptr; }));
  EXPECT_TRUE(refuses([](Bf16SplitParams& p) { p.out = nullptr; }));
  EXPECT_TRUE(refuses([](Bf16SplitParams& p) { p.num_rows = -1; }));
  EXPECT_TRUE(refuses([](Bf16SplitParams& p) { p.hidden_size = 0; }));
  EXPECT_TRUE(refuses([](Bf16SplitParams& p) { p.in_stride = 4; }));
  EXPECT_TRUE(refuses([](Bf16SplitParams& p) { p.in_stride = 10; }));
}

}  // namespace
}  // namespace logprobd::kernels
