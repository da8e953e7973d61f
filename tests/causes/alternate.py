"""What a fault costs, from one process that has it and has it not by turns.

A training made by `causes_catalogue.alternating` imports this: it asks `faulty` what to do, and says `step()` at the end of each
step, or `boundary()` before each epoch where the fault is one of epochs. Both kinds of block stand side by side in time, so that
what else the machine does falls on both. In the end one line says what share of a step the fault takes, and ends the script.

Of a training on one core the process's own time decides (user and system), which other processes hardly move; of a loader's
epochs, and on a GPU, the clock on the wall does.
"""

from __future__ import annotations

import json
import os
import sys
import time

from advisor.trials.statistics import gain_interval

CONFIDENCE = 0.95
STEPS = 5  # of a block
WARM_UP = 4  # blocks, in which allocators and caches settle
LEAST, MOST = 10, 150  # pairs
NARROW_FRAC = 0.005  # of the step on either side: what a cost has to be known to
NARROW_COST = 0.1  # or a tenth of itself
LONGEST_S = float(os.environ.get("CAUSES_LONGEST_S", "90"))
ORDER = (True, False, False, True)  # what drifts falls on both alike

faulty = ORDER[0]
seconds: list[tuple[bool, float]] = []
_steps = 0
_last: float | None = None
_begun = time.monotonic()
by_wall = False  # of a training whose fault is in how it uses several cores, the clock on the wall decides


def step() -> None:
    """A step is over."""
    global _steps
    _steps += 1
    if _steps % STEPS == 0:
        _boundary()


def boundary() -> None:
    """An epoch begins: a block ends."""
    global by_wall
    by_wall = True
    _boundary()


def _boundary() -> None:
    global faulty, _last
    now = _now()
    if _last is not None:
        seconds.append((faulty, now - _last))
    told = cost(seconds[WARM_UP:])
    if told and (_enough(told) or time.monotonic() - _begun > LONGEST_S):
        print(json.dumps({"cost": told}), flush=True)
        os._exit(0)  # loaders' workers and all
    faulty = ORDER[len(seconds) % len(ORDER)]
    _last = _now()


def _now() -> float:
    torch = sys.modules["torch"]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.perf_counter() if by_wall else time.process_time()


def cost(blocks: list[tuple[bool, float]]) -> list[float] | None:
    """Low, middle and high end of the share of a step that the fault takes, from blocks in their order; None with too few."""
    pairs = []
    for (first, one), (_, other) in zip(blocks[::2], blocks[1::2], strict=False):
        pairs.append((one, other) if first else (other, one))
    if len(pairs) < LEAST or not (found := gain_interval(pairs, CONFIDENCE)):
        return None
    return [round(value, 4) for value in (found[0].low, found[1], found[0].high)]


def _enough(told: list[float]) -> bool:
    low, middle, high = told
    half = (high - low) / 2
    return half <= max(NARROW_FRAC, NARROW_COST * abs(middle)) or len(seconds) >= 2 * MOST
