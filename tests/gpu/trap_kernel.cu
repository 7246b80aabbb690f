#include "tests/gpu/trap_kernel.h"

namespace logprobd::testing {
namespace {

__global__ void TrapKernel() { asm("trap;"); }

}  // namespace

cudaError_t BreakContext() {
  TrapKernel<<<1, 1>>>();
  return cudaDeviceSynchronize();
}

}  // namespace logprobd::testing
