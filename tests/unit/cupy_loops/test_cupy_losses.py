"""Losses of a loop whose step is recorded: copying them is no call of the step's, whatever CuPy calls to copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import stub_cupy

from advisor.cupy_loops.changes.graphs import Graphs
from advisor.cupy_loops.losses import Losses
from advisor.cupy_loops.replay.arena import Plain
from advisor.cupy_loops.replay.recorder import REPLAY
from advisor.cupy_loops.standing import Standing
from advisor.loop.patches import Patches


def module() -> Any:
    """CuPy's `copy` calls the array's own `astype`, as a method of C that Python may override is called."""
    made = stub_cupy.module()
    plain = made.ndarray.astype
    made.ndarray.copy = lambda array, order="C": array.astype(array.dtype, order=order, copy=True)
    made.ndarray.astype = lambda array, *args, **kwargs: plain(array, *args, **kwargs)
    return made


def trained(cp: Any, losses: Losses, steps: int) -> tuple[float, ...]:
    rng, w = np.random.default_rng(0), cp.array(np.ones((4, 3)))
    for step in range(steps):
        if step > 10:  # steps are found by now, and told from here on
            losses.settle()
        x = cp.array(rng.normal(size=(8, 4)))
        h = cp.tanh(x.dot(w))
        (h * h).mean()
        w = w - 0.1 * x.T.dot(h * (1.0 - h * h)) / 8
    return losses.values(steps, steps)


def test_losses_of_a_replayed_loop_are_those_of_the_plain_one() -> None:
    cp = module()
    plain = trained(cp, Losses(cp, Patches(), lambda: "here", Standing(cp)), 60)
    cp, patches, change = module(), Patches(), Graphs(Plain)
    change.apply(cp, patches)
    losses = Losses(cp, Patches(), lambda: "here", Standing(cp, [(change, patches)]))
    assert trained(cp, losses, 60) == plain
    assert len(plain) == 60
    assert change.recorder is not None
    assert change.recorder.phase == REPLAY, change.recorder.why
    assert change.recorder.replayed > 20
    assert not change.working
