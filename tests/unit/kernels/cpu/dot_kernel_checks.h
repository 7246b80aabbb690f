#pragma once

#include "kernels/common/dtype.h"
#include "kernels/cpu/tile_kernels.h"

namespace logprobd::kernels::testing {

/// Expects `kernel` to give the dot products of the double reference for `num_rows` rows and every
/// kind of hidden size, nothing for what lies beyond the rows' packed blocks, and the same bits for
/// a row whatever the number of rows and wherever it stands.
void CheckDotKernel(const DotKernel& kernel, Dtype hidden_dtype, Dtype weight_dtype);

}  // namespace logprobd::kernels::testing
