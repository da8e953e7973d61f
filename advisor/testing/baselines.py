"""Stored baselines: JSON files, one a run, with what each test measured and on which machine.

A baseline is used for counts and bytes and never for times: between two machines of one kind, and between two days of one, times
differ by more than any regression worth catching.
"""

from __future__ import annotations

import datetime
import hashlib
import platform
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from advisor import __version__
from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.testing.quantities import BY_KEY, JudgedQuantity, JudgedStep

DEFAULT_STORAGE = "perf-baselines"
NEVER_TIMES = (
    "times of two days differ by more than a regression; compare the two in one test, by perf.compare(old, new)"
)
MAX_ROWS = 400  # kernels kept with a test, the longest first: enough to name what has grown
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The fingerprint: what tells machines apart, and what else explains another count."""

    device: str
    host: str  # hashed: the files are committed
    gpu_name: str = ""
    gpu_uuid: str = ""  # hashed too
    sm_arch: int = 0
    gpu_count: int = 0
    cpu_name: str = ""
    cpu_count: int = 0
    driver: str = ""
    cuda: str = ""
    cudnn: str = ""
    torch: str = ""

    @classmethod
    def of(cls, environment: Environment) -> Machine:
        """The fingerprint of the machine that this process runs on, with the device that the step used."""
        return cls(
            device=environment.device,
            host=_hashed(platform.node()),
            gpu_name=environment.gpu_name,
            gpu_uuid=_hashed(environment.gpu_uuid),
            sm_arch=environment.sm_arch,
            gpu_count=environment.gpu_count,
            cpu_name=environment.cpu_name,
            cpu_count=environment.cpu_count,
            driver=environment.driver,
            cuda=environment.cuda,
            cudnn=environment.cudnn,
            torch=environment.torch,
        )

    def same(self, other: Machine) -> bool:
        """Whether the two are one machine."""
        return (self.device, self.host, self.gpu_uuid, self.cpu_name, self.cpu_count) == (
            other.device,
            other.host,
            other.gpu_uuid,
            other.cpu_name,
            other.cpu_count,
        )

    def __str__(self) -> str:
        return f"{self.gpu_name or self.cpu_name or self.device}, torch {self.torch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRow:
    """A kernel's calls, bytes and time a step, by name, module and source line."""

    what: str
    module: str = ""
    source: str = ""
    calls: float = 0.0
    bytes: float = 0.0
    time_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineEntry:
    """One measurement of a test: quantity → value a step, with each one's provenance."""

    label: str
    values: dict[str, float] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)
    rows: tuple[BaselineRow, ...] = ()

    @classmethod
    def of(cls, label: str, step: JudgedStep) -> BaselineEntry:
        """Everything that could be read of a step."""
        readings = {key: quantity.read(step) for key, quantity in BY_KEY.items()}
        known = {key: reading for key, reading in readings.items() if reading.value is not None}
        sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for row in step.profile.kernels:
            what = row.name if not row.op or row.op == row.name else f"{row.name} from {row.op}"
            entry = sums[what, row.module, row.source]
            entry[0] += row.calls
            entry[1] += row.dram_bytes if row.dram_bytes is not None else row.modelled_bytes
            entry[2] += row.time_us
        rows = [
            BaselineRow(what=w, module=m, source=s, calls=calls, bytes=nbytes, time_us=time_us)
            for (w, m, s), (calls, nbytes, time_us) in sums.items()
        ]
        rows.sort(key=lambda row: (-row.time_us, row.what, row.module))
        return cls(
            label=label,
            values={key: float(reading.value or 0.0) for key, reading in known.items()},
            provenance={key: reading.provenance.value for key, reading in known.items()},
            rows=tuple(rows[:MAX_ROWS]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """One file: a run's measurements by test id."""

    name: str
    created: str
    advisor: str
    machine: Machine
    tests: dict[str, tuple[BaselineEntry, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a baseline holds of one test. `recording`: this very run writes it, so there is nothing to hold anything to."""

    name: str
    machine: Machine | None = None
    entries: tuple[BaselineEntry, ...] = ()
    recording: bool = False

    def entry(self, label: str) -> BaselineEntry | None:
        """The measurement of this label, or None while the baseline is being recorded.

        Raises:
            AdvisorError: when the test measured nothing of this label when the baseline was stored.
        """
        found = next((entry for entry in self.entries if entry.label == label), None)
        if found is None and not self.recording:
            what = f"measurement {label!r} of this test" if self.entries else "this test"
            raise AdvisorError(
                f"baseline {self.name!r} has nothing of {what}",
                fix=f"Record it: pytest --perf-compare={self.name} --perf-update.",
            )
        return found


def compared(
    quantity: JudgedQuantity, value: float, stored: float, tolerance: float, *, absolute: bool = False
) -> float:
    """How far `value` is past what the stored one allows, in the quantity's unit; 0 or less when it is within.

    Args:
        tolerance: a share of the stored value, or with `absolute` an amount in the quantity's unit.
    """
    worse = stored - value if quantity.more_is_better else value - stored
    return worse - (tolerance if absolute else tolerance * abs(stored))


def path_of(folder: Path, name: str) -> Path:
    """The file of a baseline.

    Raises:
        AdvisorError: for a name that is no plain file name.
    """
    if not _NAME.fullmatch(name):
        raise AdvisorError(f"baseline name {name!r}", expected="letters, digits, dots, dashes and underscores")
    return folder / f"{name}.json"


def newest(folder: Path) -> str:
    """The name of the baseline stored last.

    Raises:
        AdvisorError: when there is none.
    """
    found = []
    for path in folder.glob("*.json"):
        baseline = storage.load(path, Baseline)
        found.append((baseline.created, baseline.name))
    if not found:
        raise AdvisorError(f"no baseline in {folder}", fix="Store one with --perf-save=NAME.")
    return max(found)[1]


def load(folder: Path, name: str) -> Baseline:
    """A stored baseline.

    Raises:
        AdvisorError: when it does not exist or cannot be read.
    """
    path = path_of(folder, name)
    if not path.exists():
        raise AdvisorError(f"no baseline {name!r} in {folder}", fix=f"Store it with --perf-save={name}.")
    return storage.load(path, Baseline)


def save(
    folder: Path, name: str, machine: Machine, tests: Mapping[str, Iterable[BaselineEntry]], *, update: bool
) -> Path:
    """Write a run's measurements; with `update` tests that this run did not measure keep what was stored of them.

    One file is one machine's: an update on another machine has to measure every test that is in it.

    Raises:
        AdvisorError: when it has not; the file stays as it is.
    """
    path = path_of(folder, name)
    measured = {test: tuple(entries) for test, entries in tests.items()}
    kept: dict[str, tuple[BaselineEntry, ...]] = {}
    if update and path.exists():
        old = storage.load(path, Baseline)
        kept = {test: entries for test, entries in old.tests.items() if test not in measured}
        if kept and not old.machine.same(machine):
            raise AdvisorError(
                f"it is of another machine ({old.machine}), and {len(kept)} of its {len(old.tests)} tests were not measured "
                f"here, as {next(iter(kept))}",
                fix=f"Record all again with --perf-save={name}.",
            )
    now = datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    baseline = Baseline(
        name=name, created=now, advisor=__version__, machine=machine, tests=dict(sorted({**kept, **measured}.items()))
    )
    storage.save(path, baseline)
    return path


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12] if text else ""
