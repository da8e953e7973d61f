"""A sound rule as text, and ways to spoil it."""

from __future__ import annotations

from pathlib import Path

RULE = """\
schema: 1
id: slow-thing
title: A thing is slow
area: input
severity: high
status: stable
role: cause
requires: [idle_data_frac, workers]
when:
  all:
    - metric: idle_data_frac
      above: 5 %
      because: a reason
    - metric: workers
      at_most: 0
      because: another reason
message: The GPU waits {idle_data_frac:pct}.
rationale: Because it does.
transform: loader_workers
parameters: {workers: "4"}
sites: loader
counter_examples:
  - text: not always
    source: https://example.org
references:
  - https://example.org
"""

GAIN = """\
gain:
  low: 0
  high: idle_data_frac
  basis: all of the wait
"""
# What a person is told, with bounds of its own.
ADVICE = RULE.replace('transform: loader_workers\nparameters: {workers: "4"}\n', GAIN).replace(
    "role: cause", "semantics: exact"
)

CASES = """\
schema: 1
rule: slow-thing
cases:
  - name: fires
    given: {idle_data_frac: 20 %, workers: 0}
    expect: fired
    message: waits 20 %
  - name: just below
    given: {idle_data_frac: 4.9 %, workers: 0}
    expect: quiet
  - name: no data
    given: {workers: 0}
    expect: not evaluated
    missing: [idle_data_frac]
"""


def write(folder: Path, text: str = RULE, name: str = "slow-thing.yaml", cases: str | None = CASES) -> Path:
    """Write a rule, and its cases beside it, into `folder/input`; returns the rule's path."""
    path = folder / "input" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if cases is not None:
        path.with_name(path.stem + ".cases.yaml").write_text(cases, encoding="utf-8")
    return path


def spoiled(*changes: tuple[str, str]) -> str:
    """The sound rule, or the sound advice, with parts of its text replaced; each part must be there."""
    text = RULE if changes[0][0] in RULE else ADVICE
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text
