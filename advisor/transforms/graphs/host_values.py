"""Tensors that a forward makes on the host and brings to the device: a table of frequencies, coordinates, class weights.

A CUDA graph cannot hold such a copy: it would read the host's memory at each replay, long after that is gone. Where the numbers are the
same in each call, as those of a table are, the graph copies what an eager call has brought. `HostValues` watches two eager calls; what
differs between them (numbers drawn on the host, a schedule's) keeps the forward from being captured.

torch's calls have stand-ins meanwhile. Dynamo guards on these, and would compile a forward anew that it sees with others: in one that it
captures they stand only while a captured graph runs (`inside`).
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from advisor.transforms.base import Undo
from advisor.transforms.patch import replace_attribute, script_frames

_MOVES = ("to", "cuda", "type", "type_as")
_MAKERS = ((torch, "tensor"), (torch, "as_tensor"), (torch.Tensor, "new_tensor"))


def on_host(tensor: torch.Tensor) -> bool:
    """Whether a capture could not copy this tensor to the device."""
    return tensor.device.type == "cpu" and not tensor.is_pinned()


def on_device(tensor: torch.Tensor) -> bool:
    """Whether this is where a graph's tensors lie."""
    return tensor.is_cuda


@dataclass(frozen=True, slots=True)
class _Brought:
    """One copy of an eager call: the host's numbers, what lies on the device since, and the line that brought it."""

    source: torch.Tensor
    result: torch.Tensor
    line: str


class HostValues:
    """What the eager calls of one signature have brought from the host."""

    def __init__(self) -> None:
        self._calls: list[list[_Brought]] = []

    @contextmanager
    def watching(self, *, within: bool) -> Iterator[None]:
        """Around an eager call; `within`: of a forward that Dynamo captures."""
        brought: list[_Brought] = []
        self._calls = [*self._calls[-1:], brought]

        def move(plain: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found = plain(tensor, *args, **kwargs)
            if isinstance(found, torch.Tensor) and on_device(found) and on_host(tensor):
                brought.append(_Brought(tensor.detach().clone(), found.detach().clone(), _line()))
            return found

        def make(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            found = plain(*args, **kwargs)
            if on_device(found) and not _is_there(args):
                brought.append(_Brought(found.detach().cpu(), found.detach().clone(), _line()))
            return found

        with _later(move, make) if within else _in_place_of(move, make):
            yield

    def differ(self) -> str:
        """Which line brought other numbers in the second call than in the first; "" when none has."""
        if len(self._calls) < 2:
            return ""
        first, second = self._calls
        for one, other in zip(first, second, strict=False):
            if not _same(one.source, other.source) or one.line != other.line:
                return f"the forward brings other numbers from the host at each call ({other.line})"
        if len(first) != len(second):
            return f"the forward brings numbers from the host in some calls alone ({(first + second)[-1].line})"
        return ""

    @contextmanager
    def standing(self, *, within: bool) -> Iterator[None]:
        """Around a capture: what was brought stands where it would be brought; `within` as there.

        Raises:
            RuntimeError: from inside, where the forward brings something else.
        """
        expected = iter(self._calls[-1] if self._calls else ())

        def known(source: torch.Tensor) -> torch.Tensor:
            brought = next(expected, None)
            if brought is None or not _same(brought.source, source):
                raise RuntimeError(f"the forward brings other numbers from the host at each call ({_line()})")
            return brought.result.clone()  # the graph's own: the forward may write there

        def move(plain: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not on_host(tensor) or not _leads_to_device(tensor, args, kwargs, always=plain.__name__ == "cuda"):
                return plain(tensor, *args, **kwargs)
            return known(tensor)

        def make(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if _is_there(args):
                return plain(*args, **kwargs)
            device = kwargs.get("device", args[0].device if plain.__name__ == "new_tensor" else None)
            if device is None or not on_device(torch.empty(0, device=device)):
                return plain(*args, **kwargs)
            if kwargs.get("requires_grad"):
                raise RuntimeError(f"the forward makes a leaf of numbers from the host ({_line()})")
            data = args[1] if plain.__name__ == "new_tensor" else args[0]
            dtype = kwargs.get("dtype", args[0].dtype if plain.__name__ == "new_tensor" else None)
            return known(torch.tensor(data, dtype=dtype) if not isinstance(data, torch.Tensor) else data.to(dtype))

        with _later(move, make) if within else _in_place_of(move, make):
            yield


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))


def _is_there(args: tuple[Any, ...]) -> bool:
    """Whether the data is a tensor of the device already."""
    data = args[-1] if args else None
    return isinstance(data, torch.Tensor) and on_device(data)


def _leads_to_device(tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], *, always: bool) -> bool:
    if always:
        return True
    given = [*args, *kwargs.values()]
    for value in given:
        if isinstance(value, torch.Tensor):
            return on_device(value)
        if isinstance(value, (str, torch.device, int)) and not isinstance(value, bool):
            text = f"cuda:{value}" if isinstance(value, int) else str(value)
            if "cuda" in text:
                return True
    return False


def _line() -> str:
    frame = next(script_frames(sys._getframe(1)), None)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "torch's own code"


_Way = Callable[..., Any]
_waiting: tuple[_Way, _Way] | None = None


@contextmanager
def _later(move: _Way, make: _Way) -> Iterator[None]:
    """Inside, these stand in while `inside` runs something."""
    global _waiting
    before, _waiting = _waiting, (move, make)
    try:
        yield
    finally:
        _waiting = before


def inside(run: Callable[..., Any], *args: Any) -> Any:
    """Run a graph that Dynamo has captured, past its guards."""
    if _waiting is None:
        return run(*args)
    with _in_place_of(*_waiting):
        return run(*args)


@contextmanager
def _in_place_of(move: Callable[..., Any], make: Callable[..., Any]) -> Iterator[None]:
    """Inside, torch's calls that bring tensors from the host are these: `move` and `make` are given the plain one first."""
    undo, busy, thread = Undo(), [False], threading.get_ident()

    def standing(way: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            if busy[0] or threading.get_ident() != thread:  # one that another of these calls, or a loader's
                return plain(*args, **kwargs)
            busy[0] = True
            try:
                return way(plain, *args, **kwargs)
            finally:
                busy[0] = False

        return call

    try:
        for name in _MOVES:
            replace_attribute(undo, torch.Tensor, name, standing(move, getattr(torch.Tensor, name)))
        for owner, name in _MAKERS:
            replace_attribute(undo, owner, name, standing(make, getattr(owner, name)))
        yield
    finally:
        undo.run()
