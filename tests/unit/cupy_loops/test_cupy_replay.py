"""A recorded step gives what the plain one gives, whatever comes between, on NumPy's arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
import stub_cupy

from advisor.cupy_loops.changes.graphs import Graphs
from advisor.cupy_loops.replay.arena import Plain
from advisor.cupy_loops.replay.recorder import OFF, REPLAY, Recorder
from advisor.loop.patches import Patches

Loop = Callable[[Any, int], list[Any]]


def rebinding(cp: Any, steps: int) -> list[Any]:
    """Weights are new arrays in each step; losses are kept as numbers."""
    rng, losses = np.random.default_rng(0), []
    w = cp.array(rng.normal(size=(4, 3)))
    for _ in range(steps):
        x = cp.array(rng.normal(size=(8, 4)))
        h = cp.tanh(x.dot(w))
        losses.append(float((h * h).mean()))
        w = w - 0.1 * x.T.dot(h * (1.0 - h * h)) / 8
    return [losses, w]


def in_place(cp: Any, steps: int) -> list[Any]:
    """Momentum, leaky relu by masks, a learning rate that falls, a print now and then, a batch scaled in place."""
    rng, losses = np.random.default_rng(1), []
    w, v = cp.array(rng.normal(size=(4, 3))), cp.zeros((4, 3))
    for i in range(steps):
        x = cp.array(rng.normal(size=(8, 4)))
        x /= 2.0
        y = x.dot(w)
        h = y.copy()
        h[y <= 0] *= 0.2
        slope = (y > 0).astype(np.float64)
        slope[slope <= 0] = 0.2
        loss = (h * h).mean()
        g = x.T.dot(h * slope)
        v *= 0.9
        v -= (0.1 / (1 + i)) * g
        w += v
        if i % 13 == 5:
            losses.append(float(loss) + float(x.sum()))
    return [losses, w, v]


def hoarding(cp: Any, steps: int) -> list[Any]:
    """Every loss is held as an array for all of the loop."""
    rng, losses = np.random.default_rng(2), []
    w = cp.array(rng.normal(size=(4, 3)))
    for _ in range(steps):
        x = cp.array(rng.normal(size=(8, 4)))
        h = x.dot(w)
        losses.append((h * h).mean())
        w -= 0.01 * x.T.dot(h)
    return [[float(loss) for loss in losses], w]


def evaluating(cp: Any, steps: int) -> list[Any]:
    """An evaluation that begins as a step does and goes another way, and a last batch of another size."""
    rng, told = np.random.default_rng(3), []
    w = cp.array(rng.normal(size=(4, 3)))
    for i in range(steps):
        x = cp.array(rng.normal(size=(5 if i % 20 == 19 else 8, 4)))
        h = cp.maximum(x.dot(w), 0.0)
        w -= 0.05 * x.T.dot(h)
        if i % 20 == 19:
            y = cp.array(rng.normal(size=(8, 4)))
            told.append(float(cp.exp(y.dot(w)).sum()))
    return [told, w]


def numbers(found: list[Any]) -> list[Any]:
    return [np.array(value) for value in found]


def replayed(loop: Loop, steps: int, backend: Callable[[], Any] = Plain) -> tuple[list[Any], Recorder]:
    cp, patches = stub_cupy.module(), Patches()
    change = Graphs(backend)
    change.apply(cp, patches)
    assert change.recorder is not None
    found = numbers(loop(cp, steps))
    recorder = change.recorder
    patches.restore_all()
    return found, recorder


@pytest.mark.parametrize("loop", [rebinding, in_place, evaluating])
def test_a_replayed_loop_gives_what_the_plain_one_gives(loop: Loop) -> None:
    plain = numbers(loop(stub_cupy.module(), 58))
    found, recorder = replayed(loop, 58)
    for a, b in zip(plain, found, strict=True):
        np.testing.assert_array_equal(a, b)
    assert recorder.phase == REPLAY, recorder.why
    assert recorder.replayed >= 25


def test_values_that_are_held_are_not_overwritten() -> None:
    plain = numbers(hoarding(stub_cupy.module(), 200))
    found, recorder = replayed(hoarding, 200)
    for a, b in zip(plain, found, strict=True):
        np.testing.assert_array_equal(a, b)
    assert recorder.phase == REPLAY, recorder.why
    assert recorder.programs >= 2  # recorded anew with arrays of the script's own in that place


@pytest.mark.parametrize("source", ["", "import cupyx.scipy.planted as p", "from cupyx.scipy.planted import f"])
@pytest.mark.parametrize("inside", [False, True])
def test_what_cupy_loads_for_itself_is_not_the_scripts(
    source: str, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted, script = ModuleType("cupyx.scipy.planted"), ModuleType("script")
    planted.f = FunctionType((lambda x: x).__code__, {"__name__": planted.__name__})
    planted.f.__module__ = planted.__name__
    for module in (ModuleType("cupyx"), ModuleType("cupyx.scipy")):
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "script", script)

    def loop(cp: Any, steps: int) -> list[Any]:
        monkeypatch.setitem(sys.modules, planted.__name__, planted)
        sys.modules["cupyx.scipy"].planted = planted
        sys.modules["cupyx"].scipy = sys.modules["cupyx.scipy"]
        exec(f"def step():\n    {source or 'pass'}" if inside else source, vars(script))
        return rebinding(cp, steps)

    _, recorder = replayed(loop, 58)
    if source:
        assert (recorder.phase, recorder.why) == (
            OFF,
            "the script uses cupyx.scipy.planted, whose calls are not seen",
        )
    else:
        assert recorder.phase == REPLAY, recorder.why


def test_a_loop_without_a_period_is_left_alone() -> None:
    def random_walk(cp: Any, steps: int) -> list[Any]:
        rng, x = np.random.default_rng(4), cp.zeros(3)
        for _ in range(steps):
            for _ in range(rng.integers(1, 6)):
                x += 1.0
            x = cp.exp(-x)
        return [x]

    plain = numbers(random_walk(stub_cupy.module(), 200))
    found, recorder = replayed(random_walk, 200)
    np.testing.assert_array_equal(plain[0], found[0])
    assert not recorder.replayed


def test_an_augmented_assignment_under_a_mask_needs_no_host() -> None:
    def slopes(cp: Any, steps: int) -> list[Any]:
        rng, w = np.random.default_rng(5), cp.ones((4, 3))
        for _ in range(steps):
            x = cp.array(rng.normal(size=(8, 4)))
            y = x.dot(w)
            y[y <= 0] *= 0.2
            y[y > 1.5] = 1.5
            w += 0.01 * x.T.dot(y)
        return [w]

    plain = numbers(slopes(stub_cupy.module(), 40))
    found, recorder = replayed(slopes, 40)
    np.testing.assert_array_equal(plain[0], found[0])
    assert recorder.phase == REPLAY
    assert recorder.program is not None
    hows = {(entry.name, entry.how) for entry in recorder.program.entries if "item__" in entry.name}
    assert hows == {("__getitem__", "placeholder"), ("__setitem__", "run")}


def unseen_view(cp: Any, steps: int) -> list[Any]:
    """A view that is made past every wrapped call."""
    rng, told = np.random.default_rng(6), []
    w = cp.array(rng.normal(size=(4, 3)))
    for _ in range(steps):
        x = cp.array(rng.normal(size=(8, 4)))
        y = x.dot(w)
        flat = np.ndarray.ravel(y)  # as Cython code would
        w += 0.01 * x.T.dot(y) * flat.sum()
        told.append(float(w.sum()))
    return [told, w]


def test_a_view_that_no_call_made_is_not_trusted() -> None:
    plain = numbers(unseen_view(stub_cupy.module(), 60))
    found, recorder = replayed(unseen_view, 60)
    for a, b in zip(plain, found, strict=True):
        np.testing.assert_array_equal(a, b)
    assert recorder.phase == OFF or not recorder.replayed


def add_one(x: Any, out: Any) -> Any:
    out[...] = x + 1.0
    return out


def test_a_kernel_made_in_each_step_is_one_in_the_graph() -> None:
    def kernels(cp: Any, steps: int) -> list[Any]:
        rng, w = np.random.default_rng(7), cp.ones((4, 3))
        for _ in range(steps):
            x = cp.array(rng.normal(size=(8, 4)))
            y = cp.ElementwiseKernel("T x", "T y", add_one, "one")(x.dot(w), cp.empty((8, 3)))
            w -= 0.01 * x.T.dot(y)
        return [w]

    plain = numbers(kernels(stub_cupy.module(), 40))
    found, recorder = replayed(kernels, 40)
    np.testing.assert_array_equal(plain[0], found[0])
    assert recorder.program is not None
    assert [e.how for e in recorder.program.entries if e.name.startswith("ElementwiseKernel")] == ["run"]
    assert len(recorder.segments) == 1


class Wrapped:
    """An autograd's value: arrays leave the work to it."""

    __array_priority__ = 200

    def __init__(self, data: Any) -> None:
        self.data = data

    def __rmul__(self, other: Any) -> Any:
        return self.data * other


def test_an_operator_that_leaves_the_work_to_its_operand_cuts_no_graph() -> None:
    def left_over(cp: Any, steps: int) -> list[Any]:
        rng, w = np.random.default_rng(8), cp.ones((4, 3))
        for _ in range(steps):
            x = cp.array(rng.normal(size=(8, 4)))
            y = x.dot(w)
            w -= 0.01 * x.T.dot(y * Wrapped(y))
        return [w]

    plain = numbers(left_over(stub_cupy.module(), 40))
    found, recorder = replayed(left_over, 40)
    np.testing.assert_array_equal(plain[0], found[0])
    assert len(recorder.segments) == 1


def test_arrays_that_only_garbage_holds_do_not_end_the_replay() -> None:
    def cycles(cp: Any, steps: int) -> list[Any]:
        rng, w = np.random.default_rng(9), cp.ones((4, 3))
        for _ in range(steps):
            x = cp.array(rng.normal(size=(8, 4)))
            y = x.dot(w)
            tape: list[Any] = [y]
            tape.append(tape)  # as closures of an autograd hold each other
            w -= 0.01 * x.T.dot(y)
        return [w]

    plain = numbers(cycles(stub_cupy.module(), 60))
    found, recorder = replayed(cycles, 60)
    np.testing.assert_array_equal(plain[0], found[0])
    assert recorder.phase == REPLAY, recorder.why
    assert recorder.replayed > 25


class Faulty(Plain):
    """A backend whose graphs are wrong in one way."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def launch(self, arena: Any, segment: tuple[int, int]) -> None:
        before = {place: value.copy() for place, value in enumerate(arena.at) if value is not None and value.size}
        arena.again(*segment)
        entries = [e for e in arena.program.entries if e.how == "run" and e.gives]
        if self.fault == "an array is stale":
            place = next(e.gives[0] for e in entries if e.name in ("dot", "__mul__"))
            arena.at[place][...] = before[place]
        elif self.fault == "an update is left out":
            place = min(arena.program.written)
            arena.at[place][...] = before[place]
        elif self.fault == "a number is off by its rounding":
            arena.at[entries[-1].gives[0]][...] *= 1 + 1e-15


@pytest.mark.parametrize("fault", ["an array is stale", "an update is left out", "a number is off by its rounding"])
@pytest.mark.parametrize("loop", [rebinding, in_place])
def test_a_graph_that_gives_other_values_is_left_behind_its_first_launch(loop: Loop, fault: str) -> None:
    if loop is rebinding and fault == "an update is left out":
        pytest.skip("nothing is changed in place there")
    plain = numbers(loop(stub_cupy.module(), 58))
    found, recorder = replayed(loop, 58, lambda: Faulty(fault))
    assert recorder.phase == OFF
    assert "other values than the calls" in recorder.why
    for a, b in zip(plain, found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_stand_in_that_computes_something_else_is_told() -> None:
    class Wrong(Plain):
        def build(self, program: Any, module: Any, segments: Any) -> Any:
            for entry in program.entries:
                if entry.name == "mean":
                    entry.run = lambda x, *args: x.sum(*args) / (x.size + 1)
            return super().build(program, module, segments)

    plain = numbers(rebinding(stub_cupy.module(), 58))
    found, recorder = replayed(rebinding, 58, Wrong)
    assert recorder.phase == OFF
    assert recorder.why == "mean gives other values than CuPy's"
    for a, b in zip(plain, found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_graph_may_be_off_as_far_as_plain_calls_are() -> None:
    scatter = np.random.default_rng(11)

    class Noisy(Plain):
        """Additions by atomics: each launch in another order."""

        def build(self, program: Any, module: Any, segments: Any) -> Any:
            for entry in program.entries:
                if entry.name == "tanh":
                    entry.run = lambda x: np.tanh(x) * (1 + scatter.normal(size=x.shape) * 1e-9)
            return super().build(program, module, segments)

    _, recorder = replayed(rebinding, 58, Noisy)
    assert recorder.phase == REPLAY, recorder.why


def test_memory_that_a_step_takes_and_never_fills_tells_nothing_of_its_graph() -> None:
    """CuPy's `empty` gives whatever lay there: another thing in each run, which had been taken for the noise of the calls."""
    draw = np.random.default_rng(12)

    def half_filled(cp: Any, steps: int) -> list[Any]:
        rng, w = np.random.default_rng(13), cp.ones((4, 3))
        for _ in range(steps):
            x = cp.array(rng.normal(size=(8, 4)))
            room = cp.empty((8, 3))
            room[:4] = x[:4].dot(w)
            w -= 0.01 * x[:4].T.dot(room[:4])
        return [w]

    class OffByALittle(Plain):
        def launch(self, arena: Any, segment: tuple[int, int]) -> None:
            super().launch(arena, segment)
            place = next(e.gives[0] for e in arena.program.entries if e.name == "empty")
            arena.at[place][0, 0] += 1.0

    cp, patches = stub_cupy.module(), Patches()
    plain_empty = cp.empty
    cp.empty = lambda shape: plain_empty(shape) * 0 + cp.array(draw.normal(size=shape)) * 1e6
    change = Graphs(OffByALittle)
    change.apply(cp, patches)
    half_filled(cp, 58)
    recorder = change.recorder
    patches.restore_all()
    assert recorder is not None
    assert recorder.phase == OFF
    assert "other values than the calls" in recorder.why


def test_switched_off_in_the_middle_of_a_step_what_was_answered_is_filled() -> None:
    def loop(cp: Any, steps: int, stop: Callable[[], None] = lambda: None) -> list[Any]:
        rng, w = np.random.default_rng(0), cp.array(np.ones((4, 3)))
        for i in range(steps):
            x = cp.array(rng.normal(size=(8, 4)))
            h = cp.tanh(x.dot(w))
            if i == steps - 1:
                stop()
            w = w - 0.1 * x.T.dot(h * (1.0 - h * h)) / 8
        return [w, h]

    cp, patches, change = stub_cupy.module(), Patches(), Graphs(Plain)
    change.apply(cp, patches)
    found = numbers(loop(cp, 40, patches.restore_all))
    assert change.recorder is not None
    assert change.recorder.replayed
    for a, b in zip(numbers(loop(stub_cupy.module(), 40)), found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_step_begins_with_its_batch_where_one_line_brings_two_arrays() -> None:
    def loop(cp: Any, steps: int) -> list[Any]:
        rng, w = np.random.default_rng(0), cp.array(np.ones((4, 3)))
        for _ in range(steps):
            x, t = cp.array(rng.normal(size=(8, 4))), cp.array(rng.normal(size=(8, 3)))
            for _ in range(2):
                w = w - 0.01 * x.T.dot(x.dot(w) - t)
            loss = cp.sqrt((w * w).sum())
        return [w, loss]

    _, recorder = replayed(loop, 40)
    assert recorder.program is not None
    assert [entry.name for entry in recorder.program.entries][:2] == ["array", "array"]
    assert len(recorder.program.given) == 1  # w: nothing else comes from the step before
