"""A timeline as the report's page carries it: one compressed, base64 text that timeline.js reads.

Layout: a 4-byte length, that many bytes of JSON (names, details, keys, rows), zeros up to a multiple of 4, then a column after the
other over all events: start, end (in `unit` ns), name, detail (uint32 each), key, depth (uint8 each). Little-endian.
"""

from __future__ import annotations

import base64
import json
import sys
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from advisor.core.timeline import CALLS, IDLE, Timeline
from advisor.core.units import time_text
from advisor.reporting.breakdown import KIND_LABELS

MOST_NS = 2**32 - 1  # that a column holds
MAX_NAME, MAX_DETAIL = 200, 300
HOST_LABELS = {"module": "module", "line": "source line", "range": "range", "op": "operator", "call": "CUDA call"}
IDLE_LABELS = {
    "data": "idle: waiting for data",
    "launch": "idle: waiting for the host",
    "copy": "idle: waiting for copies",
    "sync": "idle: after a wait of the host",
    "other": "idle: other",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What the template needs."""

    number: int
    steps: int
    length: str
    events: int
    left_out: int
    data: str
    legend: tuple[tuple[str, str], ...]  # key of a colour, label


class _Texts:
    """Texts by number, each once."""

    def __init__(self, longest: int) -> None:
        self.longest, self.known = longest, dict[str, int]()

    def number(self, text: str) -> int:
        shown = text if len(text) <= self.longest else text[: self.longest] + "…"
        return self.known.setdefault(shown, len(self.known))


def drawn(timeline: Timeline | None) -> Drawn | None:
    """The timeline for the page; None where there is none."""
    if timeline is None or not timeline.events:
        return None
    keys = list(dict.fromkeys(_colour(row.kind, e.key) for row in timeline.rows for e in row.events))
    return Drawn(
        number=timeline.number,
        steps=timeline.steps,
        length=time_text(timeline.length_ns / 1e3),
        events=timeline.events,
        left_out=timeline.left_out,
        data=_packed(timeline, keys),
        legend=tuple((key, label) for key in keys if (label := _label(key))),
    )


def _colour(kind: str, key: str) -> str:
    return f"idle-{key}" if kind == IDLE else key


def _label(key: str) -> str:
    if key.startswith("idle-"):
        return IDLE_LABELS.get(key[len("idle-") :], key)
    return HOST_LABELS.get(key) or KIND_LABELS.get(key, key)


def _packed(timeline: Timeline, keys: list[str]) -> str:
    unit = max(1, -(-timeline.length_ns // MOST_NS))
    names, details = _Texts(MAX_NAME), _Texts(MAX_DETAIL)
    columns = [array("I") for _ in range(4)]
    small = [array("B") for _ in range(2)]
    rows = []
    for row in timeline.rows:
        rows.append({"name": row.name, "count": len(row.events), "levels": row.deepest + 1, "thin": row.kind == CALLS})
        for event in row.events:
            values = (
                event.start_ns // unit,
                event.end_ns // unit,
                names.number(event.name),
                details.number(event.detail),
            )
            for column, value in zip(columns, values, strict=True):
                column.append(value)
            small[0].append(keys.index(_colour(row.kind, event.key)))
            small[1].append(min(event.depth, 255))
    head = {
        "unit": unit,
        "length": timeline.length_ns,
        "names": list(names.known),
        "details": list(details.known),
        "keys": keys,
        "labels": [_label(key) for key in keys],
        "rows": rows,
    }
    return base64.b64encode(zlib.compress(_bytes(head, (*columns, *small)), 9)).decode()


def _bytes(head: object, columns: Iterable[array[int]]) -> bytes:
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    found = len(text).to_bytes(4, "little") + text
    found += bytes(-len(found) % 4)
    for column in columns:
        if sys.byteorder == "big":
            column.byteswap()
        found += column.tobytes()
    return found
