"""Kept changes written as source: the diff is what a person would write, it parses, and git takes it."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from advisor.core.errors import AdvisorError
from advisor.core.plan import Plan, PlanItem
from advisor.core.transform_table import ROWS
from advisor.trials import as_source
from advisor.trials.snippets import SNIPPETS

SCRIPT = """\
import torch
from torch import nn, optim
from torch.utils.data import DataLoader


def main():
    model = nn.Conv2d(3, 8, 3).cuda()
    optimizer = optim.SGD(
        model.parameters(),
        lr=0.1,  # as in the paper
        foreach=False,
    )
    loader = DataLoader(range(10), batch_size=2, shuffle=True)
    for epoch in range(3):
        total = 0.0
        for images, labels in loader:
            images, labels = images.cuda(), labels.cuda()
            optimizer.zero_grad(set_to_none=False)
            outputs = model(images)
            loss = nn.functional.cross_entropy(outputs, labels)
            loss.backward()
            optimizer.step()
            total += loss.item() * images.size(0)


main()
"""


def plan(*transforms, **parameters):
    items = [PlanItem(transform=t, status="kept", parameters=parameters) for t in transforms]
    return Plan(script="train.py", argv=(), created="", items=(*items, PlanItem(transform="tf32", status="reverted")))


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    return Path("train.py")


def added(found):
    return [line[1:].strip() for line in found.diff().splitlines() if line.startswith("+") and line[1:2] != "+"]


@pytest.mark.parametrize(
    ("transform", "parameters", "lines"),
    [
        ("cudnn_benchmark", {}, ["", "torch.backends.cudnn.benchmark = True"]),
        ("fused_optimizer", {}, ["foreach=None, fused=True,"]),
        ("set_to_none", {}, ["optimizer.zero_grad(set_to_none=True)"]),
        ("loader_workers", {"workers": "3", "persistent": "true"},
         ["loader = DataLoader(range(10), batch_size=2, shuffle=True, num_workers=3, persistent_workers=True)"]),
        ("prefetch", {}, ["loader = DataLoader(range(10), batch_size=2, shuffle=True, pin_memory=True)",
                          "images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)"]),
        ("channels_last", {}, ["model = model.to(memory_format=torch.channels_last)",
                               "images = images.to(memory_format=torch.channels_last)"]),
        ("amp_bf16", {}, ["with torch.autocast(images.device.type, dtype=torch.bfloat16):", "outputs = model(images)",
                          "loss = nn.functional.cross_entropy(outputs, labels)"]),
        ("compile", {}, ["model.compile()"]),
        ("defer_sync", {}, ["total += loss.detach() * images.size(0)"]),
    ],
)  # fmt: skip
def test_each_change_is_what_a_person_would_write(script, transform, parameters, lines):
    found = as_source.write(plan(transform, **parameters), script)
    assert (found.done, found.left, added(found)) == ((transform,), {}, lines)
    assert script.read_text() == SCRIPT


def test_autocast_ends_where_the_loss_is_computed(script):
    script.write_text(
        SCRIPT.replace("            loss.backward()", "            print(outputs)\n            loss.backward()")
    )
    after = as_source.write(plan("amp_bf16"), script).after
    assert "                loss = nn.functional" in after
    assert "\n            print(outputs)" in after


def test_all_of_them_together_parse_and_git_applies_the_diff(script):
    found = as_source.write(plan(*as_source.WRITERS, "cuda_graphs", workers="2"), script)
    assert set(found.done) == set(as_source.WRITERS)
    assert set(found.left) == {"cuda_graphs"}
    ast.parse(found.after)
    if shutil.which("git"):
        subprocess.run(["git", "apply", "-"], input=found.diff(), text=True, check=True)
        assert script.read_text() == found.after


@pytest.mark.parametrize(
    ("text", "transform", "says"),
    [
        ("x = 1\n", "amp_bf16", "no loop"),
        ("x = 1\n", "tf32", "import torch"),
        ("loader = DataLoader(data, **options)\n", "loader_workers", "a dict"),
        ("optimizer = mine.SGD(p)\n", "fused_optimizer", "no torch.optim"),
        (SCRIPT.replace("model(images)", "step(images)"), "channels_last", "does not call a model"),
        (SCRIPT.replace("loss.item()", "float(loss)"), "defer_sync", "no running sum"),
    ],
)
def test_what_is_not_found_is_left_with_its_reason(script, text, transform, says):
    script.write_text(text)
    found = as_source.write(plan(transform), script)
    assert (found.done, found.diff()) == ((), "")
    assert says in found.left[transform]


def test_a_script_that_is_no_python_is_one_clear_line(script):
    script.write_text("def (")
    with pytest.raises(AdvisorError, match="cannot be read as Python"):
        as_source.write(plan("tf32"), script)


def test_the_python_of_a_plan_parses_and_leaves_the_rest_to_advisor():
    text = as_source.as_python(plan(*as_source.WRITERS, "cuda_graphs"), "plan.yaml")
    ast.parse(text)
    assert 'advisor.enable("plan.yaml")' in text
    assert "advisor.enable" not in as_source.as_python(plan("channels_last"), "plan.yaml")


def test_the_python_of_a_plan_for_cupy_alone_needs_no_torch():
    text = as_source.as_python(plan("cupy_tf32", "cupy_graphs"), "plan.yaml")
    ast.parse(text)
    assert "CUPY_TF32=1" in text
    assert "import torch" not in text
    assert 'advisor.enable("plan.yaml")' in text


def test_the_python_of_a_plan_has_the_scripts_own_optimizer(script, tmp_path):
    text = as_source.as_python(plan("fused_optimizer"), "plan.yaml", script)
    assert "optimizer = optim.SGD(model.parameters(), lr=0.1, fused=True)" in text
    assert "SGD(" not in as_source.as_python(plan("fused_optimizer"), "plan.yaml", tmp_path / "gone.py")


def test_autocast_is_for_the_device_of_the_model_where_the_batch_has_no_name(script):
    script.write_text(SCRIPT.replace("model(images)", "model(images.float())"))
    after = as_source.write(plan("amp_bf16"), script).after
    assert "with torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16):" in after


def test_every_change_that_is_written_is_in_the_table():
    assert set(as_source.WRITERS) <= set(SNIPPETS) <= set(ROWS)
