"""The time that a search may take, and how it is divided between trials and the proof of what they keep."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.core.profile import StepProfile
from advisor.trials import fresh, proof

# Of the time allowed so much is kept for the comparison of the stack, which alone decides what the plan says: what its fresh runs
# should take, and a tenth for what starts differ by; a share at least, for runs more where noise hides the answer, and a larger one
# where the script's step was not timed.
STACK_SHARE, STACK_LEAST_S, STACK_MOST_SHARE, STACK_MARGIN = 0.15, 20.0, 0.5, 1.1
STACK_SHARE_UNTIMED = 0.25
# And no more than this one for the stack without each of its items: it explains what is proved already. A ResNet-50 keeps seven,
# and one costs a fresh run of 6 to 13 s on an H200, or two.
LEFT_OUT_SHARE = 0.5
# Starting Python, torch and the script's data, before an arm's first step: 4 to 6 s for the examples on a CPU and an H200; 12 to
# 16 s where the kept changes are captured and other work runs on the machine, so what starts have taken counts where it is more.
START_S = 5.0
# A trial may take this share of the whole, and 120 s where there is less: torch.compile's first step takes 46 to 82 s for
# ResNet-50 class models on an H200. But never more than there is before the stack's turn.
TRIAL_SHARE, TRIAL_LEAST_S = 0.2, 120.0
# First steps that were measured above what a trial is given by default: not worth killing a process to find out again.
LONG_FIRST_STEP_S = {"compile_max_autotune": 240.0}
# What a fresh run's steps before the timed ones take longer with these, in steps of the plain script: cuDNN tried its algorithms for
# 22 to 31 s in five nets on an H200 whose steps took 90 to 160 ms. The flag was on from their start then, so that the plain first
# steps were timed too; since it is not, a CIFAR ResNet-18's take 4 s longer where it was 7.5. Large nets were not measured since.
TUNING_STEPS = {"cudnn_benchmark": 200.0}
STEP_UNTIMED_S = 0.125
# The least that is kept for the first comparison, where the plain script's run is there.
FIRST_LEAST_S = 8.0
# Behind starving workers a step gets shorter for seconds after the start (a ResNet-18's on an H200 from 19 to 13 ms in ten: their memory
# is the system's first), and a run that begins with a capture is timed later than a plain one: 18 and 12 ms where it gained 6 %.
SETTLE_S, SETTLE_SHARE = 10.0, 0.02
# A change on top of the stack goes before the stack without each of its items where it takes this share of the time left, or less.
CHEAP_SHARE = 0.35
# Why a trial ends, or does not begin, before the time allowed is used up.
LATE = "out of time: the rest is for the final comparison"


def settle_s(whole_s: float) -> float:
    """For how long a run behind starving workers trains before it is timed, in a search of this length."""
    return min(SETTLE_S, SETTLE_SHARE * whole_s)


# Where the first comparison has taken longer than foreseen and does not hold, the search for the change to blame may overrun by this
# share of the whole. A machine that has become busy made four times the time allowed of it; and of three published trainings whose
# first comparison left it open, each was ended from outside within a quarter more.
OVERRUN_SHARE = 0.15
# No fresh run goes on behind this share over the whole: what it was to prove stays unconfirmed then. A 3-D ResNet's first proof came
# 65 % over two minutes on an H200; of one minute, on two loaded cores, a search once took two and a half.
LAST_CALL_SHARE = 1.0


@dataclass(slots=True, kw_only=True)
class Budget:
    """The time of one search. Instants are `time.time()`; `until` moves with the time that the user takes for an answer."""

    whole_s: float
    until: float  # no further round of the stack's comparison begins after this
    step_s: float | None = None  # of the plain script
    settle_s: float = 0.0  # that a fresh run trains before it is timed

    @classmethod
    def from_now(cls, whole_s: float, profile: StepProfile | None) -> Budget:
        """The search begins now."""
        step = profile.wall_us or profile.step_us if profile is not None else None
        return cls(
            whole_s=whole_s,
            until=time.time() + whole_s,
            step_s=step.median / 1e6 if step is not None else None,
            settle_s=settle_s(whole_s) if profile is not None and profile.starved else 0.0,
        )

    @property
    def latest(self) -> float:
        """When a fresh run is to have ended that the comparison has need of."""
        return self.until + OVERRUN_SHARE * self.whole_s

    def last_call(self) -> float:
        """When a fresh run is ended, whatever it is for."""
        return self.until + LAST_CALL_SHARE * self.whole_s

    @property
    def overrun(self) -> bool:
        """No time is left, and none over it, to find out which of the kept changes does not hold."""
        return time.time() > self.latest

    @property
    def trial_s(self) -> float:
        """The most that one trial may take."""
        before_the_stack = max(self.whole_s - self.stack_s(START_S), 1.0)
        return min(max(TRIAL_LEAST_S, TRIAL_SHARE * self.whole_s), before_the_stack)

    def stack_s(
        self, start_s: float, left: float = 1.0, *, proved: bool = False, quick: bool = False, plain: bool = False
    ) -> float:
        """What the comparison of the stack needs, up to half of the whole.

        Args:
            left: of the plain script's step, with what is kept.
            proved: a part of the stack has been compared before; the plain script's runs are there.
            quick: one run of each kind is to do at first. plain: and the plain script's is there.
        """
        if self.step_s is None:
            return max(STACK_LEAST_S, STACK_SHARE_UNTIMED * self.whole_s)
        if quick:
            kinds = (proof.STACK,) if plain else (proof.PLAIN, proof.STACK)
            least_s = FIRST_LEAST_S if plain else STACK_LEAST_S
            return max(least_s, min(self._runs_s(start_s, left, kinds), STACK_MOST_SHARE * self.whole_s))
        round_of = (proof.STACK, proof.STACK) if proved else proof.ROUND
        needed_s = min(self._runs_s(start_s, left, round_of), STACK_MOST_SHARE * self.whole_s)
        return needed_s if proved else max(STACK_LEAST_S, STACK_SHARE * self.whole_s, needed_s)

    def _runs_s(self, start_s: float, left: float, kinds: Sequence[str] = proof.ROUND) -> float:
        """What fresh runs of these kinds take, whatever the whole is."""
        step_s = self.step_s or 0.0
        steps_s = {proof.PLAIN: step_s, proof.STACK: step_s * left}
        warmup, steps = fresh.lengths(self.step_s)
        runs_s = [
            start_s + max(warmup * s, self.settle_s) + max(steps * s, fresh.TIMED_S)
            for s in (steps_s[kind] for kind in kinds)
        ]
        return STACK_MARGIN * sum(runs_s)

    def enough_s(self, start_s: float) -> float:
        """Of a whole of this length, or a longer one, the comparison of the stack leaves half for trials."""
        return max(STACK_LEAST_S, self._runs_s(max(START_S, start_s), 1.0)) / STACK_MOST_SHARE

    def candidates_until(
        self, start_s: float, left: float = 1.0, *, proved: bool = False, quick: bool = False, plain: bool = False
    ) -> float:
        """When no new candidate begins: then it is the turn of the stack's comparison.

        Args:
            start_s: what starts have taken.
            left, proved, quick, plain: as `stack_s` has them.
        """
        return self.until - self.reserve_s(start_s, left, proved=proved, quick=quick, plain=plain)

    def reserve_s(
        self, start_s: float = 0.0, left: float = 1.0, *, proved: bool = False, quick: bool = False, plain: bool = False
    ) -> float:
        """What is kept for the comparison of the stack; arguments as of `candidates_until`."""
        return min(self.whole_s, self.stack_s(max(START_S, start_s), left, proved=proved, quick=quick, plain=plain))

    def left_out_until(self) -> float:
        """When, beginning now, the stack is no longer run without one of its items."""
        return min(self.until, time.time() + LEFT_OUT_SHARE * self.whole_s)

    def allows_on_top(self, transform: str, runs: int, run_s: float, *, share: float = 1.0) -> bool:
        """Whether so many fresh runs with this on top of the stack end within this share of the time left.

        Args:
            run_s: what one of the stack alone takes.
        """
        tuning_s = TUNING_STEPS.get(transform, 0.0) * (self.step_s or STEP_UNTIMED_S)
        return runs * (run_s + tuning_s) <= share * (self.until - time.time())

    def too_short_for(self, transform: str) -> str:
        """Why a trial of this transform would be cut off before its first step; "" where nothing is known against it."""
        first_s = LONG_FIRST_STEP_S.get(transform, 0.0)
        if first_s <= self.trial_s:
            return ""
        needed = first_s / TRIAL_SHARE / 60
        return f"its first step takes about {first_s / 60:.0f} min; give it time with --max-time {needed:.0f}m"
