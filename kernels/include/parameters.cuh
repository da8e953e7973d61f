// A channel vector's values of an fp32 row of parameters or sums, [C] and aligned to 16 bytes, by 16-byte loads: of loads a
// channel each would touch a sector a thread. Include vector.cuh first.

__device__ __forceinline__ void load_parameters(const float* p, int vector, float (&f)[VEC]) {
#pragma unroll
  for (int q = 0; q < VEC / 4; ++q) {
    const float4 v = ((const float4*)p)[vector * (VEC / 4) + q];
    f[4 * q] = v.x, f[4 * q + 1] = v.y, f[4 * q + 2] = v.z, f[4 * q + 3] = v.w;
  }
}
