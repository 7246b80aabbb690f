#pragma once

// EpilogueInterface: the members that CUTLASS's kernels require of every epilogue, and that do
// nothing here because our epilogues read dot products from the accumulator registers.
//
// Source    Our own.

#include <cstddef>
#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/detail.hpp"

namespace logprobd::kernels::internal {

/// Base class of all epilogues. A derived class has operator(), and its own SharedStorage if it
/// needs one.
template <class EpilogueParams>
class EpilogueInterface {
 public:
  using EpilogueSchedule = cutlass::gemm::EpilogueDefault;
  using DispatchPolicy = EpilogueSchedule;
  using ElementC = float;
  using ElementD = float;
  using StrideC = cute::Stride<int64_t, cute::_1, int64_t>;
  using StrideD = StrideC;
  using Arguments = EpilogueParams;
  using Params = EpilogueParams;
  struct SharedStorage {};

  template <class Problem>
  static constexpr Params to_underlying_arguments(const Problem&, const Arguments& arguments,
                                                  void*) {
    return arguments;
  }
  template <class Problem>
  static size_t get_workspace_size(const Problem&, const Arguments&) {
    return 0;
  }

  CUTLASS_HOST_DEVICE explicit EpilogueInterface(const Params& params) : params_(params) {}

 protected:
  const Params& params_;
};

}  // namespace logprobd::kernels::internal
