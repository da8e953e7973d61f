// Pooling windows over NDHWC volumes: sizes, and which vector a thread makes. Set by the build: KD, KH, KW window; SD, SH, SW stride.

struct Volume {
  int vectors, depth, height, width, out_depth, out_height, out_width, pad_d, pad_h, pad_w;
};

struct Voxel {
  int n, d, h, w, vector;
};

// Of `count` vectors over [N, depth, height, width, vectors]; n < 0 behind the last.
__device__ __forceinline__ Voxel voxel_of(unsigned int count, int depth, int height, int width, int vectors) {
  const unsigned int at = blockIdx.x * (unsigned int)THREADS + threadIdx.x;
  Voxel p;
  p.n = -1;
  if (at >= count) return p;
  unsigned int rest = at / vectors;
  p.vector = at - rest * vectors;
  p.w = rest % width;
  rest /= width;
  p.h = rest % height;
  rest /= height;
  p.d = rest % depth;
  p.n = rest / depth;
  return p;
}

__device__ __forceinline__ i64 at_voxel(int n, int d, int h, int w, int depth, int height, int width, int vectors) {
  return ((((i64)n * depth + d) * height + h) * width + w) * vectors;
}

#define BACK_D ((KD - 1) / SD + 1)
#define BACK_H ((KH - 1) / SH + 1)
#define BACK_W ((KW - 1) / SW + 1)
