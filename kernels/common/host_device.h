#pragma once

/// Marks a function that host and device code share; nothing on a host-only compiler.
#ifdef __CUDACC__
#define LOGPROBD_HOST_DEVICE __host__ __device__
#else
#define LOGPROBD_HOST_DEVICE
#endif
