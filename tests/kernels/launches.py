"""What the families launch for their cases, written down without a GPU, a compiler or memory: kernels, variants, grids, arguments.

`python tests/kernels/launches.py FILE` writes it for this tree, a line a launch, an operator of PyTorch's or a result. Two trees whose
files are alike launch alike: made before and after a change of what launches kernels, the files are that change's proof.

Tensors are on the meta device: they have a shape, a dtype and strides, and no values. An address is told by the tensor that has it.
"""

from __future__ import annotations

import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.ops import catalog, dispatch, nvrtc, sources, tensor_map
from advisor.ops.family import Case, Family

TICKETS, EXCHANGE, APART = 1 << 60, 1 << 61, 1 << 40
_TYPES = {"i": np.int32, "q": np.int64, "I": np.uint32, "f": np.float32, "d": np.float64}


class Generator(torch.Generator):
    """One that makes tensors without values."""

    device = property(lambda self: torch.device("meta"))  # type: ignore[assignment]  # a plain attribute there


def _upsampled(*tensors: Any, call: Any) -> tuple[Any, ...]:
    size, factors, mode, align = call
    listed = None if factors is None else list(factors)
    return [*tensors[::-1]], len(tensors) - 1, list(size), listed, mode, align


# Of an operation's public function, by its name, the arguments of the torch.library operation; None for as they are.
_OPERATIONS: dict[str, Callable[..., tuple[Any, ...]] | None] = {
    "pad2d": lambda x, amounts, mode: (x, list(amounts), mode),
    "layer_norm": None,
    "group_norm": lambda x, groups, weight, bias, eps, activation="none", dtype=None, slope=0.01: (
        *(x, groups, weight, bias, eps, activation, dtype or x.dtype, slope),
    ),
    "squeeze_excite": None,
    "max_pool2d": lambda x, *window: (x, *window),
    "avg_pool2d": lambda x, *rest: (x, *rest),
    "global_avg_pool2d": None,
    "grouped_conv2d": None,
    "depthwise_conv2d": None,
    "large_depthwise_conv2d": None,
    "fft_conv2d": None,
    "conv3x3": None,
    "winograd": lambda x, weight, padding=1: (x, weight, padding),
    "strided_pointwise_conv2d": None,
    "first_conv2d": lambda x, weight, bias, stride, padding: (x, weight, bias, stride, padding, torch.bfloat16),
    "exact_conv2d": None,
    "batchnorm_act": lambda *all: (*all[:10],),
    "batchnorm_max_pool": None,
    "bias_act": lambda x, bias, residual, activation, slope=0.01, *_: (x, bias, residual, activation, slope),
    "scale_add": lambda branch, scale, keep, residual, *_: (branch, scale, keep, residual),
    "_ours": _upsampled,
}


def operation_of(case: Case) -> tuple[Any, Callable[..., tuple[Any, ...]]] | None:
    """The torch.library operation that a case's function is in a compiled graph, and what makes its arguments of the case's."""
    function, given = getattr(case.ours, "func", case.ours), getattr(case.ours, "keywords", {})
    name = function.__name__
    if name not in _OPERATIONS or (name == "_ours" and not function.__module__.endswith("upsample.cases")):
        return None
    listed = _OPERATIONS[name] or (lambda *all: all)
    operation = getattr(torch.ops.advisor, "upsample_concat" if name == "_ours" else name)
    return operation, lambda *all: listed(*all, **given)


def operated(on: Device, family: Family, case: Case) -> list[str]:
    """What the case's torch.library operation does, forward and backward, on tensors of the CPU, and what its fake kernels promise."""
    found = operation_of(case)
    if found is None or torch.Size(case.shape).numel() > 1 << 14 or "way" in getattr(case.ours, "keywords", {}):
        return []
    if family.id == "batchnorm_act" and case.shape[1] % 8:  # the rewrite does not put the operation there
        return []
    operation, listed = found
    told = []
    for generator in (torch.Generator(), Generator()):
        on.lines, on.memory = [], Memory()
        dispatch.clear()
        try:
            arguments = case.inputs(generator, case.shape[0])
            wanting = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
            results = _tensors(operation(*listed(*arguments)))
            mine = [y for y in results if y.requires_grad]
            on.lines.append(f"results {_shapes(results)}")
            if mine and "backward" in case.passes:
                gradients = torch.autograd.grad(mine[0], wanting, torch.empty_like(mine[0]), allow_unused=True)
                on.lines.append(f"gradients {_shapes(gradients)}")
        except Exception as error:
            on.lines.append(f"{type(error).__name__}: {error}")
        engaged, fell_back = dispatch.counters(family.id)
        told += [*on.lines, f"engaged {dict(engaged)} fell back {dict(fell_back)}"]
    return told


class Memory:
    """Addresses of tensors that have none: one for each storage, which is kept so that no other gets its number."""

    def __init__(self) -> None:
        self._begins: dict[int, int] = {}
        self._kept: list[Any] = []
        self.sizes: dict[int, str] = {}
        self.roles: dict[int, str] = {}

    def begin(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._begins:
            self._begins[key] = (len(self._begins) + 1) * APART
            self._kept.append(storage)
            self.sizes[self._begins[key]] = f"{storage.nbytes()} bytes"
        return self._begins[key]

    def address(self, tensor: torch.Tensor) -> int:
        """As data_ptr."""
        if not tensor.numel():
            return 0
        return self.begin(tensor) + tensor.storage_offset() * tensor.itemsize

    def name(self, role: str, tensor: torch.Tensor) -> None:
        self.roles.setdefault(self.begin(tensor), role)

    def told(self, address: int) -> str:
        """The tensor around an address; scratch memory is numbered as launches come to it."""
        if address in (0, TICKETS, EXCHANGE):
            return {0: "null", TICKETS: "tickets", EXCHANGE: "exchange"}[address]
        begin = address - address % APART
        role = self.roles.setdefault(begin, f"scratch{sum(r.startswith('scratch') for r in self.roles.values())}")
        return f"{role}[{self.sizes[begin]}]+{address - begin}"


class Kernel:
    """In place of ops/cuda_driver's: what it is called with is written down."""

    def __init__(self, device: Device, about: str, types: str) -> None:
        self._device, self._about, self._types = device, about, types

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Any],
        shared: int = 0,
        stream: int = 0,
        *,
        cooperative: bool = False,
    ) -> None:
        told = " ".join(self._told(value, letter) for value, letter in zip(arguments, self._types, strict=True))
        self._device.launched += 1
        whole = " cooperative" if cooperative else ""
        self._device.lines.append(f"{self._about} {tuple(grid)} {tuple(block)} {shared}{whole}: {told}")

    def _told(self, value: Any, letter: str) -> str:
        if isinstance(value, Boxes):
            return f"boxes({self._device.memory.told(value.address)} {value.of})"
        if letter == sources.ADDRESS and type(value) is int:
            return self._device.memory.told(value)
        if isinstance(value, np.ndarray):
            fields = value.dtype.fields or {}
            return " ".join(f"{field}={self._table(value[field])}" for field in fields)
        struct.pack(letter, value)
        return f"{letter}:{_TYPES[letter](value)!r}".replace("np.", "")

    def _table(self, values: Any) -> str:
        if values.dtype != np.uint64:
            return str(values.tolist())
        return str([self._device.memory.told(int(address)) for address in values.ravel() if address])


class Boxes:
    """In place of ops/tensor_map's."""

    def __init__(self, address: int, of: tuple[Any, ...]) -> None:
        self.address, self.of = address, of


class Device(TorchDispatchMode):
    """In place of a GPU. `lines` are what happened on it."""

    def __init__(self, sm_count: int = 132, arch: int = 90) -> None:
        super().__init__()
        self._sm_count, self._arch = sm_count, arch
        self.memory, self.lines, self.launched = Memory(), list[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = str(func)
        if "empty" not in name and name not in ("aten.detach.default", "prim.device.default"):
            self.lines.append(f"{name} {_shapes(args)} {_shapes((kwargs or {}).values())} -> {_shapes((found,))}")
        return found

    def sm_count(self, device: int) -> int:
        return self._sm_count

    def arch(self, device: int) -> int:
        return self._arch

    def function(
        self, name: str, entry: str, defines: tuple[tuple[str, int], ...], device: int, most_dynamic: int = 0
    ) -> Kernel:
        macros = ",".join(f"{macro}={value}" for macro, value in sorted(defines))
        return Kernel(self, f"{name}:{entry} {macros} {most_dynamic}", sources.parameters(name, entry, defines))

    def boxes(self, x: torch.Tensor, *of: Any) -> Boxes:
        return Boxes(self.memory.address(x), (tuple(x.shape), *of))


def _shapes(values: Any) -> str:
    told = []
    for value in values:
        if isinstance(value, torch.Tensor):
            told.append(f"{str(value.dtype)[6:]}{list(value.shape)}{list(value.stride())}")
        elif isinstance(value, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in value):
            told.append(f"({_shapes(value)})")
        else:
            told.append(str(value))
    return " ".join(told)


def forget() -> None:
    """Drop what operations cached for the device they saw before."""
    for name, module in list(sys.modules.items()):
        if name.startswith("advisor.ops."):
            for value in list(vars(module).values()):
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


@contextmanager
def device(sm_count: int = 132, arch: int = 90) -> Iterator[Device]:
    """Inside, families launch on a device that writes it down."""
    made = Device(sm_count, arch)
    forget()
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (torch.Tensor, "data_ptr", lambda tensor: made.memory.address(tensor)),
        (nvrtc, "unavailable", lambda: ""),
        (nvrtc, "on_device", nvrtc.out_of_reach),
        (nvrtc, "refused", lambda name: ""),
        (nvrtc, "stream", lambda index: 0),
        (nvrtc, "tickets", lambda where: TICKETS),
        (nvrtc, "exchange", lambda where, half: EXCHANGE),
        (tensor_map, "unavailable", lambda: ""),
        (tensor_map, "boxes", made.boxes),
        *((nvrtc, name, getattr(made, name)) for name in ("function", "sm_count", "arch")),
    )
    patches = [mock.patch.object(*where) for where in replaced]
    for patch in patches:
        patch.start()
    try:
        yield made
    finally:
        for patch in patches:
            patch.stop()
        forget()


Change = Callable[[list[Any]], list[Any]]


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [t for t in result if isinstance(t, torch.Tensor)]


def traced(
    on: Device, family: Family, case: Case, *, change: Change | None = None, again: bool = False, leaves: int = 99
) -> list[str]:
    """What a forward and a backward of the case do. `change` of its arguments; `again`: a second derivative is wanted too."""
    arguments = list(case.inputs(Generator(), case.shape[0]))
    if change is not None:
        try:
            arguments = change(arguments)
        except (IndexError, RuntimeError) as error:
            return [f"no such arguments: {error}"]
    wanting = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    for tensor in wanting[leaves:]:
        tensor.requires_grad_(False)
    on.lines, on.memory = [], Memory()
    for number, argument in enumerate(arguments):
        for tensor in _tensors(argument) if isinstance(argument, (torch.Tensor, tuple, list)) else ():
            on.memory.name(f"argument{number}", tensor)
    dispatch.clear()
    try:
        with on:
            found = _tensors(case.ours(*arguments))
            on.lines.append(f"result {_shapes(found)}")
            mine = [y for y in found if y.requires_grad]
            if mine and "backward" in case.passes:
                above = [torch.empty_like(y) for y in mine]
                for number, dy in enumerate(above):
                    on.memory.name(f"above{number}", dy)
                gradients = torch.autograd.grad(mine, wanting[:leaves], above, create_graph=again, allow_unused=True)
                on.lines.append(f"gradients {_shapes(gradients)}")
    except Exception as error:
        on.lines.append(f"{type(error).__name__}: {error}")
    engaged, fell_back = dispatch.counters(family.id)
    return [*on.lines, f"engaged {dict(engaged)} fell back {dict(fell_back)}"]


def _first(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Of the first tensor that is floating."""

    def changed(arguments: list[Any]) -> list[Any]:
        at = next(i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor))
        made = change(arguments[at].detach()).requires_grad_(arguments[at].requires_grad)
        return [*arguments[:at], made, *arguments[at + 1 :]]

    return changed


def _others(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def changed(arguments: list[Any]) -> list[Any]:
        first = next(i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor))
        return [
            change(a.detach()).requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) and i != first else a
            for i, a in enumerate(arguments)
        ]

    return changed


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    place = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return place.as_strided(tensor.shape, tensor.stride(), 1)


CHANGES: dict[str, Change] = {
    "contiguous": _first(lambda t: t.contiguous()),
    "double": _first(lambda t: t.double()),
    "half": _first(lambda t: t.half()),
    "others half": _others(lambda t: t.half()),
    "shifted": _first(_shifted),
    "others shifted": _others(_shifted),
    "flat": _first(lambda t: t.flatten(1)),
    "empty": _first(lambda t: t[:0]),
    "fewer channels": _first(lambda t: t[:, 1:]),
}


def lines(families: Sequence[Family] = catalog.FAMILIES, *, whole: bool = True) -> Iterator[str]:
    """Of all cases, with the kernels forced and where they win; of a part of them with what families refuse, and on other GPUs."""

    def written(on: Device, what: str, family: Family, case: Case, **how: Any) -> Iterator[str]:
        yield f"=== {family.id} {case.label} {case.layout} [{what}]"
        yield from traced(on, family, case, **how)

    for family in families:
        cases = (*family.benchmark, *family.verification)
        names = Counter(case.name for case in cases)
        few = [*{case.name: case for case in reversed(cases)}.values()][:40]
        with device() as on:
            for case in cases:
                with dispatch.everything():
                    yield from written(on, "forced", family, case)
                if whole:
                    yield from written(on, "where it wins", family, case)
            if not whole:
                continue
            with dispatch.everything():
                for case in few:
                    yield from written(on, "twice", family, case, again=True)
                    yield from written(on, "one leaf", family, case, leaves=1)
                for case in few:
                    yield f"=== {family.id} {case.label} {case.layout} [library]"
                    yield from operated(on, family, case)
                for case in few[:12]:
                    for what, change in CHANGES.items():
                        yield from written(on, what, family, case, change=change)
        for sms, arch in ((16, 80), (84, 86), (128, 89), (148, 100), (170, 120), (20, 75)) if names else ():
            with device(sms, arch) as on:
                for case in few:
                    with dispatch.everything():
                        yield from written(on, f"sm_{arch}", family, case)
                    yield from written(on, f"sm_{arch} where it wins", family, case)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("\n".join(lines()) + "\n")
