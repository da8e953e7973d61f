"""Calls that run as one kernel give what they give one by one: interpreted on NumPy's arrays, and as compiled source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import host_kernels
import numpy as np
import pytest
import stub_cupy
import test_cupy_replay

from advisor.cupy_loops.changes.graphs import Graphs
from advisor.cupy_loops.replay import memory
from advisor.cupy_loops.replay.arena import Plain
from advisor.cupy_loops.replay.calls import Program
from advisor.cupy_loops.replay.recorder import REPLAY, Recorder
from advisor.loop.patches import Patches

BACKENDS = [
    Plain,
    pytest.param(host_kernels.Compiled, marks=pytest.mark.skipif(not host_kernels.COMPILER, reason="no g++")),
]
Loop = test_cupy_replay.Loop


def kernels(program: Program | None) -> list[list[str]]:
    """By kernel, the names of the calls that it does."""
    assert program is not None
    clusters = [cluster for plan in program.plans.values() for step in plan for cluster in step.kernels]
    return [[program.entries[e.number].name for e in cluster.elements] for cluster in clusters]


def compared(loop: Loop, steps: int, backend: Callable[[], Any]) -> Recorder:
    """The recorder of the replayed loop, whose results are those of the plain one."""
    plain = test_cupy_replay.numbers(loop(stub_cupy.module(), steps))
    found, recorder = test_cupy_replay.replayed(loop, steps, backend)
    for a, b in zip(plain, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    assert recorder.phase == REPLAY, recorder.why
    assert not recorder.unfused
    return recorder


def momentum(cp: Any, steps: int) -> list[Any]:
    """Parameters of many shapes, each with a momentum; a rate that falls."""
    rng = np.random.default_rng(0)
    weights = [cp.array(rng.normal(size=size)) for size in ((4, 3), (7,), (2, 3, 4), (5, 5), (1, 9))]
    speeds = [cp.array(rng.normal(size=w.shape)) for w in weights]
    for i in range(steps):
        x = cp.array(rng.normal(size=(3,)))
        for w, v in zip(weights, speeds, strict=True):
            v *= 0.9
            v -= (0.01 / (1 + i)) * (w + x.sum())
            w += v / (cp.sqrt(v * v) + 1.0)
    return weights


def columns(cp: Any, steps: int) -> list[Any]:
    """A padded image, and windows that are added up, as col2im does."""
    rng = np.random.default_rng(0)
    w = cp.array(rng.normal(size=(2, 4, 3, 3)))
    for _ in range(steps):
        x = cp.array(rng.normal(size=(2, 4, 5, 7)))
        padded = cp.pad(x * 2.0, ((0, 0), (0, 0), (1, 2), (2, 1)))
        total = cp.zeros((2, 4, 8, 10))
        for i in range(3):
            for j in range(3):
                total[:, :, i : i + 6 : 2, j : j + 8 : 2] += (
                    padded[:, :, i : i + 3, j : j + 4] * w[:, :, i : i + 1, j : j + 1]
                )
        w -= 0.001 * total.mean() * w + total[:, :, 1:4, 2:5] * 1e-4
    return [w]


def mirrored(cp: Any, steps: int) -> list[Any]:
    """What is changed in place is read the other way round, and the other way round is changed."""
    rng = np.random.default_rng(0)
    w = cp.array(rng.normal(size=(4, 6)))
    for _ in range(steps):
        x = cp.array(rng.normal(size=(4, 6)))
        w += 0.1 * x
        y = w[::-1] * 2.0 + x
        v = w[:, ::-1]
        v -= 0.01 * y
        w *= 0.5
        w += 0.01 * cp.maximum(w[::-1, ::-1] - y, 0.0)
    return [w]


def types(cp: Any, steps: int) -> list[Any]:
    """Comparisons, choices, conversions, and types that mix."""
    rng = np.random.default_rng(0)
    w = cp.array(rng.normal(size=(4, 6)).astype(np.float32))
    for _ in range(steps):
        x = cp.array(rng.normal(size=(6, 4)).astype(np.float32)).T
        y = cp.where(x > 0.25, x, 0.1 * x) + (x == w) * 3
        n = (y > 0).astype(np.int64) * 2 + 1
        z = cp.maximum(-y, 0.5) / n + abs(w) - 1.5
        w = (w + 0.01 * cp.sqrt(z * z)).astype(np.float32)
    return [w]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loop", [momentum, columns, types, mirrored, test_cupy_replay.in_place])
def test_fused_calls_give_what_they_give_one_by_one(loop: Loop, backend: Callable[[], Any]) -> None:
    compared(loop, 58, backend)


def test_all_parameters_are_updated_by_one_launch() -> None:
    recorder = compared(momentum, 58, Plain)
    assert recorder.program is not None
    (steps,) = recorder.program.plans.values()
    launches = [[cluster.shape for cluster in step.kernels] for step in steps if step.kernels]
    assert [len(shapes) for shapes in launches if len(shapes) > 1] == [5]


def test_windows_that_are_added_up_are_one_kernel() -> None:
    found = kernels(compared(columns, 58, Plain).program)
    assert ["zeros"] in found
    assert not any("__setitem__" in names for names in found)  # what a slice's sum is assigned to is itself


@pytest.mark.parametrize(
    ("held", "unwritten"), [(False, 2), (True, 1)]
)  # what the last call takes is held while it is made
def test_what_nobody_reads_is_not_written_and_what_the_script_holds_is(held: bool, unwritten: int) -> None:
    def loop(cp: Any, steps: int) -> list[Any]:
        rng, kept, seen = np.random.default_rng(0), [], []
        w = cp.array(rng.normal(size=(4, 3)))

        def product(x: Any) -> Any:
            y = x * w
            kept[:] = [y] if held else []
            return y

        for i in range(steps):
            w = w - 0.1 * (product(cp.array(rng.normal(size=(4, 3)))) + 1.0)
            if held and i % 7 == 3:
                seen.append(float(kept[0].sum()))
        return [w, seen]

    program = compared(loop, 58, Plain).program
    assert kernels(program) == [["__mul__", "__add__", "__rmul__", "__sub__"]]
    assert program is not None
    assert [len(program.unwritten(segment)) for segment in program.plans] == [unwritten]


OPERATIONS: list[Callable[[Any, Any, Any], Any]] = [
    lambda cp, a, b: a + b,
    lambda cp, a, b: a * 0.5 - b,
    lambda cp, a, b: cp.maximum(a, b),
    lambda cp, a, b: a.T.copy().T * b,
    lambda cp, a, b: a.__iadd__(b),
    lambda cp, a, b: a.__imul__(0.75),
    lambda cp, a, b: a[1:, :].__isub__(b[:-1, :]) is None or a,
    lambda cp, a, b: a[::-1] + b,
    lambda cp, a, b: a.__iadd__(a[::-1]),
    lambda cp, a, b: a - a.mean(axis=0, keepdims=True),
    lambda cp, a, b: cp.where(a > b, a, b * 0.25),
    lambda cp, a, b: a.reshape(-1).reshape(4, 5) - 0.5 * b,
    lambda cp, a, b: a.__setitem__((slice(1, 3), 2), b[1:3, 2]) or a,
    lambda cp, a, b: cp.sqrt(abs(a)) / (1.0 + b * b),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls_views_and_changes_in_place(seed: int, backend: Callable[[], Any]) -> None:
    choice = np.random.default_rng(seed)
    made = [
        (OPERATIONS[choice.integers(len(OPERATIONS))], *choice.integers(6, size=2), choice.integers(6))
        for _ in range(24)
    ]

    def loop(cp: Any, steps: int) -> list[Any]:
        rng = np.random.default_rng(seed)
        kept = [cp.array(rng.normal(size=(4, 5))) for _ in range(3)]
        for _ in range(steps):
            x = cp.array(rng.normal(size=(4, 5)))
            at = [*kept, x, x * 2.0, x + 1.0]
            for operation, first, second, into in made:
                at[into] = operation(cp, at[first], at[second])
            for old, new in zip(kept, at, strict=False):
                old *= 0.5
                old += cp.maximum(cp.minimum(new, 1.0), -1.0)
        return [np.array(value) for value in kept]

    plain = loop(stub_cupy.module(), 48)
    cp, patches, change = stub_cupy.module(), Patches(), Graphs(backend)
    change.apply(cp, patches)
    found = loop(cp, 48)
    patches.restore_all()
    assert change.recorder is not None
    assert not change.recorder.unfused
    for a, b in zip(plain, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_strides_of_dimensions_of_one_mean_nothing() -> None:
    a = np.zeros((1, 4, 1, 3))
    b = np.lib.stride_tricks.as_strided(np.zeros(12), a.shape, (8, 24, 800, 8))
    c = np.zeros((3, 1, 4, 1)).transpose(1, 2, 3, 0)
    assert a.strides != b.strides
    assert memory.alike({0: a, 1: a[:, 1:]}, {0: b, 1: b[:, 1:]})
    assert not memory.alike({0: a}, {0: c})
    assert not memory.alike({0: a, 1: a[:, 1:]}, {0: b, 1: b[:, 1:].copy()})


def slices(cp: Any, steps: int) -> list[Any]:
    """im2col by assigning slices, and by a stack of them; what is negative and nothing keeps its sign."""
    rng = np.random.default_rng(0)
    w = cp.array(rng.normal(size=(3, 2, 2, 2)))
    for _ in range(steps):
        x = cp.array(rng.normal(size=(2, 2, 5, 6)))
        padded = cp.pad(cp.maximum(x, 0.0) * -1.0, ((0, 0), (0, 0), (1, 0), (0, 1)))
        col = cp.zeros((2, 2, 2, 2, 5, 3))
        for i in range(2):
            for j in range(2):
                col[:, :, i, j, :, :] = padded[:, :, i : i + 5, j : j + 6 : 2]
        stacked = cp.stack([padded[:, :, i : i + 5, 0:6:2] for i in range(2)], axis=2)
        both = cp.concatenate((stacked, padded[:, :, None, :5, 1:4]), 2)
        once = cp.concatenate([padded[:, :, 1:, :6], x])
        y = cp.tensordot(col, w, ((1, 2, 3), (1, 2, 3)))
        w -= 0.001 * w * (y.mean() + both.sum() + once.sum() + (1.0 / (both[0, 0, 0, 0, 0] - 3.0)))
    return [w, col, both, once]


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_of_slices_are_one_kernel(backend: Callable[[], Any]) -> None:
    recorder = compared(slices, 60, backend)
    assert recorder.program is not None
    made = [e for plan in recorder.program.plans.values() for s in plan for c in s.clusters for e in c.elements]
    names = {recorder.program.entries[e.number].name: len(e.windows) for e in made if e.windows}
    assert names["zeros"] == 4
    assert {"stack", "concatenate", "pad"} <= names.keys()
    alone = [
        recorder.program.entries[s.number].name
        for plan in recorder.program.plans.values()
        for s in plan
        if s.number >= 0
    ]
    assert "__setitem__" not in alone


class Wrong(Plain):
    """Kernels whose multiplications are off by little."""

    def launch(self, arena: Any, segment: tuple[int, int]) -> None:
        super().launch(arena, segment)
        for step in arena.program.steps(segment):
            for each in (e for cluster in step.clusters for e in cluster.elements if e.place in cluster.writes):
                if arena.program.entries[each.number].name == "__mul__":
                    arena.at[each.place] *= 1.0 + 1e-12


def test_a_call_that_a_graph_gets_wrong_runs_by_itself() -> None:
    def loop(cp: Any, steps: int) -> list[Any]:
        rng, w = np.random.default_rng(0), cp.array(np.ones(7))
        for _ in range(steps):
            x = cp.array(rng.normal(size=7))
            twice = x * w
            w = w - 0.01 * cp.tanh(twice + 1.0) + twice.mean()
        return [w]

    recorder = compared(loop, 60, Wrong)
    assert recorder.apart == {"__mul__"}
    assert not any("__mul__" in names for names in kernels(recorder.program))
    assert any("tanh" in names for names in kernels(recorder.program))


def pooling(cp: Any, steps: int) -> list[Any]:
    """Largest values of windows and of rows; smallest ones of channels."""
    rng = np.random.default_rng(0)
    w, seen = cp.array(rng.normal(size=(2, 3, 6, 8))), []
    for i in range(steps):
        x = cp.array(rng.normal(size=(2, 3, 6, 8))) * w
        tiles = x.reshape(2, 3, 3, 2, 4, 2)
        top = tiles.max(axis=(3, 5), keepdims=True)
        chosen = ((tiles == top) * top).reshape(2, 3, 6, 8)
        low = x.transpose(0, 2, 3, 1).min(axis=-1)
        rows = cp.tanh(x).max(axis=3)
        w *= 0.9
        w += 0.01 * (chosen + low[:, None]) * rows[..., None]
        if i % 20 == 19:
            seen.append(float(low.sum()))
    return [w, seen]


@pytest.mark.parametrize("backend", BACKENDS)
def test_poolings_are_kernels_of_one_thread_for_a_result(backend: Any) -> None:
    recorder = compared(pooling, 60, backend)
    assert sum(names[0] in ("max", "min") for names in kernels(recorder.program)) == 3


def test_long_reductions_and_those_of_everything_stay_cupys() -> None:
    def loop(cp: Any, steps: int) -> list[Any]:
        rng = np.random.default_rng(0)
        w = cp.array(rng.normal(size=(4, 65)))
        for _ in range(steps):
            x = cp.array(rng.normal(size=(4, 65)))
            w += 0.1 * (x - x.max(axis=1, keepdims=True)) - x[:, :3].max()
        return [w]

    recorder = compared(loop, 60, Plain)
    assert not any("max" in names for names in kernels(recorder.program))
