"""The benchmark of several GPUs without one: what a case starts, and what of its output and its neighbours a row holds."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from advisor.bench import results, scaling, scaling_cases
from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.profile import StepProfile
from advisor.distributed import place
from advisor.profiling.beside.launcher import Exit
from advisor.trials import records

EXAMPLES = Path("/checkout/docs/examples")
KEPT = [
    {"name": name, "kept": ["amp_bf16"], "parameters": {}}
    for name in (*scaling_cases.TRAININGS, *scaling_cases.WITH_LOADERS)
]


def case(way: str, ranks: int, sent: str = "") -> scaling_cases.ScalingCase:
    return scaling_cases.ScalingCase(training="resnet50_b256", way=way, ranks=ranks, sent=sent)


def test_each_gpu_has_the_same_batch_however_it_is_started() -> None:
    """The script is told the batch of all where `--gpus` divides it, and the batch of each where torchrun starts it."""
    for way, ranks, told in (
        (scaling_cases.ONE, 1, 256),
        (scaling_cases.PARTS, 4, 1024),
        (scaling_cases.WHOLE, 2, 512),
        (scaling_cases.TORCHRUN, 4, 256),
    ):
        words, batch = scaling_cases.words_of(case(way, ranks), EXAMPLES)
        assert (words[words.index("--batch-size") + 1], batch) == (str(told), 256)
        assert "--device-data" not in words, "ranks divide what a loader has loaded"
        steps = int(words[words.index("--train-size") + 1]) / (256 * ranks)
        assert steps == scaling_cases.STEPS


def test_a_name_tells_cases_apart_and_part_of_one_chooses_no_other() -> None:
    names = [one.name for one in scaling_cases.cases(4)]
    assert len(set(names)) == len(names)
    assert [name for name in names if "resnet50_b256 parts x4" in name] == ["resnet50_b256 parts x4"]
    assert all(one.ranks <= 2 for one in scaling_cases.cases(2))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What is started, on a machine of two GPUs; a rank adds 80 images a second, and an evaluation falls among the steps."""
    started: list[Any] = []

    def launch(command: Any, session: Any, *, on_progress: Any = None, output: Path, **_: Any) -> Exit:
        started.append((command, session))
        if session.mode == "measure":
            ranks = int(dict(command.variables).get(place.RANKS_VARIABLE, 1))
            step_us = 2.56e6 if ranks == 1 else 3.2e6
            storage.save(
                Path(session.run_dir) / records.MEASURE_FILE,
                records.Measurement(
                    every_us=(*[step_us] * 40, 9e9),
                    held=(*[""] * 40, "evaluation"),
                    losses=(7.1, 7.0, 6.9),
                    applied=tuple(item.transform for item in session.kept),
                    left_out={"cuda_graphs": "no CUDA GPU"} if session.kept else {},
                ),
            )
        return Exit(code=0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    monkeypatch.setattr(scaling, "launch", launch)
    monkeypatch.setattr(results, "folder", lambda: tmp_path)
    monkeypatch.setattr(scaling.environment, "probe", lambda: None)
    (tmp_path / "models.json").write_text(json.dumps({"rows": KEPT}))
    return started


def rows(tmp_path: Path) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads((tmp_path / "scaling.json").read_text())["rows"]}


def test_a_row_is_beside_that_of_one_gpu_whichever_was_measured_first(launched: list[Any], tmp_path: Path) -> None:
    for pattern in ("resnet50_b256 parts x2", "resnet50_b256 one x1"):
        scaling.run(pattern=pattern, out=None, limit_s=60.0, runs=None, say=lambda _: None)
    found = rows(tmp_path)
    assert found["resnet50_b256 one x1"]["images_per_s"] == 100.0  # the evaluation does not count
    several = found["resnet50_b256 parts x2"]
    assert (several["images_per_s"], several["of_linear"]) == (160.0, 0.8)
    assert (several["kept"], several["left_out"], several["losses"]) == (
        ["amp_bf16"],
        ["cuda_graphs (no CUDA GPU)"],
        [7.1, 6.9],
    )
    command, session = launched[0]
    assert dict(command.variables)[place.NORMS_VARIABLE] == place.LOCAL
    assert [item.transform for item in session.kept] == ["amp_bf16"]
    assert [session.mode for _, session in launched] == ["measure", "measure", "profile"], (
        "one GPU is profiled for predictions"
    )


def test_settings_of_how_gradients_are_sent_go_beside_the_plan(launched: list[Any], tmp_path: Path) -> None:
    scaling.run(pattern="resnet50_b256 parts views x2", out=None, limit_s=60.0, runs=None, say=lambda _: None)
    assert [item.transform for item in launched[0][1].kept] == ["amp_bf16", "ddp_bucket_views", "ddp_static_graph"]


def test_a_prediction_is_held_against_the_step_that_was_measured(
    launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 × 2 images at 160 a second are 3.2 s a step."""
    monkeypatch.setattr(scaling.scaling, "link", lambda *_: SimpleNamespace(latency_us=3.0, gbps=100.0))
    plain = storage.load
    monkeypatch.setattr(storage, "load", lambda path, kind: None if kind is StepProfile else plain(path, kind))
    monkeypatch.setattr(scaling.links, "measure", lambda *_: {"ranks": 2, "latency_us": 3.0, "gbps": 100.0})
    monkeypatch.setattr(scaling.scaling, "foretell", lambda *_, **__: [SimpleNamespace(step_us=(3.0e6, 3.08e6))])
    scaling.run(pattern="resnet50_b256 parts x2", out=None, limit_s=60.0, runs=None, say=lambda _: None)
    found = rows(tmp_path)["resnet50_b256 parts x2"]
    assert found["predicted_ms"] == [3000.0, 3080.0]
    assert found["off"] == pytest.approx(-0.05)


def test_a_case_that_ends_early_is_told_and_the_rest_goes_on(
    launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = scaling.launch

    def launch(command: Any, session: Any, **more: Any) -> Exit:
        if "views" in session.run_dir:
            more["output"].write_text("no step")
            return Exit(code=1)
        return plain(command, session, **more)

    monkeypatch.setattr(scaling, "launch", launch)
    said: list[str] = []
    code = scaling.run(pattern="resnet50_b256 parts", out=None, limit_s=60.0, runs=None, say=said.append)
    assert code == ExitCode.INCONCLUSIVE
    assert list(rows(tmp_path)) == ["resnet50_b256 parts x2", "resnet50_b256 parts eager x2"]
    assert any("views" in line and "no measurement" in line for line in said)


def test_as_written_is_without_the_plan_and_beside_one_gpu_as_written(launched: list[Any], tmp_path: Path) -> None:
    for pattern in ("unet64_b32 whole as written x2", "unet64_b32 one as written", "unet64_b32 one x1"):
        scaling.run(pattern=pattern, out=None, limit_s=60.0, runs=None, say=lambda _: None)
    assert [len(session.kept) for _, session in launched] == [0, 0, 1]
    command, _ = launched[0]
    assert Path(command.words[0]).name == "unet.py"
    assert command.words[command.words.index("--batch-size") + 1] == "64"
    found = rows(tmp_path)["unet64_b32 whole as written x2"]
    assert (found["kept"], found["of_linear"]) == ([], pytest.approx(0.8))


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(AdvisorError) as caught:
        scaling.run(pattern="", out=None, limit_s=1.0, runs=None, say=lambda _: None)
    assert caught.value.exit_code == ExitCode.GPU_REQUIRED


def test_without_a_plan_on_file_it_says_how_to_come_by_one(launched: list[Any], tmp_path: Path) -> None:
    (tmp_path / "models.json").unlink()
    with pytest.raises(AdvisorError, match="bench models"):
        scaling.run(pattern="resnet50", out=None, limit_s=1.0, runs=None, say=lambda _: None)
