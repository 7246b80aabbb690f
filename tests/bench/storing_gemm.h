#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/cuda_resources.h"
#include "tests/bench/gpu_timer.h"

namespace logprobd::testing {

/// The baseline: one GEMM that writes all logits in bf16, by the fastest of the algorithms that
/// cuBLASLt proposes.
class StoringGemm {
 public:
  struct Sizes {
    int64_t rows = 0;
    int64_t columns = 0;
    int64_t depth = 0;  ///< Also the pitch of both inputs.
  };

  /// `weight` [columns, depth] and `hidden` [rows, depth] are bf16 device memory and must outlive
  /// the GEMM.
  static absl::StatusOr<std::unique_ptr<StoringGemm>> Create(const Sizes& sizes,
                                                             const std::byte* weight,
                                                             const std::byte* hidden, Timer& timer);
  ~StoringGemm() { (void)cublasLtDestroy(handle_); }
  StoringGemm(const StoringGemm&) = delete;
  StoringGemm& operator=(const StoringGemm&) = delete;

  absl::Status Run(cudaStream_t stream);

 private:
  StoringGemm() = default;
  absl::Status Prepare(const Sizes& sizes);
  absl::Status ChooseFastest(Timer& timer);

  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDescOpaque_t operation_{};
  cublasLtMatrixLayoutOpaque_t weight_layout_{};
  cublasLtMatrixLayoutOpaque_t hidden_layout_{};
  cublasLtMatrixLayoutOpaque_t logits_layout_{};
  cublasLtMatmulAlgo_t algorithm_{};
  const std::byte* weight_ = nullptr;
  const std::byte* hidden_ = nullptr;
  DeviceBuffer logits_;
  DeviceBuffer workspace_;
};

}  // namespace logprobd::testing
