"""Finding objects by their class, in a process where other threads go on."""

from __future__ import annotations

import threading
import time

import torch

from advisor.loop import heap
from advisor.loop.optimizers import living_optimizers


class Odd(type):
    """A metaclass whose classes run their author's code where they are compared."""

    def __hash__(cls) -> int:
        raise AssertionError("the user's code was run")

    def __eq__(cls, other: object) -> bool:
        raise AssertionError("the user's code was run")


class Base:
    pass


class Made(Base, metaclass=type("Both", (Odd, type(Base)), {})):
    pass


def test_objects_of_a_class_and_of_those_made_from_it() -> None:
    one, other, neither = Base(), Made(), object()
    found = heap.living(heap.classes(Base))
    assert {id(one), id(other)} == {id(o) for o in found}
    assert heap.living([]) == []
    assert neither not in found


def test_a_tuple_that_another_thread_builds_is_left_alone() -> None:
    """As a DataLoader's pinning thread does: of a tuple in other hands CPython makes a SystemError."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    ended = threading.Event()
    failed: list[BaseException] = []
    built = 0

    def pinned():
        yield torch.ones(1)
        time.sleep(0.002)  # as a copy does, it lets other threads run
        yield torch.ones(1)

    def pin() -> None:
        nonlocal built
        while not ended.is_set():
            try:
                built += len(tuple(pinned()))
            except SystemError as error:
                failed.append(error)

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        for _ in range(30):
            assert any(o is optimizer for o in living_optimizers())
            time.sleep(0.001)
    finally:
        ended.set()
        thread.join()
    assert built
    assert not failed
