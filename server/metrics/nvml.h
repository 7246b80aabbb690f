#pragma once

#include <cstdint>
#include <memory>

namespace logprobd {

/// What the driver says of a GPU now.
struct GpuReadings {
  double utilization_ratio = 0;  ///< 0 to 1, over the driver's last sample period.
  double power_watts = 0;
  double sm_clock_hertz = 0;
  double memory_used_bytes = 0;  ///< By all processes, this one included.
  double memory_free_bytes = 0;
};

/// NVIDIA's management library, loaded at run time: a machine without a driver works, without
/// readings. Thread-safe.
class Nvml {
 public:
  /// Loads the library; where that fails, Read gives zeros.
  Nvml();
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  /// Readings of CUDA device `gpu`; a figure that the driver does not give is 0. May take some
  /// milliseconds.
  GpuReadings Read(int gpu) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
