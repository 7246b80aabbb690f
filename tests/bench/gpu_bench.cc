#include "tests/bench/gpu_bench.h"

#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace logprobd::testing {
namespace {

/// Returns the version of the kernel module, which is the first word of its version file that looks
/// like 580.82.07.
std::string DriverVersion() {
  std::ifstream file("/proc/driver/nvidia/version");
  for (std::string word; file >> word;) {
    if (absl::ascii_isdigit(static_cast<unsigned char>(word[0])) &&
        word.find('.') != std::string::npos) {
      return word;
    }
  }
  return "unknown";
}

int Megahertz(cudaDeviceAttr attribute) {
  int kilohertz = 0;
  if (cudaDeviceGetAttribute(&kilohertz, attribute, 0) != cudaSuccess) return 0;
  return kilohertz / 1000;
}

}  // namespace

std::string GpuMachineName() {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, 0);
  if (error != cudaSuccess) return absl::StrCat("no GPU: ", cudaGetErrorString(error));
  int runtime = 0;
  if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) runtime = 0;
  return absl::StrCat(properties.name, ", ", properties.multiProcessorCount, " SMs, up to ",
                      Megahertz(cudaDevAttrClockRate), " MHz, memory ",
                      Megahertz(cudaDevAttrMemoryClockRate), " MHz, driver ", DriverVersion(),
                      ", CUDA ", runtime / 1000, ".", runtime % 1000 / 10);
}

}  // namespace logprobd::testing
