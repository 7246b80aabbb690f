# Benchmarks on a GPU; they need nothing but the CUDA engine.
logprobd_executable(gpu_chunked_bench
  SOURCES gpu_chunked_bench.cc storing_gemm.cc
  LIBS logprobd_large_head logprobd_bench_record logprobd_gpu_machine absl::str_format)
