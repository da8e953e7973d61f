"""What the user asks of a search: the options of `apply`, wherever it is searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.core.findings import Recommendation
from advisor.core.transform_table import row

USUAL_TIME_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Options of `apply`.

    Attributes:
        only, skip: transforms' ids; nothing in `only` stands for all of them.
        min_gain: least share of the step's time that a change must save to be kept.
        max_pairs: most pairs of blocks, or of fresh runs, in a trial.
        time_s: no candidate begins after this, in seconds.
        rules_dirs: folders of the user's own rules, which recommend as well.
    """

    only: Sequence[str] = ()
    skip: Sequence[str] = ()
    min_gain: float = 0.01
    max_pairs: int = 20
    time_s: float = USUAL_TIME_S
    rules_dirs: Sequence[Path] = ()

    def wants(self, candidate: Recommendation) -> bool:
        """Whether it is to be tried."""
        return candidate.transform not in self.skip and (not self.only or candidate.transform in self.only)

    def chosen(self, recommendations: Sequence[Recommendation]) -> tuple[Recommendation, ...]:
        """What to try. A transform named in `only` is tried even when no rule asked for it: the user did."""
        known = {r.transform for r in recommendations}
        asked = [
            Recommendation(transform=name, title=row(name).title, reason="named with --only")
            for name in self.only
            if name not in known
        ]
        return tuple(candidate for candidate in (*recommendations, *asked) if self.wants(candidate))


USUAL = SearchOptions()
