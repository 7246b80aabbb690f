#pragma once

/// Marks an inline function that host and device code share. In host code it is always inlined:
/// files that are compiled for different CPU features must not share an out-of-line copy.
#ifdef __CUDACC__
#define LOGPROBD_HOST_DEVICE __host__ __device__
#else
#define LOGPROBD_HOST_DEVICE [[gnu::always_inline]]
#endif
