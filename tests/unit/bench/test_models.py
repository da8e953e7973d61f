"""The benchmark of whole trainings without a GPU: what of a search and of the peers' runs a row holds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from advisor import pipeline
from advisor.bench import fresh, models
from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.plan import Plan
from advisor.core.profile import ConvFact, ModelFacts, Spread, StepProfile
from advisor.core.verdict import Round, StackVerdict, TrialLog, Verdict
from advisor.profiling.beside.launcher import Exit
from advisor.runs import PROFILE_FILE
from advisor.trials import planfile, records

CONV = ConvFact(
    module="conv1", in_channels=3, out_channels=8, kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1,
    bias=False, input_shape=(64, 3, 32, 32),
)  # fmt: skip
LOSSES = {"plain": 2.0, "advisor": 2.1, "eager": 1.9, "compile": 2.0}


def profile(limit_us: float) -> StepProfile:
    return StepProfile(
        script="net.py", argv=(), created="", environment=Environment(), step_kind="optimizer", wall_us=None,
        step_us=Spread(median=9000.0, p10=9000.0, p90=9000.0, n=9), limit_us=limit_us,
        model=ModelFacts(batch_size=64, convs=(CONV,)),
    )  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")


def bench(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    kept: tuple[str, ...],
    profiled_with: tuple[str, ...],
    **more: Any,
) -> dict[str, Any]:
    """The row of a training whose search kept these, and whose last profile had those on."""
    run_dir = tmp_path / "run"
    storage.save(run_dir / "round-2" / PROFILE_FILE, profile(1500.0))
    stack = StackVerdict(
        passed=True, detail="losses alike", plain_us=(8000.0, 8200.0), stack_us=(1990.0, 2000.0, 2030.0), speedup=4.0,
        speedup_low=3.9, speedup_high=4.1, losses_plain=(LOSSES["plain"],) * 12, losses_stack=(LOSSES["advisor"],) * 10,
        kernels=("grouped/grouped_forward.cu",),
    )  # fmt: skip
    log = TrialLog(
        script="net.py", argv=(), seconds=100.0, stack=stack,
        verdicts=tuple(Verdict(transform=name, status="kept", reason="faster") for name in kept),
        rounds=(Round(number=1), Round(number=2, kept=profiled_with, folder="round-2")),
    )  # fmt: skip
    found = SimpleNamespace(profile=profile(4000.0), log=log, run_dir=run_dir)
    limits: list[float] = []

    def apply(*_: Any, **options: Any) -> Any:
        limits.append(options["options"].time_s)
        Path("left").write_text("by the search")  # in the folder that it runs in
        return found

    monkeypatch.setattr(pipeline, "apply", apply)

    def launch(command: object, session: Any, **_: object) -> Exit:
        folder = Path(session.run_dir)
        peer = "compile" if "compile" in [item.transform for item in session.kept] else "eager"
        times = {"eager": (4000.0, 4100.0, 4200.0), "compile": (3000.0,)}[peer]
        storage.save(
            folder / records.MEASURE_FILE,
            records.Measurement(step_us=times, losses=(LOSSES[peer],) * 12, complete=True),
        )
        return Exit(code=0)

    monkeypatch.setattr(fresh, "launch", more.get("launch", launch))
    target, baselines = tmp_path / "models.json", more.get("baselines", ("eager", "compile"))
    with contextlib.suppress(KeyboardInterrupt):
        models.run(
            pattern="resnet50",
            out=target,
            baselines=baselines,
            max_time_s=77.0,
            runs=more.get("runs"),
            say=lambda _: None,
        )
    assert limits == [77.0]
    row: dict[str, Any]
    (row,) = json.loads(target.read_text())["rows"]
    return row


def test_a_row_holds_the_search_and_its_peers(monkeypatch, machine, tmp_path) -> None:
    row = bench(monkeypatch, tmp_path, kept=("channels_last", "amp_bf16"), profiled_with=("amp_bf16",))
    assert (row["name"], row["pass"], row["shape"]) == ("resnet50_b256", "step", [64, 3, 32, 32])
    assert (row["dtype"], row["layout"]) == ("bfloat16", "nhwc")
    assert (row["plain_ms"], row["advisor_ms"], row["eager_ms"], row["compile_ms"]) == (8.1, 2.0, 4.1, 3.0)
    assert (row["spread"], row["n"]) == (pytest.approx(0.02), 3)
    assert row["error"] == pytest.approx(0.05)
    assert row["baseline_error"] == pytest.approx(0.05)
    assert row["limit_ms"] == 1.5
    assert row["advisor_images_per_s"] == pytest.approx(64 / 2e-3)
    assert row["launched"] == ["grouped/grouped_forward.cu"]
    assert set(row["kernel_sha"]) > set(row["launched"])


def test_a_limit_of_another_dtype_is_none(monkeypatch, machine, tmp_path) -> None:
    row = bench(monkeypatch, tmp_path, kept=("channels_last", "amp_bf16"), profiled_with=("channels_last",))
    assert row["limit_ms"] is None


def test_peers_that_were_not_asked_for_or_died_have_no_time(monkeypatch, machine, tmp_path) -> None:
    row = bench(
        monkeypatch,
        tmp_path,
        kept=("tf32",),
        profiled_with=("tf32",),
        baselines=("eager",),
        launch=lambda *_, **__: Exit(code=1),
    )
    assert (row["eager_ms"], row["compile_ms"], row["baseline_error"]) == (None, None, None)
    assert (row["dtype"], row["layout"]) == ("tf32", "nchw")


@pytest.mark.parametrize("told", [True, False])
def test_a_baseline_that_is_interrupted_costs_no_row(monkeypatch, machine, tmp_path, told) -> None:
    starts: list[object] = []

    def interrupted(*_: Any, **__: Any) -> Exit:
        starts.append(None)
        if told:
            return Exit(code=130, interrupted=True)
        raise KeyboardInterrupt

    row = bench(monkeypatch, tmp_path, kept=("tf32",), profiled_with=("tf32",), launch=interrupted)
    assert (row["plain_ms"], row["advisor_ms"], row["eager_ms"], row["compile_ms"]) == (8.1, 2.0, None, None)
    assert len(starts) == 1


def test_run_folders_are_left_where_asked(monkeypatch, machine, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"kept": ("tf32",), "profiled_with": ("tf32",)}
    bench(monkeypatch, tmp_path / "a", **given)
    bench(monkeypatch, tmp_path / "b", runs=Path("runs"), **given)
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("left")] == [Path("runs/resnet50_b256/left")]
    assert Path.cwd() == tmp_path
    (tmp_path / "file").write_text("")
    with pytest.raises(AdvisorError, match="cannot make"):
        bench(monkeypatch, tmp_path / "c", runs=Path("file"), **given)


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(AdvisorError) as caught:
        models.run(pattern="", out=None, baselines=(), max_time_s=1.0, say=print)
    assert caught.value.exit_code == ExitCode.GPU_REQUIRED


def on_file(path: Path, **changes: Any) -> models.ModelRow:
    """A row as an earlier search left it, of kernels that are others by now."""
    row = models.ModelRow(
        name="resnet50_b256", shape=(64, 3, 32, 32), dtype="bfloat16", layout="nhwc", script="imagenet.py", plain_ms=9.0,
        advisor_ms=3.0, eager_ms=5.0, compile_ms=4.0, limit_ms=1.5, spread=0.1, n=2, error=0.0, baseline_error=0.0,
        plain_images_per_s=1.0, advisor_images_per_s=1.0, speedup=3.0, speedup_low=2.9, speedup_high=3.1,
        kept=("channels_last", "amp_bf16", "grouped_conv"), trials=("tf32: reverted, slower",), losses="", apply_s=200.0, spent_s={},
        trial_s={}, kernel_sha={"grouped/grouped_forward.cu": "0" * 64}, launched=("grouped/grouped_forward.cu",), torch="2.11",
        date="2026-01-01",
    )  # fmt: skip
    row = dataclasses.replace(row, **changes)
    path.write_text(json.dumps({"rows": [{**storage.to_plain(row), "name": "of another net"}, storage.to_plain(row)]}))
    return row


def again(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    dropped: tuple[str, ...] = (),
    *,
    interrupted: bool = False,
    baselines: tuple[str, ...] = (),
) -> list[Plan]:
    """Run what has changed; the plans that were proved."""
    plans: list[Plan] = []

    def prove(words: tuple[str, ...], *, plan: Path, **_: Any) -> Any:
        plans.append(planfile.read(plan))
        stack = StackVerdict(
            passed=True, detail="losses alike", plain_us=(8000.0, 8200.0), stack_us=(1990.0, 2010.0), speedup=4.0,
            speedup_low=3.9, speedup_high=4.1, losses_plain=(2.0,) * 9, losses_stack=(2.1,) * 9,
            kernels=("grouped/grouped_forward.cu",),
        )  # fmt: skip
        verdicts = tuple(
            Verdict(transform=i.transform, status="reverted" if i.transform in dropped else "kept", reason="")
            for i in plans[-1].items
        )
        log = TrialLog(script="net.py", argv=(), seconds=60.0, stack=stack, verdicts=verdicts, interrupted=interrupted)
        return pipeline.ApplyResult(run_dir=tmp_path, exit_code=0, log=log, plan=plans[-1])

    def no_search(*_: Any, **__: Any) -> None:
        raise AssertionError("it was searched")

    monkeypatch.setattr(pipeline, "prove", prove)
    monkeypatch.setattr(pipeline, "apply", no_search)
    monkeypatch.setattr(fresh, "launch", lambda *_, **__: Exit(code=1))
    models.run(
        pattern="resnet50",
        out=tmp_path / "models.json",
        baselines=baselines,
        changed=True,
        max_time_s=77.0,
        say=lambda _: None,
    )
    return plans


def test_what_a_search_kept_is_timed_with_todays_kernels(monkeypatch, machine, tmp_path) -> None:
    known = on_file(tmp_path / "models.json", parameters={"grouped_conv": {"a": "b"}})
    (plan,) = again(monkeypatch, tmp_path, dropped=("amp_bf16",))
    assert [(i.transform, i.semantics, i.parameters) for i in plan.items] == [
        ("channels_last", "reassociated", {}), ("amp_bf16", "precision", {}), ("grouped_conv", "reassociated", {"a": "b"}),
    ]  # fmt: skip
    row, other = json.loads((tmp_path / "models.json").read_text())["rows"]
    assert (row["name"], other["name"]) == ("resnet50_b256", "of another net")
    assert (row["plain_ms"], row["advisor_ms"], row["eager_ms"], row["speedup"]) == (8.1, 2.0, None, 4.0)
    assert row["plain_images_per_s"] == pytest.approx(64 / 8.1e-3)
    assert row["kept"] == ["channels_last", "grouped_conv"]
    assert (row["apply_s"], row["searched"], row["trials"]) == (200.0, "2026-01-01", list(known.trials))
    assert row["date"] > "2026-01-01"
    assert not models.has_changed(row)
    assert again(monkeypatch, tmp_path) == []  # nothing has changed since
    assert len(again(monkeypatch, tmp_path, baselines=("eager",))) == 1  # but this was not measured


def test_the_search_is_as_old_as_it_was(monkeypatch, machine, tmp_path) -> None:
    on_file(tmp_path / "models.json", searched="2025-12-31")
    again(monkeypatch, tmp_path)
    assert json.loads((tmp_path / "models.json").read_text())["rows"][0]["searched"] == "2025-12-31"


def test_an_interrupted_proof_leaves_the_row_on_file(monkeypatch, machine, tmp_path) -> None:
    on_file(tmp_path / "models.json")
    before = (tmp_path / "models.json").read_text()
    with pytest.raises(KeyboardInterrupt):
        again(monkeypatch, tmp_path, interrupted=True)
    assert (tmp_path / "models.json").read_text() == before


def test_of_a_strict_training_nothing_with_fewer_bits_is_tried() -> None:
    strict = [words for words in models.SCRIPTS.values() if models.STRICT in words]
    assert len(strict) == 2
    for words in strict:
        left = models.skipped(words)
        assert {"amp_bf16", "amp_fp16", "tf32", "winograd_conv"} <= set(left)
        assert not {"exact_conv", "channels_last", "fused_optimizer"} & set(left)
    assert models.skipped(models.SCRIPTS["vgg16_b128"]) == ()
