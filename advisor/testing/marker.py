"""`@pytest.mark.perf(…)`: what each keyword means. A keyword that is unknown or badly written is an error at collection."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from advisor.core.errors import AdvisorError
from advisor.testing import amounts

# keyword → the bound it sets: quantity and unit
_BOUNDS = {"max_step_ms": ("step", "us"), "max_memory": ("memory", "bytes"), "max_kernels": ("kernels", "count")}
_ARCH = re.compile(r"sm_(\d{2,3})")
KEYWORDS = (*_BOUNDS, "no_sync", "baseline", "tolerance", "min_arch", "gpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """A test's markers taken together. `maxima`: quantity → limit in its unit."""

    maxima: Mapping[str, float]
    no_sync: bool = False
    baseline: str = ""
    tolerance: float | None = None
    min_arch: int = 0
    gpus: int = 0

    @property
    def judges(self) -> bool:
        """Something measured is to be held to something, so that a test which measures nothing is a mistake."""
        return bool(self.maxima or self.no_sync or self.baseline)

    @property
    def needs_gpu(self) -> bool:
        return bool(self.min_arch or self.gpus)


def parse(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Marked:
    """The meaning of a marker.

    Raises:
        AdvisorError: for a positional argument, an unknown keyword, a value of the wrong kind, a tolerance without a baseline.
    """
    if args:
        raise AdvisorError(f"the perf marker has a positional argument {args[0]!r}", expected="keywords only")
    for name in keywords:
        if name not in KEYWORDS:
            near = difflib.get_close_matches(name, KEYWORDS, 1)
            raise AdvisorError(
                f"the perf marker has no keyword {name!r}",
                expected="one of " + ", ".join(KEYWORDS),
                fix=f"Did you mean {near[0]!r}?" if near else "",
            )
    maxima = {}
    for name, (quantity, unit) in _BOUNDS.items():
        if name in keywords:
            value = keywords[name]
            if name == "max_step_ms" and isinstance(value, (int, float)) and not isinstance(value, bool):
                value = value * 1e3
            maxima[quantity] = amounts.parse(value, unit, name)
    no_sync, baseline = keywords.get("no_sync", False), keywords.get("baseline", "")
    if not isinstance(no_sync, bool):
        raise AdvisorError(f"no_sync={no_sync!r}", expected="True or False")
    if not isinstance(baseline, str) or ("baseline" in keywords and not baseline):
        raise AdvisorError(f"baseline={baseline!r}", expected="the name of a stored baseline")
    if "tolerance" in keywords and not baseline:
        raise AdvisorError("a tolerance without a baseline has no effect", fix="Name the baseline it is for.")
    gpus = keywords.get("gpus", 0)
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 0:
        raise AdvisorError(f"gpus={gpus!r}", expected="how many GPUs the test needs")
    return Marked(
        maxima=maxima,
        no_sync=no_sync,
        baseline=baseline,
        tolerance=amounts.share(keywords["tolerance"]) if "tolerance" in keywords else None,
        min_arch=_arch(keywords["min_arch"]) if "min_arch" in keywords else 0,
        gpus=gpus,
    )


def _arch(value: Any) -> int:
    match = _ARCH.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise AdvisorError(f"min_arch={value!r}", expected="a text such as 'sm_80'")
    return int(match[1])
