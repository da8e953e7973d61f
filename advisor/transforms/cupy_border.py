"""Arrays go between CuPy and PyTorch on the device, where the script sends them by way of the host.

`torch.from_numpy(cupy.asnumpy(x)).to(device)` waits for the device, copies to the host and back. The device's own copy of x gives the same bits
and waits for nothing. Wins where images are made by one of the two and used by the other. Only where the source shows that
nothing else sees what is on the host (`border`); no other call is changed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from advisor.core.profile import StepProfile
from advisor.core.units import counted
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.border import CASTS, TO_CUPY, TO_TORCH, Sites, sites
from advisor.transforms.patch import all_or_nothing, replace_attribute, script_frames

made = {TO_TORCH: 0, TO_CUPY: 0}  # arrays that stayed on the device


class CupyBorder(Transform):
    """Keeps on the device what goes from CuPy to PyTorch, or back. Match and apply from inside the step: they read the caller's source."""

    id = "cupy_border"
    traced = False

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if not hasattr(sys.modules.get("cupy"), "asnumpy"):
            return Match(applies=False, reason="the script has not imported CuPy")
        found = sorted({f"{code.co_filename}:{line}" for code, line in sites(sys._getframe(1))})
        reason = "" if found else "no array goes between CuPy and PyTorch in an expression that nothing else sees"
        return Match(applies=bool(found), reason=reason, sites=tuple(found))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        cupy, found = sys.modules["cupy"], sites(sys._getframe(1))
        made.update(dict.fromkeys(made, 0))
        with all_or_nothing() as undo:
            _from_cupy(undo, cupy, found)
            _from_torch(undo, cupy, found)
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        told = ", ".join(f"{way}: {counted(number, 'array')}" for way, number in made.items() if number)
        return Check(passed=bool(told), detail=f"on the device {told}" if told else "no array stayed on the device")


class Sent:
    """An array of CuPy's on its way to PyTorch: stands for the NumPy array, then for the tensor on the host.

    Args:
        get: CuPy's own way to the host. casts: methods called since.
    """

    def __init__(self, array: Any, get: Callable[[Any], Any], casts: tuple[str, ...] = ()) -> None:
        self.array, self.get, self.casts = array, get, casts

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `Tensor.to`."""
        asked = {name: value for name, value in kwargs.items() if name != "copy"}  # this is one
        device = torch._C._nn._parse_to(*args, **asked)[0]
        return self._tensor(on_host=device is None or device.type == "cpu").to(*args, **kwargs)

    def cuda(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `Tensor.cuda`."""
        return self._tensor(on_host=False).cuda(*args, **kwargs)

    def tensor(self, **kwargs: Any) -> torch.Tensor:
        """As `torch.as_tensor` of the NumPy array."""
        device = kwargs.get("device")
        on_host = device is None or torch.device(device).type == "cpu"
        return torch.as_tensor(self._tensor(on_host=on_host), **kwargs)

    def _tensor(self, *, on_host: bool) -> torch.Tensor:
        if on_host:
            found = torch.from_numpy(self.get(self.array))
        else:
            try:
                found = torch.utils.dlpack.from_dlpack(self.array).clone(memory_format=torch.contiguous_format)
                _cupy_waits(found)
                made[TO_TORCH] += 1
            except Exception:  # a type that DLPack or torch has not: by way of the host, as the script says it
                found = torch.from_numpy(self.get(self.array))
        for name in self.casts:
            found = getattr(found, name)() if name != "pin_memory" else found
        return found


for _name in CASTS:
    setattr(Sent, _name, lambda sent, name=_name: Sent(sent.array, sent.get, (*sent.casts, name)))


class Fetched:
    """A tensor on its way to CuPy: stands for the tensor on the host, then for its NumPy array. `cpu`: PyTorch's own way there."""

    def __init__(self, tensor: torch.Tensor, cpu: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.held, self.cpu = tensor, cpu

    def numpy(self) -> Fetched:
        """As `Tensor.numpy`."""
        return self

    def array(self, cupy: Any) -> Any:
        """The device's own copy; by way of the host where it has a type that CuPy has not."""
        try:
            found = cupy.from_dlpack(self.held).copy(order="C")
            _torch_waits(self.held)
        except Exception:
            return self.cpu(self.held).numpy()
        made[TO_CUPY] += 1
        return found


def _cupy_waits(tensor: torch.Tensor) -> None:
    """CuPy's stream goes on behind PyTorch's: it may give an array's memory to another, or write to it."""
    if (pair := _streams(tensor)) is not None:
        pair[1].wait_stream(pair[0])


def _torch_waits(tensor: torch.Tensor) -> None:
    """PyTorch's stream goes on behind CuPy's, likewise."""
    if (pair := _streams(tensor)) is not None:
        pair[0].wait_stream(pair[1])


def _streams(tensor: torch.Tensor) -> tuple[Any, Any] | None:
    """PyTorch's current stream and CuPy's, where they are two. (What reads behind DLPack waits for what has written already.)"""
    if not tensor.is_cuda:
        return None
    own = torch.cuda.current_stream(tensor.device)
    theirs = int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    if own.cuda_stream == theirs:
        return None
    # Whatever waits for the default stream by its number waits for torch's object of it.
    other = torch.cuda.ExternalStream(theirs, tensor.device) if theirs else torch.cuda.default_stream(tensor.device)
    return own, other


def _begins(found: Sites, way: str) -> bool:
    """Whether the script's line that called begins this way; call it from what stands in a function's place."""
    frame = next(script_frames(sys._getframe(2)), None)
    return frame is not None and found.get((frame.f_code, frame.f_lineno)) == way


def _from_cupy(undo: Undo, cupy: Any, found: Sites) -> None:
    array, plain, plain_get = cupy.ndarray, cupy.asnumpy, cupy.ndarray.get

    @functools.wraps(plain)
    def asnumpy(value: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and type(value) is array and _begins(found, TO_TORCH):
            return Sent(value, plain_get)
        return plain(value, *args, **kwargs)

    @functools.wraps(plain_get)
    def get(value: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and type(value) is array and _begins(found, TO_TORCH):
            return Sent(value, plain_get)
        return plain_get(value, *args, **kwargs)

    def taking(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if args and type(args[0]) is Sent:
                return args[0] if function.__name__ == "from_numpy" else args[0].tensor(**kwargs)
            return function(*args, **kwargs)

        return call

    replace_attribute(undo, torch, "from_numpy", taking(torch.from_numpy))
    replace_attribute(undo, torch, "as_tensor", taking(torch.as_tensor))
    replace_attribute(undo, array, "get", get)
    replace_attribute(undo, cupy, "asnumpy", asnumpy)


def _from_torch(undo: Undo, cupy: Any, found: Sites) -> None:
    plain_cpu = torch.Tensor.cpu

    @functools.wraps(plain_cpu)
    def cpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and on_device(tensor) and not tensor.requires_grad and _begins(found, TO_CUPY):
            return Fetched(tensor, plain_cpu)
        return plain_cpu(tensor, *args, **kwargs)

    def taking(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if args and type(args[0]) is Fetched:
                args = (args[0].array(cupy), *args[1:])
            return function(*args, **kwargs)

        return call

    for name in ("asarray", "array"):
        replace_attribute(undo, cupy, name, taking(getattr(cupy, name)))
    replace_attribute(undo, torch.Tensor, "cpu", cpu)


def on_device(tensor: torch.Tensor) -> bool:
    """Whether it is on a GPU: on the host `cpu()` gives the tensor itself."""
    return tensor.is_cuda and tensor.layout == torch.strided
