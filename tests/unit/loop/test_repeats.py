"""Whether a call stands in a loop, told from the bytecode of those who have called."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from advisor.loop.repeats import in_loop


class Batches:
    """Asks at `iter()`, as a loader's hook does."""

    asked: list[bool]

    def __init__(self) -> None:
        self.asked = []

    def __iter__(self) -> Iterator[int]:
        self.asked.append(in_loop(sys._getframe(1)))
        return iter((1, 2))


def one_epoch(batches: Batches) -> None:
    for _ in batches:
        pass


def flat(batches: Batches) -> None:
    for _ in range(2):
        for _ in batches:
            pass


def by_function(batches: Batches) -> None:
    for _ in range(2):
        one_epoch(batches)


def by_while(batches: Batches) -> None:
    while len(batches.asked) < 2:
        one_epoch(batches)


def by_comprehension(batches: Batches) -> None:
    [one_epoch(batches) for _ in range(2)]


def in_a_with_and_a_try(batches: Batches) -> None:
    for _ in range(2):
        try:
            with open("/dev/null", encoding="utf-8"):
                one_epoch(batches)
        finally:
            pass


@pytest.mark.parametrize("train", [flat, by_function, by_while, by_comprehension, in_a_with_and_a_try])
def test_an_epoch_in_a_loop_comes_again(train) -> None:
    batches = Batches()
    train(batches)
    assert batches.asked == [True, True]


def behind_a_loop(batches: Batches) -> None:
    for _ in range(3):
        pass
    for _ in batches:
        for _ in range(3):
            pass


@pytest.mark.parametrize("train", [one_epoch, behind_a_loop])
def test_a_single_epoch_does_not(train) -> None:
    """In a thread: pytest itself calls tests in a loop."""
    import threading

    batches = Batches()
    thread = threading.Thread(target=train, args=(batches,))
    thread.start()
    thread.join()
    assert batches.asked == [False]
