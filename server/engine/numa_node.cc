#include "server/engine/numa_node.h"

#include <cuda_runtime_api.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace logprobd {
namespace {

constexpr int kNodesMax = 64;

}  // namespace

PreferNodeOfGpu::PreferNodeOfGpu(int32_t gpu) {
  int node = -1;
  if (cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, gpu) != cudaSuccess) {
    (void)cudaGetLastError();
    return;
  }
  if (node < 0 || node >= kNodesMax) return;
  int policy = MPOL_DEFAULT;
  // A policy that the operator has chosen (numactl) stays.
  if (syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0) != 0 || policy != MPOL_DEFAULT) {
    return;
  }
  const uint64_t nodes = uint64_t{1} << node;
  // The system reads one bit less than it is told.
  is_set_ = syscall(SYS_set_mempolicy, MPOL_PREFERRED, &nodes, kNodesMax + 1) == 0;
}

PreferNodeOfGpu::~PreferNodeOfGpu() {
  if (is_set_) (void)syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0);
}

}  // namespace logprobd
