"""Launches of Winograd's transforms, and the products between them. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import cache, lru_cache

import torch

from advisor.ops import storage
from advisor.ops.alignment import empty_nhwc
from advisor.ops.launches import Launch, launch
from advisor.ops.winograd import spec
from advisor.ops.winograd.spec import WinogradConv


@lru_cache(maxsize=4096)
def _filter(product: WinogradConv, weight_dtype: torch.dtype, strides: tuple[int, ...], device: int) -> Launch:
    macros = spec.weight_defines(storage.name(weight_dtype), turned=product.turned)
    sizes = product.outputs, product.inputs, *strides
    return launch(spec.FILTER, macros, device, product.outputs // spec.FILTER_OUTPUTS, spec.FILTER_THREADS, sizes)


@lru_cache(maxsize=4096)
def _transforms(
    product: WinogradConv, weight_dtype: torch.dtype, strides: tuple[int, ...], device: int
) -> tuple[Launch, Launch]:
    """The pixels', and that back."""
    tiles = spec.tiles(product)
    segments = -(-product.tiles_w // spec.WALK)
    macros = spec.input_defines(product)
    sizes = product.height, product.width, product.tiles_h, product.tiles_w, segments, tiles
    grid, nbytes = product.batch * product.tiles_h * segments, spec.staged_bytes(product.inputs)
    pixels = launch(spec.INPUT, macros, device, grid, macros["THREADS"], sizes, shared_bytes=nbytes)
    back = (
        *(product.outputs, product.inputs, product.out_height, product.out_width),
        *(product.tiles_h, product.tiles_w, tiles),
        *strides,
    )
    blocks = -(-tiles * (product.outputs // 2) // spec.OUTPUT_THREADS)
    macros = spec.output_defines(storage.name(weight_dtype), product.padding, turned=product.turned)
    return pixels, launch(spec.OUTPUT, macros, device, blocks, spec.OUTPUT_THREADS, back)


@lru_cache(maxsize=4096)
def _weight_gradient(
    call: WinogradConv, weight_dtype: torch.dtype, strides: tuple[int, ...], device: int
) -> tuple[Launch, Launch]:
    """The result's gradient, and the way back."""
    tiles, threads = spec.tiles(call), spec.WEIGHT_THREADS
    sizes = call.outputs, call.out_height, call.out_width, call.tiles_h, call.tiles_w, tiles
    macros = {"THREADS": threads}
    to_tiles = launch(spec.GRADIENT, macros, device, -(-tiles * (call.outputs // 2) // threads), threads, sizes)
    macros = spec.gradient_defines(storage.name(weight_dtype), call.padding)
    blocks = -(-call.outputs * call.inputs // threads)
    back = call.outputs, call.inputs, call.batch, call.height, call.width, *strides
    return to_tiles, launch(spec.WEIGHT, macros, device, blocks, threads, back)


def _pixels(x: torch.Tensor, scales: torch.Tensor, product: WinogradConv, to_tiles: Launch) -> torch.Tensor:
    """x as frequencies of tiles; `scales` gets the inverse of each tile's scale."""
    pixels = torch.empty((spec.FREQUENCIES, spec.tiles(product), product.inputs), dtype=torch.float16, device=x.device)
    to_tiles.run(x, pixels, scales)
    return pixels


def _product(x: torch.Tensor, weight: torch.Tensor, product: WinogradConv) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the inverse of the scales of x's tiles, [N, tiles of an image]."""
    device = x.device.index or 0
    out, into, row, column = weight.stride()
    strides = (into, out, row, column) if product.turned else (out, into, row, column)  # of outputs first
    filters = torch.empty((spec.FREQUENCIES, product.outputs, product.inputs), dtype=torch.float16, device=x.device)
    filter_scales = torch.empty(product.outputs, dtype=torch.float32, device=x.device)
    _filter(product, weight.dtype, strides, device).run(weight, filters, filter_scales)
    scales = torch.empty((product.batch, product.tiles_h * product.tiles_w), dtype=torch.float32, device=x.device)
    y = empty_nhwc((product.batch, product.outputs, product.out_height, product.out_width), x)
    for first, last in spec.parts(product):
        part, of_x, of_scales = product._replace(batch=last - first), x[first:last], scales[first:last]
        to_tiles, to_images = _transforms(part, weight.dtype, strides, device)
        pixels = _pixels(of_x, of_scales, part, to_tiles)
        products = pixels.new_empty((spec.FREQUENCIES, pixels.shape[1], product.outputs))
        torch.bmm(pixels, filters.mT, out=products)  # with `out` since autocast would cast fp16 to its own dtype
        del pixels
        to_images.run(products, y[first:last], of_scales, filter_scales, of_x, weight)
        del products
    return y, scales


def forward(x: torch.Tensor, weight: torch.Tensor, call: WinogradConv) -> torch.Tensor:
    """Returns y [N, O, OH, OW] channels_last in x's dtype. x: channels_last, 16-byte aligned; weight [O, I, 3, 3], any strides."""
    return _product(x, weight, call)[0]


def backward_data(dy: torch.Tensor, weight: torch.Tensor, call: WinogradConv) -> torch.Tensor:
    """Returns dx [N, I, H, W] channels_last in dy's dtype. dy: channels_last, 16-byte aligned."""
    return _product(dy, weight, call.gradient())[0]


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, call: WinogradConv
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns dx as `backward_data`, and dweight in the weight's dtype and strides. dy, x: channels_last, 16-byte aligned."""
    turned = call.gradient()
    dx, scales = _product(dy, weight, turned)
    # Tiles of dx stand where those of y do, and may be one more along a side.
    scales = scales.view(-1, turned.tiles_h, turned.tiles_w)[:, : call.tiles_h, : call.tiles_w]
    parts = spec.parts(call)
    if len(parts) == 1:
        return dx, _weight_of_part(dy, x, weight, call, scales, weight.dtype)
    dweight = torch.zeros_like(weight, dtype=torch.float32)
    for first, last in parts:
        of_part = call._replace(batch=last - first)
        dweight += _weight_of_part(dy[first:last], x[first:last], weight, of_part, scales[first:last], torch.float32)
    return dx, dweight.to(weight.dtype)


def _weight_of_part(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    call: WinogradConv,
    dy_scales: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weight's gradient by these images, in `dtype` and the weight's strides; dy_scales: [N, rows, columns] of tiles."""
    device = x.device.index or 0
    dweight = torch.empty_like(weight, dtype=dtype)
    strides = tuple(dweight.stride())
    scales = torch.empty(dy_scales.shape, dtype=torch.float32, device=x.device)
    pixels = _pixels(x, scales, call, _transforms(call, weight.dtype, tuple(weight.stride()), device)[0])
    # A scale bounds its tile to below 2^PIXELS_BELOW, and the tile of dy's that it is of has the one here within.
    most = (scales * dy_scales).amax() * spec.PIXELS_BOUND
    to_tiles, to_taps = _weight_gradient(call, dtype, strides, device)
    gradients = pixels.new_empty((spec.FREQUENCIES, pixels.shape[1], call.outputs))
    to_tiles.run(dy, gradients, scales, most)
    to_taps.run(_summed(gradients, pixels), dweight, most, x, dy)
    return dweight


@cache
def sums_in_fp32() -> bool:
    """Whether this torch leaves products of fp16 in fp32 (since 2.8)."""
    return hasattr(torch.ops.aten.bmm, "dtype_out")


def _summed(gradients: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """[36, O, I] fp32: the products of two fp16 tensors [36, tiles, O] and [36, tiles, I], summed over tiles."""
    sums = torch.empty(
        (spec.FREQUENCIES, gradients.shape[2], pixels.shape[2]), dtype=torch.float32, device=pixels.device
    )
    if pixels.is_cuda:
        torch.ops.aten.bmm.dtype_out(gradients.mT, pixels, torch.float32, out=sums)
        return sums
    return torch.bmm(gradients.mT.float(), pixels.float(), out=sums)
