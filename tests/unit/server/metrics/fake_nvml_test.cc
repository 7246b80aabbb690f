#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <thread>

#include "server/metrics/metrics.h"
#include "server/metrics/nvml.h"

namespace logprobd {
namespace {

/// Returns a function of the fake that steers it.
template <typename Function>
Function* FunctionOf(const char* name) {
  void* const library = dlopen("libnvidia-ml.so.1", RTLD_LAZY);
  auto* const function = reinterpret_cast<Function*>(dlsym(library, name));
  dlclose(library);  // `nvml_` of the test holds it
  return function;
}

/// Uses tests/support/fake_nvml.cc, which this binary loads instead of the driver's library.
class FakeNvmlTest : public ::testing::Test {
 protected:
  FakeNvmlTest() { unsetenv("CUDA_VISIBLE_DEVICES"); }
  ~FakeNvmlTest() override { unsetenv("CUDA_VISIBLE_DEVICES"); }

  const Nvml nvml_;
};

TEST_F(FakeNvmlTest, ReadsEveryValueInItsUnit) {
  const GpuReadings readings = nvml_.Read(0, "0000:1a:00.0");

  EXPECT_TRUE(readings.is_read);
  EXPECT_DOUBLE_EQ(readings.utilization_ratio, 0.42);
  EXPECT_DOUBLE_EQ(readings.power_watts, 350.25);
  EXPECT_DOUBLE_EQ(readings.sm_clock_hertz, 1.98e9);
  EXPECT_DOUBLE_EQ(readings.memory_used_bytes, 20'000.0 * (1 << 20));
  EXPECT_DOUBLE_EQ(readings.memory_free_bytes, 123'000.0 * (1 << 20));
  EXPECT_EQ(readings.ecc_corrected, 2);
  EXPECT_EQ(readings.ecc_uncorrected, 0);
}

TEST_F(FakeNvmlTest, ReadsTheVersionOfTheDriver) { EXPECT_EQ(nvml_.DriverVersion(), "580.12.3"); }

TEST_F(FakeNvmlTest, ReportsWhyTheClocksAreLowered) {
  const GpuThrottle capped = nvml_.Read(0, "0000:3b:00.0").throttle;
  const GpuThrottle hot = nvml_.Read(0, "0000:1a:00.0").throttle;

  EXPECT_TRUE(capped.power_cap);
  EXPECT_FALSE(capped.thermal || capped.power_brake || capped.hw_slowdown);
  EXPECT_TRUE(hot.thermal && hot.hw_slowdown);
  EXPECT_FALSE(hot.power_cap || hot.power_brake);
}

// Regression: CUDA's ordinal was used as the driver's index, which orders GPUs by bus ID.
TEST_F(FakeNvmlTest, FindsAGpuByItsBusIdWhateverItsOrdinal) {
  EXPECT_DOUBLE_EQ(nvml_.Read(0, "0000:1a:00.0").utilization_ratio, 0.42);
  EXPECT_DOUBLE_EQ(nvml_.Read(1, "0000:3b:00.0").utilization_ratio, 0.97);
  EXPECT_FALSE(nvml_.Read(0, "0000:ff:00.0").is_read);
}

TEST_F(FakeNvmlTest, WithoutABusIdUsesTheOrdinalOrTheVisibleDevice) {
  EXPECT_DOUBLE_EQ(nvml_.Read(0, "").utilization_ratio, 0.97);

  setenv("CUDA_VISIBLE_DEVICES", "1", 1);
  EXPECT_DOUBLE_EQ(nvml_.Read(0, "").utilization_ratio, 0.42);
  setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b", 1);
  EXPECT_DOUBLE_EQ(nvml_.Read(1, "").utilization_ratio, 0.97);
  EXPECT_FALSE(nvml_.Read(2, "").is_read);
}

TEST_F(FakeNvmlTest, DoesNotReadTheWholeGpuForASlice) {
  setenv("CUDA_VISIBLE_DEVICES", "MIG-unknown", 1);

  EXPECT_FALSE(nvml_.Read(0, "0000:1a:00.0").is_read);
}

TEST_F(FakeNvmlTest, ReadsASliceByItsName) {
  setenv("CUDA_VISIBLE_DEVICES", "MIG-a", 1);

  EXPECT_DOUBLE_EQ(nvml_.Read(0, "0000:1a:00.0").utilization_ratio, 0.07);
  EXPECT_DOUBLE_EQ(nvml_.Read(0, "").utilization_ratio, 0.07);
}

TEST_F(FakeNvmlTest, ReadsNothingForAVisibleDeviceThatItDoesNotUnderstand) {
  setenv("CUDA_VISIBLE_DEVICES", "none", 1);

  EXPECT_FALSE(nvml_.Read(0, "").is_read);
}

TEST_F(FakeNvmlTest, StartsTheLibraryAndShutsItDown) {
  const auto num_started = FunctionOf<int()>("FakeNvmlNumStarted");
  const int before = num_started();
  std::optional<Nvml> other(std::in_place);
  EXPECT_EQ(num_started(), before + 1);

  other.reset();

  EXPECT_EQ(num_started(), before);
}

TEST_F(FakeNvmlTest, FillsTheMetricsOfAGpu) {
  Metrics metrics({.gpus = {0}, .gpu_pci_bus_ids = {{0, "0000:1a:00.0"}}});
  metrics.SetMemory({{"gpu0", "weights", int64_t{15'000} << 20}});

  const std::string text = metrics.Serialize();

  for (const char* line :
       {R"(logprobd_gpu_nvml_up{gpu="0"} 1)", R"(logprobd_gpu_utilization_ratio{gpu="0"} 0.42)",
        R"(logprobd_gpu_power_watts{gpu="0"} 350.25)",
        R"(logprobd_gpu_sm_clock_hertz{gpu="0"} 1980000000)",
        R"(logprobd_gpu_memory_bytes{gpu="0",kind="other"} 5242880000)",
        R"(logprobd_gpu_memory_peak_bytes{gpu="0",kind="other"} 5242880000)",
        R"(logprobd_gpu_memory_bytes{gpu="0",kind="free"} 128974848000)",
        R"(logprobd_gpu_throttled{gpu="0",reason="thermal"} 1)",
        R"(logprobd_gpu_throttled{gpu="0",reason="power_cap"} 0)",
        R"(logprobd_gpu_ecc_errors_total{gpu="0",kind="corrected"} 2)",
        R"(logprobd_gpu_ecc_errors_total{gpu="0",kind="uncorrected"} 0)"}) {
    EXPECT_NE(text.find(std::string(line) + "\n"), std::string::npos) << line;
  }
}

TEST_F(FakeNvmlTest, TellsOneReasonFromAnother) {
  Metrics metrics({.gpus = {0}, .gpu_pci_bus_ids = {{0, "0000:1a:00.0"}}});

  const std::string text = metrics.Serialize();

  for (const char* line : {R"(throttled{gpu="0",reason="hw_slowdown"} 1)",
                           R"(throttled{gpu="0",reason="power_brake"} 0)"}) {
    EXPECT_NE(text.find(std::string(line) + "\n"), std::string::npos) << line;
  }
}

TEST_F(FakeNvmlTest, OtherMemoryIsWhatTheServerHasNotReserved) {
  constexpr int64_t kMib = 1 << 20;
  Metrics metrics({.gpus = {0}, .gpu_pci_bus_ids = {{0, "0000:1a:00.0"}}});
  const auto other = [&](const MemoryPlan& plan) {
    metrics.SetMemory(plan);
    metrics.ReadGpus();
    return metrics.Snapshot().Sum("logprobd_gpu_memory_bytes", {{"kind", "other"}}) / kMib;
  };
  metrics.ReadGpus();
  EXPECT_EQ(metrics.Snapshot().Sum("logprobd_gpu_memory_bytes", {{"kind", "other"}}),
            20'000.0 * kMib);

  EXPECT_EQ(other({{"gpu0", "weights", 1'000 * kMib},
                   {"gpu0", "workspace", 200 * kMib},
                   {"gpu0", "staging", 30 * kMib}}),
            18'770);
  EXPECT_EQ(other({{"gpu0", "weights", 20'001 * kMib}}), 0);  // the driver counts less
}

TEST_F(FakeNvmlTest, CountsTheErrorsThatHaveBeenAddedAlsoAfterTheDriverRestarted) {
  const auto set_corrected = FunctionOf<void(long long)>("FakeNvmlSetCorrected");
  Metrics metrics({.gpus = {1}, .gpu_pci_bus_ids = {{1, "0000:3b:00.0"}}});
  const auto corrected = [&](long long count) {
    set_corrected(count);
    metrics.ReadGpus();
    return metrics.Snapshot().Sum("logprobd_gpu_ecc_errors_total", {{"kind", "corrected"}});
  };

  EXPECT_EQ(corrected(5), 5);
  EXPECT_EQ(corrected(12), 12);
  EXPECT_EQ(corrected(3), 15);  // the driver counts from 0 again
  EXPECT_EQ(corrected(4), 16);
  set_corrected(-1);
}

TEST_F(FakeNvmlTest, CountsAnErrorOnceHoweverOftenItIsRead) {
  Metrics metrics({.gpus = {1}, .gpu_pci_bus_ids = {{1, "0000:3b:00.0"}}});

  metrics.ReadGpus();
  metrics.ReadGpus();

  const MetricsSnapshot read = metrics.Snapshot();
  EXPECT_EQ(read.Sum("logprobd_gpu_ecc_errors_total", {{"kind", "corrected"}}), 5);
  EXPECT_EQ(read.Sum("logprobd_gpu_ecc_errors_total", {{"kind", "uncorrected"}}), 1);
}

// Regression: each scrape waited for the driver, and after eight no thread was left for /healthz.
TEST_F(FakeNvmlTest, ADriverThatHangsDelaysOneReaderAndTheOthersGoOnWithoutReadings) {
  void* const library = dlopen("libnvidia-ml.so.1", RTLD_LAZY);
  const auto hang = reinterpret_cast<void (*)(bool)>(dlsym(library, "FakeNvmlHang"));
  const auto await_hang = reinterpret_cast<int (*)()>(dlsym(library, "FakeNvmlAwaitHang"));
  Metrics metrics({.gpus = {0}, .gpu_pci_bus_ids = {{0, "0000:1a:00.0"}}});
  const auto is_up = [&] { return metrics.Snapshot().Sum("logprobd_gpu_nvml_up") == 1; };
  metrics.ReadGpus();
  EXPECT_TRUE(is_up());
  hang(true);
  std::thread first([&] { metrics.ReadGpus(); });
  EXPECT_EQ(await_hang(), 1);

  metrics.ReadGpus();

  EXPECT_FALSE(is_up());
  EXPECT_EQ(await_hang(), 1);
  hang(false);
  first.join();
  EXPECT_TRUE(is_up());
  dlclose(library);
}

}  // namespace
}  // namespace logprobd
