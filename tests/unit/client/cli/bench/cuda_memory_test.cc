#include "client/cli/bench/cuda_memory.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "client/cli/bench/load_generator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

/// Returns the bytes in the memory of the fake driver, whose handles are addresses.
std::string BytesOf(const DeviceRows& rows) {
  uint64_t address = 0;
  std::memcpy(&address, rows.handle.data(), sizeof(address));
  std::string bytes(static_cast<size_t>(rows.bytes), ' ');
  std::memcpy(bytes.data(), reinterpret_cast<const char*>(address) + rows.offset, bytes.size());
  return bytes;
}

absl::Span<const std::byte> AsBytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

TEST(CudaMemoryTest, ReportsAMissingDriver) {
  const auto memory = CudaMemory::Open(0, "/nowhere/libcuda.so.1");

  EXPECT_EQ(memory.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(memory.status().message(),
              AllOf(HasSubstr("this machine has no NVIDIA driver"), HasSubstr("/nowhere/libcuda")));
}

TEST(CudaMemoryTest, ReportsALibraryThatIsNoDriver) {
  const auto memory = CudaMemory::Open(0, "libc.so.6");

  EXPECT_THAT(memory.status().message(), HasSubstr("libc.so.6 is not the library of an NVIDIA"));
}

TEST(CudaMemoryTest, NamesAMissingGpu) {
  const auto memory = CudaMemory::Open(3, FAKE_LIBCUDA);

  EXPECT_EQ(memory.status(), absl::FailedPreconditionError("GPU 3: CUDA_ERROR_INVALID_DEVICE"));
}

TEST(CudaMemoryTest, ReportsAFullGpu) {
  CudaMemory memory = *CudaMemory::Open(0, FAKE_LIBCUDA);

  EXPECT_EQ(
      memory.Allocate(int64_t{1} << 40).status(),
      absl::ResourceExhaustedError("cuMemAlloc of 1099511627776 bytes: CUDA_ERROR_OUT_OF_MEMORY"));
}

TEST(CudaMemoryTest, WritesAndCopiesToTheMemoryOfItsHandle) {
  CudaMemory memory = *CudaMemory::Open(0, FAKE_LIBCUDA);
  CudaBuffer from = *memory.Allocate(64);
  CudaBuffer to = *memory.Allocate(64);

  ASSERT_TRUE(from.Write(16, AsBytes("0123456789")).ok());
  ASSERT_TRUE(to.Copy(32, from, 20, 4).ok());

  EXPECT_EQ(BytesOf(from.Rows(16, 10)), "0123456789");
  EXPECT_EQ(BytesOf(to.Rows(32, 4)), "4567");
  EXPECT_THAT(to.Rows(32, 4).device_uuid, Each(7));
}

/// Answers at once and records the bytes that requests refer to.
class DeviceTarget final : public LoadTarget {
 public:
  void Send(const ScoreArgs& args, ScoreCallback done) override {
    EXPECT_TRUE(args.hidden.empty());
    ASSERT_TRUE(args.device_rows.has_value());
    hidden.push_back(BytesOf(*args.device_rows));
    targets.emplace_back(args.targets.begin(), args.targets.end());
    ScoreResult result;
    result.rows = args.rows;
    std::move(done)(std::move(result));
  }

  std::vector<std::string> hidden;
  std::vector<std::vector<int32_t>> targets;
};

class LoadFromGpuTest : public ::testing::TestWithParam<bool> {};

TEST_P(LoadFromGpuTest, RequestsNameTheRowsOfThePool) {
  const bool fresh = GetParam();
  Head head;
  head.hidden_size = 8;
  head.vocab_size = 100;
  const RowPool pool = *RowPool::Create(head, Dtype::kBf16, 300, 1);
  CudaMemory memory = *CudaMemory::Open(0, FAKE_LIBCUDA);
  DeviceTarget target;
  LoadObserver observer;

  const absl::StatusOr<LoadMeasurement> measurement = RunLoad(
      {.target = target, .pool = pool, .request = {}, .device = &memory, .observer = observer},
      {.mix = {.sizes = {{.rows = 300}}}, .writers = 1, .fresh = fresh, .requests = 4});

  ASSERT_TRUE(measurement.ok()) << measurement.status();
  EXPECT_EQ(measurement->measured.Total().errors, 0);
  ASSERT_EQ(target.hidden.size(), 4U);
  for (int64_t request = 0; request < 4; ++request) {
    std::vector<std::byte> hidden(300 * 16);
    std::vector<int32_t> targets(300);
    pool.Fill(fresh ? request * 101 : 0, 300, absl::MakeSpan(hidden), absl::MakeSpan(targets));
    const auto index = static_cast<size_t>(request);
    EXPECT_EQ(target.hidden[index],
              std::string(reinterpret_cast<const char*>(hidden.data()), hidden.size()));
    EXPECT_EQ(target.targets[index], targets);
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, LoadFromGpuTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "Fresh" : "TheSame"; });

}  // namespace
}  // namespace logprobd::client
