"""A small kernel with its backward, and the ways to get it wrong: one source for a GPU, and for the emulator of the tests.

y = max(w[c] x + b[c], 0) of an NCHW tensor; dx, dw and db of it. `FAULT` plants one fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

SOURCE = r"""
// x, y, dy, dx: [n, c, h, w] contiguous fp32; w, b, dw, db: [c] fp32.
extern "C" __global__ void affine_relu(
    const float* x, const float* w, const float* b, float* y, int total, int channels, int pixels, float known
) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
#if FAULT == UNWRITTEN
  if (i >= total - 4 * pixels) return;
#elif FAULT == WRITES_OUTSIDE
  if (i >= total && i < total + 8) y[i] = 1.f;
#endif
  if (i >= total) return;
  const int c = i / pixels % channels;
#if FAULT == READS_OUTSIDE
  float v = x[i + 8] * w[c] + b[c];
#else
  float v = x[i] * w[c] + b[c];
#endif
#if FAULT == ONE_ELEMENT
  if (i == total / 2) v = 8.f;
#elif FAULT == ONE_BATCH
  if (x[0] != known) v *= 1.5f;
#elif FAULT == SINGLE_SAMPLE
  if (total == channels * pixels && i % 2) v *= 1.5f;
#endif
  y[i] = v > 0.f ? v : 0.f;
}

// One block of 256 threads a channel. Warps 1 to 7 sum, warp 0 waits for them and adds up.
extern "C" __global__ void affine_relu_backward(
    const float* dy, const float* x, const float* y, const float* w, float* dx, float* dw, float* db,
    int samples, int channels, int pixels
) {
  __shared__ float sums[2][256];
  const int c = blockIdx.x, t = threadIdx.x;
  float of_w = 0.f, of_b = 0.f;
  sums[0][t] = sums[1][t] = 0.f;
  __syncthreads();
  if (t >= 32) {
#if FAULT == RACE && defined(__CUDACC_RTC__)
    __nanosleep(100000);  // so that any GPU loses the race
#endif
    for (int k = t - 32; k < samples * pixels; k += 224) {
      const int i = (k / pixels * channels + c) * pixels + k % pixels;
      const float g = y[i] > 0.f ? dy[i] : 0.f;
#if FAULT == GRADIENT_ONLY
      dx[i] = 1.3f * g * w[c];
#else
      dx[i] = g * w[c];
#endif
      of_w += g * x[i];
      of_b += g;
    }
    sums[0][t] = of_w;
    sums[1][t] = of_b;
  }
#if FAULT != RACE
  __syncthreads();
#endif
  if (t == 0) {
    float whole_w = 0.f, whole_b = 0.f;
    for (int k = 0; k < 256; ++k) {
      whole_w += ((volatile float*)sums[0])[k];
      whole_b += ((volatile float*)sums[1])[k];
    }
#if FAULT == STALE_WORKSPACE
    dw[c] += whole_w;
    db[c] += whole_b;
#else
    dw[c] = whole_w;
    db[c] = whole_b;
#endif
  }
}
"""

FAULTS = (
    "ONE_ELEMENT",
    "ONE_BATCH",
    "SINGLE_SAMPLE",
    "RACE",
    "READS_OUTSIDE",
    "WRITES_OUTSIDE",
    "WRONG_STRIDE",
    "GRADIENT_ONLY",
    "STALE_WORKSPACE",
    "UNWRITTEN",
)
MARGIN = 16  # values behind every tensor that a kernel could reach by mistake, in the same allocation

Compile = Callable[[str, str, dict[str, int]], Any]  # source, entry, macros → f(grid, block, arguments, 0, stream)


# What each takes, as ops/cuda_driver.Kernel has it.
TYPES = {"affine_relu": "PPPPiiif", "affine_relu_backward": "PPPPPPPiii"}


class Kernels:
    """The pair compiled with one fault ("" for none), and the memory that it keeps from call to call."""

    def __init__(self, compile_: Compile, stream: Callable[[], Any], fault: str, behind: torch.Tensor | None) -> None:
        numbers = {name: number for number, name in enumerate(FAULTS, 1)}
        defines = {**numbers, "FAULT": numbers.get(fault, 0)}
        self.forward = compile_(SOURCE, "affine_relu", defines)
        self.backward = compile_(SOURCE, "affine_relu_backward", defines)
        self.stream, self.fault, self.behind = stream, fault, behind
        self.known: float | None = None
        self.output: torch.Tensor | None = None
        self.workspace: torch.Tensor | None = None

    def result(self, like: torch.Tensor) -> torch.Tensor:
        """Where a forward writes: in one fault just before somebody's values, in another where the last call wrote."""
        if self.fault == "WRITES_OUTSIDE":
            assert self.behind is not None  # a view of a storage with room before it
            return self.behind.as_strided(like.shape, like.stride(), 0)
        if self.fault == "UNWRITTEN":
            if self.output is None:
                self.output = torch.zeros_like(like)
            return self.output
        return torch.empty_like(like)

    def sums(self, like: torch.Tensor) -> torch.Tensor:
        """[2, c] for dw and db."""
        if self.fault != "STALE_WORKSPACE":
            return torch.empty(2, like.numel(), device=like.device)
        if self.workspace is None:
            self.workspace = torch.zeros(2, like.numel(), device=like.device)
        return self.workspace


class AffineReLU(torch.autograd.Function):
    """The kernels as an operation of autograd's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        if kernels.fault == "WRONG_STRIDE":
            x = x.contiguous(memory_format=torch.channels_last)  # as it may come; the kernel does not look
        else:
            x = torch.nn.functional.pad(x.flatten(), (0, MARGIN), value=100.0)[: x.numel()].view(x.shape)
        if kernels.known is None:
            kernels.known = x.flatten()[0].item()
        y = kernels.result(x)
        total, channels, pixels = x.numel(), x.shape[1], x.shape[2] * x.shape[3]
        kernels.forward(
            (-(-(total + MARGIN) // 256), 1, 1),
            (256, 1, 1),
            (
                *(t.data_ptr() for t in (x, w, b, y)),
                *(np.int32(size) for size in (total, channels, pixels)),
                np.float32(kernels.known),
            ),
            0,
            kernels.stream(),
        )
        y = y.clone()
        ctx.save_for_backward(x, y, w)
        ctx.kernels = kernels
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x, y, w = ctx.saved_tensors
        dy, dx, sums = dy.contiguous(), torch.empty(x.shape, device=x.device), ctx.kernels.sums(w)
        ctx.kernels.backward(
            (x.shape[1], 1, 1),
            (256, 1, 1),
            (
                *(t.data_ptr() for t in (dy, x, y, w, dx, sums[0], sums[1])),
                *(np.int32(size) for size in (x.shape[0], x.shape[1], x.shape[2] * x.shape[3])),
            ),
            0,
            ctx.kernels.stream(),
        )
        return dx, *sums.clone(), None
