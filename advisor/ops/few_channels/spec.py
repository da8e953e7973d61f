"""Which convolutions of a few channels are computed with eight, where that wins, and how the input is laid out. Plain arithmetic."""

from __future__ import annotations

import math

from advisor.ops import dispatch_table
from advisor.ops.storage import MIN_ARCH, STORAGE

PAD = "few_channels/pad_channels.cu"
KERNELS = {PAD: ("pad_channels",)}

CHANNELS = 8  # tensor cores take them by eights
COMPUTE = ("bfloat16", "float16")
THREADS, UNROLL = 256, 2
TUNABLE = {"UNROLL": (1, 2, 4)}


def name(dims: int, channels: int, taps: tuple[int, ...]) -> str:
    """`volumes of 3 channels k7x7x7`."""
    return f"{'volumes' if dims == 3 else 'images'} of {channels} channels k{'x'.join(map(str, taps))}"


def kind(dims: int, channels: int) -> str:
    """`volumes of 3 channels`."""
    return f"{'volumes' if dims == 3 else 'images'} of {channels} channels"


def wins(*, dims: int, channels: int, compute: str = "") -> str:
    """Why PyTorch's own operation is left in place; empty where this wins. `compute`: of what is multiplied; empty for either."""
    return dispatch_table.refusal("few_channels", kind(dims, channels), compute)


def unsupported(*, shape: tuple[int, ...], dense: bool, dtype: str, compute: str, groups: int, arch: int) -> str:
    """Why a convolution of an input of `shape` [N, C, ...] is none of these; empty when it is.

    Args:
        dense: the input lies in NCHW or NHWC without gaps.
        dtype, compute: of the input, and of what is multiplied.
    """
    if arch < MIN_ARCH:
        return f"sm_{arch} is older than sm_{MIN_ARCH}"
    if len(shape) not in (4, 5):
        return f"{len(shape)}-D input"
    if groups != 1:
        return f"{groups} groups"
    if not 1 <= shape[1] < CHANNELS:
        return f"{shape[1]} channels"
    if compute not in COMPUTE:
        return f"computed in {compute}"
    if dtype not in STORAGE:
        return f"dtype {dtype}"
    if not math.prod(shape):
        return "an empty tensor"
    if not dense:
        return "input has gaps"
    return "2^31 pixels or more" if math.prod(shape) // shape[1] >= 2**31 else ""


def defines(dtype: str, compute: str, channels: int, *, planes: bool) -> dict[str, int]:
    """Macros of one variant. `planes`: the input is NCHW."""
    found = {"STORAGE": STORAGE[compute], "INPUT": STORAGE[dtype], "C": channels, "PLANES": int(planes)}
    return {**found, "THREADS": THREADS, "UNROLL": UNROLL}


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of the variants that are compiled ahead."""
    return (
        defines("float32", "bfloat16", 3, planes=True),
        defines("bfloat16", "bfloat16", 1, planes=False),
        defines("float32", "float16", 7, planes=False),
    )


def blocks(pixels: int) -> int:
    """Blocks of one launch, for so many pixels of all samples."""
    return -(-pixels // (THREADS * UNROLL))
