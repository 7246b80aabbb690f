logprobd_test(cuda_engine_gpu_test
  SOURCES cuda_engine_gpu_test.cc
  LIBS logprobd_engine logprobd_engine_suite
  LABELS gpu)
