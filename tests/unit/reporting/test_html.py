from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import samples

from advisor.core.profile import StepProfile
from advisor.reporting.html import MAX_PLACES, json_script, report_html, web_address

VOID = {"meta", "br", "wbr", "img", "input", "link", "hr"}


class Page(HTMLParser):
    """Collects tags, attributes, text and script bodies, and checks that elements nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def applied() -> str:
    return report_html(samples.resnet50(), samples.findings(), samples.trials())


def test_same_run_same_bytes(applied):
    assert report_html(samples.resnet50(), samples.findings(), samples.trials()) == applied


def test_it_loads_nothing(applied):
    page = Page(applied)
    for tag, attrs in page.tags:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base")
        assert "src" not in attrs
        if "href" in attrs:
            assert tag == "a"
            assert attrs["href"].startswith(("#", "https://"))
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttpRequest", applied)


def test_sections_and_findings(applied):
    text = " ".join(Page(applied).text.split())
    for part in (
        "Proved: 3.10× the plain script's speed (3.05 to 3.14), 3 of 9 changes kept.",
        "advisor run train_imagenet.py --arch resnet50 --batch-size 256",
        "Effect passed 53 of 53 convolutions ran NHWC kernels",
        "Numerics failed loss 7.31 at step 14",
        "Timing undecided",
        "Pays off after 16 steps",
        "Without it the plan is 25–27 % of the step slower.",
        "Lost without it",
        "no activation follows 1 place layer1.0.downsample.1",
        "idle: waiting for copies",
        "train_imagenet.py:81",
        "5 quiet rules: nothing found",
        "2 rules not evaluated: something is missing",
        "comm_exposed_frac: needs more than one process",
        "Not available (NVML refused throttle reasons (not supported)): throttled_frac",
        "Launches with a device record99.8 %",
        "median SM clock over the maximum SM clock",
        "checkpoint.pth (diverted from checkpoint.pth)",
    ):
        assert part in text, part


def test_trials_are_left_out_of_a_profile():
    text = report_html(samples.resnet50(), samples.findings(), None)
    assert 'id="trials"' not in text
    assert "advisor apply --auto train_imagenet.py" in samples.whole(text)


def test_every_table_has_headers_and_every_chart_a_label(applied):
    page = Page(applied)
    assert all(a.get("aria-label") for t, a in page.tags if t == "svg")
    assert all(a.get("scope") in ("col", "row") for t, a in page.tags if t == "th")
    assert all(a.get("aria-label") for t, a in page.tags if a.get("role") == "region")


def test_names_stay_text():
    profile, findings, log = samples.hostile()
    html = report_html(profile, findings, log)
    page = Page(html)
    assert [a for t, a in page.tags if t == "script"] == [{"type": "application/json", "id": "data"}, {}]
    assert not [t for t, _ in page.tags if t == "img"]
    assert not [a for _, a in page.tags if any(name.startswith("on") for name in a)]
    assert not [a for _, a in page.tags if a.get("href", "#")[:1] != "#" and not a["href"].startswith("https://")]
    assert samples.HOSTILE.split("\x1b")[0] in page.text  # shown as it is


def test_embedded_data_cannot_leave_its_element_and_parses():
    profile, findings, log = samples.hostile()
    page = Page(report_html(profile, findings, log))
    data = json.loads(page.scripts[0])
    assert data["script"] == samples.HOSTILE
    assert "<" not in str(json_script({"a": "</script><!--"}))


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("https://a/b", True),
        ("http://a", True),
        ("javascript:alert(1)", False),
        ("https://a b", False),
        ("data:x", False),
    ],
)
def test_only_web_addresses_become_links(text, link):
    assert web_address(text) is link


def test_three_thousand_kernels_stay_small_and_say_what_is_left_out():
    profile = samples.resnet50()
    long = "<" + "std::array<char*, 2ul>, " * 400 + ">"
    rows = tuple(
        replace(r, name=f"{r.name}{long}{i}", module=f"{r.module}.{i}" if r.module else "")
        for i in range(9)
        for r in profile.kernels
    )
    assert len(rows) > 3000
    html = report_html(replace(profile, kernels=rows), samples.findings(), samples.trials())
    assert len(html.encode()) < 1_500_000
    assert f"{len(rows) - 500:,} more rows in profile.json" in html


def test_runs_with_little_in_them():
    assert "AMD EPYC" in report_html(samples.cpu_run(), None, None)
    empty = StepProfile(
        script="x.py", argv=(), created="", environment=replace(samples.LAPTOP, copy_gbps=0.0, matrix_tflops={}),
        step_kind="none", step_us=None, wall_us=None, complete=False,
    )  # fmt: skip
    text = Page(report_html(empty, None, replace(samples.trials(), verdicts=(), stack=None, complete=False))).text
    assert "This run is incomplete" in text
    assert "The search did not finish" in text


def test_script_is_small(applied):
    assert len(Page(applied).scripts[1].encode()) <= 5_000


def test_a_finding_says_the_whole_command_that_tries_it(applied):
    assert "<code>advisor apply --auto --only amp_bf16 train_imagenet.py --arch resnet50" in samples.whole(applied)


def test_on_a_cpu_an_operator_is_named_once():
    text = report_html(samples.cpu_run(), None, None)
    assert "One row is one operator of a module, phase" in text
    assert "One row is one kernel and operator of a module" in report_html(samples.resnet50(), None, None)


def test_every_place_is_listed_and_each_reason_said_once():
    log = samples.many_places()
    html = report_html(samples.resnet50(), samples.findings(), log)
    text = " ".join(Page(html).text.split())
    fused = next(v for v in log.verdicts if len(v.matched) == 250)
    assert not [path for entry in fused.matched + fused.unmatched if (path := entry.partition(": ")[0]) not in text]
    assert "Took effect on 250 places bn+relu 167 places stages.0.blocks.0.norm stages.0.blocks.1.norm" in text
    left = text[text.index("Unchanged: 120 places") :]
    reasons = (
        "the norm behind it has no use for it 60 places",
        "64–256 channels in, 32 out: cuDNN is faster 35 places stages.0.blocks.25.conv 64 stages.0.blocks.26.conv 128",
        "no measurement on file 20 places",
        'left to <Inductor> & "others" {0} 5 places',
    )
    assert [left.count(reason) for reason in reasons] == [1, 1, 1, 1]
    assert sorted(reasons, key=left.index) == list(reasons)
    assert "<Inductor>" not in html


def test_more_places_than_a_page_holds_are_counted():
    html = report_html(samples.resnet50(), None, samples.many_places(3 * MAX_PLACES, 0))
    assert "bn+relu</b>" in html
    assert Page(html).text.count(".norm\n") == 2 * MAX_PLACES
    assert "and 1,000 more in trials.json" in html


def test_a_change_without_places_has_no_list_of_them():
    log = samples.many_places(0, 0)
    text = report_html(samples.resnet50(), None, replace(log, verdicts=log.verdicts[2:3]))
    assert "fused batch norm" in text
    assert "Took effect" not in text
    assert "as before" not in text


def test_a_command_breaks_between_its_words_alone(applied):
    """A browser breaks "--auto" behind its dashes, and a phone showed "-" and "-auto" on two lines."""
    assert '<span class="word">--auto</span> ' in applied
    assert re.search(r"\.word \{[^}]*display: inline-block", applied)


def test_a_finding_that_asks_for_nothing_has_no_result():
    """Steps that vary widely were "Result: bit-equal": of what?"""
    found = samples.findings()
    fired = replace(found.findings[0], transform="", gain=None, severity="high")
    cards = tuple(card for card in found.cards if card.rule == fired.rule)
    text = report_html(samples.resnet50(), replace(found, findings=(fired,), cards=cards), None)
    assert "For you to decide." in text
    assert "Result:" not in text


def test_a_long_name_breaks_between_its_parts(applied):
    """`downsamp` and `le.1`, and `vectorized_ele` and `mentwise_kerne`, stood on two lines."""
    assert "<code>layer1.<wbr>0.<wbr>" in applied or "<code>ResNet.<wbr>layer1" in applied
