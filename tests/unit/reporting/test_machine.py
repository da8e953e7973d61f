from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace

import samples

from advisor.core.profile import StepProfile
from advisor.core.storage import from_plain
from advisor.reporting.machine import cell, markdown, proof_markdown, report_json


def test_json_is_stable_strict_and_complete():
    document = report_json(samples.resnet50(), samples.findings(), samples.trials())
    text = json.dumps(document, allow_nan=False)
    assert list(document) == ["schema_version", "type", "summary", "profile", "findings", "trials"]
    assert document["summary"]["kept"] == ["amp_bf16", "channels_last", "fused_bn_act"]
    assert document["summary"]["speedup"] == 3.101
    assert abs(sum(c["frac"] for c in document["summary"]["causes"]) - 1) < 1e-9
    assert from_plain(StepProfile, json.loads(text)["profile"]) == samples.resnet50()


def test_json_has_null_for_what_is_not_known():
    profile = replace(samples.cpu_run(), step_us=None, limit_us=math.nan, losses=(math.nan,))
    document = report_json(profile, None, None)
    json.dumps(document, allow_nan=False)
    assert document["summary"]["step_us"] is None
    assert document["summary"]["limit_frac"] is None
    assert document["findings"] is None


def test_markdown_tables():
    text = markdown(samples.resnet50(), samples.findings(), samples.trials())
    assert "| normalisation | 33.7 ms | 29 % | 40 % |" in text
    assert (
        "| channels\\_last layout | 8–52 % | 48–49 % | kept | faster beyond noise; its first step takes 800 ms longer, paid back after 16 steps |"
        in text
    )
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        widths = {line.replace("\\|", "").count("|") for line in rows}
        assert len(widths) <= 1, block


def test_markdown_escapes():
    text = markdown(*samples.hostile())
    assert "<script" not in text
    assert "<img" not in text
    assert cell("a|b\n`c` [x](y) <b>") == "a\\|b \\`c\\` \\[x\\](y) &lt;b&gt;"


def test_markdown_says_where_kept_changes_took_effect():
    log = samples.many_places()
    text = markdown(samples.resnet50(), None, log)
    assert text.count("<details>") == 1
    lines = text[text.index("<summary>fused batch norm, add and ReLU: 250 places, 120 unchanged</summary>") :]
    items = [line for line in lines.splitlines() if line.startswith("- ")]
    assert [item.partition(":")[0] for item in items[:2]] == ["- bn+relu, 167 places", "- bn+add+relu, 83 places"]
    assert items[0].count(".norm") == 20
    assert items[0].endswith(" and 147 more in trials.json")
    assert "- unchanged, no measurement on file, 20 places: stages.0.blocks.5.conv, " in text
    assert "stages.0.blocks.24.conv\n- unchanged, left to &lt;Inductor&gt; &amp; " in text
    assert "stages.0.blocks.25.conv (64), stages.0.blocks.26.conv (128), " in text
    assert len(items) == 6
    assert items == [line for line in proof_markdown(log).splitlines() if line.startswith("- ")]
    assert "<details>" not in markdown(samples.resnet50(), None, samples.many_places(0, 0))


def test_reports_import_neither_torch_nor_cupy():
    code = (
        "import sys, advisor.reporting.html, advisor.reporting.terminal, advisor.reporting.machine\n"
        "bad = {'torch', 'cupy', 'numpy'} & set(sys.modules)\nassert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
