"""Deferred scalars: the same numbers to the last bit, plain wherever they can be seen."""

from __future__ import annotations

import copy
import json
import math
import operator
import pickle
import sys
from types import SimpleNamespace
from typing import ClassVar

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loops import fingerprint, make_loop

from advisor.core.profile import Site
from advisor.transforms import defer_sync, deferred
from advisor.transforms.defer_sync import DeferSync
from advisor.transforms.deferred import Deferred

HOST_WRITE = deferred.HostWrite


class Slow:
    """A copy that arrives when the test says so, or when it is waited for."""

    arrived = False
    waits = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.number = tensor.tolist()

    def done(self) -> bool:
        return Slow.arrived

    def value(self):
        Slow.waits += not Slow.arrived
        return self.number


@pytest.fixture(autouse=True)
def _slow(monkeypatch):
    monkeypatch.setattr(deferred, "HostWrite", Slow)
    Slow.arrived, Slow.waits = False, 0


def number(value, dtype=torch.float64) -> Deferred:
    result = deferred.defer(torch.tensor(value, dtype=dtype))
    assert type(result) is Deferred
    return result


# ---- the number


@pytest.mark.parametrize("arrived", [False, True])
def test_no_call_waits_for_what_has_arrived(arrived: bool) -> None:
    """UNet's read waited in a trace though its number had come: the copy of the next batch had waited for everything before."""

    class Event:
        calls: ClassVar[list[str]] = []

        def query(self) -> bool:
            Event.calls.append("query")
            return arrived

        def synchronize(self) -> None:
            Event.calls.append("synchronize")

    write = HOST_WRITE.__new__(HOST_WRITE)
    write._places, write._place = [], SimpleNamespace(here=torch.tensor(2.5), arrived=Event())
    assert write.done() == arrived
    assert write.value() == 2.5
    assert ("synchronize" in Event.calls) == (not arrived)


def test_every_look_at_it_gives_the_plain_number() -> None:
    x, plain = 2.6789, number(2.6789)
    assert f"{plain:.2f}" == f"{x:.2f}"
    assert "%.3f %s %d" % (plain, plain, plain) == "%.3f %s %d" % (x, x, x)  # noqa: UP031 – what is tested
    assert "{:.1e}".format(plain) == "{:.1e}".format(x)  # noqa: UP032 – what is tested
    assert (str(plain), repr(plain), float(plain), int(plain), round(plain, 2), round(plain)) == (
        (str(x), repr(x), float(x), int(x), round(x, 2), round(x))
    )
    assert plain == x
    assert x == plain
    assert plain < 3
    assert plain < 3
    assert hash(plain) == hash(x)
    assert {x: 1}[plain] == 1
    assert math.floor(plain) == 2
    assert math.ceil(plain) == 3
    assert math.trunc(plain) == 2
    assert math.isfinite(plain)
    assert math.sqrt(plain) == math.sqrt(x)
    assert bool(plain)
    assert not number(0.0)
    assert divmod(plain, 2) == divmod(x, 2)
    assert plain.is_integer() is False
    assert complex(plain) == complex(x)
    assert isinstance(plain, float)
    assert isinstance(number(3, torch.int64), int)
    assert not isinstance(number(3, torch.int64), float)
    assert number(True, torch.bool) + 1 == 2
    assert [10, 20][number(1, torch.int64)] == 20
    with pytest.raises(TypeError):
        [10][number(1.0)]
    assert sum([number(1.0), number(2.0)]) == 3.0
    assert max(number(1.0), number(2.0)) == 2.0
    for made in (pickle.loads(pickle.dumps(plain)), copy.copy(plain), copy.deepcopy(plain)):
        assert type(made) is float
        assert made == x
    assert json.dumps(plain + 0) == json.dumps(x)
    assert abs(number(-1.5)) == 1.5
    assert -plain == -x
    assert +plain == x
    assert plain**2 == x**2
    assert 2**plain == 2**x
    assert "%x" % number(255, torch.int64) == "ff"  # noqa: UP031 – what is tested


@pytest.mark.parametrize("name", ["pow", "and_", "or_", "xor", "lshift", "rshift"])
def test_every_operator_of_numbers_is_one_of_its(name: str) -> None:
    function = getattr(operator, name)
    for left, right, dtype in ((6, 3, torch.int64), (True, False, torch.bool), (True, 2, torch.bool)):
        expected = function(left, right)
        for result in (
            function(number(left, dtype), right),
            function(left, number(right, torch.bool if type(right) is bool else torch.int64)),
            getattr(operator, f"i{name.rstrip('_')}")(
                left, number(right, torch.bool if type(right) is bool else torch.int64)
            ),
        ):
            assert type(result) is type(expected)
            assert result == expected
    assert ~number(6, torch.int64) == ~6
    with pytest.raises(TypeError):
        number(1.0) | 1


def test_arrays_and_tensors_take_it_as_a_plain_number() -> None:
    plain = number(1.5)
    array = numpy.ones(2, dtype=numpy.float32)
    for result in (array * plain, plain * array):
        assert result.dtype == numpy.float32
        assert result.tolist() == [1.5, 1.5]
    assert numpy.mean([plain, plain]) == 1.5
    for result in (
        torch.ones(2) * plain,
        plain * torch.ones(2),
        torch.ones(2).mul(plain),
        torch.add(torch.ones(2), plain) - 1,
    ):
        assert result.dtype == torch.float32
        assert result.tolist() == [1.5, 1.5]


def test_it_is_added_in_an_arrays_own_place() -> None:
    array, counts = numpy.zeros(2, dtype=numpy.float32), numpy.zeros(2, dtype=numpy.int64)
    array += number(0.1)
    array *= number(3.0)
    counts += number(2, torch.int64)
    expected = numpy.zeros(2, dtype=numpy.float32)
    expected += 0.1
    expected *= 3.0
    assert array.tolist() == expected.tolist()
    assert array.dtype == numpy.float32
    assert counts.tolist() == [2, 2]
    with pytest.raises(TypeError, match="Cannot cast ufunc"):
        counts += number(0.5)


def test_what_it_is_made_of() -> None:
    assert deferred.defer(torch.zeros(2)) is None
    assert deferred.defer(torch.zeros((), dtype=torch.complex64)) is None
    assert deferred.defer(torch.ones(1, 1, dtype=torch.bfloat16)) is not None


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
values = st.one_of(finite, st.integers(-(2**31), 2**31))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "sub", "mul", "truediv", "floordiv", "mod"]), values, st.booleans(), st.booleans()
        )
    ),
    values,
)
def test_deferred_arithmetic_is_bit_equal(steps, start) -> None:
    def as_deferred(value):
        return number(value, torch.float64 if isinstance(value, float) else torch.int64)

    expected, actual = start, as_deferred(start)
    line = {(sys._getframe().f_code, n) for n in range(1, 1000)}
    Deferred.lazy.update(line)
    try:
        for name, value, swap, wrap in steps:
            if type(expected) is int and abs(expected) > 2**200:
                break
            function = getattr(operator, name)
            side = as_deferred(value) if wrap else value
            try:
                expected = function(value, expected) if swap else function(expected, value)
            except (ZeroDivisionError, OverflowError) as error:
                with pytest.raises(type(error)):
                    float(_apply(function, side, actual) if swap else _apply(function, actual, side))
                return
            actual = _apply(function, side, actual) if swap else _apply(function, actual, side)
            assert isinstance(actual, type(expected))
    finally:
        Deferred.lazy.difference_update(line)
    result = deferred.plain(actual)
    assert type(result) is type(expected)
    assert repr(result) == repr(expected)


def _apply(function, left, right):
    symbols = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/"}
    symbol = {**symbols, operator.floordiv: "//", operator.mod: "%"}[function]
    code = CODES.setdefault(symbol, compile(f"left {symbol} right", "lazy", "eval"))
    Deferred.lazy.add((code, 1))
    return eval(code)


CODES: dict = {}


# ---- the transform


class AverageMeter:
    def __init__(self) -> None:
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self) -> str:
        return "{val:.4f} ({avg:.4f})".format(**self.__dict__)


class Hoarder(AverageMeter):
    def update(self, val, n=1):
        self.history = [val]


def epoch(switch, steps: int = 6, every: int = 100) -> dict:
    """A training function in the usual style; `switch` is called in each step, as the optimizer's hook would be."""
    losses, other = AverageMeter(), Hoarder()
    running, correct = 0.0, 0
    printed, waits = [], []
    for i in range(steps):
        loss = torch.tensor(0.1 * (i + 1))
        hits = torch.tensor(i)
        switch(i)
        running += loss.item()
        correct += hits.item()
        losses.update(loss.item(), 3)
        other.update(loss.item())
        if i % every == every - 1:
            printed.append(f"{running / every:.6f} {losses} {losses.avg:.6f}")
            running = 0.0
        waits.append(Slow.waits)
    accuracy = 100.0 * correct / steps
    return {
        "printed": printed,
        "running": running * 1.0,
        "accuracy": accuracy,
        "avg": losses.avg,
        "dict": losses.__dict__,
        "waits": waits,
        "kept": other.history[0],
    }


def numbers(result: dict) -> str:
    return json.dumps({key: value for key, value in result.items() if key != "waits"})


def applying(loop, at: int = 1, undo_at: int | None = None):
    held: dict = {}

    def switch(step: int) -> None:
        if step == at:
            held["plans"] = defer_sync.plans_for(sys._getframe(0))
            held["undo"] = DeferSync().apply(loop.training, {})
        if step == undo_at:
            held["undo"].run()

    return switch, held


def test_numbers_are_equal_and_nothing_waits() -> None:
    loop = make_loop(steps=0)
    expected = epoch(lambda i: None)
    before = fingerprint(loop)
    switch, held = applying(loop)
    actual = epoch(switch)
    assert numbers(actual) == numbers(expected)
    assert all(type(actual[key]) in (int, float) for key in ("running", "accuracy", "avg", "kept"))
    assert all(type(value) in (int, float) for value in actual["dict"].values())
    assert actual["waits"][-1] == 0
    plan = next(plan for plan in held["plans"] if plan.code is epoch.__code__)
    assert len(plan.sites) == 3
    assert "Hoarder" in next(iter(plan.refused.values()))
    check = DeferSync().effect(loop.training, None, None)
    assert check.passed
    assert check.numbers["deferred"] == 15
    held["undo"].run()
    assert fingerprint(loop) == before
    assert not Deferred.lazy - {(code, 1) for code in CODES.values()}
    assert "__getattribute__" not in vars(AverageMeter)
    assert not defer_sync.deferred_lines


@pytest.mark.parametrize("arrived", [False, True])
@pytest.mark.parametrize("undo_at", [3, None])
def test_printing_now_and_then_and_undo_in_the_loop(arrived, undo_at) -> None:
    loop = make_loop(steps=0)
    expected = epoch(lambda i: None, 8, 2)
    Slow.arrived = arrived
    switch, held = applying(loop, 1, undo_at)
    assert numbers(epoch(switch, 8, 2)) == numbers(expected)
    held["undo"].run()


def test_memory_is_bounded_when_the_gpu_never_answers() -> None:
    loop = make_loop(steps=0)
    switch, _ = applying(loop, 0)
    epoch(switch, 400, 10**9)
    assert Slow.waits > 0  # the oldest were waited for
    depth = []
    x = number(0.0)
    code = compile("x + y", "deep", "eval")
    Deferred.lazy.add((code, 1))
    for _ in range(500):
        x = eval(code, {"x": x, "y": number(1.0)})
        depth.append(x._depth)
    assert max(depth) <= deferred.DEEPEST + 1
    assert x == 500.0
    Deferred.lazy.clear()


def test_a_settled_chain_is_folded() -> None:
    Slow.arrived = True
    code = compile("x + y", "fold", "eval")
    Deferred.lazy.add((code, 1))
    x = number(0.0)
    for _ in range(10):
        x = eval(code, {"x": x, "y": number(1.0)})
        assert x._depth <= 2
    Deferred.lazy.clear()


def test_only_the_gpu_and_only_with_an_effect(profile) -> None:
    from dataclasses import replace

    loop = make_loop(steps=0)
    assert "host already" in DeferSync().match(loop.training, {}).reason
    defer_sync.counts["deferred"] = 0
    assert DeferSync().effect(loop.training, None, None).passed is False
    waiting = replace(profile(), syncs=(Site(source="a:1", what="item", calls=1, time_us=5),))
    for waited in (0, 3):  # the trace knows of no line that defers: it is left to the count
        defer_sync.counts.update(deferred=4, waited=deferred.waits() - waited)
        check = DeferSync().effect(loop.training, waiting, waiting)
        assert check.passed is (waited == 0)
        assert f"{waited} of them waited for" in check.detail


def test_a_step_that_prints_is_judged_by_the_lines_that_defer(profile, monkeypatch) -> None:
    from dataclasses import replace

    def waits(**calls: float):
        return replace(
            profile(), syncs=tuple(Site(source=s, what="item", calls=n, time_us=5) for s, n in calls.items())
        )

    loop = make_loop(steps=0)
    monkeypatch.setitem(defer_sync.counts, "deferred", 4)
    monkeypatch.setattr(defer_sync, "deferred_lines", {"deferred"})
    assert DeferSync().effect(loop.training, waits(deferred=1), waits(printed=4)).passed
    assert DeferSync().effect(loop.training, waits(deferred=1, printed=4), waits(deferred=1)).passed is False


def test_a_trace_without_lines_leaves_it_to_the_count(profile, monkeypatch) -> None:
    """A VGG's step of the second round: one wait before, of no known line, and one where the step printed."""
    from dataclasses import replace

    loop = make_loop(steps=0)
    waiting = replace(profile(), syncs=(Site(source="", what="item", calls=1, time_us=5),))
    for count, passed in ((4, True), (0, False)):
        monkeypatch.setitem(defer_sync.counts, "deferred", count)
        monkeypatch.setitem(defer_sync.counts, "waited", deferred.waits())
        assert DeferSync().effect(loop.training, waiting, waiting).passed is passed


def test_match_lists_sites_and_reasons() -> None:
    loop = make_loop(steps=0)
    loop.training.device = torch.device("cuda")
    found = []
    epoch(lambda i: found.append(DeferSync().match(loop.training, {})), 1)
    match = found[0]
    assert match.applies
    assert len(match.sites) == 3
    assert all(site.startswith(__file__) for site in match.sites)
    assert any("Hoarder" in line for line in match.unmatched)


def test_a_copy_that_cannot_be_made_falls_back(monkeypatch) -> None:
    def broken(tensor):
        raise RuntimeError("out of pinned memory")

    loop = make_loop(steps=0)
    expected = epoch(lambda i: None)
    monkeypatch.setattr(deferred, "HostWrite", broken)
    switch, _ = applying(loop)
    assert numbers(epoch(switch)) == numbers(expected)
