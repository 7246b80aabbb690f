# The CUDA engine, part of logprobd_engine where the build has CUDA. The runtime is linked statically, so
# that a machine without a driver gets a sentence and no loader error; cuBLASLt comes only shared.
target_sources(logprobd_engine PRIVATE
  cuda_engine.cc cuda_gemm.cc cuda_head.cc cuda_memory.cc cuda_plan.cc cuda_scorer.cc cuda_slot.cc cuda_status.cc)
target_link_libraries(logprobd_engine
  PUBLIC logprobd_kernels_chunk_plan CUDA::cudart_static CUDA::cublasLt
  PRIVATE logprobd_kernels_chunked logprobd_kernels_combine logprobd_kernels_fused)
