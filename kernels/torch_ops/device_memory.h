#pragma once

#include <cstdint>

namespace logprobd::torch_ops {

/// Bytes of a GPU that this process can still get, those that torch holds and does not use
/// included; `enough` or more where there are as many. In microseconds, which is what torch.cuda's
/// own statistics do not take.
int64_t FreeBytes(int64_t device, int64_t enough);

}  // namespace logprobd::torch_ops
