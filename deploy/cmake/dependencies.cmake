# Finds the dependencies of the build. If one is missing, the configure step fails with an error
# that names its Debian 12 / Ubuntu 24.04 package.

macro(logprobd_require package debian_package)
  find_package(${package} ${ARGN} QUIET)
  if(NOT ${package}_FOUND)
    message(FATAL_ERROR "${package} was not found: install ${debian_package} "
                        "(bash deploy/quickstart.sh installs everything)")
  endif()
endmacro()

find_package(Threads REQUIRED)
logprobd_require(absl libabsl-dev)
# Only the package file of a newer Protobuf names the libraries that it needs. Debian's Protobuf has no such file.
find_package(Protobuf CONFIG QUIET)
if(NOT Protobuf_FOUND)
  logprobd_require(Protobuf "libprotobuf-dev and protobuf-compiler" 3.21)
endif()
logprobd_require(gRPC "libgrpc++-dev and protobuf-compiler-grpc" 1.51 CONFIG)
# Computes the sha256 of weights. gRPC depends on it, too.
logprobd_require(OpenSSL libssl-dev 3.0 COMPONENTS Crypto)
logprobd_require(nlohmann_json nlohmann-json3-dev 3.11)
logprobd_require(CLI11 libcli11-dev 2.1)
find_program(LOGPROBD_GRPC_PLUGIN grpc_cpp_plugin)
if(NOT LOGPROBD_GRPC_PLUGIN)
  message(FATAL_ERROR "grpc_cpp_plugin was not found: install protobuf-compiler-grpc")
endif()
find_path(LOGPROBD_HAS_TOML11 toml.hpp)
if(NOT LOGPROBD_HAS_TOML11)
  message(FATAL_ERROR "toml.hpp was not found: install libtoml11-dev")
endif()
# Serve HTTP and HTTPS. The versions are Debian 12's.
find_package(PkgConfig QUIET)
if(PkgConfig_FOUND)
  pkg_check_modules(MICROHTTPD QUIET IMPORTED_TARGET libmicrohttpd>=0.9.75)
  pkg_check_modules(GNUTLS QUIET IMPORTED_TARGET gnutls>=3.7.9)
endif()
if(NOT TARGET PkgConfig::MICROHTTPD)
  message(FATAL_ERROR "libmicrohttpd was not found: install pkg-config and libmicrohttpd-dev")
endif()
if(NOT TARGET PkgConfig::GNUTLS)
  message(FATAL_ERROR "gnutls was not found: install pkg-config and libgnutls28-dev")
endif()

# Finds only the core of prometheus-cpp, because its package file requires curl and civetweb, which
# are not used here.
find_library(LOGPROBD_PROMETHEUS_LIBRARY NAMES prometheus-cpp-core)
if(NOT LOGPROBD_PROMETHEUS_LIBRARY)
  message(FATAL_ERROR "prometheus-cpp-core was not found: install prometheus-cpp-dev")
endif()

# The CUDA engine needs nvcc of toolkit 13 or later, on PATH or in /usr/local/cuda/bin.
set(LOGPROBD_HAVE_CUDA OFF)
if(NOT LOGPROBD_CUDA STREQUAL "OFF")
  find_program(LOGPROBD_NVCC nvcc HINTS /usr/local/cuda/bin)
  if(LOGPROBD_NVCC)
    set(CMAKE_CUDA_COMPILER ${LOGPROBD_NVCC})
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      # A100, A10 and RTX 30, L4 and RTX 40, Hopper, and PTX for later GPUs. The kernels with wgmma, which take most
      # of the build's time, are built for Hopper alone. Tests run on 9.0 only.
      set(CMAKE_CUDA_ARCHITECTURES "80-real;86-real;89-real;90" CACHE STRING "GPU architectures of the CUDA code")
    endif()
    enable_language(CUDA)
    find_package(CUDAToolkit QUIET)
    if(NOT CUDAToolkit_FOUND)
      set(cuda_lack "${LOGPROBD_NVCC} was found, but its toolkit was not: install cuda-cudart-dev-13-0")
    elseif(CUDAToolkit_VERSION VERSION_LESS 13)
      set(cuda_lack "the CUDA toolkit has version ${CUDAToolkit_VERSION}, but 13 or later is needed: "
                    "install cuda-nvcc-13-0, cuda-cudart-dev-13-0 and libcublas-dev-13-0")
    elseif(NOT TARGET CUDA::cublasLt OR NOT TARGET CUDA::cublas)
      set(cuda_lack "the CUDA toolkit does not contain cuBLAS: install libcublas-dev-13-0")
    else()
      set(LOGPROBD_HAVE_CUDA ON)
    endif()
  else()
    set(cuda_lack "no CUDA toolkit was found: install CUDA 13 or later (nvcc and cuBLAS) and put "
                  "nvcc on PATH")
  endif()
  string(CONCAT cuda_lack ${cuda_lack})
  if(LOGPROBD_CUDA STREQUAL "ON" AND NOT LOGPROBD_HAVE_CUDA)
    message(FATAL_ERROR "LOGPROBD_CUDA=ON, but ${cuda_lack}; or configure with -DLOGPROBD_CUDA=OFF")
  elseif(LOGPROBD_NVCC AND NOT LOGPROBD_HAVE_CUDA)
    message(WARNING "Built without the CUDA engine: ${cuda_lack}")
  endif()
endif()

# The fused kernels for Hopper need CUTLASS's headers, which deploy/fetch_cutlass.sh downloads.
set(LOGPROBD_CUTLASS_INCLUDE ${PROJECT_SOURCE_DIR}/build/cutlass/cutlass_library/source/include
    CACHE PATH "Folder that contains cutlass/cutlass.h (4.2)")
set(LOGPROBD_HAVE_FUSED OFF)
if(LOGPROBD_HAVE_CUDA AND CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)90a?(-|;|$)|native|all")
  if(EXISTS ${LOGPROBD_CUTLASS_INCLUDE}/cutlass/cutlass.h)
    set(LOGPROBD_HAVE_FUSED ON)
  elseif(LOGPROBD_CUDA STREQUAL "ON")
    message(FATAL_ERROR "LOGPROBD_CUDA=ON, but there is no CUTLASS in ${LOGPROBD_CUTLASS_INCLUDE}: fetch it with "
                        "bash deploy/fetch_cutlass.sh, or set LOGPROBD_CUTLASS_INCLUDE")
  endif()
endif()
message(STATUS "logprobd ${PROJECT_VERSION}: CUDA engine ${LOGPROBD_HAVE_CUDA}, fused kernel ${LOGPROBD_HAVE_FUSED}")

# Compiled objects are stored in the user's cache folder (ccache's default, or CCACHE_DIR). Paths below the source folder
# are hashed as relative paths, so that all clones of this repository share the objects.
find_program(LOGPROBD_CCACHE ccache)
if(LOGPROBD_CCACHE)
  set(launcher env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_ctime,include_file_mtime ${LOGPROBD_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${launcher})
endif()

# Finds PyTorch for the calling folder. PyTorch's own search for CUDA clears the cached paths of CUDA's libraries and may
# find them under another name, such as lib64 instead of lib; the next configuration would then link every program again,
# also while tests run it. So the paths are put back.
macro(logprobd_find_torch)
  get_cmake_property(logprobd_cuda_libraries CACHE_VARIABLES)
  list(FILTER logprobd_cuda_libraries INCLUDE REGEX "^CUDA_.*_LIBRARY$")
  foreach(library IN LISTS logprobd_cuda_libraries)
    set(logprobd_found_${library} ${${library}})
  endforeach()
  find_package(Torch REQUIRED)
  foreach(library IN LISTS logprobd_cuda_libraries)
    if(logprobd_found_${library})
      set(${library} ${logprobd_found_${library}} CACHE FILEPATH "" FORCE)
    endif()
  endforeach()
endmacro()
