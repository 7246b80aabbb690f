# Benchmarks on a GPU; they need nothing but the CUDA engine.
logprobd_executable(gpu_chunked_bench
  SOURCES gpu_chunked_bench.cc storing_gemm.cc
  LIBS logprobd_large_head logprobd_bench_record logprobd_gpu_machine absl::str_format)
if(LOGPROBD_HAVE_FUSED)
  logprobd_executable(gpu_fused_bench
    SOURCES gpu_fused_bench.cc fused_scene.cc random_fill.cu storing_gemm.cc
    LIBS logprobd_engine logprobd_kernels_fused logprobd_kernels_combine logprobd_bench_record
         logprobd_gpu_machine absl::str_format)
endif()
