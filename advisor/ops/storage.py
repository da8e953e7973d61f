"""How kernels see a tensor's values: the macro STORAGE and the 16-byte vectors of kernels/include/vector.cuh."""

from __future__ import annotations

from functools import cache

from advisor.core import architectures

STORAGE = {"float32": 0, "float16": 1, "bfloat16": 2}
MIN_ARCH = architectures.BUNDLED_KERNELS


@cache
def name(dtype: object) -> str:
    """`bfloat16` of `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def vector_width(dtype: str) -> int:
    """Elements in 16 bytes."""
    return 4 if dtype == "float32" else 8


def itemsize(dtype: str) -> int:
    """Bytes an element takes."""
    return 4 if dtype == "float32" else 2


# A result may be stored in another type than the input where autocast would have it so: in fp32 after a half-precision
# input, or in half precision after fp32 (kernels/include/mixed.cuh).
RESULT_PAIRS = tuple((a, b) for a in STORAGE for b in STORAGE if a == b or "float32" in (a, b))


def unsupported(*, dtype: str, result: str, channels: int, arch: int) -> str:
    """Why vectors of this dtype cannot be taken; empty when they can."""
    if arch < MIN_ARCH:
        return f"sm_{arch} is older than sm_{MIN_ARCH}"
    if dtype not in STORAGE:
        return f"dtype {dtype}"
    if (dtype, result) not in RESULT_PAIRS:
        return f"result in {result} of an input in {dtype}"
    if channels % vector_width(dtype):
        return f"{channels} channels are no multiple of {vector_width(dtype)}"
    return ""
