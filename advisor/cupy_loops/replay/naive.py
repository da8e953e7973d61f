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
from advisor.cupy_loops.facts import ROUNDED_BY, fewer_bits
from advisor.cupy_loops.replay import columns
from advisor.cupy_loops.replay.calls import CupyCall, Program
from advisor.cupy_loops.replay.memory import apart, samples

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
    """What a kernel computes. `kind`: "product", "convolution", "largest", "columns" or "image", with `numbers` that say more of it; `operation`: the same by
    CuPy's functions; `takes`: positions of its inputs among the kernel's arguments; `gives`: of its output.
    """

    kind: str
    numbers: tuple[int, ...]
    operation: Operation
    takes: tuple[int, ...]
    gives: int
    sums: bool  # rounding may differ, as terms are added in another order; else it is equal to the bit

    def off(self, module: Any, found: Any, *inputs: Any, fewer: float = 0.0) -> bool:
        """Whether this result is not the operation's, by fp64. `fewer`: what its terms may be rounded by before they are added."""
        wide = [value.astype("f8") for value in inputs]
        exact = self.operation(*wide)
        if exact.shape != found.shape or not bool(module.isfinite(found).all()):
            return True
        if not self.sums:
            return not bool((exact == found).all())
        scale = self.operation(*(abs(value) for value in wide))
        return not bool((abs(found - exact) <= max(fewer, _ROUNDING[str(found.dtype)]) * scale + 1e-300).all())


def meaning(call: CupyCall, module: Any, seed: int = 0) -> Meaning | None:
    """What the kernel of this call computes; None where that is none of what is known, or cannot be told."""
    parts = _parts(call)
    if parts is None or _STATE.search(parts.source):
        return None
    arrays = {i: value for i, value in enumerate(parts.given) if isinstance(value, module.ndarray)}
    if not 2 <= len(arrays) <= 3 or any(not _usual(value) for value in arrays.values()):
        return None
    if len({str(value.dtype) for value in arrays.values()}) > 1 or len({id(v) for v in arrays.values()}) < len(arrays):
        return None
    rng = np.random.default_rng(seed)

    def run(fill: float, scale: float) -> dict[int, tuple[Any, Any]]:
        """By position, each array before and after."""
        before = {i: module.asarray((rng.normal(size=v.shape) * scale).astype(v.dtype)) for i, v in arrays.items()}
        after = {i: _apart(module, value, arrays[i]) for i, value in before.items()}
        if written is not None:
            after[written].fill(fill)
        parts.run(tuple(after.get(i, value) for i, value in enumerate(parts.given)))
        return {i: (before[i], after[i]) for i in arrays}

    written: int | None = None
    changed = [i for i, (a, b) in run(0.0, 1.0).items() if not bool((a == b).all())]
    if len(changed) != 1:
        return None
    written = changed[0]
    takes = tuple(i for i in arrays if i != written)
    numbers = {int(v) for v in parts.given if isinstance(v, (int, np.integer))}
    found = list(_candidates(arrays, takes, written, numbers))
    for fill, scale in ((7.0, 1.0), (float("nan"), 100.0), (-1.0, 1e-2)):
        both = run(fill, scale)
        if any(not bool((both[i][0] == both[i][1]).all()) for i in takes):
            return None
        found = [m for m in found if not m.off(module, both[written][1], *(both[i][0] for i in m.takes))]
    return found[0] if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class CallParts:
    """A kernel's call. `given`: its arguments; `run`: calls it with others."""

    source: str
    given: tuple[Any, ...]
    run: Callable[[tuple[Any, ...]], Any]


def _parts(call: CupyCall) -> CallParts | None:
    kernel, *rest = call.args or (None,)
    if call.name.startswith("RawKernel:") and len(rest) == 3 and isinstance(rest[2], (tuple, list)):
        source, before, given = getattr(kernel, "code", None), (kernel, *rest[:2]), rest[2]
    elif call.name.startswith("ElementwiseKernel:"):
        source, before, given = getattr(kernel, "operation", None), (kernel,), rest
    else:
        return None
    raw = len(before) == 3

    def run(values: tuple[Any, ...]) -> Any:
        return call.plain(*before, values) if raw else call.plain(*before, *values)

    return CallParts(source, tuple(given), run) if isinstance(source, str) and not call.kwargs else None


def _usual(value: Any) -> bool:
    return str(value.dtype) in _ROUNDING and value.size > 0 and apart(value) and 0 < value.size < 1 << 31


def _apart(module: Any, value: Any, like: Any) -> Any:
    """A copy that lies as `like` does; with room around it where that is without gaps."""
    if not like.flags.c_contiguous:
        part = like.copy(order="K")
    else:
        room = _SLACK // value.dtype.itemsize
        whole = module.zeros((value.size + 2 * room,), dtype=value.dtype)
        part = whole[room : room + value.size].reshape(value.shape)
    part[...] = value
    return part


def _candidates(arrays: dict[int, Any], takes: tuple[int, ...], written: int, numbers: set[int]) -> Iterator[Meaning]:
    """Operations whose shapes fit."""
    out = arrays[written].shape
    if not arrays[written].flags.c_contiguous:
        return
    if len(takes) == 1 and len(out) == 6:
        for sizes, operation in columns.into_columns(arrays[takes[0]], out, numbers):
            yield Meaning("columns", sizes, operation, takes, written, sums=False)
    if len(takes) == 1 and len(out) == 4:
        for sizes, operation in columns.into_image(arrays[takes[0]], out, numbers):
            yield Meaning("image", sizes, operation, takes, written, sums=True)
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
        calls: of the recorded step. backend: has `operation`, what computes a meaning of its inputs into an output, and `faster`, whether
            the first of two calls is.
    """
    known: dict[Any, tuple[Meaning, Operation] | None] = {}
    told: dict[str, None] = {}
    arrays = samples(program)
    for entry, call in zip(program.entries, calls, strict=True):
        parts = _parts(call) if entry.how == "run" and entry.run is None else None
        if parts is None:
            continue
        key = _key(call, parts, module)
        if key not in known:
            try:
                known[key] = _better(call, parts, module, backend)
            except Exception:  # a probe that cannot be run: the kernel stays
                known[key] = None
        better = known[key]
        if better is not None:
            found, operation = better
            entry.run = _stands_for(found, operation, call.name)
            output = parts.given[found.gives]
            entry.changes = tuple(place for place in entry.changes if arrays.get(place) is output)
            told[f"{call.name}: {found.kind}"] = None
    return list(told)


def _key(call: CupyCall, parts: CallParts, module: Any) -> Any:
    """What tells calls of kernels apart; a kernel made anew from the same source is the same."""
    given = tuple(
        ("array", v.shape, v.strides, str(v.dtype)) if isinstance(v, module.ndarray) else repr(v) for v in parts.given
    )
    launched = tuple(repr(value) for value in call.args[1:3]) if call.name.startswith("RawKernel:") else ()
    return call.name, parts.source, launched, given


def _better(call: CupyCall, parts: CallParts, module: Any, backend: Any) -> tuple[Meaning, Operation] | None:
    """What the kernel means, and what computes that as well on the loop's own numbers, and faster."""
    found = meaning(call, module)
    if found is None:
        return None
    live = tuple(_apart(module, v, v) if isinstance(v, module.ndarray) else v for v in parts.given)
    inputs = [live[i] for i in found.takes]
    operation = backend.operation(found, inputs)
    if operation is None:
        return None

    def stands(values: tuple[Any, ...]) -> None:
        operation(*(values[i] for i in found.takes), values[found.gives])

    # Products of fp32 may be TF32's, if the script or a change of ours says so.
    fewer = ROUNDED_BY[fewer_bits(module)] if fewer_bits(module) and found.kind in ("product", "convolution") else 0.0
    for run, rounded in ((parts.run, 0.0), (stands, fewer)):
        run(live)
        if found.off(module, live[found.gives], *inputs, fewer=rounded):
            return None
    return (found, operation) if backend.faster(lambda: stands(live), lambda: parts.run(live)) else None


def _stands_for(found: Meaning, operation: Operation, name: str) -> Callable[..., Any]:
    raw = name.startswith("RawKernel:")

    def call(kernel: Any, *rest: Any) -> Any:
        given = rest[2] if raw else rest
        operation(*(given[i] for i in found.takes), given[found.gives])
        return None if raw else given[found.gives]

    return call
