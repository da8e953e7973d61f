"""The vocabulary that analysis writes and rules read: every metric, its type, unit and meaning, in one list.

A metric without a value is missing with a reason; it is never guessed and never zero by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from advisor.core.metric_spec import MetricSpec, Section
from advisor.core.metrics_of_causes import CAUSES
from advisor.core.metrics_of_steps import STEP
from advisor.core.provenance import Provenance

Scalar = float | str | bool


_MODELLED = frozenset(
    (
        *(
            "limit_us",
            "limit_frac",
            "memory_full_us",
            "host_full_us",
            "half_rate_ratio",
            "tail_wave_frac",
            "host_frac",
            "l2_fit_frac",
            "dram_excess_ratio",
        ),
        *("memory_bound_frac", "weight_cast_frac", "weight_casts", "se_frac", "bn_act_frac", "bias_act_frac"),
        *("unnormed_elementwise_frac", "written_norm_frac", "bn_act_count", "state_bytes", "activation_bytes"),
        *(f"{kind}_efficiency" for kind in ("memory_bound", "conv", "conv_worst", "norm", "depthwise", "grouped")),
        *("pool_efficiency", "upsample_efficiency"),
        *(
            "fetch_saved_low",
            "fetch_saved_high",
            "layout_kept_saved_low",
            "layout_kept_saved_high",
            "half_speed",
            "cudnn_off_saved_low",
            "cudnn_off_saved_high",
        ),
    )
)
# Modelled where this machine does not let them be measured.
_MODELLED_ELSE = frozenset(("data_wait_frac", "copy_gbps", "bf16_supported", "dram_gb_per_step", "dram_frac"))


def _specs() -> Iterator[MetricSpec]:
    """All metrics, each with what its section and the two sets above say of it."""
    section = Section("", "")
    for entry in (*STEP, *CAUSES):
        if isinstance(entry, Section):
            section = entry
            continue
        provenance: tuple[Provenance, ...] = (
            (Provenance.MODELLED,) if entry.name in _MODELLED or "_saved_" in entry.name else (Provenance.MEASURED,)
        )
        if entry.name in _MODELLED_ELSE:
            provenance = (Provenance.MEASURED, Provenance.MODELLED)
        yield replace(entry, section=section.title, gathered=section.gathered, provenance=provenance)


SPECS: tuple[MetricSpec, ...] = tuple(_specs())
BY_NAME: dict[str, MetricSpec] = {spec.name: spec for spec in SPECS}


@dataclass(frozen=True, slots=True)
class Metric:
    """A value with its provenance, or None with the reason it is missing."""

    value: Scalar | None
    provenance: Provenance
    reason: str = ""


class MetricTable:
    """Metric name → Metric. Names outside `BY_NAME` and values of the wrong kind are refused."""

    __slots__ = ("_metrics",)

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def set(self, name: str, value: Scalar, provenance: Provenance = Provenance.MEASURED, reason: str = "") -> None:
        """Record a value. NaN and infinities count as missing.

        Raises:
            KeyError: when `name` is not in the registry.
            TypeError: when the value's kind is not the registry's.
        """
        kind = BY_NAME[name].kind
        fits = (
            isinstance(value, bool)
            if kind == "flag"
            else isinstance(value, str)
            if kind == "text"
            else isinstance(value, (int, float)) and not isinstance(value, bool)
        )
        if not fits:
            raise TypeError(f"metric {name} is a {kind}, got {type(value).__name__}")
        if kind == "number" and not abs(float(value)) < float("inf"):
            self.miss(name, reason or "the measurement gave no finite number")
            return
        self._metrics[name] = Metric(float(value) if kind == "number" else value, provenance, reason)

    def miss(self, name: str, reason: str) -> None:
        """Record that a metric could not be had, and why."""
        BY_NAME[name]
        self._metrics[name] = Metric(None, Provenance.UNAVAILABLE, reason)

    def __getitem__(self, name: str) -> Metric:
        spec = BY_NAME[name]
        missing = f"needs {spec.needs}" if spec.needs else "was not gathered"
        return self._metrics.get(name) or Metric(None, Provenance.UNAVAILABLE, missing)

    def number(self, name: str) -> float | None:
        """The value of a number metric, or None."""
        value = self[name].value
        return value if isinstance(value, float) else None

    def __iter__(self) -> Iterator[tuple[str, Metric]]:
        for spec in SPECS:
            yield spec.name, self[spec.name]
