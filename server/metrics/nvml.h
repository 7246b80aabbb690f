#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace logprobd {

/// What holds a GPU's clocks down now.
struct GpuThrottle {
  bool power_cap = false;    ///< Its power limit: usual under full load.
  bool thermal = false;      ///< Its temperature, by the driver or by the hardware.
  bool power_brake = false;  ///< The machine's power supply.
  bool hw_slowdown = false;  ///< The hardware halves the clocks, for heat or for power.
};

/// What the driver says of a GPU now.
struct GpuReadings {
  bool is_read = false;          ///< The driver answered; else all is 0.
  double utilization_ratio = 0;  ///< 0 to 1, over the driver's last sample period.
  double power_watts = 0;
  double sm_clock_hertz = 0;
  double memory_used_bytes = 0;  ///< By all processes, this one included.
  double memory_free_bytes = 0;
  GpuThrottle throttle;
  /// Errors of memory since the driver was loaded.
  uint64_t ecc_corrected = 0;
  uint64_t ecc_uncorrected = 0;
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
  /// milliseconds, and longer where a GPU no longer answers. `pci_bus_id`: where the device sits,
  /// "0000:3b:00.0", which is surer than its number; empty: not known.
  GpuReadings Read(int gpu, const std::string& pci_bus_id) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
