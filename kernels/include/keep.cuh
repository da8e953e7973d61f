// A sample's factor of a drop path, zero or one over the survival rate: fp32 (KEEP 1) or 16 bits like the branch (KEEP 2), as autocast has
// it; a cast would be a launch more in each direction. Include vector.cuh first.

#if KEEP == 2
#include "half.cuh"
typedef unsigned short Keep;
__device__ __forceinline__ float widen_keep(Keep k) { return STORAGE == 1 ? widen_f16(k) : widen_bf16(k); }
#else
typedef float Keep;
__device__ __forceinline__ float widen_keep(Keep k) { return k; }
#endif
