#pragma once

#include "kernels/common/dtype.h"
#include "kernels/cpu/tile_kernels.h"

namespace logprobd::kernels::testing {

/// Expects that `kernel` computes the dot products of the double reference for many numbers of rows
/// and hidden sizes, writes nothing beyond the packed blocks of the rows, and gives bit-identical
/// results for a row regardless of the number of rows, of its position, and of whether the weight
/// is multiplied as a whole or in chunks.
void CheckDotKernel(const DotKernel& kernel, Dtype hidden_dtype, Dtype weight_dtype);

}  // namespace logprobd::kernels::testing
