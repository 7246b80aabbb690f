#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "gtest/gtest.h"

namespace logprobd::testing {

/// An array in device memory that is filled from the host and can be read back. A CUDA error fails
/// the test.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : count_(values.size()) {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, bytes()), cudaSuccess);
    data_ = static_cast<T*>(memory);
    EXPECT_EQ(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice), cudaSuccess);
    // A copy from pageable memory may return before the data has arrived, and other streams would
    // not wait for it.
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  ~DeviceArray() { EXPECT_EQ(cudaFree(data_), cudaSuccess); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }

  /// Waits for the device and returns the content.
  std::vector<T> Read() const {
    std::vector<T> values(count_);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost), cudaSuccess);
    return values;
  }

 private:
  size_t bytes() const { return count_ * sizeof(T); }
  size_t count_;
  T* data_ = nullptr;
};

}  // namespace logprobd::testing
