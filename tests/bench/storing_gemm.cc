#include "tests/bench/storing_gemm.h"

#include <vector>

#include "server/base/errors.h"
#include "server/engine/cuda_resources.h"

namespace logprobd::testing {
namespace {

constexpr int64_t kGemmWorkspaceBytes = int64_t{64} << 20;
constexpr int kGemmAlgorithms = 8;

}  // namespace

absl::StatusOr<std::unique_ptr<StoringGemm>> StoringGemm::Create(const Sizes& sizes,
                                                                 const std::byte* weight,
                                                                 const std::byte* hidden,
                                                                 Timer& timer) {
  std::unique_ptr<StoringGemm> gemm(new StoringGemm);
  gemm->weight_ = weight;
  gemm->hidden_ = hidden;
  LOGPROBD_RETURN_IF_ERROR(gemm->Prepare(sizes));
  LOGPROBD_RETURN_IF_ERROR(gemm->ChooseFastest(timer));
  return gemm;
}

absl::Status StoringGemm::Run(cudaStream_t stream) {
  const float one = 1.0F;
  const float zero = 0.0F;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cublasLtMatmul(
      handle_, &operation_, &one, weight_, &weight_layout_, hidden_, &hidden_layout_, &zero,
      logits_.get(), &logits_layout_, logits_.get(), &logits_layout_, &algorithm_, workspace_.get(),
      static_cast<size_t>(kGemmWorkspaceBytes), stream));
  return absl::OkStatus();
}

absl::Status StoringGemm::Prepare(const Sizes& sizes) {
  const auto rows = static_cast<uint64_t>(sizes.rows);
  const auto columns = static_cast<uint64_t>(sizes.columns);
  const auto depth = static_cast<uint64_t>(sizes.depth);
  LOGPROBD_RETURN_IF_CUDA_ERROR(cublasLtCreate(&handle_));
  LOGPROBD_ASSIGN_OR_RETURN(logits_, AllocateDevice(sizes.rows * sizes.columns * 2, "bf16 logits"));
  LOGPROBD_ASSIGN_OR_RETURN(workspace_, AllocateDevice(kGemmWorkspaceBytes, "GEMM workspace"));
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cublasLtMatmulDescInit(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t transpose = CUBLAS_OP_T;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cublasLtMatmulDescSetAttribute(
      &operation_, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose)));
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cublasLtMatrixLayoutInit(&weight_layout_, CUDA_R_16BF, depth, columns, sizes.depth));
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cublasLtMatrixLayoutInit(&hidden_layout_, CUDA_R_16BF, depth, rows, sizes.depth));
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cublasLtMatrixLayoutInit(&logits_layout_, CUDA_R_16BF, columns, rows, sizes.columns));
  return absl::OkStatus();
}

absl::Status StoringGemm::ChooseFastest(Timer& timer) {
  cublasLtMatmulPreferenceOpaque_t preference{};
  LOGPROBD_RETURN_IF_CUDA_ERROR(cublasLtMatmulPreferenceInit(&preference));
  const auto workspace_bytes = static_cast<uint64_t>(kGemmWorkspaceBytes);
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                           &workspace_bytes, sizeof(workspace_bytes)));
  std::vector<cublasLtMatmulHeuristicResult_t> results(kGemmAlgorithms);
  int found = 0;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cublasLtMatmulAlgoGetHeuristic(
      handle_, &operation_, &weight_layout_, &hidden_layout_, &logits_layout_, &logits_layout_,
      &preference, kGemmAlgorithms, results.data(), &found));
  double best = 1e30;
  cublasLtMatmulAlgo_t best_algorithm{};
  const Work run = [this](cudaStream_t stream) { return Run(stream); };
  // Only the second run of each algorithm counts, because the clock has settled by then.
  for (int turn = 0; turn < 2 * found; ++turn) {
    algorithm_ = results[static_cast<size_t>(turn % found)].algo;
    LOGPROBD_RETURN_IF_ERROR(Run(timer.stream()));
    LOGPROBD_ASSIGN_OR_RETURN(const double milliseconds, timer.Milliseconds(run, 2));
    if (turn >= found && milliseconds < best) {
      best = milliseconds;
      best_algorithm = algorithm_;
    }
  }
  algorithm_ = best_algorithm;
  return absl::OkStatus();
}

}  // namespace logprobd::testing
