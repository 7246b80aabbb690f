#pragma once

#include <cstddef>
#include <cstdint>

#include "client/cpp/score.h"

namespace logprobd::client {

/// `value` as bf16 or f16, rounded to nearest even; f16 beyond its range becomes infinite.
uint16_t ToBf16(float value);
uint16_t ToF16(float value);

/// Writes `value` as an element of `dtype`; any alignment.
void StoreElement(float value, Dtype dtype, std::byte* place);

/// Element `index` of an array of `dtype` at any alignment, exactly.
double LoadElement(const std::byte* array, int64_t index, Dtype dtype);

}  // namespace logprobd::client
