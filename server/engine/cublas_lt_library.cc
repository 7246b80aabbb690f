// A program that is linked with cuBLASLt does not start on a machine without it, even to score on
// the CPU. So the functions of cublasLt.h are defined here and call those of the library.

#include "server/engine/cublas_lt_library.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include "absl/status/statusor.h"
#include "server/engine/cuda_library.h"

namespace logprobd {
namespace {

const absl::StatusOr<void*>& Library() {
  static const auto& library = *new absl::StatusOr<void*>(
      OpenCudaLibrary("libcublasLt.so.13", "cuBLASLt", "libcublas-13-0"));
  return library;
}

/// Calls the function of the library with the name and type of `function`. Returns `missing` if the
/// library does not have it or cannot be loaded.
template <typename Result, typename... Parameters, typename... Arguments>
Result CallOr(Result missing, const char* name, Result (* /*function*/)(Parameters...),
              Arguments... arguments) {
  if (!Library().ok()) return missing;
  const auto found = reinterpret_cast<Result (*)(Parameters...)>(dlsym(*Library(), name));
  return found == nullptr ? missing : found(arguments...);
}

template <typename... Parameters, typename... Arguments>
cublasStatus_t Call(const char* name, cublasStatus_t (*function)(Parameters...),
                    Arguments... arguments) {
  return CallOr(CUBLAS_STATUS_NOT_INITIALIZED, name, function, arguments...);
}

}  // namespace

absl::Status LoadCublasLt() { return Library().status(); }

}  // namespace logprobd

using logprobd::Call;
using logprobd::CallOr;

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  return Call("cublasLtCreate", cublasLtCreate, handle);
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  return Call("cublasLtDestroy", cublasLtDestroy, handle);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                              const void* alpha, const void* a, cublasLtMatrixLayout_t a_layout,
                              const void* b, cublasLtMatrixLayout_t b_layout, const void* beta,
                              const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  return Call("cublasLtMatmul", cublasLtMatmul, handle, operation, alpha, a, a_layout, b, b_layout,
              beta, c, c_layout, d, d_layout, algorithm, workspace, workspace_bytes, stream);
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                       cublasLtMatrixLayout_t a_layout,
                                       cublasLtMatrixLayout_t b_layout,
                                       cublasLtMatrixLayout_t c_layout,
                                       cublasLtMatrixLayout_t d_layout,
                                       const cublasLtMatmulAlgo_t* algorithm,
                                       cublasLtMatmulHeuristicResult_t* result) {
  return Call("cublasLtMatmulAlgoCheck", cublasLtMatmulAlgoCheck, handle, operation, a_layout,
              b_layout, c_layout, d_layout, algorithm, result);
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algorithm,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                    void* value, size_t size, size_t* written) {
  return Call("cublasLtMatmulAlgoConfigGetAttribute", cublasLtMatmulAlgoConfigGetAttribute,
              algorithm, attribute, value, size, written);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a_layout,
    cublasLtMatrixLayout_t b_layout, cublasLtMatrixLayout_t c_layout,
    cublasLtMatrixLayout_t d_layout, cublasLtMatmulPreference_t preference, int requested,
    cublasLtMatmulHeuristicResult_t* results, int* found) {
  return Call("cublasLtMatmulAlgoGetHeuristic", cublasLtMatmulAlgoGetHeuristic, handle, operation,
              a_layout, b_layout, c_layout, d_layout, preference, requested, results, found);
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t operation, size_t size,
                                               cublasComputeType_t compute_type,
                                               cudaDataType_t scale_type) {
  return Call("cublasLtMatmulDescInit_internal", cublasLtMatmulDescInit_internal, operation, size,
              compute_type, scale_type);
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t size) {
  return Call("cublasLtMatmulDescSetAttribute", cublasLtMatmulDescSetAttribute, operation,
              attribute, value, size);
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference,
                                                     size_t size) {
  return Call("cublasLtMatmulPreferenceInit_internal", cublasLtMatmulPreferenceInit_internal,
              preference, size);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t size) {
  return Call("cublasLtMatmulPreferenceSetAttribute", cublasLtMatmulPreferenceSetAttribute,
              preference, attribute, value, size);
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t size,
                                                 cudaDataType type, uint64_t rows, uint64_t columns,
                                                 int64_t leading_dimension) {
  return Call("cublasLtMatrixLayoutInit_internal", cublasLtMatrixLayoutInit_internal, layout, size,
              type, rows, columns, leading_dimension);
}

const char* cublasLtGetStatusName(cublasStatus_t status) {
  return CallOr<const char*>("unknown", "cublasLtGetStatusName", cublasLtGetStatusName, status);
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
  return CallOr<const char*>("cuBLASLt is not loaded", "cublasLtGetStatusString",
                             cublasLtGetStatusString, status);
}

size_t cublasLtGetVersion() { return CallOr<size_t>(0, "cublasLtGetVersion", cublasLtGetVersion); }
