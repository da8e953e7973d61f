"""The traced steps as a file that ui.perfetto.dev and chrome://tracing open, with the findings as annotations.

Format: Chrome's trace events (JSON), https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from advisor.core.findings import Findings
from advisor.core.timeline import CALLS, HOST, Event, Timeline, TimelineRow
from advisor.reporting import numbers, wording

# Processes of the trace, in the order in which they are shown.
ADVICE, DEVICE, HOST_PROCESS = 1, 2, 3
_NAMES = {ADVICE: "advisor: steps and findings", DEVICE: "device", HOST_PROCESS: "host"}


def trace_events(timeline: Timeline, findings: Findings | None) -> dict[str, Any]:
    """The trace as plain data. Times are microseconds from the first traced step."""
    told = wording.cards(findings)
    lines = {line: t.lead.rule for t in reversed(told) for line in _lines(t.lead.sites)}
    events: list[dict[str, Any]] = [
        _meta(process, 0, "process_name", name=name) for process, name in _NAMES.items()
    ] + [_meta(process, 0, "process_sort_index", sort_index=process) for process in _NAMES]
    events += [_meta(ADVICE, 1, "thread_name", name="steps")]
    bounds = timeline.bounds_ns
    for number, (a, b) in enumerate(pairwise(bounds), timeline.number or 1):
        events.append(_span(ADVICE, 1, f"step {number}", a, b, "step", {}))
    for t in told:
        finding, thread = t.lead, 1 + t.card.rank
        name = f"{t.card.rank}. {finding.title}"
        arguments = {
            "rule": finding.rule,
            "says": finding.message,
            "predicted": numbers.gain(t.card.predicted),
            "where": list(finding.sites[:20]),
            "evidence": {e.metric: e.value for e in finding.evidence},
        }
        events += [
            _meta(ADVICE, thread, "thread_name", name=f"finding {t.card.rank}"),
            _span(ADVICE, thread, name, 0, timeline.length_ns, "finding", arguments),
        ]
    for number, row in enumerate(timeline.rows, 1):
        process = HOST_PROCESS if row.kind in (HOST, CALLS) else DEVICE
        events += [
            _meta(process, number, "thread_name", name=row.name),
            _meta(process, number, "thread_sort_index", sort_index=number),
            *_events(row, process, number, lines),
        ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _events(row: TimelineRow, process: int, thread: int, lines: dict[str, str]) -> Iterator[dict[str, Any]]:
    for event in row.events:
        arguments = {"of": event.detail} if event.detail else {}
        rule = next((rule for line, rule in lines.items() if _at(event, line)), "")
        if rule:
            arguments["finding"] = rule
        yield _span(process, thread, event.name, event.start_ns, event.end_ns, event.key, arguments)
        if rule and event.key == "line":
            yield {
                "ph": "i", "s": "t", "name": f"finding: {rule}", "cat": "finding", "pid": process, "tid": thread,
                "ts": event.start_ns / 1e3,
            }  # fmt: skip


def _at(event: Event, line: str) -> bool:
    """The event is at this source line."""
    return event.name == line if event.key == "line" else line in event.detail.split("\n")


def _lines(sites: Iterable[str]) -> Iterator[str]:
    """The source lines that a finding names: the first word of a site, where it is `file:line`."""
    for site in sites:
        first = site.split()[0] if site.split() else ""
        if first.rpartition(":")[2].isdigit():
            yield first


def _span(process: int, thread: int, name: str, a: int, b: int, key: str, arguments: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "ph": "X", "name": name, "cat": key, "pid": process, "tid": thread, "ts": a / 1e3, "dur": (b - a) / 1e3,
    }  # fmt: skip
    if arguments:
        found["args"] = arguments
    return found


def _meta(process: int, thread: int, kind: str, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": arguments}
