"""The table of convolutions as text, Markdown and JSON."""

from __future__ import annotations

import samples

from advisor.reporting import convolutions


def test_all_forms_hold_every_product() -> None:
    resnet50 = samples.resnet50()
    told = convolutions.conv_json(resnet50)
    assert told["schema_version"] == convolutions.CONV_SCHEMA_VERSION
    count = len(told["products"])
    assert count > convolutions.SHOWN
    assert {p["direction"] for p in told["products"]} == {"forward", "data gradient", "weight gradient"}
    text = convolutions.conv_text(resnet50, 100)
    assert max(map(len, text.splitlines())) <= 104
    narrow = convolutions.conv_text(resnet50, 80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert "\n    tensor cores" in narrow  # what has no column there is told below
    assert f"Shown: the {convolutions.SHOWN} longest" in text
    assert "Shown" not in convolutions.conv_text(resnet50, 100, everything=True)
    assert "implicit GEMM" in text
    assert "convert" in text
    assert len(convolutions.conv_markdown(resnet50, everything=True).splitlines()) == count + 2
