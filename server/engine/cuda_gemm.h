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
#include "server/engine/cuda_memory.h"

namespace logprobd {

/// Dot products of hidden rows with weight rows in fp32, by one cuBLASLt algorithm that is chosen
/// once and kept for every shape: a dot product's bits do not depend on what else is multiplied.
///
/// The algorithm has no split of K and no workspace (kGemmCounterBytes) that could hold sums, so
/// each dot product is one chain in a fixed order. fp32 inputs are multiplied in fp32, never TF32.
/// One stream at a time.
class CudaGemm {
 public:
  /// A multiplication [rows, depth] x [columns, depth]^T.
  struct Shape {
    int64_t columns = 0;
    int64_t rows = 0;
  };

  struct Options {
    kernels::Dtype dtype = kernels::Dtype::kBf16;  ///< Of both inputs.
    int64_t depth = 0;                             ///< K, also the pitch of both inputs.
    std::vector<Shape> shapes;  ///< All that will be run; the algorithm must do each.
    /// Takes the n-th suitable algorithm instead of the first; for benchmarks.
    int algorithm_index = 0;
  };

  /// INTERNAL when cuBLASLt offers no algorithm for all shapes.
  static absl::StatusOr<std::unique_ptr<CudaGemm>> Create(const Options& options);

  /// Enqueues logits[row, column] = sum over depth of hidden[row] * weight[column], row-major with
  /// `columns` elements a row. Pointers are device memory, 256-byte aligned.
  absl::Status Run(const void* weight, const void* hidden, const Shape& shape, float* logits,
                   cudaStream_t stream) const;

  /// The algorithm, in cuBLASLt's own numbers.
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
