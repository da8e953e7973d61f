// Where an output pixel of an upsampling takes its value from, along one axis, as aten::upsample_* computes it in fp32.
//
// Set by the build: BILINEAR 1, or 0 for nearest; HALF_PIXEL 1 where pixel centres lie at halves (bilinear with
// align_corners=False, nearest-exact), else 0 (align_corners=True; nearest).
// `scale` is input pixels an output pixel: (in - 1) / (out - 1) with align_corners, else in / out or 1 / scale_factor.

struct Source {
  int index;     // of the first of two input pixels
  float weight;  // of the second one, index + 1; 0 where there is none
};

__device__ __forceinline__ Source source_of(int out, float scale, int size) {
  Source s;
#if BILINEAR
  const float at = HALF_PIXEL ? fmaxf(scale * ((float)out + 0.5f) - 0.5f, 0.f) : scale * (float)out;
  s.index = (int)at;
  s.weight = at - (float)s.index;
  if (s.index >= size - 1) s.weight = 0.f;
#else
  s.index = (int)floorf(((float)out + (HALF_PIXEL ? 0.5f : 0.f)) * scale);
  s.weight = 0.f;
#endif
  s.index = s.index < size - 1 ? s.index : size - 1;
  return s;
}

// The first output pixel whose source index is at least `index`; `out_size` when there is none. `inverse` is 1 / scale, or 0.
__device__ __forceinline__ int first_output(int index, float scale, float inverse, int size, int out_size) {
  // Bilinear's lies at (index + 0.5) / scale - 0.5, nearest-exact's at index / scale - 0.5: two ahead of either is never too late.
  const float estimate = ((float)index + (BILINEAR && HALF_PIXEL ? 0.5f : 0.f)) * inverse - 2.f;
  int out = estimate > 0.f ? (int)estimate : 0;
  while (out < out_size && source_of(out, scale, size).index < index) ++out;
  return out;
}
