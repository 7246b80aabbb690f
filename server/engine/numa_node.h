#pragma once

#include <cstdint>

namespace logprobd {

/// While it lives, memory that this thread is given comes from the NUMA node that is closest to GPU
/// `gpu`, where there is room. A wish: where the system knows no nodes or does not let us choose,
/// memory comes as ever.
class PreferNodeOfGpu {
 public:
  explicit PreferNodeOfGpu(int32_t gpu);
  ~PreferNodeOfGpu();
  PreferNodeOfGpu(const PreferNodeOfGpu&) = delete;
  PreferNodeOfGpu& operator=(const PreferNodeOfGpu&) = delete;

 private:
  bool is_set_ = false;
};

}  // namespace logprobd
