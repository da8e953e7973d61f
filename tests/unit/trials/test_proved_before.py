"""A whole that was proved of the same workload on this machine is tried first; another workload, machine or kernel says nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from advisor.core.environment import Environment
from advisor.core.findings import Recommendation
from advisor.core.profile import ConvFact, InputStats, ModelFacts, Spread, StepProfile
from advisor.core.verdict import StackVerdict, TrialLog, Verdict
from advisor.profiling.beside.launcher import Exit, ScriptCommand
from advisor.trials import ledger, planfile, proved_before, search

CONV = ConvFact(
    module="Net.conv", in_channels=3, out_channels=8, kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1),
    groups=1, bias=False, input_shape=(32, 3, 64, 64), dtype="fp32",
)  # fmt: skip
PROFILE = StepProfile(
    script="train.py", argv=(), created="", step_kind="optimizer", wall_us=None,
    environment=Environment(device="cuda", gpu_name="NVIDIA H200", sm_arch=90, torch="2.11.0"),
    step_us=Spread(median=1000.0, p10=990.0, p90=1010.0, n=20),
    model=ModelFacts(roots=("Net",), parameters=1_000, convs=(CONV,), batch_size=32, optimizers=("SGD",)),
    input=InputStats(batch_dtype="fp32", batch_bytes=1_000),
)  # fmt: skip


def log(*kept: str, proved: bool = True) -> TrialLog:
    verdicts = tuple(Verdict(transform=name, status="kept", reason="") for name in kept)
    refused = Verdict(transform="cuda_graphs", status="reverted", reason="slower")
    stack = StackVerdict(passed=proved, detail="", speedup=2.0, speedup_low=1.9, speedup_high=2.1)
    return TrialLog(script="train.py", argv=(), verdicts=(*verdicts, refused), stack=stack)


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ledger.VARIABLE, str(tmp_path / "ledger.jsonl"))
    return tmp_path / "ledger.jsonl"


def remember(*kept: str, profile: StepProfile = PROFILE) -> None:
    whole = proved_before.entry(log(*kept), profile)
    assert whole is not None
    ledger.append([whole])


def candidates(*names: str) -> list[Recommendation]:
    return [Recommendation(transform=name) for name in names]


def test_what_was_proved_comes_first_and_the_others_behind_it() -> None:
    remember("tf32")
    remember("amp_bf16", "channels_last")
    # Another project's script, and another name of the class: the same layers, shapes and batch.
    again = replace(PROFILE, script="other.py", model=replace(PROFILE.model, roots=("Theirs",)))
    known = proved_before.find(again)
    assert known is not None
    assert known.proved == ("amp_bf16", "channels_last")  # the latest
    asked = candidates("channels_last", "amp_bf16", "cuda_graphs", "fused_optimizer")
    assert proved_before.others(known, asked) == ("cuda_graphs", "fused_optimizer")
    assert "2.00× (1.90 to 2.10)" in proved_before.told(known)
    # One alone is no whole: everything that fits is tried first, as ever.
    assert proved_before.others(known, candidates("amp_bf16", "cuda_graphs")) == ()
    assert ledger.read() == ()  # predictions are other lines


@pytest.mark.parametrize(
    "other",
    [
        replace(PROFILE, environment=replace(PROFILE.environment, torch="2.12.0")),
        replace(PROFILE, environment=replace(PROFILE.environment, gpu_name="NVIDIA H100")),
        replace(PROFILE, model=replace(PROFILE.model, batch_size=64)),
        replace(PROFILE, model=replace(PROFILE.model, optimizers=("Adam",))),
        replace(PROFILE, model=replace(PROFILE.model, convs=(replace(CONV, input_shape=(32, 3, 96, 96)),))),
        replace(PROFILE, model=ModelFacts()),
    ],
)
def test_another_workload_or_machine_says_nothing(other: StepProfile) -> None:
    remember("amp_bf16", "channels_last")
    assert proved_before.find(other) is None


def test_other_kernels_and_a_broken_line_say_nothing(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember("amp_bf16", "channels_last")
    with own_file.open("a") as stream:
        stream.write('{"date": "2026", "machine"\n')
    assert proved_before.find(PROFILE) is not None
    monkeypatch.setattr(planfile, "kernels_hash", lambda: "other")
    assert proved_before.find(PROFILE) is None


def test_what_is_not_proved_is_not_remembered() -> None:
    assert proved_before.entry(log("amp_bf16", proved=False), PROFILE) is None
    assert proved_before.entry(log(), PROFILE) is None
    assert proved_before.entry(log("amp_bf16"), replace(PROFILE, model=ModelFacts())) is None


def test_a_search_gives_its_processes_what_is_known(tmp_path: Path) -> None:
    remember("amp_bf16", "channels_last")
    said: list[str] = []
    script = tmp_path / "train.py"
    script.write_text("")
    found = search.begin(
        ScriptCommand.parse([str(script)]),
        PROFILE,
        run_dir=tmp_path,
        say=said.append,
        launch=lambda *a, **o: Exit(code=0),
    )
    orders = found.processes.orders(candidates("amp_bf16", "channels_last", "cuda_graphs"))
    assert orders["later"] == ("cuda_graphs",)
    assert any("that is tried first" in line for line in said)
