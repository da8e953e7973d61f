"""The outcome of trying one change."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from advisor.core.findings import Interval, Semantics


class Status(str, Enum):
    """What became of a change; files, plans and messages have its word."""

    KEPT = "kept"
    UNCONFIRMED = (
        "unconfirmed"  # kept by the running loop, and not confirmed in fresh processes beside the plain script
    )
    REVERTED = "reverted"
    INCONCLUSIVE = "inconclusive"
    NOT_APPLICABLE = "not applicable"
    FAILED = "failed"  # it raised, or its process died
    SKIPPED = "skipped"  # never on: passed over for a reason
    DECLINED = "declined"  # never on: the user said no
    MORE = "more"  # none yet: more blocks are needed, or its turn comes again. No record and no plan has it

    __str__ = str.__str__  # else a text would have "Status.KEPT" from Python 3.11 on


STATUSES = tuple(status for status in Status if status is not Status.MORE)
UNTRIED = frozenset({Status.SKIPPED, Status.DECLINED})
# Another search, or another answer, may keep it.
OPEN = frozenset({Status.UNCONFIRMED, Status.INCONCLUSIVE, Status.DECLINED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One of the three checks. `passed` is None when it could not be made; then `detail` says why."""

    passed: bool | None
    detail: str
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """ABBA block medians, microseconds a step; pair i is (off_us[i], on_us[i])."""

    off_us: tuple[float, ...] = ()
    on_us: tuple[float, ...] = ()
    steps_per_block: int = 0  # of each part, where a block has several
    parts: int = 1  # of a block: they alternate with the other arm's, and the block is the mean of their medians
    dropped: int = 0  # steps that were no clean training steps
    disturbed: int = 0  # blocks taken again, for what the machine did meanwhile
    device_off_us: tuple[
        float, ...
    ] = ()  # the device's own time in each, where a part of the step is a wait for the loader
    device_on_us: tuple[float, ...] = ()
    exponent: float = 0.0  # inputs differ in size, and times are those at one size: they grow as its elements to this


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`gain` is the share of the step's time saved, as an interval at `confidence`, from the paired blocks; or of the device's time in
    it (`gain_of` is "device"), where the step waits for its loader.
    """

    transform: str
    status: Status
    reason: str
    parameters: dict[str, str] = field(default_factory=dict)
    title: str = ""
    round: int = 1  # of the search, in which it was tried; `predicted` is a share of the step profiled for it
    semantics: Semantics = Semantics.EXACT
    predicted: Interval | None = None
    gain: Interval | None = None
    gain_of: str = "step"
    confidence: float = 0.99
    together: tuple[
        str, ...
    ] = ()  # other transforms that were tried with it, as one: gates and `timing` are of all of them
    effect: Check | None = None
    numerics: Check | None = None
    timing: Check | None = None
    blocks: Blocks = field(default_factory=Blocks)
    first_step_us: float = 0.0  # extra time of the first step with the change (compile, capture, tuning)
    break_even_steps: float | None = None
    # Share of the final stack's step that it saves there, by leaving it out in fresh processes; None where that was not tried.
    left_out_gain: Interval | None = None
    memory_delta_bytes: int = 0
    seconds: float = 0.0  # that its trial took, in the process that ended it
    matched: tuple[str, ...] = ()  # module paths or kernels it took effect on
    unmatched: tuple[str, ...] = ()  # "path: why not"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackVerdict:
    """The kept changes together against the plain script, in fresh runs."""

    passed: bool | None
    detail: str
    plain_us: tuple[float, ...] = ()  # median step of each fresh plain run
    stack_us: tuple[float, ...] = ()
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    # The device's own time, where the plain script's step waits for its loader or for the host's launches (`waits_for`): None elsewhere.
    waits_for: str = ""
    device_speedup: float | None = None
    device_speedup_low: float | None = None
    device_speedup_high: float | None = None
    samples_per_s_plain: float | None = None
    samples_per_s_stack: float | None = None
    losses_plain: tuple[float, ...] = ()
    losses_stack: tuple[float, ...] = ()
    kernels: tuple[str, ...] = ()  # sources of the bundled kernels that ran in the stack

    @property
    def by_device(self) -> bool:
        """Whether it holds by the device's time, while the step itself tells nothing: it waits for something else, as long as before."""
        return bool(self.passed) and (self.speedup_low or 0.0) <= 1.0 < (self.device_speedup_low or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One pass over candidates. The first starts from the plain script's profile, each later one from the script with
    all that was kept until then; `step_us` is 0.0 where that profile could not be had.
    """

    number: int
    step_us: float = 0.0  # median step of the profile that the round's predictions are shares of
    kept: tuple[str, ...] = ()  # transforms that were on in that profile
    tried: tuple[str, ...] = ()  # transforms chosen for trial
    folder: str = (
        ""  # with the round's profile.json and findings.json, below the run folder; "" for the run folder itself
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLog:
    """Everything `apply` did: the verdicts in the order of trial, the stack's verdict, and files the script wrote."""

    script: str
    argv: tuple[str, ...]
    verdicts: tuple[Verdict, ...] = ()
    rounds: tuple[Round, ...] = ()
    stack: StackVerdict | None = None
    files_written: tuple[str, ...] = ()
    seconds: float = 0.0  # in all, the first profile included
    proved_s: float | None = None  # from the script's first step to the first proved plan; None without one
    spent: dict[str, float] = field(default_factory=dict)  # of these, by phase
    complete: bool = True
    interrupted: bool = False  # the user asked for an end
    fault: str = ""  # of advisor's own, which ended it
    notes: tuple[str, ...] = ()
