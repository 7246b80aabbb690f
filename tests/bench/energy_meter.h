#pragma once

#include <memory>
#include <optional>

namespace logprobd::testing {

/// Measures the average power of the current CUDA device with the energy counter of NVIDIA's
/// management library (NVML), which is loaded at run time. Without the library or the counter there
/// are no measurements.
///
/// The driver updates the counter every 20 to 100 ms. The meter therefore polls it on a thread of
/// its own, and divides the energy between the first and the last update by the time between them.
/// The time that is measured must be at least half a second, and the GPU's load must not change.
class EnergyMeter {
 public:
  EnergyMeter();
  ~EnergyMeter();
  EnergyMeter(const EnergyMeter&) = delete;
  EnergyMeter& operator=(const EnergyMeter&) = delete;

  /// Starts to poll the counter.
  void Start();

  /// Ends what Start began and returns the average power in watts. Returns nothing if there is no
  /// counter, or if its updates are less than a quarter of a second apart.
  std::optional<double> Stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd::testing
