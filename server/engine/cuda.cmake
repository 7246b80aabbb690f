# The CUDA engine, part of logprobd_engine where the build has CUDA. The runtime is linked statically, so
# that a machine without a driver gets a sentence and no loader error; cuBLASLt comes only shared.
target_sources(logprobd_engine PRIVATE
  cuda_engine.cc cuda_gemm.cc cuda_head.cc cuda_host_pinning.cc cuda_ipc_memory.cc cuda_memory.cc cuda_plan.cc cuda_scorer.cc cuda_shard.cc
  cuda_slot.cc cuda_status.cc numa_node.cc peer_collective.cc)
target_link_libraries(logprobd_engine
  PUBLIC logprobd_kernels_chunk_plan CUDA::cudart_static CUDA::cublasLt
  PRIVATE logprobd_kernels_chunked logprobd_kernels_combine logprobd_kernels_fused)

# NCCL joins shards on GPUs that cannot reach each other's memory. Only its header is needed here: the library
# is loaded when it is used.
find_path(LOGPROBD_NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
if(LOGPROBD_NCCL_INCLUDE)
  target_sources(logprobd_engine PRIVATE nccl_collective.cc nccl_library.cc)
  target_include_directories(logprobd_engine SYSTEM PRIVATE ${LOGPROBD_NCCL_INCLUDE})
  target_link_libraries(logprobd_engine PRIVATE ${CMAKE_DL_LIBS})
else()
  target_sources(logprobd_engine PRIVATE nccl_absent.cc)
endif()
