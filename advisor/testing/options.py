"""The plugin's command line: what each flag is, and what the flags of a run say together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.core.errors import AdvisorError

if TYPE_CHECKING:
    import pytest

# --perf-inconclusive: what becomes of a comparison that noise leaves open
WARN, FAIL, SKIP = "warn", "fail", "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """How much worse than a baseline a quantity may be: a share of the stored value, or an amount."""

    amount: float
    absolute: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A run's flags. `compare` is None when nothing is to be compared and "" for the newest baseline."""

    storage: Path
    only: bool = False
    skip: bool = False
    require_gpu: bool = False
    save: str = ""
    compare: str | None = None
    compare_fail: Mapping[str, Threshold] | None = None
    update: bool = False
    inconclusive: str = WARN
    json: Path | None = None
    report_dir: Path | None = None

    def records(self, name: str) -> bool:
        """This run writes the baseline of that name, so that nothing is held to it."""
        return bool(name) and (self.save == name or (self.update and self.compare == name))


def add(parser: pytest.Parser) -> None:
    """The flags, in a group of their own."""
    group = parser.getgroup("advisor", "performance (advisor)")
    flag = group.addoption
    flag("--perf-only", action="store_true", help="run only tests that measure performance")
    flag("--perf-skip", action="store_true", help="skip tests that measure performance")
    flag("--perf-require-gpu", action="store_true", help="fail tests that would be skipped because there is no GPU")
    flag("--perf-save", metavar="NAME", default="", help="store what this run measures as a baseline")
    flag(
        "--perf-compare",
        metavar="NAME",
        nargs="?",
        const="",
        default=None,
        help="compare with a stored baseline, the newest by default; write --perf-compare=NAME",
    )
    flag(
        "--perf-compare-fail",
        metavar="LIMITS",
        default="",
        help="what may be worse than the baseline by how much, as dram:5%%,memory:2%%,kernels:0",
    )
    flag("--perf-update", action="store_true", help="store this run's values in the baseline it is compared with")
    flag(
        "--perf-inconclusive",
        choices=(WARN, FAIL, SKIP),
        default=WARN,
        help="a comparison of times that noise leaves open (default: %(default)s)",
    )
    flag("--perf-storage", metavar="DIR", default=None, help="where baselines are (default: perf-baselines)")
    flag("--perf-json", metavar="FILE", default=None, help="write everything that was measured to a file")
    flag("--perf-report-dir", metavar="DIR", default=None, help="write an HTML report of each failed measurement")


def read(config: pytest.Config) -> Options:
    """The flags of this run.

    Raises:
        AdvisorError: for flags that would have no effect, a limit that cannot be read, or a baseline to update that cannot.
    """
    from advisor.testing import baselines

    get = config.getoption
    compare, update, limits = get("perf_compare"), get("perf_update"), get("perf_compare_fail")
    if get("perf_only") and get("perf_skip"):
        raise AdvisorError("--perf-only and --perf-skip leave nothing to run", expected="one of them")
    if limits and compare is None:
        raise AdvisorError("--perf-compare-fail without --perf-compare", fix="Name a baseline: --perf-compare=NAME.")
    if update and not compare:
        raise AdvisorError(
            "--perf-update does not say what to update", fix="Name it: --perf-compare=NAME --perf-update."
        )
    storage = Path(get("perf_storage") or config.rootpath / baselines.DEFAULT_STORAGE)
    for name in (get("perf_save"), compare):
        if name:
            baselines.path_of(storage, name)
    if update and baselines.path_of(storage, compare).exists():
        baselines.load(storage, compare)  # one that cannot be read is told now, not when all has been measured
    return Options(
        storage=storage,
        only=get("perf_only"),
        skip=get("perf_skip"),
        require_gpu=get("perf_require_gpu"),
        save=get("perf_save"),
        compare=compare,
        compare_fail=limits_of(limits) if limits else None,
        update=update,
        inconclusive=get("perf_inconclusive"),
        json=Path(get("perf_json")) if get("perf_json") else None,
        report_dir=Path(get("perf_report_dir")) if get("perf_report_dir") else None,
    )


def limits_of(text: str) -> dict[str, Threshold]:
    """`dram:5%,memory:10 MiB,kernels:0` by quantity.

    Raises:
        AdvisorError: for an unknown quantity, a time, or an amount that cannot be read.
    """
    from advisor.testing import amounts
    from advisor.testing.baselines import NEVER_TIMES
    from advisor.testing.quantities import BY_KEY

    found: dict[str, Threshold] = {}
    known = [key for key, quantity in BY_KEY.items() if not quantity.timed]
    for part in text.split(","):
        key, colon, amount = (piece.strip() for piece in part.partition(":"))
        if not colon or key not in BY_KEY:
            raise AdvisorError(
                f"--perf-compare-fail {part.strip()!r}", expected="quantity:limit with one of " + ", ".join(known)
            )
        if BY_KEY[key].timed:
            raise AdvisorError(f"--perf-compare-fail {part.strip()!r}: no baseline holds it", fix=f"{NEVER_TIMES}.")
        relative = amount.endswith("%")
        if not relative and amount.replace(".", "", 1).isdigit() and BY_KEY[key].unit != "count":
            if float(amount):
                raise AdvisorError(f"--perf-compare-fail {part.strip()!r} has no unit", expected="a per cent or a unit")
            relative = True
        if relative:
            found[key] = Threshold(amount=amounts.share(amount if amount.endswith("%") else 0.0, key), absolute=False)
        elif BY_KEY[key].unit == "count":
            found[key] = Threshold(amount=amounts.parse(amount, "count", key), absolute=True)
        else:
            found[key] = Threshold(amount=amounts.parse(amount, BY_KEY[key].unit, key), absolute=True)
    return found
