"""The traced steps for Perfetto, and findings for code scanning."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import samples

from advisor.core.findings import Outcome
from advisor.core.timeline import HOST, STREAM, Event, Timeline, TimelineRow
from advisor.reporting.perfetto import trace_events
from advisor.reporting.sarif import sarif

TIMELINE = Timeline(
    steps=2,
    length_ns=2_000,
    bounds_ns=(0, 1_000, 2_000),
    rows=(
        TimelineRow(STREAM, "stream 7", (Event(100, 600, "sgemm<float>", "gemm", 0, "fc\ntrain.py:9"),)),
        TimelineRow(HOST, "training thread", (Event(0, 900, "train.py:9", "line"), Event(10, 90, "aten::mm", "op", 1))),
    ),
)


def at_line_nine():
    found = samples.findings()
    lead = found.of(found.cards[0].rule)
    moved = dataclasses.replace(lead, sites=("train.py:9 fc: aten::mm (forward)", "nowhere"))
    return dataclasses.replace(found, findings=tuple(moved if f.rule == lead.rule else f for f in found.findings))


def test_every_event_and_every_finding_is_in_the_trace():
    found = at_line_nine()
    document = json.loads(json.dumps(trace_events(TIMELINE, found), allow_nan=False))
    spans = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert all({"name", "pid", "tid", "ts", "dur"} <= set(e) for e in spans)
    assert [e["name"] for e in spans if e["cat"] == "step"] == ["step 1", "step 2"]
    assert len([e for e in spans if e["cat"] == "finding"]) == len(found.cards)
    assert [(e["ts"], e["dur"]) for e in spans if e["name"] == "sgemm<float>"] == [(0.1, 0.5)]
    named = {(e["pid"], e["tid"]) for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in spans} <= named


def test_a_findings_line_is_marked_where_it_runs():
    found = at_line_nine()
    events = trace_events(TIMELINE, found)["traceEvents"]
    rule = found.cards[0].rule
    assert [e["name"] for e in events if e["ph"] == "i"] == [f"finding: {rule}"]
    assert [e["name"] for e in events if e.get("args", {}).get("finding") == rule] == ["sgemm<float>", "train.py:9"]


def test_sarif_has_an_alert_for_each_line_and_declares_every_rule(tmp_path):
    found = at_line_nine()
    log = json.loads(json.dumps(sarif(found, tmp_path, "1.0"), allow_nan=False))
    (run,) = log["runs"]
    assert log["version"] == "2.1.0"
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == {f.rule for f in found.findings}
    mine = [r for r in run["results"] if r["ruleId"] == found.cards[0].rule]
    (place,) = [r["locations"][0]["physicalLocation"] for r in mine]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("train.py", 9)
    assert {r["level"] for r in run["results"]} <= {"warning", "note"}
    fired = {f.rule for f in found.findings if f.outcome is Outcome.FIRED}
    assert {r["ruleId"] for r in run["results"]} <= fired


def test_paths_below_the_checkout_are_told_from_there(tmp_path):
    found = samples.findings()
    lead = dataclasses.replace(found.of(found.cards[0].rule), sites=(f"{tmp_path}/lib/net.py:3 x", "/elsewhere/a.py:4"))
    found = dataclasses.replace(found, findings=tuple(lead if f.rule == lead.rule else f for f in found.findings))
    results = sarif(found, Path(tmp_path), "1.0")["runs"][0]["results"]
    uris = [
        r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in results if r["ruleId"] == lead.rule
    ]
    assert uris == ["lib/net.py", "elsewhere/a.py"]
