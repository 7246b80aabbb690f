#include "tests/bench/cuda_graph.h"

#include <cuda.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/errors.h"
#include "server/engine/cuda_resources.h"

namespace logprobd::testing {
namespace {

struct GraphDestroy {
  void operator()(cudaGraph_t graph) const { (void)cudaGraphDestroy(graph); }
};
using CapturedGraph = std::unique_ptr<CUgraph_st, GraphDestroy>;

absl::StatusOr<CapturedGraph> Capture(const Work& work, int calls, cudaStream_t stream) {
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  absl::Status status;
  for (int i = 0; i < calls; ++i) status.Update(work(stream));
  cudaGraph_t graph = nullptr;
  const cudaError_t error = cudaStreamEndCapture(stream, &graph);
  CapturedGraph captured(graph);
  LOGPROBD_RETURN_IF_ERROR(status);
  LOGPROBD_RETURN_IF_CUDA_ERROR(error);
  return captured;
}

/// Returns a function of the driver in the given version of its interface. The programs do not link
/// the driver, since they must start without one.
template <typename Function>
absl::StatusOr<Function> DriverFunction(const char* name, unsigned int version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    return absl::UnavailableError(absl::StrCat("the driver has no ", name));
  }
  return reinterpret_cast<Function>(function);
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaGraph>> CudaGraph::Create(const Work& work, int calls,
                                                             cudaStream_t stream) {
  LOGPROBD_ASSIGN_OR_RETURN(const CapturedGraph captured, Capture(work, calls, stream));
  std::unique_ptr<CudaGraph> graph(new CudaGraph);
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaGraphInstantiate(&graph->executable_, captured.get(), 0));
  return graph;
}

absl::Status CudaGraph::Run(cudaStream_t stream) const {
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaGraphLaunch(executable_, stream));
  return absl::OkStatus();
}

absl::StatusOr<std::string> KernelNames(const Work& work, cudaStream_t stream) {
  // The runtime does not know kernels that cuBLASLt loads through the driver, so the driver is
  // asked.
  LOGPROBD_ASSIGN_OR_RETURN(
      const auto get_params,
      DriverFunction<decltype(&cuGraphKernelNodeGetParams)>("cuGraphKernelNodeGetParams", 12'000));
  LOGPROBD_ASSIGN_OR_RETURN(const auto get_function_name,
                            DriverFunction<decltype(&cuFuncGetName)>("cuFuncGetName", 12'030));
  LOGPROBD_ASSIGN_OR_RETURN(const auto get_kernel_name,
                            DriverFunction<decltype(&cuKernelGetName)>("cuKernelGetName", 12'030));
  LOGPROBD_ASSIGN_OR_RETURN(const CapturedGraph captured, Capture(work, 1, stream));
  size_t count = 0;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaGraphGetNodes(captured.get(), nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaGraphGetNodes(captured.get(), nodes.data(), &count));
  std::vector<std::string> names;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaGraphNodeGetType(node, &type));
    if (type != cudaGraphNodeTypeKernel) continue;
    CUDA_KERNEL_NODE_PARAMS params{};
    const char* name = nullptr;
    const bool has_name =
        get_params(node, &params) == CUDA_SUCCESS &&
        ((params.func != nullptr && get_function_name(&name, params.func) == CUDA_SUCCESS) ||
         (params.kern != nullptr && get_kernel_name(&name, params.kern) == CUDA_SUCCESS));
    if (!has_name || name == nullptr) {
      return absl::UnavailableError("the driver does not name a kernel of a graph");
    }
    names.emplace_back(name);
  }
  return absl::StrJoin(names, " + ");
}

}  // namespace logprobd::testing
