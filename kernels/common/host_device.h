#pragma once

/// Marks an inline function that host and device code share. On a host it is always inlined: files
/// compiled for different CPU features must not share an out-of-line copy of it.
#ifdef __CUDACC__
#define LOGPROBD_HOST_DEVICE __host__ __device__
#else
#define LOGPROBD_HOST_DEVICE [[gnu::always_inline]]
#endif
