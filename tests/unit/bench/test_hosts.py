"""What a step costs the host, with the kernels and without: which networks, what is written and told. No GPU: stand-ins run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pipelines
import pytest
import torch

from advisor.bench import hosts, results, timing
from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode
from benchmark_pages import hosts_section


def row(name: str, plain_ms: float = 4.0, advisor_ms: float = 2.0) -> hosts.HostRow:
    return hosts.HostRow(
        name=name,
        shape=(4, 3, 64, 64),
        dtype="bfloat16",
        layout="nhwc",
        plain_ms=plain_ms,
        advisor_ms=advisor_ms,
        plain_spread=0.05,
        advisor_spread=0.04,
        n=40,
        ran={"batchnorm_act": 20, "pooling": 2},
        torch="2.11",
        date="2026-11-25",
    )


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AdvisorError, match="no CUDA GPU") as refused:
        hosts.run(pattern="", out=None, say=print)
    assert refused.value.exit_code == ExitCode.GPU_REQUIRED


def test_without_torchvision_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(AdvisorError, match="does not import") as refused:
        hosts.run(pattern="", out=None, say=print)
    assert refused.value.fix == "pip install torchvision"


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU's stand-in, on which each network takes as long as its row says; returns those that were measured."""
    measured: list[str] = []

    def measure(name: str, model: torch.nn.Module, *, device: str) -> hosts.HostRow:
        assert isinstance(model, torch.nn.Module)
        measured.append(name)
        return row(name)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(hosts, "measure", measure)
    return measured


def test_what_no_network_is_named_like_is_refused(on_a_gpu: list[str]) -> None:
    with pytest.raises(AdvisorError, match="nothing is named like 'vit'"):
        hosts.run(pattern="vit", out=None, say=print)


def test_each_network_goes_on_file_in_order_and_others_stay(
    on_a_gpu: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipelines.package("torchvision.models")
    file = tmp_path / "hosts.json"
    results.write(file, "hosts", [row("vgg11", 8.0), row("resnet18", 9.0)])
    assert hosts.run(pattern="shufflenet", out=file, say=print) == ExitCode.OK
    assert hosts.run(pattern="resnet18", out=file, say=print) == ExitCode.OK
    assert on_a_gpu == ["shufflenet_v2_x1_0", "resnet18"]
    document = json.loads(file.read_text())
    assert [(found["name"], found["plain_ms"]) for found in document["rows"]] == [
        ("resnet18", 4.0),
        ("vgg11", 8.0),
        ("shufflenet_v2_x1_0", 4.0),
    ]
    assert "resnet18             as written   4.00 ms  with the kernels   2.00 ms  2.00 x" in capsys.readouterr().out


def test_every_network_is_torchvision_s() -> None:
    models = pipelines.package("torchvision.models")
    assert all(hasattr(models, name) for name in hosts.NETWORKS)


def test_steps_take_turns_with_gradients_cleared_and_are_timed_behind_the_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = torch.nn.Linear(2, 2)
    ran: list[Any] = []

    def step(name: str) -> None:
        ran.append((name, model.weight.grad))
        model(torch.ones(1, 2)).sum().backward()

    steps = {"plain": lambda: step("plain"), "advisor": lambda: step("advisor")}
    times = timing.host(steps, warmup=hosts.WARMUP, rounds=3, before=model.zero_grad)
    assert [spread.n for spread in times.values()] == [3, 3]
    assert all(spread.p10 > 0 for spread in times.values())
    assert ran == [("plain", None), ("advisor", None)] * (hosts.WARMUP + 3)


def test_a_network_in_which_no_kernel_ran_is_not_measured() -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * hosts.SIZE**2, 1000))
    with pytest.raises(AdvisorError, match="linear: no kernel ran"):
        hosts.measure("linear", net, device="cpu")


def test_the_section_has_a_line_a_network_and_nothing_without() -> None:
    told = hosts_section.section(
        [storage.to_plain(row("resnet18")), storage.to_plain(row("vgg11", 3.0, 3.3))]
    ).splitlines()
    assert told[-2:] == [
        "| resnet18 | 22 | 4.00 | 5% | 2.00 | 4% | 2.00 | 2026-11-25 |",
        "| vgg11 | 22 | 3.00 | 5% | 3.30 | 4% | 0.91 | 2026-11-25 |",
    ]
    assert hosts_section.section([]) == ""
