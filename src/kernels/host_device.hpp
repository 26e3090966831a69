// Marks functions that run on the host and, when nvcc compiles them, on the device.
#pragma once

#ifdef __CUDACC__
#define KDT_HOST_DEVICE __host__ __device__
#else
#define KDT_HOST_DEVICE
#endif
