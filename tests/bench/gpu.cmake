# Benchmarks on a GPU; they need nothing but the CUDA engine.
logprobd_executable(gpu_shards_bench
  SOURCES gpu_shards_bench.cc engine_load.cc
  LIBS logprobd_large_head logprobd_bench_record logprobd_gpu_machine absl::str_format CLI11::CLI11)
logprobd_executable(gpu_chunked_bench
  SOURCES gpu_chunked_bench.cc engine_load.cc storing_gemm.cc
  LIBS logprobd_large_head logprobd_bench_record logprobd_gpu_machine absl::str_format CLI11::CLI11)
if(LOGPROBD_HAVE_FUSED)
  logprobd_library(logprobd_fused_fixture
    SOURCES fused_fixture.cc random_fill.cu
    PUBLIC logprobd_engine
    PRIVATE logprobd_kernels_chunked logprobd_kernels_combine logprobd_kernels_fused)
  logprobd_executable(gpu_fused_bench
    SOURCES gpu_fused_bench.cc storing_gemm.cc
    LIBS logprobd_fused_fixture logprobd_bench_record logprobd_gpu_machine absl::str_format CLI11::CLI11)
  logprobd_executable(gpu_errors_bench
    SOURCES gpu_errors_bench.cc logits_reference.cu synthetic_rows.cc
    LIBS logprobd_fused_fixture logprobd_engine_testing logprobd_kernels_reference
         logprobd_bench_record logprobd_gpu_machine absl::str_format CLI11::CLI11)
endif()
