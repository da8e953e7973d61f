"""The terminal section: what was measured, the budgets, and how much of each is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from advisor.core.units import percent_text
from advisor.testing import amounts
from advisor.testing.judged import JudgedBudget
from advisor.testing.quantities import BY_KEY
from advisor.testing.records import Record, Tested

_HEADLINE = ("step", "kernels", "syncs", "memory")
TITLE = "advisor: performance"


def lines(tests: Iterable[Tested], files: dict[str, str]) -> Iterator[tuple[str, bool]]:
    """Text lines, each with whether something in it failed.

    Args:
        files: what was written → where.
    """
    machines: dict[str, None] = {}
    for test in tests:
        for record in test.records:
            yield _headline(test.test, record), test.outcome == "failed"
            for budget, exact in _each_once(record.budgets):
                yield _budget(budget, exact=exact), not budget.passed
            for text in (*record.against, *record.notes):
                yield f"    {text}", False
            if record.report:
                yield f"    report: {record.report}", False
            if record.machine is not None:
                machines[str(record.machine)] = None
    if machines:
        yield "measured on " + "; ".join(machines), False
    for what, where in files.items():
        yield f"{what}: {where}", False


def _headline(test: str, record: Record) -> str:
    name = f"{test} [{record.label}]" if record.label else test
    if record.entry is None:
        told = "compared"
        if len(record.gain) == 3:
            low, point, high = record.gain
            told = f"saves {point:+.1%} ({low:+.1%} to {high:+.1%}, {record.pairs} pairs)"
        return f"{name}  {told}"
    values = record.entry.values
    parts = [f"{key} {amounts.text(values[key], BY_KEY[key].unit)}" for key in _HEADLINE if key in values]
    return "  ".join([name, *parts, f"({record.seconds:.1f} s)"])


def _each_once(budgets: Iterable[JudgedBudget]) -> Iterator[tuple[JudgedBudget, bool]]:
    """Each budget, and whether it is exact: one that is the most and the least of the same is one line, unless it is broken."""
    told: list[JudgedBudget] = []
    every = list(budgets)
    for budget in every:
        other = replace(budget, bound="min" if budget.bound == "max" else "max")
        exact = budget.bound in ("max", "min") and budget.passed and other in every
        if not (exact and other in told):
            yield budget, exact
        told.append(budget)


def _budget(budget: JudgedBudget, *, exact: bool = False) -> str:
    if budget.bound == "check":
        return f"    {_titled(budget)}: " + ("kept" if budget.passed else "FAILED")
    if exact:
        return f"    {_titled(budget)}: {amounts.text(budget.value, budget.unit)}, as wanted"
    wanted = "at most" if budget.bound == "max" else "at least"
    text = f"    {_titled(budget)}: {amounts.text(budget.value, budget.unit)} of {wanted} {amounts.text(budget.limit, budget.unit)}"
    used = f", {percent_text(budget.used)} used" if budget.used is not None else ""
    return text + used + ("" if budget.passed else "  FAILED")


def _titled(budget: JudgedBudget) -> str:
    return f"{budget.title} ({budget.note})" if budget.note else budget.title
