#pragma once

#include <cstdint>
#include <memory>

#include "server/base/client_memory.h"

namespace logprobd {

/// Registers memory with CUDA, for every GPU, from the context of GPU `gpu`.
std::unique_ptr<HostPinning> CreateCudaHostPinning(int32_t gpu);

}  // namespace logprobd
