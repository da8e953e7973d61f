"""CUDA graphs of this machine's CPU: what is launched in a capture is noted, and a replay launches it again on the same memory.

As a GPU's, a capture refuses what would wait for a result, and changes nothing that was there before; a replay runs no Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.transforms.graphs import arguments, calls

_WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.is_nonzero")


class Graph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.replays = 0

    def pool(self) -> tuple[int, int]:
        return 0, id(self)

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, made in self.launches:
            found = function(*args, **kwargs)
            given = {_memory(t) for t in _tensors((args, kwargs))}
            for old, new in zip(_tensors(made), _tensors(found), strict=True):
                if _memory(old) not in given:
                    old.detach().copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what was there, by its memory
        self._own: set[int] = set()
        self._drawn = torch.get_rng_state()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        with torch.no_grad():
            for tensor, value in self._before.values():
                tensor.copy_(value)
        torch.set_rng_state(self._drawn)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        chooses = str(func).startswith("aten.index") and any(t.dtype == torch.bool for t in _tensors(args[1]))
        if str(func).startswith(_WAITS) or chooses:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if func._schema.is_mutable or "batch_norm" in str(func):  # whose schema does not say so
            for tensor in _tensors((args, kwargs)):
                if _memory(tensor) not in self._own:
                    self._before.setdefault(_memory(tensor), (tensor.detach(), tensor.detach().clone()))
        found = func(*args, **(kwargs or {}))
        given = {_memory(t) for t in _tensors((args, kwargs))}
        self._own |= {_memory(t) for t in _tensors(found)} - given
        if not func.is_view:
            # By its own handle: who is given a tensor may put other memory under it.
            keep = lambda t: t.detach() if isinstance(t, torch.Tensor) else t  # noqa: E731 – as short as what it stands for
            self._graph.launches.append((func, *(pytree.tree_map(keep, part) for part in (args, kwargs or {}, found))))
        return found


def _tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


class _Stream:
    def __init__(self, *_: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Graphs of CPU tensors, in the order of their captures."""
    made: list[Graph] = []
    stream = _Stream()
    current = [stream]

    @contextmanager
    def capture(graph: Graph, stream: Any = None, **_: object) -> Iterator[None]:
        """As torch's, which where its end raises too says nothing of the first error, and leaves its stream current."""
        made.append(graph)
        current.append(stream or _Stream())
        try:
            with _Recorder(graph):
                yield
        except BaseException:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")  # noqa: B904 – as the original does
        current.pop()

    def set_stream(stream: Any) -> None:
        current[:] = [stream]

    monkeypatch.setattr(arguments, "on_device", lambda tensor: tensor.device.type == "cpu")
    script = calls.is_script
    monkeypatch.setattr(
        calls, "is_script", lambda filename: script(filename) and filename != __file__
    )  # it is torch here
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 40, 1 << 40))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plain = distributed.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if len(current) == 1:
            return plain(tensor, *args, async_op=async_op, **kwargs)
        memory = tensor.detach()  # nothing is sent in a capture; each replay sends
        made[-1].launches.append((lambda: plain(memory, *args, **kwargs), (), {}, None))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    return made
