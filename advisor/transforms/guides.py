"""bf16 autocast and NHWC weights for models that a step calls without gradients: a teacher, a momentum encoder.

Nothing is learned through such a model, so all of it may round: what it gives out comes back in fp32. Its parameters stay fp32, the
same objects with the same values, so that a script that averages weights into them goes on as before. Loses what `channels_last` and
`amp_bf16` lose by: grouped convolutions on some GPUs, and casts where the step is bound by launches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from advisor.core.profile import StepProfile
from advisor.core.units import percent_text
from advisor.core.verdict import Check
from advisor.loop.training import RootModule, Training
from advisor.transforms.autocast import AutocastBf16
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.channels_last import ChannelsLast
from advisor.transforms.forward import AUTOCAST, ForwardStack
from advisor.transforms.patch import all_or_nothing, parameters_of
from advisor.transforms.targets import targets


class GuidesBf16(Transform):
    """What `channels_last` and `amp_bf16` do to the models that train, for those that do not."""

    id = "guides_bf16"
    guides = True

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        """Parameters: `cpu` as `amp_bf16` has it."""
        reason = AutocastBf16().device_refuses(training.device, parameters)
        if reason:
            return Match(applies=False, reason=reason)
        sites = tuple(guide.name for guide in training.guides if _is_fp32(training, guide))
        unmatched = tuple(
            f"{guide.name}: its parameters are not all fp32" for guide in training.guides if guide.name not in sites
        )
        reason = "" if sites else "; ".join(unmatched) or "no model runs without gradients in every step"
        return Match(applies=bool(sites), reason=reason, sites=sites, unmatched=unmatched)

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        silent = _with_roots(training, [guide for guide in training.guides if _is_fp32(training, guide)])
        with all_or_nothing() as undo:
            undo.push(ChannelsLast().apply(silent, {}).run)
            undo.push(AutocastBf16().apply(silent, {}).run)
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        modules = targets(_with_roots(training, training.guides))
        if not any(ForwardStack.of(module).get(AUTOCAST) for module in modules):
            return Check(passed=False, detail="no model without gradients runs under autocast")
        names = ", ".join(guide.name for guide in training.guides)
        rows = (
            [row for row in after.kernels if row.kind in ("conv", "gemm") and after.guided(row)]
            if after is not None
            else []
        )
        total = sum(row.time_us for row in rows)
        if not total:
            return Check(passed=True, detail=f"{names} under bf16 autocast")
        share = sum(row.time_us for row in rows if row.dtype == "bf16") / total
        return Check(
            passed=share > 0.5,
            detail=f"{percent_text(share)} of convolution and product time of {names} is bf16",
            numbers={"half_frac": share},
        )


def _with_roots(training: Training, roots: list[RootModule]) -> Training:
    """The same training as changes of the model see it, with these for its models."""
    return dataclasses.replace(training, roots=roots)


def _is_fp32(training: Training, guide: RootModule) -> bool:
    parameters = parameters_of(_with_roots(training, [guide]))
    return {p.dtype for p in parameters if p.is_floating_point()} == {torch.float32}
