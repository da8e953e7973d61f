"""Reads that make the host wait for a GPU, found on a CPU: `.item()`, `.cpu()`, `print(tensor)`, masks, and their lines.

A CPU waits for nobody, so a trace of it holds no waits; but the calls that would wait are the same ones. One run of the
step is watched from both ends: calls from Python into torch by a function mode, what reaches the dispatcher by a dispatch mode.
Compiled code would be made anew for both, so it runs uncompiled meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.core.profile import Site
from advisor.loop import sources

# Calls that hand a tensor's values to Python. `.to("cpu")` is none of them: on a CPU it is how batches are moved.
_CALLS = {
    "item": "Tensor.item",
    "tolist": "Tensor.tolist",
    "cpu": "Tensor.cpu",
    "numpy": "Tensor.numpy",
    "__bool__": "bool(tensor)",
    "__int__": "int(tensor)",
    "__float__": "float(tensor)",
    "__complex__": "complex(tensor)",
    "__index__": "a tensor as an index",
    "__contains__": "`in` a tensor",
    "__array__": "numpy.asarray(tensor)",
    "__repr__": "a printed tensor",
    "__format__": "a formatted tensor",
}
# Operators that read values on the host, or whose output's shape depends on them.
_OPERATORS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal",
     "allclose", "is_nonzero"}
)  # fmt: skip
# Torch's own code that reads tensors which live on the host: optimizers their step counters, samplers their random numbers.
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_HOSTS = (os.path.join(_TORCH, "optim", ""), os.path.join(_TORCH, "utils", "data", ""))


def watch(step: Callable[[], Any], *, compiled: bool = False) -> tuple[Site, ...]:
    """Run the step once; where it would have waited on a GPU. Both modes are gone afterwards, also when the step raises.

    Args:
        compiled: compiled code runs in it.
    """
    reads = _Reads()
    uncompiled = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    with uncompiled, _Dispatched(reads), _Called(reads):
        step()
    return tuple(
        Site(source=source, what=what, calls=float(count), time_us=0.0) for (source, what), count in reads.found.items()
    )


class _Reads:
    def __init__(self) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        self.inside = False  # a read that is counted already

    def add(self, what: str) -> None:
        if not _on_the_host():
            self.found[sources.user_line(), what] += 1


class _Called(TorchFunctionMode):
    def __init__(self, reads: _Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = _CALLS.get(getattr(func, "__name__", ""))
        outermost = what is not None and not self._reads.inside
        if what is not None and outermost:
            self._reads.add(what)
            self._reads.inside = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            if outermost:
                self._reads.inside = False


class _Dispatched(TorchDispatchMode):
    def __init__(self, reads: _Reads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without types
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if not self._reads.inside and (name in _OPERATORS or (name in ("index", "index_put_") and _masked(args))):
            self._reads.add(f"aten::{name}" + (" with a mask" if name.startswith("index") else ""))
        return func(*args, **(kwargs or {}))


def _masked(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _on_the_host() -> bool:
    """Whether one of `_HOSTS` reads, and not a closure or a data set that it has called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_HOSTS):
            return True
        if sources.kind(path) != sources.PASSED_OVER:
            return False
        frame = frame.f_back
    return False
