# What the build needs and from which Debian 12 / Ubuntu 24.04 package it comes. A missing one is a
# configure error that names the package.

macro(logprobd_require package debian_package)
  find_package(${package} ${ARGN} QUIET)
  if(NOT ${package}_FOUND)
    message(FATAL_ERROR "${package} was not found: install ${debian_package} "
                        "(bash deploy/quickstart.sh installs everything)")
  endif()
endmacro()

find_package(Threads REQUIRED)
logprobd_require(absl libabsl-dev)
logprobd_require(Protobuf "libprotobuf-dev and protobuf-compiler" 3.21)
logprobd_require(gRPC "libgrpc++-dev and protobuf-compiler-grpc" 1.51 CONFIG)
logprobd_require(spdlog libspdlog-dev 1.10)
logprobd_require(nlohmann_json nlohmann-json3-dev 3.11)
logprobd_require(CLI11 libcli11-dev 2.1)
find_program(LOGPROBD_GRPC_PLUGIN grpc_cpp_plugin)
if(NOT LOGPROBD_GRPC_PLUGIN)
  message(FATAL_ERROR "grpc_cpp_plugin was not found: install protobuf-compiler-grpc")
endif()
foreach(header IN ITEMS httplib.h toml.hpp)
  find_path(LOGPROBD_HAS_${header} ${header})
  if(NOT LOGPROBD_HAS_${header})
    message(FATAL_ERROR "${header} was not found: install libcpp-httplib-dev and libtoml11-dev")
  endif()
endforeach()
# Debian builds cpp-httplib as a library, Ubuntu too; where it is header-only nothing is linked.
find_library(LOGPROBD_HTTPLIB_LIBRARY NAMES cpp-httplib)


# Only prometheus-cpp's core; its package file insists on curl and civetweb, which we do not use.
find_library(LOGPROBD_PROMETHEUS_LIBRARY NAMES prometheus-cpp-core)
if(NOT LOGPROBD_PROMETHEUS_LIBRARY)
  message(FATAL_ERROR "prometheus-cpp-core was not found: install prometheus-cpp-dev")
endif()

# CUDA: nvcc of toolkit 13 or later, on PATH or in the usual place.
set(LOGPROBD_HAVE_CUDA OFF)
if(NOT LOGPROBD_CUDA STREQUAL "OFF")
  find_program(LOGPROBD_NVCC nvcc HINTS /usr/local/cuda/bin)
  if(LOGPROBD_NVCC)
    set(CMAKE_CUDA_COMPILER ${LOGPROBD_NVCC})
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      # 9.0 is what is tested; a package for other GPUs names its own list (8.0 and later).
      set(CMAKE_CUDA_ARCHITECTURES 90 CACHE STRING "GPU architectures of the CUDA code")
    endif()
    enable_language(CUDA)
    find_package(CUDAToolkit QUIET)
    if(CUDAToolkit_FOUND)
      set(LOGPROBD_HAVE_CUDA ON)
    endif()
  endif()
  if(LOGPROBD_CUDA STREQUAL "ON" AND NOT LOGPROBD_HAVE_CUDA)
    message(FATAL_ERROR "LOGPROBD_CUDA=ON, but no CUDA toolkit was found: install CUDA 13 or later "
                        "(nvcc and cuBLAS), put nvcc on PATH, or configure with -DLOGPROBD_CUDA=OFF")
  endif()
endif()

# CUTLASS, headers only, for the fused kernel; deploy/packages.sh fetches it.
set(LOGPROBD_CUTLASS_INCLUDE ${PROJECT_SOURCE_DIR}/build/cutlass/cutlass_library/source/include
    CACHE PATH "Folder that holds cutlass/cutlass.h (4.2)")
set(LOGPROBD_HAVE_FUSED OFF)
if(LOGPROBD_HAVE_CUDA)
  if(EXISTS ${LOGPROBD_CUTLASS_INCLUDE}/cutlass/cutlass.h)
    set(LOGPROBD_HAVE_FUSED ON)
  elseif(LOGPROBD_CUDA STREQUAL "ON")
    message(FATAL_ERROR "LOGPROBD_CUDA=ON, but there is no CUTLASS in ${LOGPROBD_CUTLASS_INCLUDE}: fetch it with "
                        "bash deploy/fetch_cutlass.sh, or set LOGPROBD_CUTLASS_INCLUDE")
  endif()
endif()
message(STATUS "logprobd ${PROJECT_VERSION}: CUDA engine ${LOGPROBD_HAVE_CUDA}, fused kernel ${LOGPROBD_HAVE_FUSED}")

find_program(LOGPROBD_CCACHE ccache)
if(LOGPROBD_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${LOGPROBD_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${LOGPROBD_CCACHE})
endif()
