"""What is known of a metric before it has a value, and the words in which the lists of metrics are written."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.core.provenance import Provenance


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """`kind` is number, text or flag. `unit` is frac, us, bytes, gbps, count, percent_c, watt, mhz, tflops or ""."""

    name: str
    kind: str
    unit: str
    doc: str
    needs: str = ""  # what a machine must offer for it to be known
    section: str = ""  # what it is about
    gathered: str = ""  # by what means, in words
    provenance: tuple[Provenance, ...] = (Provenance.MEASURED,)  # those that a value of it can have

    @property
    def of_device_time(self) -> bool:
        """It is a share of the time in which the device works, not of the step."""
        return self.doc.startswith(("share of device time", "share of device (CPU: operator) time"))


@dataclass(frozen=True, slots=True)
class Section:
    """Holds for the metrics listed behind it: what they are about, and how they are gathered."""

    title: str
    gathered: str


def number(name: str, unit: str, doc: str, needs: str = "") -> MetricSpec:
    return MetricSpec(name, "number", unit, doc, needs)


def text(name: str, doc: str) -> MetricSpec:
    return MetricSpec(name, "text", "", doc)


def flag(name: str, doc: str, needs: str = "") -> MetricSpec:
    return MetricSpec(name, "flag", "", doc, needs)


def saved(name: str, what: str) -> tuple[MetricSpec, MetricSpec]:
    return (
        number(f"{name}_saved_low", "frac", f"share of the step that {what} saves at least"),
        number(f"{name}_saved_high", "frac", f"share of the step that {what} saves at most"),
    )


GPU, GPM, DRAM = "a CUDA GPU", "NVML GPM (Hopper or newer)", "hardware counters or NVML GPM"
