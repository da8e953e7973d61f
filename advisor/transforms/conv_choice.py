"""Each convolution's forward and two gradients are made the way that is fastest here: in NCHW or NHWC, by cuDNN's heuristics or its search.

Wins where the best way differs from layer to layer, or from one direction to the other: cudnn.benchmark and channels_last are one switch
for all. Loses time of the host, a call of Python for each product, which CUDA graphs take off again. Each product is timed on the step's
own tensors when it first comes, within a bounded time, and held against fp64: its error stays within twice the usual way's own. TF32 is
as the script has it. Choices are kept in the user's cache.

Only a fresh process can take what a search finds, as with cudnn.benchmark: PyTorch keeps the first plan of each shape for the life of the
thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from advisor.core.environment import Environment
from advisor.core.findings import Semantics
from advisor.core.profile import StepProfile
from advisor.core.units import counted
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.profiling.machine import environment
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.choosing.chooser import Chooser
from advisor.transforms.choosing.store import Store
from advisor.transforms.choosing.ways import USUAL
from advisor.transforms.patch import all_or_nothing

_running: list[Chooser] = []  # the one that is on


class ConvChoice(Transform):
    """Times each convolution's products and takes the fastest way."""

    id = "conv_choice"
    traced = False
    allowed = Semantics.REASSOCIATED  # what may become of a product's numbers

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        cudnn = torch.backends.cudnn
        if not hasattr(torch.library, "get_kernel"):
            return Match(applies=False, reason=f"torch {torch.__version__} has no torch.library.get_kernel")
        if training.device.type != "cuda" or cudnn.version() is None or not cudnn.enabled:
            return Match(applies=False, reason="the step does not run on cuDNN")
        if not training.fixed_shapes:
            return Match(applies=False, reason="input shapes change, and each new shape would be timed again")
        if cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
            return Match(applies=False, reason="the script asks for deterministic algorithms")
        sites = tuple(
            name
            for root in training.roots
            for name, module in root.module.named_modules()
            if isinstance(module, torch.nn.Conv2d)
        )
        return Match(applies=True, sites=sites) if sites else Match(applies=False, reason="no convolutions of images")

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        with all_or_nothing() as undo:
            # Where a script begins its device is not known yet.
            device = torch.device("cuda") if torch.cuda.is_available() else training.device
            chooser = Chooser(device, environment.kept() or Environment(), Store(), allowed=self.allowed)
            undo.push(lambda: _stop(chooser))
            chooser.start()
            _running.append(chooser)
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        if not _running:
            return Check(passed=False, detail="no choice stands in front of the convolutions")
        return told(_running[-1])


class ConvChoicePrecision(ConvChoice):
    """As `conv_choice`, with Winograd's transforms among the ways: their error is within twice bf16's own."""

    id = "conv_choice_precision"
    allowed = Semantics.PRECISION


def told(chooser: Chooser) -> Check:
    """What was chosen, and whether anything runs another way than it did."""
    ran: Counter[str] = Counter()
    for (_, way), calls in chooser.ran.items():
        ran[way] += calls
    others = {way: calls for way, calls in ran.items() if way != USUAL}
    if not ran:
        return Check(passed=False, detail="no convolution was called")
    saved = sum(choice.usual_us - choice.time_us for choice in chooser.chosen.values())
    numbers = {"products": float(len(chooser.chosen)), "saved_us": saved, "choosing_s": chooser.spent_s}
    if not others:
        return Check(
            passed=False,
            detail=f"{counted(len(chooser.chosen), 'product')} timed, the usual way is the fastest of each",
            numbers=numbers,
        )
    named = ", ".join(f"{counted(calls, 'call')} {way}" for way, calls in sorted(others.items()))
    return Check(
        passed=True, detail=f"{named} of {sum(ran.values())}; {len(chooser.failed)} not chosen", numbers=numbers
    )


def _stop(chooser: Chooser) -> None:
    chooser.stop()
    if chooser in _running:
        _running.remove(chooser)
