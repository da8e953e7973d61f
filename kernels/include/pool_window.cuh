// Pooling windows over NHWC images: which thread works where, and which windows cover an element.
//
// Set by the build: KH, KW window; SH, SW stride; DH, DW dilation. Output (oh, ow) covers the elements
// (oh * SH - pad_h + kh * DH, ow * SW - pad_w + kw * DW).
//
// Block: (channel vectors, columns, rows), so that neighbouring windows meet in one SM's L1 in both directions.
// Grid: (column tiles x channel tiles, row tiles, images).

struct Place {
  int vector, column, row;
};

__device__ __forceinline__ Place place_of(int channel_tiles) {
  Place p;
  p.vector = blockIdx.x % channel_tiles * blockDim.x + threadIdx.x;
  p.column = blockIdx.x / channel_tiles * blockDim.y + threadIdx.y;
  p.row = blockIdx.y * blockDim.z + threadIdx.z;
  return p;
}

// Image sizes in elements; `vectors` channel vectors a pixel.
struct Sizes {
  int vectors, height, width, out_height, out_width, pad_h, pad_w, channel_tiles;
};

// Elements seen from behind: the element at h + pad = SH * q + r (0 <= r < SH) is covered by the windows oh = q - a with
// kh * DH = r + a * SH for a in 0 .. BACK_H - 1. A thread takes whole groups of SH x SW elements, so that a and kh are known
// when it is compiled, and every window is read once for the group.
#define BACK_H ((KH - 1) * DH / SH + 1)
#define BACK_W ((KW - 1) * DW / SW + 1)

// kh for phase r and window q - a; -1 when the window does not cover this phase.
__device__ __forceinline__ constexpr int tap(int r, int a, int stride, int dilation, int size) {
  return (r + a * stride) % dilation == 0 && (r + a * stride) / dilation < size ? (r + a * stride) / dilation : -1;
}
