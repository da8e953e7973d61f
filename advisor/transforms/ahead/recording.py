"""Graphs of a running training as Inductor would get them, left in files for a process beside.

Inductor finds a compiled graph again by its operations, its inputs' shapes, strides and dtypes, and the settings of torch and of its own.
All of these are in the file; no value of a weight or a batch is.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from advisor.core import storage
from advisor.transforms.ahead import graph_text

GRAPH, WHY_NOT = "graph-{}.json", "graph-{}.txt"
_DEVICES = ("cuda", "cpu")
# Below torch.backends. By operation where torch has such settings (2.9), else the older ones.
_PRECISIONS = ("cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision", "fp32_precision")
_OLDER = ("cuda.matmul.allow_tf32", "cudnn.allow_tf32")
_PATHS = (
    *(_PRECISIONS if hasattr(torch.backends.cuda.matmul, "fp32_precision") else _OLDER),
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cudnn.benchmark",
    "cudnn.deterministic",
)


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor that a graph is given. `static`: Dynamo's word for one whose address stays; a weight."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    parameter: bool
    static: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Input:
        """What there is to know of it."""
        return cls(
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=str(tensor.device),
            requires_grad=tensor.requires_grad,
            parameter=isinstance(tensor, torch.nn.Parameter),
            static=getattr(tensor, "_dynamo_static_input_type", None) or "",
        )

    def made(self) -> torch.Tensor:
        """A tensor like it, of no particular values."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=getattr(torch, self.dtype), device=self.device)
        if self.parameter:
            tensor = torch.nn.Parameter(tensor, requires_grad=self.requires_grad)
        else:
            tensor.requires_grad_(self.requires_grad)
        if self.static:
            torch._dynamo.mark_static_address(tensor, guard=self.static == "guarded")
        return tensor


@dataclass(frozen=True, slots=True)
class Recorded:
    """One graph, by graph_text.py. `inductor` are the settings that the script has changed;"""

    mode: str
    graph: list[dict[str, Any]]
    inputs: tuple[Input, ...]
    autocasts: dict[str, str]  # device → dtype
    autocast_cache: bool
    inductor: dict[str, Any]
    flags: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recording:
    """In place of torch.compile's mode: graphs are written into `folder` and run as they are."""

    mode: str
    folder: str

    def keep(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Write one graph, or why it cannot be; returns what runs in its place."""
        folder = Path(self.folder)
        number = len(list(folder.glob(GRAPH.format("*")))) + len(list(folder.glob(WHY_NOT.format("*"))))
        try:
            (folder / GRAPH.format(number)).write_text(
                json.dumps(storage.to_plain(self.recorded(graph, inputs))), encoding="utf-8"
            )
        except Exception as error:  # whatever the script has in its graph: it is compiled in the loop then
            (folder / GRAPH.format(number)).unlink(missing_ok=True)
            (folder / WHY_NOT.format(number)).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        forward: Callable[..., Any] = graph.forward
        return forward

    def recorded(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Recorded:
        if not all(isinstance(given, torch.Tensor) for given in inputs):
            raise TypeError("an input that is no tensor")
        return Recorded(
            mode=self.mode,
            graph=graph_text.written(graph.graph),
            inputs=tuple(Input.of(given) for given in inputs),
            autocasts={
                kind: str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
                for kind in _DEVICES
                if torch.is_autocast_enabled(kind)
            },
            autocast_cache=torch.is_autocast_cache_enabled(),
            inductor=_changed_settings(),
            flags=flags(),
        )


def _changed_settings() -> dict[str, Any]:
    """Of Inductor's, those that are not as they are by default, as far as they are plain values."""
    import torch._inductor.config as config

    found = config.get_config_copy()
    plain = (bool, int, float, str, type(None))
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, plain) and _default(config, name, value) != value
    }


def _default(config: Any, name: str, value: Any) -> Any:
    entry = getattr(config, "_config", {}).get(name)
    return getattr(entry, "default", value)


def flags() -> dict[str, Any]:
    """torch's own settings that a compiled graph hangs on, by the path that they are set by."""
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    found["default_dtype"] = str(torch.get_default_dtype()).removeprefix("torch.")
    found["deterministic"] = torch.are_deterministic_algorithms_enabled()
    for path in _PATHS:
        owner, _, name = path.rpartition(".")
        try:
            found[path] = getattr(functools.reduce(getattr, owner.split("."), torch.backends), name)
        except (AttributeError, RuntimeError):  # of another version; or older and newer settings used side by side
            continue
    return found


def set_flags(wanted: dict[str, Any]) -> None:
    """Set torch so. What is so already is let be: a setting made is another thing to the cache than one that was never touched."""
    now = flags()
    for path, value in wanted.items():
        if now.get(path) == value:
            continue
        if path == "threads":
            torch.set_num_threads(value)
        elif path == "default_dtype":
            torch.set_default_dtype(getattr(torch, value))
        elif path == "deterministic":
            torch.use_deterministic_algorithms(value)
        else:
            owner, _, name = path.rpartition(".")
            setattr(functools.reduce(getattr, owner.split("."), torch.backends), name, value)
