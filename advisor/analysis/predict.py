"""What a transform would save of this step: measured rows shrunk, merged or removed, on the step model of `whatif`.

Every constant is an efficiency or a ratio that was measured somewhere and says where. Intervals are meant to hold the
outcome, so they are wide where shapes decide; the live trial gives the number.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import import_module

from advisor.analysis.predictions.basis import Predictor
from advisor.analysis.view import View
from advisor.analysis.whatif import Step
from advisor.core import transform_table
from advisor.core.findings import Interval
from advisor.core.profile import StepProfile

_GPU_ONLY = "needs a CUDA GPU"


def predict(profile: StepProfile, transform_id: str, parameters: Mapping[str, str]) -> Interval | None:
    """The share of this step that a transform would save, as an interval with its basis; None when that cannot be told.

    `high` never exceeds the share of what the transform touches (Amdahl's bound); `low` may be negative where the change
    can lose. An interval of zero says that the transform finds nothing to do.

    Raises:
        AdvisorError: for an id that no transform has.
    """
    row = transform_table.row(transform_id)
    if not row.predictor:
        return None
    view = View.of(profile)
    step = Step.of(view) or (Step.untraced(view) if row.untraced else None)
    if step is None:
        return None
    if not view.on_gpu and row.needs_gpu:
        return Interval(low=0.0, high=0.0, basis=_GPU_ONLY)
    change = predictor(row.predictor)(view if row.everywhere else view.without_guides(), step, parameters)
    return step.gain(change) if change is not None else None


@functools.cache
def predictor(name: str) -> Predictor:
    """What a row names as its predictor, "module:function" of `advisor.analysis.predictions`."""
    module, _, function = name.partition(":")
    found: Predictor = getattr(import_module(f"advisor.analysis.predictions.{module}"), function)
    return found
