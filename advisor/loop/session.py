"""What the supervisor asks of the child process, and what the child tells back: files in the run folder only.

The supervisor writes `session.json` and names it in `ADVISOR_SESSION`. The child appends one JSON object a line to
`progress.jsonl` and writes its results beside it, each atomically, so a killed child leaves what it had gathered.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from advisor.core import storage
from advisor.core.findings import Recommendation
from advisor.core.plan import PlanItem

SESSION_VARIABLE = "ADVISOR_SESSION"
DISABLE_VARIABLE = "ADVISOR_DISABLE"
STANDBY_VARIABLE = "ADVISOR_STANDBY"  # a handle that orders come on, and after commas what to import ahead of them
TIMING_FILE = "timing"  # in the run folder while steps are timed: a process that waits for orders does nothing then
LEAVING = "leaving"  # the event of a script that was stopped and has run its clean-up


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One child process's orders.

    mode:
        profile  measure, trace, then stop the script (or let it run with `keep_running`); `kept` is on before, if there is any
        search   apply `kept`, then try `candidates` live, one after the other, then stop
        measure  apply `kept`, take `steps` losses, and step times for `timed_s`, then stop: one arm of a fresh-process comparison
        run      apply `kept` and train to the end
    """

    mode: str
    run_dir: str
    script: str
    argv: tuple[str, ...] = ()
    warmup: int = 10
    steps: int = 20
    timed_s: float = 0.0  # measure: go on behind `steps` until so many seconds were timed
    settle_s: float = 0.0  # measure: time no step before so many seconds behind the first
    kernel_steps: int = (
        0  # measure: of so many steps behind these the kernels' time; search: where noise hides a step's
    )
    detail_steps: int = 3
    pace: float = 1.0  # profile: of the usual time for slow steps, in a search that is short
    keep_running: bool = False
    hands_over: bool = False  # profile: do not stop behind it, but wait for a search's orders in `NEXT_FILE`
    brief: bool = False  # the script makes just the steps ordered: none can be waited for that is fit to be timed
    infers: bool = False  # the script is known to train nothing: rounds of its model calls are its steps
    counters: bool = True  # hardware counters wanted
    precision: bool = False  # profile: behind the trace one step more, whose layers are held against fp64 (profiling/inside/precision.py)
    course: bool = (
        False  # profile: behind the trace one step more, of which is watched what it holds (profiling/inside/held.py)
    )
    candidates: tuple[Recommendation, ...] = ()
    later: tuple[str, ...] = ()  # search: changes that are no part of what is tried as one, first of all
    whole_first: bool = False  # search: what fits together of the candidates is tried as one before any by itself
    kept: tuple[PlanItem, ...] = ()
    min_gain: float = 0.01
    max_pairs: int = 20
    parts: int = 1  # search: of a block at first, for the noise that was seen in the plain loop
    trial_timeout_s: float = 120.0
    deadline_unix_s: float = 0.0  # 0: none
    first_step_s: float = 0.0  # from its start a process has so long to its first step; 0: as long as it likes
    protect_files: bool = False  # the run is thrown away: the user's files are put back, trackers stay offline
    files_dir: str = ""  # the run folder whose journal says what was set aside; "" for `run_dir`
    seed: int | None = None  # measure: seed every generator at import, so that two arms see the same data
    watched: tuple[str, ...] = ()  # measure: source files of which is told whether they were loaded
    strict: bool = False  # run: a plan item that does not fit is an error
    rotate: float = 0.0  # measure: each training batch begins at this share of it: the same sums in another order
    prints: int = 0  # measure: gradients and buffers of so many steps are noted (distributed/prints.py)
    model_hash: str = ""  # run: the model that the plan was proved on; another one trains without the plan

    @property
    def folder(self) -> Path:
        return Path(self.run_dir)

    @property
    def protecting(self) -> Path:
        """The run folder that the script's files are set aside in."""
        return Path(self.files_dir or self.run_dir)


def disabled(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether these variables switch advisor off: `ADVISOR_DISABLE` is set, to something other than 0."""
    return variables.get(DISABLE_VARIABLE, "") not in ("", "0")


def from_environment() -> Session | None:
    """The session this process was started under, or None when there is none or `ADVISOR_DISABLE` is set."""
    path = os.environ.get(SESSION_VARIABLE)
    if not path or disabled():
        return None
    return storage.load(Path(path), Session)


def tell(session: Session, event: str, **fields: object) -> None:
    """Append one line to `progress.jsonl`. Never raises: a full disk must not stop the training."""
    line = json.dumps({"t": time.time(), "event": event, **fields}, default=str) + "\n"
    try:
        with open(session.folder / "progress.jsonl", "a", encoding="utf-8") as stream:
            stream.write(line)
    except OSError:
        pass
