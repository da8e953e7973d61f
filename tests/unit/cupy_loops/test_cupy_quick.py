"""The usual call of a replayed step, answered in Python and by the compiled quick.cpp: both give and refuse the same."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

from advisor.cupy_loops.replay import quick
from advisor.cupy_loops.replay.calls import Entry, Program
from advisor.loop.patches import Patches

KINDS = ["python", pytest.param("native", marks=pytest.mark.skipif(quick.native() is None, reason="no compiler"))]


class Thing:
    """Stands for an array."""


class Unlike:
    """Not even equal to itself, and says so loudly."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None


def step(kind: str) -> tuple[Any, Any, list[str], list[Thing]]:
    """A recorder in a step of three calls, what stands in the place of `f`, what it was asked, and the arrays."""
    base = quick.PlainState if kind == "python" else quick.state()
    asked: list[str] = []

    class Fake(base):
        patches = Patches()

        def handle(self, name: str, plain: Any, args: Any, kwargs: Any) -> Any:
            asked.append(name)
            return plain(*args, **kwargs)

        def end(self) -> None:
            asked.append("end")
            self.expected = None

    x, y, z = Thing(), Thing(), Thing()
    entries = [
        Entry("f", len, 2, (), arrays=((0, 0),), constants=((1, (slice(None), 3)),), gives=(1,)),
        Entry("f", len, 1, ("axis",), arrays=((0, 1),), constants=((1, 2),), gives=(2,)),
        Entry("f", len, 1, (), arrays=((0, 2),), gives=(), single=False, value=NotImplemented),
    ]
    Program(entries, 3).link()
    quick.link(entries, Fake)
    recorder = Fake()
    recorder.at, recorder.expected = [x, y, z], entries[0]
    return recorder, quick.wrapped(recorder, "f", lambda *args, **kwargs: "plain"), asked, [x, y, z]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_answered_to_its_end(kind: str) -> None:
    recorder, f, asked, (x, y, z) = step(kind)
    assert f(x, (slice(None), 3)) is y
    assert f(y, axis=2) is z
    assert recorder.cursor == 2
    assert f(z) is NotImplemented
    assert asked == ["end"]
    assert recorder.expected is None
    assert f(z) == "plain"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "call",
    [
        lambda f, x, y: f(y, (slice(None), 3)),
        lambda f, x, y: f(x, (slice(None), 4)),
        lambda f, x, y: f(x, [slice(None), 3]),
        lambda f, x, y: f(x, Unlike()),
        lambda f, x, y: f(x),
        lambda f, x, y: f(x, (slice(None), 3), axis=2),
        lambda f, x, y: f(x, (slice(None), 3), None),
    ],
)
def test_what_is_not_usual_is_left_to_the_recorder(kind: str, call: Any) -> None:
    recorder, f, asked, (x, y, _) = step(kind)
    assert call(f, x, y) == "plain"
    assert asked == ["f"]
    assert recorder.cursor == 0
    assert f(x, (slice(None), 3)) is y  # it is still expected
    assert f(y, axis=3) == "plain"
    assert f(y) == "plain"


@pytest.mark.parametrize("kind", KINDS)
def test_inside_and_in_other_threads_calls_are_plain(kind: str) -> None:
    recorder, f, asked, (x, _, _) = step(kind)
    recorder.inside = True
    assert f(x, (slice(None), 3)) == "plain"
    recorder.inside = False
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(f(x, (slice(None), 3))))
    other.start()
    other.join()
    assert found == ["plain"]
    assert asked == []


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_a_method_where_it_stands_in_a_class(kind: str) -> None:
    recorder, f, _, (_, y, _) = step(kind)
    made: Any = type("Array", (Thing,), {"f": f, "__getitem__": f})
    array = made()
    recorder.at[0] = array
    assert array.f((slice(None), 3)) is y
    recorder.cursor = 0
    assert made.f is not None
    assert array[0] == "plain"


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_kept_alive(kind: str) -> None:
    recorder, f, _, things = step(kind)
    f(things[0], (slice(None), 3))
    alive = [weakref.ref(things[0]), weakref.ref(things[1])]
    del recorder, f, things
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
