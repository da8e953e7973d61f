"""The report's timeline: what the page carries, and, in Chromium where there is one, that it is drawn without a fault."""

from __future__ import annotations

import base64
import json
import zlib
from array import array
from pathlib import Path

import browser
import pytest
import samples

from advisor.core.timeline import HOST, IDLE, STREAM, Event, Timeline, TimelineRow
from advisor.reporting.html import report_html
from advisor.reporting.timeline import drawn

STEP = Timeline(
    number=2,
    steps=3,
    length_ns=5_000_000_000,  # more than four bytes hold
    rows=(
        TimelineRow(IDLE, "idle GPU", (Event(0, 900, "no batch", "data"),)),
        TimelineRow(
            STREAM, "stream 7", (Event(1_000, 4_999_999_999, "<script>alert(1)</script>", "conv", 0, "conv1"),)
        ),
        TimelineRow(
            HOST, "training thread", (Event(0, 800, "conv1 (Conv2d)", "module"), Event(10, 90, "aten::mm", "op", 1)), 1
        ),
    ),
)


def unpacked(data: str):
    raw = zlib.decompress(base64.b64decode(data))
    size = int.from_bytes(raw[:4], "little")
    head = json.loads(raw[4 : 4 + size])
    at, count = 4 + size + -(4 + size) % 4, sum(row["count"] for row in head["rows"])
    columns = [array("I", raw[at + 4 * count * i : at + 4 * count * (i + 1)]) for i in range(4)]
    at += 16 * count
    return head, columns, [list(raw[at + count * i : at + count * (i + 1)]) for i in range(2)]


def test_the_page_carries_every_event():
    found = drawn(STEP)
    head, (starts, ends, names, details), (keys, depths) = unpacked(found.data)
    assert (head["unit"], found.events, depths) == (2, 4, [0, 0, 0, 1])
    assert list(zip(starts, ends, strict=True)) == [(0, 450), (500, 2_499_999_999), (0, 400), (5, 45)]
    assert [head["names"][i] for i in names][1:3] == ["<script>alert(1)</script>", "conv1 (Conv2d)"]
    assert head["details"][details[1]] == "conv1"
    assert [head["keys"][i] for i in keys] == ["idle-data", "conv", "module", "op"]
    assert dict(found.legend)["idle-data"] == "idle: waiting for data"


def test_a_hundred_thousand_events_stay_below_two_megabytes():
    rows = tuple(
        TimelineRow(STREAM, f"stream {s}", tuple(Event(i * 977 + s, i * 977 + 500 + i % 97, f"kernel{i % 300}", "conv", 0, f"layer{i % 90}")
                                         for i in range(10_000)))
        for s in range(10)
    )  # fmt: skip
    step = Timeline(number=1, steps=1, length_ns=10_000_000, rows=rows)
    page = report_html(samples.resnet50(), samples.findings(), samples.trials(), step)
    assert len(page.encode()) < 2_000_000


def test_a_page_without_a_trace_has_no_timeline():
    assert drawn(None) is None
    assert 'id="timeline"' not in report_html(samples.resnet50(), samples.findings(), None)


# Numbers in segments of the bars that stand partly outside of these. Seen: "normalisation 11", of 11 %.
CUT_NUMBERS = """[...document.querySelectorAll('.bar span')].filter(s => {
  const r = document.createRange(); r.selectNodeContents(s);
  const box = s.getBoundingClientRect();
  return [...r.getClientRects()].some(w => w.width > 2 && w.top < box.bottom && w.right > box.right + 1);
}).map(s => s.textContent)"""


@pytest.mark.long
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 400])
def test_chromium_shows_it_without_a_fault(tmp_path: Path, width: int, dark: bool):
    chromium = browser.executable()
    if chromium is None:
        pytest.skip("no Chromium here")
    file = tmp_path / "page.html"
    file.write_text(report_html(samples.resnet50(), samples.findings(), samples.trials(), STEP), encoding="utf-8")
    with browser.page(chromium) as page:
        page.open(file.as_uri(), width=width, dark=dark, mobile=width < 600)
        page.run(
            "new Promise(done => { const t = setInterval(() => { if (tl.dataset.ready) { clearInterval(t); requestAnimationFrame(() => requestAnimationFrame(done)); } }, 20); })"
        )
        assert page.run("tl.dataset.ready") == "4"
        colours = page.run(
            "(() => { const c = tl.firstElementChild, d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, s = {};"
            "for (let i = 0; i < d.length; i += 4) s[d[i] << 16 | d[i + 1] << 8 | d[i + 2]] = 1; return Object.keys(s).map(Number); })()"
        )
        shown = {"conv": 0x4F86E8, "module": 0x5D738F} if dark else {"conv": 0x2563C9, "module": 0x41536B}
        assert set(shown.values()) <= set(colours)
        page.run(
            "(() => { const s = document.getElementById('tl-search'); s.value = 'mm'; s.dispatchEvent(new Event('input')); })()"
        )
        page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert page.run("document.getElementById('tl-found').textContent").startswith("1 found")
        assert page.run("document.documentElement.scrollWidth") == width  # nothing sticks out at the side
        assert page.run(CUT_NUMBERS) == []
        page.printed(tmp_path / "page.pdf")
        assert page.faults == []
