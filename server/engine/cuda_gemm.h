#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/common/dtype.h"
#include "server/engine/cuda_resources.h"

namespace logprobd {

/// Computes fp32 dot products of hidden rows with weight rows by one cuBLASLt algorithm, which is
/// chosen once for every shape. The bits of a dot product do not depend on what else is multiplied.
///
/// The algorithm does not split K, and its workspace (kGemmCounterBytes) is too small for partial
/// sums, so each dot product is one chain of additions in a fixed order. fp32 inputs are multiplied
/// in fp32, never in TF32. An object may be used on one stream at a time.
class CudaGemm {
 public:
  /// The product [rows, depth] x [columns, depth]^T.
  struct Shape {
    int64_t columns = 0;
    int64_t rows = 0;
  };

  struct Options {
    kernels::Dtype dtype = kernels::Dtype::kBf16;  ///< Dtype of both inputs.
    int64_t depth = 0;                             ///< K, and the row stride of both inputs.
    std::vector<Shape> shapes;                     ///< All shapes that Run will get.
    /// Index of the algorithm to use among the suitable ones; it is 0 except in benchmarks.
    int algorithm_index = 0;
  };

  /// Returns INTERNAL if cuBLASLt offers no algorithm that suits all shapes.
  static absl::StatusOr<std::unique_ptr<CudaGemm>> Create(const Options& options);

  /// Enqueues logits[row, column] = sum over depth of hidden[row] * weight[column], row-major with
  /// `columns` elements per row. Pointers are device memory, 256-byte aligned.
  absl::Status Run(const void* weight, const void* hidden, const Shape& shape, float* logits,
                   cudaStream_t stream) const;

  /// Returns the numbers that cuBLASLt gives to the algorithm and its options, for the log.
  const std::string& description() const { return description_; }

 private:
  struct HandleDestroy {
    void operator()(cublasLtHandle_t handle) const { (void)cublasLtDestroy(handle); }
  };

  CudaGemm() = default;
  absl::Status Choose(const Options& options);

  std::unique_ptr<cublasLtContext, HandleDestroy> handle_;
  cudaDataType_t type_ = CUDA_R_16BF;
  int64_t depth_ = 0;
  cublasLtMatmulDescOpaque_t operation_{};
  cublasLtMatmulAlgo_t algorithm_{};
  DeviceBuffer workspace_;
  std::string description_;
};

}  // namespace logprobd
