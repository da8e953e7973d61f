"""A candidate on and off beside what it cannot stand with."""

from __future__ import annotations

import pytest

from advisor.transforms.base import Undo
from advisor.trials.kept import StandingChange
from advisor.trials.live.switch import Switch, Unclean


class Change:
    """What is on is in `loop`; `breaks` are the applications, counted from one, that raise."""

    def __init__(self, name: str, loop: list[str], *breaks: int, stuck: bool = False) -> None:
        self.id, self.loop, self.breaks, self.stuck, self.applied = name, loop, breaks, stuck, 0

    def apply(self, training: object, parameters: object) -> Undo:
        self.applied += 1
        if self.applied in self.breaks:
            raise RuntimeError(f"{self.id} broke\nand advice")
        self.loop.append(self.id)
        undo = Undo()
        undo.push(self._back)
        return undo

    def _back(self) -> None:
        if self.stuck:
            raise ValueError("stuck")
        self.loop.remove(self.id)


def beside(candidate: Change, *rivals: Change) -> Switch:
    return Switch(None, candidate, {}, [StandingChange(rival, {}, rival.apply(None, {})) for rival in rivals])


def test_a_candidate_takes_its_rivals_place_and_gives_it_back() -> None:
    loop: list[str] = []
    switch = beside(Change("candidate", loop), Change("a", loop), Change("b", loop))
    switch.on()
    switch.on()
    assert (loop, switch.is_on) == (["candidate"], True)
    switch.off()
    switch.off()
    assert (loop, switch.is_on) == (["a", "b"], False)


def test_a_candidate_that_cannot_be_applied_leaves_the_loop_as_it_stood() -> None:
    loop: list[str] = []
    switch = beside(Change("candidate", loop, 1), Change("a", loop))
    with pytest.raises(RuntimeError, match="candidate broke"):
        switch.on()
    assert (loop, switch.is_on) == (["a"], False)


@pytest.mark.parametrize("candidate_breaks", [(), (1,)])
def test_a_loop_that_lost_a_kept_change_is_no_basis_for_trials(candidate_breaks: tuple[int, ...]) -> None:
    """Planted: a rival that cannot be put back on. Later trials would be held against a loop without it."""
    loop: list[str] = []
    switch = beside(Change("candidate", loop, *candidate_breaks), Change("a", loop, 2), Change("b", loop))

    def tried() -> None:
        switch.on()
        switch.off()

    with pytest.raises(Unclean, match=r"^a could not be put back on: a broke$"):
        tried()
    assert "b" in loop


def test_what_cannot_be_taken_back_is_no_basis_either() -> None:
    switch = beside(Change("candidate", [], stuck=True))
    switch.on()
    with pytest.raises(Unclean, match="candidate could not be taken back: stuck"):
        switch.off()
