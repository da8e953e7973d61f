"""Normalised images that are kept as their bytes: a tensor with the shape, dtype and values of the fp32 image it stands for.

Whoever computes with one gets the fp32 values, made on the host then and there. Moved to a GPU as it is, it goes as uint8, a quarter
of the bytes, and is normalised there, on the stream that copies it. Either way the values are those of the script's own transforms,
bit for bit: they come from a table that these have filled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils import _pytree as pytree

from advisor.ops.input import api, reference

# Tensors moved to a GPU as uint8 and as what they stand for, in this process.
moved: Counter[str] = Counter()


class Table:
    """The fp32 value that each byte of each channel stands for."""

    def __init__(self, values: torch.Tensor) -> None:
        """`values`: [C, 256] fp32."""
        self.values = values.contiguous()
        self.data = self.values.numpy().tobytes()
        self._elsewhere: dict[torch.device, torch.Tensor] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self.data == other.data

    def __hash__(self) -> int:
        return hash(self.data)

    def on(self, device: torch.device) -> torch.Tensor:
        """The values on a device, copied there once; any stream may read them."""
        if device not in self._elsewhere:
            self._elsewhere[device] = self.values.to(device)  # waits for the copy
        return self._elsewhere[device]


@lru_cache(maxsize=16)
def table_of(data: bytes) -> Table:
    """The table with this `data`."""
    values = torch.frombuffer(bytearray(data), dtype=torch.float32)
    return Table(values.view(-1, 256))


class NormalisedImages(torch.Tensor):
    """[N, C, H, W] or [C, H, W] fp32 on the host, contiguous, without gradient.

    Attributes:
        pixels: uint8 of the same shape, in any memory order. Not to be changed.
        table: what they stand for.
    """

    pixels: torch.Tensor
    table: Table
    _plain: torch.Tensor | None

    @staticmethod
    def __new__(cls, pixels: torch.Tensor, table: Table) -> NormalisedImages:
        made: NormalisedImages = torch.Tensor._make_wrapper_subclass(cls, pixels.shape, dtype=torch.float32)
        made.pixels, made.table, made._plain = pixels, table, None
        return made

    @property
    def untouched(self) -> bool:
        """Nobody has computed with it yet: the pixels say all."""
        return self._plain is None

    def plain(self) -> torch.Tensor:
        """The fp32 values, contiguous: a plain tensor of its own, or the one that computations with this one have seen."""
        if self._plain is not None:
            return self._plain
        whole = self.pixels if self.pixels.dim() == 4 else self.pixels.unsqueeze(0)
        return reference.normalise(whole, self.table.values).view(self.pixels.shape)

    def become_plain(self) -> torch.Tensor:
        """The fp32 values, which from now on are this tensor: what is done to them in place is done to it."""
        self._plain = self.plain()
        return self._plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved to a file it must be readable without advisor.
        return self.plain().__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]  # torch's takes contents by name
        return repr(self.plain())

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        owner = args[0] if args else None
        if isinstance(owner, NormalisedImages) and owner.untouched:
            if func in _FACTS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            answer = _ANSWERS.get(getattr(func, "__name__", ""))
            if answer is not None:
                result = answer(owner, *args[1:], **kwargs)
                if result is not NotImplemented:
                    return result
        args, kwargs = pytree.tree_map_only(
            NormalisedImages, NormalisedImages.become_plain, (tuple(args), dict(kwargs))
        )
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is typed as a method of no class
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Callers that went past Python: C++ code, and whoever has switched `__torch_function__` off.
        args, kwargs = pytree.tree_map_only(
            NormalisedImages, NormalisedImages.become_plain, (tuple(args), dict(kwargs or {}))
        )
        return func(*args, **kwargs)


def _rebuilt(pixels: torch.Tensor, data: bytes) -> NormalisedImages:
    return NormalisedImages(pixels, table_of(data))


def _handed_over(images: NormalisedImages) -> Any:
    """From a worker to its loader: bytes in shared memory, as torch hands over tensors."""
    if not images.untouched:
        return _plain, (images.plain(),)
    return _rebuilt, (images.pixels, images.table.data)


def _plain(values: torch.Tensor) -> torch.Tensor:
    return values


ForkingPickler.register(NormalisedImages, _handed_over)


# What the wrapper itself knows. The pixels need not be touched for it.
_FACTS = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn")
    ),
    *(getattr(torch.Tensor, name).__get__ for name in ("is_cuda", "is_sparse", "is_quantized", "is_meta", "_version")),
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("is_mps", "is_xpu", "is_mkldnn", "is_nested", "itemsize", "nbytes")
    ),
    *(
        getattr(torch.Tensor, name)
        for name in ("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset")
    ),
    *(getattr(torch.Tensor, name) for name in ("is_contiguous", "is_floating_point", "is_complex", "is_inference")),
    *(getattr(torch.Tensor, name) for name in ("__len__", "get_device")),
}


def _pinned(images: NormalisedImages, *where: Any, **named: Any) -> NormalisedImages:
    return NormalisedImages(images.pixels.pin_memory(*where, **named), images.table)


def _is_pinned(images: NormalisedImages, *where: Any, **named: Any) -> bool:
    return images.pixels.is_pinned(*where, **named)


def _to(images: NormalisedImages, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.to`: onto a device as uint8; NotImplemented for what plain values are needed for."""
    try:
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    except (TypeError, RuntimeError):  # copy=True, or the script's own mistake, which the plain tensor then tells
        return NotImplemented
    if device is None or device.type == "cpu":
        return NotImplemented
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format, torch.channels_last):
        return NotImplemented
    return moved_batch(images, device, dtype or torch.float32, non_blocking, memory_format)


def _cuda(images: NormalisedImages, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
    """`Tensor.cuda`."""
    target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    return _to(images, target, non_blocking=non_blocking, memory_format=memory_format)


def moved_batch(
    images: NormalisedImages, device: torch.device, dtype: torch.dtype, non_blocking: bool, memory_format: Any
) -> Any:
    if images.pixels.dim() != 4 or not dtype.is_floating_point:
        return NotImplemented
    pixels = images.pixels.to(device, non_blocking=non_blocking)
    moved["uint8"] += 1
    wanted = memory_format if memory_format is torch.channels_last else torch.contiguous_format
    return api.normalise(pixels, images.table.on(pixels.device), dtype, wanted)


def _type(images: NormalisedImages, dtype: Any = None, non_blocking: bool = False) -> Any:
    """`Tensor.type`, with a class of CUDA tensors."""
    if not getattr(dtype, "is_cuda", False):
        return NotImplemented
    return _to(images, torch.device("cuda"), dtype.dtype, non_blocking=non_blocking)


def _type_as(images: NormalisedImages, other: torch.Tensor) -> Any:
    """`Tensor.type_as`."""
    return _to(images, other.device, other.dtype)


_ANSWERS: dict[str, Callable[..., Any]] = {
    "to": _to,
    "cuda": _cuda,
    "type": _type,
    "type_as": _type_as,
    "pin_memory": _pinned,
    "is_pinned": _is_pinned,
}
