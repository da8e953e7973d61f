"""Wholes that were proved on this machine, by what was trained: a search of the same model, shapes, device and kernels tries them first.

One line each in the user's ledger (ledger.py), whichever project the script lies in. They choose what is tried first, as one; what holds
there goes through every check here too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.core import storage, transform_table
from advisor.core.errors import AdvisorError
from advisor.core.findings import Recommendation
from advisor.core.profile import StepProfile
from advisor.core.verdict import Status, TrialLog
from advisor.trials import ledger, outcome, planfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """One proved whole. `workload` and `kernels` are hashes: of what was trained, and of the bundled kernels' sources."""

    date: str  # ISO 8601, UTC
    machine: str
    kernels: str
    workload: str
    proved: tuple[str, ...]  # transforms
    speedup: str  # "3.10× (3.05 to 3.14)"


def workload(profile: StepProfile) -> str:
    """What is trained, as a hash: the model's layers, their shapes and dtypes, the batch, the optimizers; "" where no model was seen.

    No name of the script's, its classes or its files is in it.
    """
    model = profile.model
    if not model.parameters:
        return ""
    layers = [dataclasses.replace(conv, module="") for conv in model.convs]
    known = (
        model.parameters,
        sorted(model.module_counts.items()),
        [storage.to_plain(layer) for layer in layers],
        (model.optimizers, model.parameter_dtype, model.autocast, model.grad_scaler, model.channels_last),
        (model.batch_size, model.accumulation, model.world_size, model.fixed_shapes),
        (profile.input.batch_dtype, profile.input.batch_bytes),
    )
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def entry(log: TrialLog, profile: StepProfile) -> Whole | None:
    """What this search has proved; None where it has not, or nobody can tell what was trained."""
    speedup, trained = outcome.speedup(log), workload(profile)
    proved = tuple(sorted(verdict.transform for verdict in log.verdicts if verdict.status == Status.KEPT))
    if not (speedup and trained and proved):
        return None
    return Whole(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=planfile.environment_text(profile.environment),
        kernels=planfile.kernels_hash(),
        workload=trained,
        proved=proved,
        speedup=speedup,
    )


def find(profile: StepProfile) -> Whole | None:
    """The latest whole that was proved here of what this profile is of."""
    trained = workload(profile)
    here = (planfile.environment_text(profile.environment), planfile.kernels_hash(), trained)
    found = None
    for line in ledger.lines() if trained else ():
        with contextlib.suppress(ValueError, AdvisorError):
            known = storage.from_plain(Whole, json.loads(line))
            found = known if (known.machine, known.kernels, known.workload) == here else found
    return found


def others(known: Whole, candidates: Sequence[Recommendation]) -> tuple[str, ...]:
    """The candidates that were no part of it: they have their turn behind it. () where fewer than two were."""
    names = dict.fromkeys(candidate.transform for candidate in candidates)
    rest = tuple(name for name in names if name not in known.proved)
    return rest if len(names) - len(rest) > 1 else ()


def told(known: Whole) -> str:
    """As people read it."""
    titles = ", ".join(map(transform_table.title, known.proved))
    return f"the same model, shapes and device were searched here on {known.date[:10]}: {known.speedup} with {titles}; that is tried first"
