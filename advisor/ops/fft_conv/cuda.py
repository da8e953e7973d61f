"""Convolution by transforms: cuFFT's of whole images, a matrix product a frequency, and back. Shapes have been checked by the caller (spec).

With hats for transforms, a frequency at a time: y^ = x^ conj(w^), dx^ = dy^ w^, dw^ = conj(dy^) x^.
"""

from __future__ import annotations

import torch

from advisor.ops import nvrtc
from advisor.ops.fft_conv import spec
from advisor.ops.fft_conv.spec import FftConv
from advisor.ops.launches import launch


def _turned(planes: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, columns] complex64, contiguous, as [columns, rows]."""
    columns = planes.numel() // rows
    found = torch.empty((columns, rows), dtype=torch.complex64, device=planes.device)
    grid = -(-rows // spec.TILE), -(-columns // spec.TILE)
    launch(spec.TURN, {}, planes.device.index or 0, grid, spec.THREADS, (rows, columns)).run(planes, found)
    return found


def _transform(images: torch.Tensor, call: FftConv) -> torch.Tensor:
    """Of [A, B, H, W] fp32: a matrix [A, B] for each frequency, [frequencies, A, B] complex64."""
    found: torch.Tensor = torch.fft.rfft2(images, s=call.sizes).contiguous()
    return _turned(found, images.shape[0] * images.shape[1]).view(-1, *images.shape[:2])


def _images(matrices: torch.Tensor, call: FftConv, first: tuple[int, int], size: tuple[int, int]) -> torch.Tensor:
    """Back from [frequencies, A, B] to [A, B, *size] fp32, from row and column `first` on, which may be negative: those wrap around."""
    a, b = matrices.shape[1:]
    planes = _turned(matrices.contiguous(), call.frequencies)
    rows, columns = call.sizes
    found: torch.Tensor = torch.fft.irfft2(planes.view(a, b, rows, columns // 2 + 1), s=call.sizes)
    if first != (0, 0):
        found = found.roll((-first[0], -first[1]), (2, 3))
    return found[:, :, : size[0], : size[1]].contiguous()


def _repaired(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor, call: FftConv, product: int) -> torch.Tensor:
    """`result` as a convolution has it where it is not finite. `a`, `b`: its operands, as the source names them."""
    device = result.device.index or 0
    values = result.numel()
    blocks = min(-(-values // spec.THREADS), spec.BLOCKS_AN_SM * nvrtc.sm_count(device))
    sizes = (
        *(values, call.batch, call.inputs, call.outputs, call.height, call.width, call.out_height, call.out_width),
        *(call.taps_h, call.taps_w, call.pad_h, call.pad_w),
    )
    launch(spec.REPAIR, {"PRODUCT": product}, device, blocks, spec.THREADS, sizes).run(result, a, b)
    return result


def forward(x: torch.Tensor, weight: torch.Tensor, call: FftConv) -> torch.Tensor:
    """Returns y [N, O, OH, OW] contiguous fp32. x, weight: contiguous fp32."""
    product = torch.bmm(_transform(x, call), _transform(weight, call).mH)
    y = _images(product, call, (-call.pad_h, -call.pad_w), (call.out_height, call.out_width))
    return _repaired(y, x, weight, call, spec.FORWARD)


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, call: FftConv, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns dx [N, I, H, W] and dweight [O, I, R, S], contiguous fp32, each where wanted."""
    above = _transform(dy, call)
    dx = dweight = None
    if wanted[1]:
        product = torch.bmm(above.mH, _transform(x, call))
        dweight = _images(product, call, (-call.pad_h, -call.pad_w), (call.taps_h, call.taps_w))
        dweight = _repaired(dweight, dy, x, call, spec.WEIGHT)
    if wanted[0]:
        product = torch.bmm(above, _transform(weight, call))
        dx = _images(product, call, (call.pad_h, call.pad_w), (call.height, call.width))
        dx = _repaired(dx, dy, weight, call, spec.DATA)
    return dx, dweight
