#pragma once

#include <string>

namespace logprobd::testing {

/// The first GPU with what decides its speed, as "NVIDIA H200, 132 SMs, up to 1980 MHz, memory 3201
/// MHz, driver 580.82.07, CUDA 13.0"; "no GPU: ..." with the reason where there is none.
std::string GpuMachineName();

}  // namespace logprobd::testing
