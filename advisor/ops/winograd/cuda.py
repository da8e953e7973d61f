"""Launches of Winograd's transforms, and the products between them. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import storage
from advisor.ops.alignment import empty_nhwc
from advisor.ops.launches import Launch, launch
from advisor.ops.winograd import spec
from advisor.ops.winograd.spec import Call


@lru_cache(maxsize=4096)
def _filter(product: Call, weight_dtype: torch.dtype, strides: tuple[int, ...], device: int) -> Launch:
    macros = spec.weight_defines(storage.name(weight_dtype), turned=product.turned)
    sizes = product.outputs, product.inputs, *strides
    return launch(spec.FILTER, macros, device, product.outputs // spec.FILTER_OUTPUTS, spec.FILTER_THREADS, sizes)


@lru_cache(maxsize=4096)
def _transforms(
    product: Call, weight_dtype: torch.dtype, strides: tuple[int, ...], device: int
) -> tuple[Launch, Launch]:
    """The pixels', and that back."""
    tiles = product.batch * product.tiles_h * product.tiles_w
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


def _product(x: torch.Tensor, weight: torch.Tensor, product: Call) -> torch.Tensor:
    device = x.device.index or 0
    out, into, row, column = weight.stride()
    strides = (into, out, row, column) if product.turned else (out, into, row, column)  # of outputs first
    filters = torch.empty((spec.FREQUENCIES, product.outputs, product.inputs), dtype=torch.float16, device=x.device)
    filter_scales = torch.empty(product.outputs, dtype=torch.float32, device=x.device)
    _filter(product, weight.dtype, strides, device).run(weight, filters, filter_scales)
    to_tiles, to_images = _transforms(product, weight.dtype, strides, device)
    tiles = product.batch * product.tiles_h * product.tiles_w
    pixels = torch.empty((spec.FREQUENCIES, tiles, product.inputs), dtype=torch.float16, device=x.device)
    scales = torch.empty(tiles, dtype=torch.float32, device=x.device)
    to_tiles.run(x, pixels, scales)
    products = pixels.new_empty((spec.FREQUENCIES, tiles, product.outputs))
    torch.bmm(pixels, filters.mT, out=products)  # with `out` since autocast would cast fp16 to its own dtype
    del pixels, filters
    y = empty_nhwc((product.batch, product.outputs, product.height, product.width), x)
    to_images.run(products, y, scales, filter_scales, x, weight)
    return y


def forward(x: torch.Tensor, weight: torch.Tensor, call: Call) -> torch.Tensor:
    """Returns y [N, O, H, W] channels_last in x's dtype. x: channels_last, 16-byte aligned; weight [O, I, 3, 3], any strides."""
    return _product(x, weight, call)


def backward_data(dy: torch.Tensor, weight: torch.Tensor, call: Call) -> torch.Tensor:
    """Returns dx [N, I, H, W] channels_last in dy's dtype. dy: channels_last, 16-byte aligned."""
    return _product(dy, weight, call.gradient())
