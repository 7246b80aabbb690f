#include "tests/unit/kernels/cpu/dot_kernel_checks.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/packed_weight.h"
#include "kernels/reference/row_reference.h"

namespace logprobd::kernels::testing {
namespace {

/// Memory aligned to a cache line and filled with bytes that are NaN in every type. Its destructor
/// expects that nothing was written in the lines behind it.
class Bytes {
 public:
  explicit Bytes(int64_t size)
      : size_(static_cast<size_t>(size)),
        data_(::operator new (size_ + kBehind, std::align_val_t{64})) {
    std::memset(data_, 0xFF, size_ + kBehind);
  }
  ~Bytes() {
    const auto* behind = static_cast<const unsigned char*>(data_) + size_;
    EXPECT_TRUE(std::all_of(behind, behind + kBehind, [](auto byte) { return byte == 0xFF; }));
    ::operator delete (data_, std::align_val_t{64});
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  void* get() const { return data_; }

 private:
  static constexpr size_t kBehind = 1024;
  size_t size_;
  void* data_;
};

/// Returns `count` multiples of 1/64 in [-2, 2), which are exact in every type.
std::vector<std::byte> Values(Dtype dtype, int64_t count, uint32_t seed) {
  std::vector<std::byte> bytes(static_cast<size_t>(count * DtypeBytes(dtype)));
  uint32_t state = seed;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525U + 1013904223U;
    const float value = static_cast<float>(static_cast<int32_t>(state >> 24) - 128) / 64.0F;
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    if (dtype == Dtype::kF32) {
      std::memcpy(&bytes[static_cast<size_t>(i) * 4], &bits, 4);
      continue;
    }
    auto half = static_cast<uint16_t>(bits >> 16);
    if (dtype == Dtype::kF16) {
      half = value == 0 ? 0
                        : static_cast<uint16_t>(((bits >> 16) & 0x8000U) |
                                                (((bits >> 13) & 0x3FFFFU) - (112U << 10)));
    }
    std::memcpy(&bytes[static_cast<size_t>(i) * 2], &half, 2);
  }
  return bytes;
}

/// Multiplies rows by a weight [kTileColumns, hidden_size], `k_chunk` hidden elements at a time.
std::vector<float> Dots(const DotKernel& kernel, Dtype hidden_dtype, const void* hidden,
                        Dtype weight_dtype, const void* weight, int64_t num_rows,
                        int64_t hidden_size, int64_t k_chunk) {
  const int64_t blocks = (num_rows + kernel.row_block - 1) / kernel.row_block;
  const Bytes packed(blocks * kernel.row_block * kernel.packed_row_bytes(hidden_size));
  const Bytes dots(blocks * kernel.row_block * kTileColumns * 4);
  const Bytes scratch(kDotScratchBytes);
  kernel.pack_rows(hidden_dtype, hidden, num_rows, hidden_size, packed.get());
  for (int64_t k = 0; k < hidden_size; k += k_chunk) {
    const int64_t k_end = std::min(k + k_chunk, hidden_size);
    const Bytes tile(PackedTileBytes(weight_dtype, k_end - k));
    PackTile(weight_dtype, StridedWeight{weight, hidden_size}.From(weight_dtype, 0, k),
             kTileColumns, k_end - k, tile.get());
    kernel.tile_dots({.hidden = packed.get(),
                      .num_rows = num_rows,
                      .hidden_size = hidden_size,
                      .k_begin = k,
                      .k_end = k_end,
                      .weight_tile = tile.get(),
                      .weight_dtype = weight_dtype,
                      .dots = static_cast<float*>(dots.get()),
                      .scratch = scratch.get()});
  }
  const auto* first = static_cast<const float*>(dots.get());
  return {first, first + num_rows * kTileColumns};
}

}  // namespace

void CheckDotKernel(const DotKernel& kernel, Dtype hidden_dtype, Dtype weight_dtype) {
  constexpr int64_t kRows = 41;
  for (const int64_t hidden_size : {1, 2, 15, 31, 32, 33, 63, 64, 127, 128, 129, 255, 257, 520}) {
    SCOPED_TRACE(::testing::Message() << "hidden size " << hidden_size);
    const std::vector<std::byte> hidden = Values(hidden_dtype, kRows * hidden_size, 1);
    const std::vector<std::byte> weight = Values(weight_dtype, kTileColumns * hidden_size, 2);
    const auto row_bytes = hidden_size * DtypeBytes(hidden_dtype);
    const auto dots_of = [&](int64_t begin, int64_t num_rows, int64_t k_chunk) {
      return Dots(kernel, hidden_dtype, hidden.data() + begin * row_bytes, weight_dtype,
                  weight.data(), num_rows, hidden_size, k_chunk);
    };

    const std::vector<float> all = dots_of(0, kRows, hidden_size);

    for (int64_t row = 0; row < kRows; ++row) {
      const std::vector<double> truth =
          LogitsReference(hidden.data() + row * row_bytes, hidden_dtype, weight.data(),
                          weight_dtype, kTileColumns, hidden_size, {}, {});
      for (int64_t column = 0; column < kTileColumns; ++column) {
        // Products are multiples of 2^-12 of magnitude at most 4, so sums of 520 products are exact
        // in fp32.
        ASSERT_EQ(all[static_cast<size_t>(row * kTileColumns + column)],
                  truth[static_cast<size_t>(column)])
            << "row " << row << ", column " << column;
      }
    }
    for (int64_t num_rows = 1; num_rows <= 17; ++num_rows) {
      for (const int64_t begin : {int64_t{0}, int64_t{5}, kRows - num_rows}) {
        const std::vector<float> some = dots_of(begin, num_rows, hidden_size);
        ASSERT_EQ(std::memcmp(some.data(), &all[static_cast<size_t>(begin * kTileColumns)],
                              some.size() * sizeof(float)),
                  0)
            << num_rows << " rows from " << begin;
      }
    }
    if (hidden_size <= KChunk(weight_dtype)) continue;
    for (const int64_t num_rows : {int64_t{1}, int64_t{2}, int64_t{4}, int64_t{8}, kRows}) {
      const std::vector<float> in_chunks = dots_of(0, num_rows, KChunk(weight_dtype));
      ASSERT_EQ(std::memcmp(in_chunks.data(), all.data(), in_chunks.size() * sizeof(float)), 0)
          << num_rows << " rows in chunks";
    }
  }
}

}  // namespace logprobd::kernels::testing
