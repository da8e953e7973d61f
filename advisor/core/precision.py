"""What `advisor profile --precision` has seen: plain data, in a run's precision.json."""

from __future__ import annotations

from dataclasses import dataclass, field

PRECISION_FILE = "precision.json"
FORWARD, DATA, WEIGHT = "forward", "data gradient", "weight gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """One product of one layer.

    Attributes:
        module: path. product: forward, data gradient or weight gradient.
        ran: fp32, tf32, bf16, fp16 or fp64; by: who switched it.
        error: relative error of what ran against fp64, in the 2-norm; None where it could not be told.
        errors: of each precision on the same tensors.
    """

    module: str
    product: str
    ran: str
    by: str
    error: float | None
    errors: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRecord:
    """One step's layers; `samples` of a batch were kept of each. `notes`: layers that could not be made again."""

    rows: tuple[Audited, ...]
    samples: int
    notes: tuple[str, ...] = ()
