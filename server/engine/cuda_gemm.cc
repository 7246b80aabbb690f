#include "server/engine/cuda_gemm.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/workspace_plan.h"

namespace logprobd {
namespace {

/// The shape for which the algorithm is chosen. Neither it nor the results depend on this server's
/// options.
constexpr CudaGemm::Shape kCanonicalShape = {.columns = 6'144, .rows = 2'048};
constexpr int kAlgorithmsMax = 32;
/// Bytes of workspace, too few for partial sums. This excludes algorithms that split dot products
/// between thread blocks, because they need more memory.
constexpr size_t kWorkspaceBytes = kGemmCounterBytes;

cudaDataType_t TypeOf(kernels::Dtype dtype) {
  switch (dtype) {
    case kernels::Dtype::kBf16:
      return CUDA_R_16BF;
    case kernels::Dtype::kF16:
      return CUDA_R_16F;
    case kernels::Dtype::kF32:
      return CUDA_R_32F;
  }
  return CUDA_R_32F;
}

/// The layouts of the operands. cuBLASLt is column-major, so it sees a row-major matrix as its
/// transpose.
struct Layouts {
  cublasLtMatrixLayoutOpaque_t weight{};
  cublasLtMatrixLayoutOpaque_t hidden{};
  cublasLtMatrixLayoutOpaque_t logits{};
};

absl::StatusOr<Layouts> MakeLayouts(const CudaGemm::Shape& shape, int64_t depth,
                                    cudaDataType_t type) {
  const auto columns = static_cast<uint64_t>(shape.columns);
  const auto rows = static_cast<uint64_t>(shape.rows);
  const auto k = static_cast<uint64_t>(depth);
  Layouts layouts;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cublasLtMatrixLayoutInit(&layouts.weight, type, k, columns, depth));
  LOGPROBD_RETURN_IF_CUDA_ERROR(cublasLtMatrixLayoutInit(&layouts.hidden, type, k, rows, depth));
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cublasLtMatrixLayoutInit(&layouts.logits, CUDA_R_32F, columns, rows, shape.columns));
  return layouts;
}

template <typename T>
T Config(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute,
         T fallback) {
  T value = fallback;
  size_t written = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof(value), &written);
  return status == CUBLAS_STATUS_SUCCESS ? value : fallback;
}

/// Returns true if the algorithm computes each dot product as one chain of additions.
bool KeepsOneChain(const cublasLtMatmulHeuristicResult_t& result) {
  return result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= kWorkspaceBytes &&
         Config<int32_t>(result.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 1) <= 1 &&
         Config<uint32_t>(result.algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                          CUBLASLT_REDUCTION_SCHEME_NONE) == CUBLASLT_REDUCTION_SCHEME_NONE;
}

std::string Describe(const cublasLtMatmulAlgo_t& algorithm) {
  return absl::StrCat(
      "algorithm ", Config<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_ID, -1), ", tile ",
      Config<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, 0), ", stages ",
      Config<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID, 0), ", cluster ",
      Config<uint16_t>(algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 0), ", swizzle ",
      Config<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 0));
}

absl::StatusOr<std::vector<cublasLtMatmulHeuristicResult_t>> Candidates(
    cublasLtHandle_t handle, cublasLtMatmulDescOpaque_t& operation, Layouts& layouts,
    kernels::Dtype dtype) {
  cublasLtMatmulPreferenceOpaque_t preference{};
  LOGPROBD_RETURN_IF_CUDA_ERROR(cublasLtMatmulPreferenceInit(&preference));
  const uint64_t workspace_bytes = kWorkspaceBytes;
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                           &workspace_bytes, sizeof(workspace_bytes)));
  const uint32_t reduction_schemes = CUBLASLT_REDUCTION_SCHEME_NONE;
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                           &reduction_schemes, sizeof(reduction_schemes)));
  if (dtype == kernels::Dtype::kF32) {
    // Allows only plain fp32 multiply-adds: no TF32 and no emulation by bf16 products.
    const uint64_t implementation = CUBLASLT_NUMERICAL_IMPL_FLAGS_FMA |
                                    CUBLASLT_NUMERICAL_IMPL_FLAGS_ACCUMULATOR_32F |
                                    CUBLASLT_NUMERICAL_IMPL_FLAGS_INPUT_32F;
    LOGPROBD_RETURN_IF_CUDA_ERROR(cublasLtMatmulPreferenceSetAttribute(
        &preference, CUBLASLT_MATMUL_PREF_IMPL_MASK, &implementation, sizeof(implementation)));
  }
  std::vector<cublasLtMatmulHeuristicResult_t> results(kAlgorithmsMax);
  int found = 0;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cublasLtMatmulAlgoGetHeuristic(
      handle, &operation, &layouts.weight, &layouts.hidden, &layouts.logits, &layouts.logits,
      &preference, kAlgorithmsMax, results.data(), &found));
  results.resize(static_cast<size_t>(found));
  return results;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaGemm>> CudaGemm::Create(const Options& options) {
  std::unique_ptr<CudaGemm> gemm(new CudaGemm);
  cublasLtHandle_t handle = nullptr;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cublasLtCreate(&handle));
  gemm->handle_.reset(handle);
  gemm->type_ = TypeOf(options.dtype);
  gemm->depth_ = options.depth;
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cublasLtMatmulDescInit(&gemm->operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t transpose = CUBLAS_OP_T;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cublasLtMatmulDescSetAttribute(
      &gemm->operation_, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose)));
  LOGPROBD_ASSIGN_OR_RETURN(gemm->workspace_, AllocateDevice(kWorkspaceBytes, "GEMM counters"));
  LOGPROBD_RETURN_IF_ERROR(gemm->Choose(options));
  return gemm;
}

absl::Status CudaGemm::Choose(const Options& options) {
  LOGPROBD_ASSIGN_OR_RETURN(Layouts canonical, MakeLayouts(kCanonicalShape, depth_, type_));
  LOGPROBD_ASSIGN_OR_RETURN(const auto candidates,
                            Candidates(handle_.get(), operation_, canonical, options.dtype));
  // Returns the first shape that the algorithm cannot compute, with the reason, or an empty string.
  const auto first_failure = [&](const cublasLtMatmulAlgo_t& algorithm) -> std::string {
    for (const Shape& shape : options.shapes) {
      auto layouts = MakeLayouts(shape, depth_, type_);
      if (!layouts.ok()) return std::string(layouts.status().message());
      cublasLtMatmulHeuristicResult_t result{};
      const cublasStatus_t status =
          cublasLtMatmulAlgoCheck(handle_.get(), &operation_, &layouts->weight, &layouts->hidden,
                                  &layouts->logits, &layouts->logits, &algorithm, &result);
      if (status != CUBLAS_STATUS_SUCCESS || result.workspaceSize > kWorkspaceBytes) {
        return absl::StrCat(shape.columns, " columns, ", shape.rows,
                            " rows: ", cublasLtGetStatusName(status), ", workspace ",
                            result.workspaceSize);
      }
    }
    return "";
  };
  int skip = options.algorithm_index;
  std::string reasons;
  for (const cublasLtMatmulHeuristicResult_t& candidate : candidates) {
    const std::string failure =
        KeepsOneChain(candidate) ? first_failure(candidate.algo) : "splits its sums";
    if (failure.empty() && skip-- == 0) {
      algorithm_ = candidate.algo;
      description_ = Describe(algorithm_);
      return absl::OkStatus();
    }
    if (!failure.empty()) absl::StrAppend(&reasons, "; ", Describe(candidate.algo), ": ", failure);
  }
  return absl::InternalError(absl::StrCat(
      "cuBLASLt has no algorithm that computes every shape at depth ", depth_, reasons));
}

absl::Status CudaGemm::Run(const void* weight, const void* hidden, const Shape& shape,
                           float* logits, cudaStream_t stream) const {
  LOGPROBD_ASSIGN_OR_RETURN(Layouts layouts, MakeLayouts(shape, depth_, type_));
  const float one = 1.0F;
  const float zero = 0.0F;
  // The call only reads the descriptor but takes a mutable pointer.
  cublasLtMatmulDescOpaque_t operation = operation_;
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cublasLtMatmul(handle_.get(), &operation, &one, weight, &layouts.weight, hidden,
                     &layouts.hidden, &zero, logits, &layouts.logits, logits, &layouts.logits,
                     &algorithm_, workspace_.get(), kWorkspaceBytes, stream));
  return absl::OkStatus();
}

}  // namespace logprobd
