"""Which kinds of call run the bundled kernels: dispatch_table.json, one look-up for all families.

`advisor bench ops` writes it (bench/dispatch_rows.py): what the rows on file show to be faster is taken, and so is what a person has
written beside that, to do as something that is on file. Needs neither torch nor CuPy.

A family in the file has
    measured  kind → dtype → [least, most] of our time as a share of PyTorch's, both passes together, over the cases on file; written anew
    slower    the same, of kinds that are left to PyTorch: they were not faster, or are in `left`; written anew
    left      kinds that are PyTorch's all the same, with the reason; before all else
    like      kinds without rows of their own, with what they are taken to do as, and why
    parts     kind → the products of a call that are ours, for families that take a call apart
    sizes     what is asked of a call's size; each entry with alternatives, of which one must hold
    notes     what was measured beside the rows: of parts of calls, and of what is asked of sizes
    only      architectures that some kinds are taken on, with or without rows of another one

`layers` says of each architecture whose rows it goes by. `of` has `measured` and `slower` of those with rows of their own, beside that of
the first: there a kind that was slower is left to PyTorch, and what has no row goes as it does on the first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from advisor.core import architectures
from advisor.core.errors import AdvisorError
from advisor.ops.dispatch import UNMEASURED, Inferred, Kind

FILE = Path(__file__).with_name("dispatch_table.json")
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What one quantity of a call must be. `because`: a text with the call's quantities in braces."""

    quantity: str
    least: float = float("-inf")
    most: float = float("inf")
    because: str = UNMEASURED


Alternatives = tuple[tuple[Bound, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeAsked:
    """What calls of these kinds and this part are asked, all kinds where none is named."""

    kinds: tuple[str, ...] = ()
    part: str = ""
    text: str = ""  # for the page
    any_of: Alternatives

    def refusal(self, sizes: Mapping[str, float]) -> str:
        """Empty where an alternative holds; else the reason of the one that holds furthest. A quantity that a call has not is not asked."""
        furthest, reason = -1, ""
        for bounds in self.any_of:
            for number, bound in enumerate(bounds):
                value = sizes.get(bound.quantity)
                if value is not None and not bound.least <= value <= bound.most:
                    if number > furthest:
                        furthest, reason = number, bound.because.format(**sizes)
                    break
            else:
                return ""
        return reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """One family's part of the table."""

    measured: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    slower: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    left: Mapping[Kind, str] = field(default_factory=dict)
    like: tuple[Inferred, ...] = ()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: tuple[SizeAsked, ...] = ()
    only: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by kind; "" is every kind
    taken: Mapping[str, frozenset[str]] = field(default_factory=dict)  # kind → dtypes

    @property
    def kinds(self) -> frozenset[Kind]:
        """Every kind that is taken at some size."""
        return frozenset((kind, dtype) for kind, dtypes in self.taken.items() for dtype in dtypes)


def _measured() -> int:
    return architectures.MEASURED.sm


present: Callable[[], int] = _measured  # which layer calls go by: nvrtc, which knows the GPU, sets it


@cache
def _document(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdvisorError(f"{file} cannot be read ({error})", fix="Reinstall cnn-advisor.") from None
    if found.get("schema_version") != SCHEMA:
        raise AdvisorError(f"{file} has schema {found.get('schema_version')}", expected=str(SCHEMA))
    return dict(found)


def read(sm: int = architectures.MEASURED.sm, file: Path = FILE) -> dict[str, Entries]:
    """The table's layer for this architecture, by family.

    Raises:
        AdvisorError: when it is missing, or of another schema.
    """
    return _layer(sm, file)


class _Layer(dict[str, Entries]):
    """A layer by family; one that is not in it has nothing measured."""

    def __missing__(self, family: str) -> Entries:
        return Entries()


@cache
def _layer(sm: int, file: Path) -> dict[str, Entries]:
    found = _document(file)
    if str(sm) in found.get("of", {}):
        own = found["of"][str(sm)]
        return _Layer((family, entries(of, own.get(family, {}))) for family, of in found["families"].items())
    first = architectures.MEASURED.sm
    if sm != first:
        return _layer(first, file)
    return _Layer((family, entries(of)) for family, of in found["families"].items())


def _shares(*of: Mapping[str, Any]) -> dict[str, dict[str, tuple[float, float]]]:
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for one in of:
        for kind, by in one.items():
            found.setdefault(kind, {}).update({dtype: (low, high) for dtype, (low, high) in by.items()})
    return found


def entries(of: Mapping[str, Any], own: Mapping[str, Any] = MappingProxyType({})) -> Entries:
    """One family's, from what the file has. `own`: of an architecture with rows of its own."""
    measured = _shares(of.get("measured", {}), own.get("measured", {}))
    slower = _shares(of.get("slower", {}), own.get("slower", {}))
    lost = {(kind, dtype) for kind, by in own.get("slower", {}).items() for dtype in by}
    like = tuple(
        Inferred(**{**e, "names": tuple(e["names"]), "dtypes": tuple(e["dtypes"])}) for e in of.get("like", ())
    )
    left = {(name, dtype): e["because"] for e in of.get("left", ()) for name in e["names"] for dtype in e["dtypes"]}
    sizes = tuple(
        SizeAsked(
            kinds=tuple(e.get("kinds", ())),
            part=e.get("part", ""),
            text=e.get("text", ""),
            any_of=tuple(tuple(Bound(**bound) for bound in bounds) for bounds in e["any_of"]),
        )
        for e in of.get("sizes", ())
    )
    taken: dict[str, set[str]] = {}
    for name, dtype in (
        *((kind, dtype) for kind, by in measured.items() for dtype in by),
        *(pair for e in like for pair, _ in e.pairs),
    ):
        if (name, dtype) not in left and (name, dtype) not in lost:
            taken.setdefault(name, set()).add(dtype)
    return Entries(
        measured=measured,
        slower=slower,
        left=left,
        like=like,
        parts={kind: tuple(parts) for kind, parts in of.get("parts", {}).items()},
        sizes=sizes,
        only={kind: tuple(sms) for kind, sms in of.get("only", {}).items()},
        taken={kind: frozenset(dtypes) for kind, dtypes in taken.items()},
    )


def put(family: str, of: Entries) -> Entries:
    """Put these in the place of the family's entries in this process, and return what was there."""
    before = read()[family]
    read()[family] = of
    for name, module in list(sys.modules.items()):  # what specs keep of earlier answers
        if name.startswith("advisor.ops.") and name.endswith(".spec"):
            for value in vars(module).values():
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()
    return before


@contextmanager
def instead(family: str, of: Entries) -> Iterator[None]:
    """Inside, these are the family's entries: for who writes the table, and for tests."""
    before = put(family, of)
    try:
        yield
    finally:
        put(family, before)


_NOTHING: Mapping[str, float] = MappingProxyType({})


def refusal(family: str, kind: str, dtype: str = "", sizes: Mapping[str, float] = _NOTHING, *, part: str = "") -> str:
    """Why PyTorch's own operation is left in place; empty where the kernels are measured, or taken, to be faster.

    Args:
        dtype: empty where the family's calls are told apart without it.
        sizes: quantities of the call, as the family's entries in `sizes` name them.
        part: the product of a call that is asked for; empty for the whole.
    """
    table = read(present())[family]
    if reason := table.left.get((kind, dtype)):
        return reason
    dtypes = table.taken.get(kind)
    if not dtypes or (dtype and dtype not in dtypes):
        return next((reason for (name, _), reason in table.left.items() if name == kind and not dtypes), UNMEASURED)
    if part and part not in table.parts.get(kind, ()):
        return UNMEASURED
    for asked in table.sizes:
        if asked.part == part and (not asked.kinds or kind in asked.kinds) and (reason := asked.refusal(sizes)):
            return reason
    return ""


def elsewhere(family: str, kind: str, arch: int = 0) -> str:
    """Why PyTorch's own operation is left in place on this architecture (90 for sm_90; 0 for one that lacks what others have), at any size."""
    only = read(present())[family].only
    allowed = only.get(kind, only.get("", ()))
    return UNMEASURED if allowed and arch not in allowed else ""


@cache
def layers(file: Path = FILE) -> Mapping[int, str]:
    """Of each architecture that kernels run on, whose rows it goes by: the GPUs' folders in docs/benchmarks, or `like sm_90: why`."""
    found = _document(file)["layers"]
    like = f"like sm_{architectures.MEASURED.sm}: no GPU of it was measured, nothing is known to be faster there"
    rows = (row.sm for row in architectures.ROWS if row.sm >= architectures.BUNDLED_KERNELS)
    return {sm: found.get(str(sm), like) for sm in rows}
