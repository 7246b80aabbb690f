#pragma once

#include <cuda_runtime_api.h>

#include "gtest/gtest.h"

namespace logprobd::testing {

inline bool HasGpu() {
  int num_devices = 0;
  return cudaGetDeviceCount(&num_devices) == cudaSuccess && num_devices > 0;
}

/// Base class of kernel tests, which are skipped on machines without a GPU.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no GPU";
  }
};

}  // namespace logprobd::testing
