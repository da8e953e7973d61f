"""`advisor rules metrics`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import click

from advisor.cli import layout, output
from advisor.cli.help import Command
from advisor.cli.parameters import format_option
from advisor.core.errors import AdvisorError, meant
from advisor.core.metric_spec import MetricSpec
from advisor.core.metrics import SPECS
from advisor.core.units import counted


@click.command(cls=Command)
@format_option("text", "json")
@click.argument("pattern", required=False, default="", metavar="[TEXT]")
def metrics(*, pattern: str, form: str) -> None:
    """List the metrics that rules use: name, unit, meaning, needs, how each is gathered, and which rules use it.

    TEXT selects metrics: by a part of the name or meaning, or by a glob on the name.

    \b
    Examples:
      advisor rules metrics loader
      advisor rules metrics 'idle_*'
      advisor rules metrics --format json
    """
    chosen = _chosen(pattern)
    askers = _askers()
    if form == "json":
        output.say(output.document("metrics", [_facts(spec, askers) for spec in chosen]), sys.stdout)
        return
    for text in (*_sections(chosen), *_last_words(chosen, askers)):
        output.say(text, sys.stdout)


def _chosen(pattern: str) -> tuple[MetricSpec, ...]:
    """The metrics that the pattern names, or else those whose meaning holds it.

    Raises:
        AdvisorError: when there are none, with the nearest name.
    """

    asked = pattern.lower()
    named = tuple(spec for spec in SPECS if asked in spec.name or fnmatchcase(spec.name, asked))
    found = named or tuple(spec for spec in SPECS if asked in spec.doc.lower() or asked in spec.section.lower())
    if not found:
        fix = meant(asked, [spec.name for spec in SPECS]) or "`advisor rules metrics` lists them all."
        raise AdvisorError(f"no metric {pattern!r}", expected="a part of a name or of a meaning, or a glob", fix=fix)
    return found


def _askers() -> Mapping[str, list[str]]:
    """Metric → the bundled rules that read it."""
    from advisor.rules import load
    from advisor.rules.conditions import comparisons

    found: dict[str, list[str]] = {}
    for rule in load():
        for name in dict.fromkeys((*rule.requires, *(leaf.metric for leaf in comparisons(rule.when)))):
            found.setdefault(name, []).append(rule.id)
    return found


def _written(spec: MetricSpec) -> str:
    """How a rule writes a value of it, in few words."""
    from advisor.rules.units import example

    return {"text": "text", "flag": "true or false"}.get(spec.kind, "20" if spec.unit == "count" else example(spec))


def _provenance(spec: MetricSpec) -> str:
    return " or ".join(kind.value for kind in spec.provenance)


def _facts(spec: MetricSpec, askers: Mapping[str, list[str]]) -> dict[str, object]:
    return {
        "name": spec.name,
        "kind": spec.kind,
        "unit": spec.unit,
        "written": _written(spec),
        "meaning": spec.doc,
        "needs": spec.needs,
        "section": spec.section,
        "provenance": [kind.value for kind in spec.provenance],
        "gathered": spec.gathered,
        "rules": askers.get(spec.name, []),
    }


def _sections(chosen: Iterable[MetricSpec]) -> Iterable[str]:
    """A table, with each section's name and means above its metrics."""
    chosen = tuple(chosen)
    head = ("metric", "written as", "provenance", "needs", "meaning")
    rows = [
        (spec.name, _written(spec), _provenance(spec), f"needs {spec.needs}" if spec.needs else "–", spec.doc)
        for spec in chosen
    ]
    table = layout.table([head, *rows], output.width())
    yield table[0]
    section = ""
    for spec, text in zip(chosen, table[1:], strict=True):
        if spec.section != section:
            section = spec.section
            yield "\n" + layout.wrapped(f"{section}: {spec.gathered}", output.width())
        yield text


def _last_words(chosen: tuple[MetricSpec, ...], askers: Mapping[str, list[str]]) -> Iterable[str]:
    yield f"\n{counted(len(chosen), 'metric')}."
    if len(chosen) == 1:
        asked = ", ".join(askers.get(chosen[0].name, ())) or "no bundled rule"
        yield layout.wrapped(f"Asked by {asked}.", output.width())
