#pragma once

#include <cstdint>
#include <string>

namespace logprobd {

/// "296.8 MiB"; below 10 KiB in bytes.
std::string HumanBytes(int64_t bytes);

}  // namespace logprobd
