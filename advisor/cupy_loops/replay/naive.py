"""A RawKernel of the script's that is a convolution, a pooling or a matrix product, known by what it does and by nothing else.

The kernel is run on random arrays of the shapes that it is given in the loop, and its result is compared with what each operation of these shapes
gives, in fp64, within the rounding of sums of such terms. It is replaced where one operation is equal on every probe, where it writes one
array, wholly, from the others alone, and the same each time, and where the replacement is faster. A source that says of atomic additions, of
memory of its own, of clocks or of assembly is never asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from advisor import cupy as operations
from advisor.cupy_loops.replay.calls import CupyCall, Program
from advisor.cupy_loops.replay.memory import samples

# What may give another result the next time, or reach what is no argument.
_STATE = re.compile(
    r"atomic|\bred\.|\basm\b|clock|printf|curand|__constant__|\bstatic\b|__device__\s+\w+\s+\w+\s*(\[|=|;)|malloc"
)
_ROUNDING = {"float32": 1e-5, "float64": 1e-12}
_STRIDES = (1, 2, 3, 4)
_SLACK = 1 << 20  # bytes on both sides of a probe's arrays: naive kernels read past theirs

Operation = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a kernel computes. `kind`: "product", "convolution" or "largest", with `numbers` that say more of it; `operation`: the same by
    CuPy's functions; `takes`: positions of its inputs among the kernel's arguments; `gives`: of its output.
    """

    kind: str
    numbers: tuple[int, ...]
    operation: Operation
    takes: tuple[int, ...]
    gives: int
    sums: bool  # rounding may differ, as terms are added in another order; else it is equal to the bit

    def off(self, module: Any, found: Any, *inputs: Any) -> bool:
        """Whether this result is not the operation's, by fp64."""
        wide = [value.astype("f8") for value in inputs]
        exact = self.operation(*wide)
        if exact.shape != found.shape or not bool(module.isfinite(found).all()):
            return True
        if not self.sums:
            return not bool((exact == found).all())
        scale = self.operation(*(abs(value) for value in wide))
        return not bool((abs(found - exact) <= _ROUNDING[str(found.dtype)] * scale + 1e-300).all())


def meaning(call: CupyCall, module: Any, seed: int = 0) -> Meaning | None:
    """What the kernel of this call computes; None where that is none of what is known, or cannot be told."""
    if not call.name.startswith("RawKernel:") or len(call.args) != 4 or call.kwargs:
        return None
    kernel, grid, block, given = call.args
    source = getattr(kernel, "code", None)
    if not isinstance(source, str) or _STATE.search(source) or not isinstance(given, (tuple, list)):
        return None
    arrays = {i: value for i, value in enumerate(given) if isinstance(value, module.ndarray)}
    if not 2 <= len(arrays) <= 3 or any(not _usual(value) for value in arrays.values()):
        return None
    if len({str(value.dtype) for value in arrays.values()}) > 1 or len({id(v) for v in arrays.values()}) < len(arrays):
        return None
    rng = np.random.default_rng(seed)

    def run(fill: float, scale: float) -> dict[int, tuple[Any, Any]]:
        """By position, each array before and after."""
        before = {i: module.asarray((rng.normal(size=v.shape) * scale).astype(v.dtype)) for i, v in arrays.items()}
        after = {i: _apart(module, value) for i, value in before.items()}
        if written is not None:
            after[written].fill(fill)
        call.plain(kernel, grid, block, tuple(after.get(i, value) for i, value in enumerate(given)))
        return {i: (before[i], after[i]) for i in arrays}

    written: int | None = None
    changed = [i for i, (a, b) in run(0.0, 1.0).items() if not bool((a == b).all())]
    if len(changed) != 1:
        return None
    written = changed[0]
    takes = tuple(i for i in arrays if i != written)
    found = list(_candidates(arrays, takes, written))
    for fill, scale in ((7.0, 1.0), (float("nan"), 100.0), (-1.0, 1e-2)):
        both = run(fill, scale)
        if any(not bool((both[i][0] == both[i][1]).all()) for i in takes):
            return None
        found = [m for m in found if not m.off(module, both[written][1], *(both[i][0] for i in m.takes))]
    return found[0] if len(found) == 1 else None


def _usual(value: Any) -> bool:
    return str(value.dtype) in _ROUNDING and bool(value.flags.c_contiguous) and value.ndim in (2, 4) and value.size > 0


def _apart(module: Any, value: Any) -> Any:
    """A copy with room around it."""
    room = _SLACK // value.dtype.itemsize
    whole = module.zeros((value.size + 2 * room,), dtype=value.dtype)
    part = whole[room : room + value.size].reshape(value.shape)
    part[...] = value
    return part


def _candidates(arrays: dict[int, Any], takes: tuple[int, ...], written: int) -> Iterator[Meaning]:
    """Operations whose shapes fit."""
    out = arrays[written].shape
    if len(takes) == 1 and len(out) == 4 and arrays[takes[0]].ndim == 4:
        yield from _poolings(arrays[takes[0]].shape, out, takes, written)
    if len(takes) != 2:
        return
    for pair in (takes, takes[::-1]):
        first, second = arrays[pair[0]].shape, arrays[pair[1]].shape
        if len(first) == len(second) == len(out) == 2:
            yield from _products(first, second, out, pair, written)
        if len(first) == len(second) == len(out) == 4:
            yield from _convolutions(first, second, out, pair, written)


def _products(a: Any, b: Any, out: Any, takes: tuple[int, ...], written: int) -> Iterator[Meaning]:
    for left in (False, True):
        for right in (False, True):
            rows, inner = a[::-1] if left else a
            inside, columns = b[::-1] if right else b
            if (rows, columns) == tuple(out) and inner == inside:

                def product(x: Any, y: Any, left: bool = left, right: bool = right) -> Any:
                    return (x.T if left else x).dot(y.T if right else y)

                yield Meaning("product", (int(left), int(right)), product, takes, written, sums=True)


def _convolutions(x: Any, w: Any, out: Any, takes: tuple[int, ...], written: int) -> Iterator[Meaning]:
    if x[1] != w[1] or tuple(out[:2]) != (x[0], w[0]):
        return
    for stride in _STRIDES:
        for padding in range(max(w[2:])):
            if tuple((x[i] + 2 * padding - w[i]) // stride + 1 for i in (2, 3)) != tuple(out[2:]):
                continue
            for turned in (False, True):
                if turned and tuple(w[2:]) == (1, 1):
                    continue

                def convolution(x: Any, w: Any, s: int = stride, p: int = padding, turned: bool = turned) -> Any:
                    return operations.conv2d(x, w[:, :, ::-1, ::-1] if turned else w, stride=s, padding=p)

                numbers = stride, padding, int(turned)
                yield Meaning("convolution", numbers, convolution, takes, written, sums=True)


def _poolings(x: Any, out: Any, takes: tuple[int, ...], written: int) -> Iterator[Meaning]:
    if tuple(x[:2]) != tuple(out[:2]):
        return
    for stride in (2, 3, 4):
        for size in range(stride, stride + 2):
            if tuple((x[i] - size) // stride + 1 for i in (2, 3)) == tuple(out[2:]):

                def largest(x: Any, size: int = size, stride: int = stride) -> Any:
                    return operations.max_pool2d(x, size, stride=stride)[0]

                yield Meaning("largest", (size, stride), largest, takes, written, sums=False)


def replace(program: Program, calls: list[CupyCall], module: Any, backend: Any) -> list[str]:
    """Put what stands for them in the place of naive kernels; their names, and what they were.

    Args:
        calls: of the recorded step. backend: has `operation`, what computes a meaning, and `faster`, which of two calls is.
    """
    known: dict[Any, tuple[Meaning, Operation] | None] = {}
    told: dict[str, None] = {}
    arrays = samples(program)
    for entry, call in zip(program.entries, calls, strict=True):
        if entry.how != "run" or entry.run is not None or not call.name.startswith("RawKernel:"):
            continue
        key = _key(call, module)
        if key not in known:
            try:
                known[key] = _better(call, module, backend)
            except Exception:  # a probe that cannot be run: the kernel stays
                known[key] = None
        better = known[key]
        if better is not None:
            found, operation = better
            entry.run = _stands_for(found, operation)
            output = call.args[3][found.gives]
            entry.changes = tuple(place for place in entry.changes if arrays.get(place) is output)
            told[f"{call.name}: {found.kind}"] = None
    return list(told)


def _key(call: CupyCall, module: Any) -> Any:
    kernel, grid, block, given = call.args if len(call.args) == 4 else (None, None, None, ())
    parts = tuple(("array", v.shape, str(v.dtype)) if isinstance(v, module.ndarray) else repr(v) for v in given)
    return id(kernel), repr(grid), repr(block), parts


def _better(call: CupyCall, module: Any, backend: Any) -> tuple[Meaning, Operation] | None:
    """What the kernel means, and what computes that as well on the loop's own numbers, and faster."""
    found = meaning(call, module)
    operation = backend.operation(found) if found is not None else None
    if found is None or operation is None:
        return None
    kernel, grid, block, given = call.args
    live = tuple(_apart(module, value) if isinstance(value, module.ndarray) else value for value in given)
    inputs = [live[i] for i in found.takes]
    stands = _stands_for(found, operation)
    for run in (call.plain, stands):
        run(kernel, grid, block, live)
        if found.off(module, live[found.gives], *inputs):
            return None
    if not backend.faster(lambda: stands(kernel, grid, block, live), lambda: call.plain(kernel, grid, block, live)):
        return None
    return found, operation


def _stands_for(found: Meaning, operation: Operation) -> Callable[..., None]:
    def call(kernel: Any, grid: Any, block: Any, given: Any) -> None:
        given[found.gives][...] = operation(*(given[i] for i in found.takes))

    return call
