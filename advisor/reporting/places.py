"""Where changes took effect and where not: places, most of them module paths, by what is said of each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from advisor.core.units import counted
from advisor.core.verdict import TrialLog, Verdict
from advisor.reporting import wording

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Group:
    """Places of which the same is said, numbers apart.

    Attributes:
        text: what is said of them (`bn+relu`, `no measurement on file`), with spans for numbers that differ; empty where
            nothing is.
        places: each with its own numbers where those differ: `64, 32` for one of `64–512 channels in, 32–256 out`; else with "".
    """

    text: str
    places: tuple[tuple[str, str], ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """The places alone."""
        return tuple(path for path, _ in self.places)


def grouped(entries: Iterable[str]) -> list[Group]:
    """A verdict's `matched` or `unmatched` (`path: what`) by what is said, that of most places first; else in their order."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for entry in entries:
        path, _, text = entry.partition(": ")
        alike.setdefault(numberless(text), []).append((path, text))
    return sorted(map(_group, alike.values()), key=lambda group: -len(group.places))


def _group(said: Sequence[tuple[str, str]]) -> Group:
    numbers = [_NUMBER.findall(text) for _, text in said]
    differ = [len(set(column)) > 1 for column in zip(*numbers, strict=True)]
    own = (", ".join(itertools.compress(row, differ)) for row in numbers)
    return Group(
        spanned(text for _, text in said), tuple((path, row) for (path, _), row in zip(said, own, strict=True))
    )


def numberless(text: str) -> str:
    """What texts that differ in numbers alone share: `3x3 64 to 128` → `0x0 0 to 0`."""
    return _NUMBER.sub("0", text)


def spanned(texts: Iterable[str]) -> str:
    """Texts that differ in numbers alone as one, with the spans of those: `3x3 32–64 to 128`."""
    first, *others = dict.fromkeys(texts)
    spans = map(_span, zip(*(_NUMBER.findall(text) for text in (first, *others)), strict=True))
    return _NUMBER.sub(lambda _: next(spans), first)


def _span(numbers: Sequence[str]) -> str:
    low, high = min(numbers, key=float), max(numbers, key=float)
    return low if float(low) == float(high) else f"{low}–{high}"


def told(trials: TrialLog) -> tuple[Verdict, ...]:
    """The kept changes that say of each place what was put there, as kernels do, or that left some as before."""
    return tuple(v for v in wording.kept(trials) if v.unmatched or any(group.text for group in grouped(v.matched)))


def headline(verdict: Verdict) -> str:
    """`CUDA graphs: 2 places, 1 unchanged`."""
    left = f", {len(verdict.unmatched):,} unchanged" if verdict.unmatched else ""
    return f"{verdict.title or verdict.transform}: {counted(len(verdict.matched), 'place')}{left}"
