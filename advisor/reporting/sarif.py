"""Findings that name a line of source, as SARIF 2.1.0: what GitHub code scanning and editors read."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from advisor.core.findings import Finding, Findings, Outcome
from advisor.reporting import numbers

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_PLACE = re.compile(r"^(?P<file>[^\s:]+\.py):(?P<line>\d+)")


def sarif(findings: Findings | None, root: Path, version: str) -> dict[str, Any]:
    """A SARIF log. Every rule that was asked is declared, so that an alert closes once its rule is quiet. Advice is never an error.

    Args:
        version: advisor's own.
        root: paths below it are told from there, as code scanning needs them.
    """
    asked = findings.findings if findings is not None else ()
    fired = [f for f in asked if f.outcome is Outcome.FIRED]
    driver = {
        "name": "advisor",
        "version": version,
        "rules": [_rule(f) for f in sorted(asked, key=lambda f: f.rule)],
    }
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": [r for f in fired for r in _results(f, root)]}],
    }


def _rule(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.rule,
        "shortDescription": {"text": finding.title},
        "fullDescription": {"text": finding.rationale or finding.title},
        "defaultConfiguration": {"level": _level(finding)},
        "properties": {"tags": ["performance", finding.area]},
    }


def _level(finding: Finding) -> str:
    return "warning" if finding.severity in ("high", "medium") else "note"


def _results(finding: Finding, root: Path) -> list[dict[str, Any]]:
    """One for each file and line that the finding names."""
    places = dict.fromkeys((found["file"], int(found["line"])) for s in finding.sites if (found := _PLACE.match(s)))
    gain = f" It could save {numbers.gain(finding.gain)} of the step." if finding.gain is not None else ""
    return [
        {
            "ruleId": finding.rule,
            "level": _level(finding),
            "message": {"text": f"{finding.message or finding.title}{gain}"},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": _uri(file, root), "uriBaseId": "%SRCROOT%"},
                        "region": {"startLine": line},
                    }
                }
            ],
            "partialFingerprints": {"advisor/v1": _fingerprint(finding.rule, _uri(file, root), line)},
        }
        for file, line in places
    ]


def _uri(file: str, root: Path) -> str:
    path = Path(file)
    try:
        return (
            (path.resolve() if path.is_absolute() else path).relative_to(root if path.is_absolute() else "").as_posix()
        )
    except ValueError:
        return path.as_posix().lstrip("/")


def _fingerprint(rule: str, uri: str, line: int) -> str:
    return hashlib.sha256(f"{rule}\0{uri}\0{line}".encode()).hexdigest()[:32]
