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
        *(product.outputs, product.inputs, product.height, product.width, product.tiles_h, product.tiles_w, tiles),
        *strides,
    )
    blocks = -(-tiles * (product.outputs // 2) // spec.OUTPUT_THREADS)
    macros = spec.output_defines(storage.name(weight_dtype), turned=product.turned)
    return pixels, launch(spec.OUTPUT, macros, device, blocks, spec.OUTPUT_THREADS, back)


@lru_cache(maxsize=4096)
def _weight_gradient(
    call: WinogradConv, weight_dtype: torch.dtype, strides: tuple[int, ...], device: int
) -> tuple[Launch, Launch]:
    """The result's gradient, and the way back."""
    tiles, threads = spec.tiles(call), spec.WEIGHT_THREADS
    sizes = call.outputs, call.height, call.width, call.tiles_h, call.tiles_w, tiles
    macros = {"THREADS": threads}
    to_tiles = launch(spec.GRADIENT, macros, device, -(-tiles * (call.outputs // 2) // threads), threads, sizes)
    macros, blocks = spec.gradient_defines(storage.name(weight_dtype)), -(-call.outputs * call.inputs // threads)
    back = call.outputs, call.inputs, call.batch, call.height, call.width, *strides
    return to_tiles, launch(spec.WEIGHT, macros, device, blocks, threads, back)


def _pixels(x: torch.Tensor, product: WinogradConv, to_tiles: Launch) -> tuple[torch.Tensor, torch.Tensor]:
    """x as frequencies of tiles, and the inverse of each tile's scale."""
    tiles = spec.tiles(product)
    pixels = torch.empty((spec.FREQUENCIES, tiles, product.inputs), dtype=torch.float16, device=x.device)
    scales = torch.empty(tiles, dtype=torch.float32, device=x.device)
    to_tiles.run(x, pixels, scales)
    return pixels, scales


def _product(x: torch.Tensor, weight: torch.Tensor, product: WinogradConv) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the inverse of the scales of x's tiles."""
    device = x.device.index or 0
    out, into, row, column = weight.stride()
    strides = (into, out, row, column) if product.turned else (out, into, row, column)  # of outputs first
    filters = torch.empty((spec.FREQUENCIES, product.outputs, product.inputs), dtype=torch.float16, device=x.device)
    filter_scales = torch.empty(product.outputs, dtype=torch.float32, device=x.device)
    _filter(product, weight.dtype, strides, device).run(weight, filters, filter_scales)
    to_tiles, to_images = _transforms(product, weight.dtype, strides, device)
    pixels, scales = _pixels(x, product, to_tiles)
    products = pixels.new_empty((spec.FREQUENCIES, pixels.shape[1], product.outputs))
    torch.bmm(pixels, filters.mT, out=products)  # with `out` since autocast would cast fp16 to its own dtype
    del pixels, filters
    y = empty_nhwc((product.batch, product.outputs, product.height, product.width), x)
    to_images.run(products, y, scales, filter_scales, x, weight)
    return y, scales


def forward(x: torch.Tensor, weight: torch.Tensor, call: WinogradConv) -> torch.Tensor:
    """Returns y [N, O, H, W] channels_last in x's dtype. x: channels_last, 16-byte aligned; weight [O, I, 3, 3], any strides."""
    return _product(x, weight, call)[0]


def backward_data(dy: torch.Tensor, weight: torch.Tensor, call: WinogradConv) -> torch.Tensor:
    """Returns dx [N, I, H, W] channels_last in dy's dtype. dy: channels_last, 16-byte aligned."""
    return _product(dy, weight, call.gradient())[0]


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, call: WinogradConv
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns dx as `backward_data`, and dweight in the weight's dtype and strides. dy, x: channels_last, 16-byte aligned."""
    dx, gradient_scales = _product(dy, weight, call.gradient())
    device = x.device.index or 0
    dweight = torch.empty_like(weight)
    pixels, scales = _pixels(x, call, _transforms(call, weight.dtype, tuple(weight.stride()), device)[0])
    # A scale bounds its tile to below 2^PIXELS_BELOW, and the tile of dy's that it is of has the one here within.
    most = (scales * gradient_scales).amax() * spec.PIXELS_BOUND
    to_tiles, to_taps = _weight_gradient(call, weight.dtype, tuple(dweight.stride()), device)
    gradients = pixels.new_empty((spec.FREQUENCIES, pixels.shape[1], call.outputs))
    to_tiles.run(dy, gradients, scales, most)
    to_taps.run(_summed(gradients, pixels), dweight, most, x, dy)
    return dx, dweight


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
