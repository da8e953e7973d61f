"""The benchmark of whole trainings without a GPU: what of a search and of the peers' runs a row holds."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from advisor import pipeline
from advisor.bench import models
from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.profile import ConvFact, ModelFacts, Spread, StepProfile
from advisor.core.verdict import Round, StackVerdict, TrialLog, Verdict
from advisor.trials import records

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
    storage.save(run_dir / "round-2" / pipeline.PROFILE_FILE, profile(1500.0))
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
        limits.append(options["max_time_s"])
        Path("left").write_text("by the search")  # in the folder that it runs in
        return found

    monkeypatch.setattr(pipeline, "apply", apply)

    def launch(command: object, session: Any, **_: object) -> None:
        folder = Path(session.run_dir)
        peer = "compile" if "compile" in [item.transform for item in session.kept] else "eager"
        times = {"eager": (4000.0, 4100.0, 4200.0), "compile": (3000.0,)}[peer]
        storage.save(
            folder / records.MEASURE_FILE,
            records.Measurement(step_us=times, losses=(LOSSES[peer],) * 12, complete=True),
        )

    monkeypatch.setattr(models, "launch", more.get("launch", launch))
    target, baselines = tmp_path / "models.json", more.get("baselines", ("eager", "compile"))
    with contextlib.suppress(KeyboardInterrupt):
        models.run(
            pattern="resnet50",
            json_out=target,
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
        launch=lambda *_, **__: None,
    )
    assert (row["eager_ms"], row["compile_ms"], row["baseline_error"]) == (None, None, None)
    assert (row["dtype"], row["layout"]) == ("tf32", "nchw")


def test_a_baseline_that_is_interrupted_costs_no_row(monkeypatch, machine, tmp_path) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    row = bench(monkeypatch, tmp_path, kept=("tf32",), profiled_with=("tf32",), launch=interrupted)
    assert (row["plain_ms"], row["advisor_ms"], row["eager_ms"], row["compile_ms"]) == (8.1, 2.0, None, None)


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
        models.run(pattern="", json_out=None, baselines=(), max_time_s=1.0, say=print)
    assert caught.value.exit_code == ExitCode.GPU_REQUIRED
