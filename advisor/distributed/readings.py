"""Numbers that the script reads from tensors, the same on every rank.

A script that prints its loss, steers by it (`if loss.item() > best`), or sums it up wants the whole batch's. Each rank has that of its
part: what it reads of a floating-point tensor with one element, outside of models, is the mean over ranks by their samples while the
last batch drawn was divided, and rank 0's number else. All ranks run the same code and so read at the same places; and because they read
the same numbers, they go on running the same code. A truth value is true where any rank's is. Whole numbers (counts, shapes) stay
each rank's own.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from advisor.distributed.shards import Loaders
from advisor.loop.patches import Patches
from advisor.loop.sources import PASSED_OVER, kind

_TRANSFORMS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "transforms", "")


class Readings:
    """Hooks the ways in which Python reads a tensor's number, from `install` on."""

    def __init__(self, loaders: Loaders, inside_model: Callable[[], bool]) -> None:
        self._loaders, self._inside = loaders, inside_model
        self._process, self._thread = os.getpid(), threading.main_thread()
        self._item: Any = torch.Tensor.item
        self._kinds: dict[str, bool] = {}

    def install(self, patches: Patches) -> None:
        """Hook `item`, `tolist`, `float`, `bool` and format."""
        tensor = torch.Tensor
        patches.replace(tensor, "item", self._reads(tensor.item, self.whole))
        patches.replace(tensor, "__float__", self._reads(tensor.__float__, self.whole))
        patches.replace(tensor, "tolist", self._reads(tensor.tolist, self.whole, scalar=True))
        patches.replace(tensor, "__bool__", self._reads(tensor.__bool__, self.any, kinds=True))
        patches.replace(tensor, "__format__", self._formats(tensor.__format__))

    def whole(self, number: torch.Tensor) -> float:
        """The number of the whole batch. Of FSDP2's tensors (a clipped gradient's norm) all ranks have the same."""
        if hasattr(number, "full_tensor"):
            return float(self._item(number.full_tensor()))
        value = number.detach().to(torch.float32 if number.dtype != torch.float64 else torch.float64).reshape(1).clone()
        if self._loaders.divided:
            value *= self._loaders.share
            distributed.all_reduce(value)
        else:
            distributed.broadcast(value, 0)
        return float(self._item(value))

    def ahead(self, number: torch.Tensor) -> torch.Tensor:
        """A tensor with the number of the whole batch, for one that is read later; as it is where each rank reads its own."""
        if not number.is_floating_point() or not self._loaders.divided or self._inside():
            return number
        value = number.detach() * self._loaders.share
        distributed.all_reduce(value)
        return value

    def any(self, truth: torch.Tensor) -> bool:
        """Whether it is true on any rank."""
        value = (truth.detach() != 0).to(torch.float32).reshape(1)
        distributed.all_reduce(value, distributed.ReduceOp.MAX)
        return bool(self._item(value))

    def _reads(
        self, plain: Any, whole: Callable[[torch.Tensor], Any], *, scalar: bool = False, kinds: bool = False
    ) -> Any:
        @functools.wraps(plain)
        def read(tensor: Any) -> Any:
            wanted = (kinds or tensor.is_floating_point()) and tensor.numel() == 1 and (not scalar or not tensor.dim())
            return whole(tensor) if wanted and self._scripts(sys._getframe(1)) else plain(tensor)

        return read

    def _formats(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def formatted(tensor: Any, spec: str) -> str:
            if not tensor.dim() and tensor.is_floating_point() and self._scripts(sys._getframe(1)):
                return format(self.whole(tensor), spec)
            return str(plain(tensor, spec))

        return formatted

    def _scripts(self, frame: Any) -> bool:
        """Whether the script reads here, or a library for it, in training or evaluation."""
        if self._loaders.divided is None or os.getpid() != self._process:
            return False
        if threading.current_thread() is not self._thread or torch.compiler.is_compiling() or self._inside():
            return False
        while frame is not None and frame.f_code.co_filename.startswith(_TRANSFORMS):
            frame = frame.f_back  # a change that stands in `item`'s place
        name = frame.f_code.co_filename if frame is not None else ""
        known = self._kinds.get(name)
        if known is None:
            # `<string>` is Python's own (dataclasses, named tuples) or the script's `exec`.
            known = self._kinds[name] = kind(os.path.abspath(name)) != PASSED_OVER
        return known
