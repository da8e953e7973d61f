"""The trainings with planted causes are whole: they compile, train, and name rules that exist; the record is counted rightly."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import alternate
import causes_catalogue
import causes_page
import pytest

from advisor import rules

TEXTS = {name: text for machine in ("gpu", "cpu") for name, _, text in causes_catalogue.scripts(machine)}


@pytest.mark.parametrize("name", TEXTS)
def test_each_training_is_python_without_an_open_slot(name: str) -> None:
    compile(TEXTS[name], name, "exec")
    assert "#: " not in TEXTS[name]
    assert "$" not in TEXTS[name]


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, _, _ in causes_catalogue.scripts("cpu")])
def test_each_training_trains(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TEXTS[name], encoding="utf-8")
    done = subprocess.run([sys.executable, str(script), "2"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("path", sorted(causes_page.VARIED.glob("*.py")), ids=lambda path: path.stem)
def test_a_variation_trains(path: Path) -> None:
    done = subprocess.run([sys.executable, str(path), "2"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_variation_is_for_the_machine_that_it_names() -> None:
    on = {m: {t.name for t in causes_page.trainings(m) if t.name.startswith("varied-")} for m in ("cpu", "gpu")}
    assert "varied-cudnn_flags_around" in on["gpu"] - on["cpu"]
    assert "varied-threads_for_the_loader" in on["cpu"] - on["gpu"]
    assert len(on["cpu"] | on["gpu"]) == len(list(causes_page.VARIED.glob("*.py")))


def test_wanted_rules_exist() -> None:
    known = {rule.id for rule in rules.load([])}
    wanted = {
        rule for machine in ("cpu", "gpu") for training in causes_page.trainings(machine) for rule in training.expect
    }
    assert wanted <= known, wanted - known


def test_a_cured_training_has_no_fault() -> None:
    fault = next(f for f in causes_catalogue.FAULTS if f.id == "average-of-parameters")
    for style in fault.styles:
        assert "kept.mul_" in causes_catalogue.text(fault, style)
        assert "kept.mul_" not in causes_catalogue.text(fault, style, cured=True)


def test_names_differ_from_style_to_style() -> None:
    fault = next(f for f in causes_catalogue.FAULTS if f.id == "average-of-parameters")
    assert "self.network" in causes_catalogue.text(fault, "trainer")
    assert "net.parameters()" in causes_catalogue.text(fault, "flat")


def test_a_folder_brings_trainings_that_say_what_they_expect(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("# EXPECT: recompiles|graph-breaks\n", encoding="utf-8")
    (tmp_path / "b.py").write_text("print()\n", encoding="utf-8")
    (found,) = [t for t in causes_page.trainings("cpu", [tmp_path]) if t.name in ("a", "b")]
    assert (found.name, found.expect) == ("a", ("recompiles", "graph-breaks"))


def _card(rule: str, *reasons: str, low: float = 0.0, transform: str = "") -> dict[str, object]:
    return {"rules": [rule, *reasons], "predicted": [low, 0.5], "transform": transform}


def test_the_rank_is_that_of_the_first_card_with_a_wanted_rule() -> None:
    cards = [_card("launch-bound", "host-busy"), _card("recompiles")]
    assert causes_page.rank(("recompiles",), cards) == 2
    assert causes_page.rank(("host-busy",), cards) == 1  # a reason of the first card
    assert causes_page.rank(("anomaly-mode",), cards) == 0


def _promised(predicted: list[float] | None, share: list[float] | None) -> dict[str, object]:
    card = {"rules": ["a-rule"], "transform": "compile", "predicted": predicted}
    return {"cards": [card], "gained": {"change": "compile", "share": share, "verdict": "kept: faster"}}


# A sound training's record, and what its first card is then.
SOUND: dict[str, tuple[dict[str, object], str]] = {
    "quiet": ({"cards": []}, causes_page.NO_PROMISE),
    "kept": (_promised([0.0, 0.3], [0.1, 0.2, 0.3]), causes_page.TRUE),
    "more": (_promised([0.0, 0.3], [0.3, 0.4, 0.5]), causes_page.FALSE),
    "slower": (_promised([0.0, 0.3], [-0.4, -0.3, -0.2]), causes_page.FALSE),
    "not-tried": (_promised([0.0, 0.3], None), causes_page.FALSE),
    "without-a-number": (_promised(None, [0.1, 0.2, 0.3]), causes_page.FALSE),
    "nothing": (_promised([0.0, 0.004], None), causes_page.NO_PROMISE),
    "asks": ({"cards": [_card("a-rule", low=0.02)]}, causes_page.FALSE),
    "busy": ({**_promised([0.0, 0.3], [0.3, 0.4, 0.5]), "disturbed": True}, causes_page.NOT_JUDGED),
    "failed": ({"error": "exit code 1"}, causes_page.NOT_JUDGED),
}


def test_the_page_counts_what_was_found_and_what_was_foretold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def training(rank: int, cost: list[float] | None, predicted: list[float]) -> dict[str, object]:
        card = {"rules": ["a-rule"], "predicted": predicted}
        found = {"expect": ["a-rule"], "rank": rank, "cards": [card], "expected": card, "step_us": 1.0}
        return found if cost is None else {**found, "cost": cost}

    made = {
        "device": "",
        "torch": "2.13.0",
        "date": "2026-11-27",
        "trainings": {
            "first": training(1, [0.19, 0.2, 0.21], [0.1, 0.3]),
            "second": training(2, [0.4, 0.5, 0.6], [0.1, 0.3]),
            "third": training(3, None, [0, 0]),
            "noisy": training(3, [0.03, 0.13, 0.22], [0.1, 0.3]),
            "broken": {"expect": ["a-rule"], "error": "exit code 1: no"},
            "first-cured": {**training(1, None, [0, 0]), "expect": []},
            "second-cured": {**training(1, None, [0, 0]), "expect": [], "cards": [_card("another")]},
            **{name: {"expect": [], **found} for name, (found, _) in SOUND.items()},
        },
    }
    (tmp_path / "cpu.json").write_text(json.dumps(made), encoding="utf-8")
    monkeypatch.setattr(causes_page, "RECORDS", tmp_path)
    page = causes_page.page()
    assert "Found: 2 of 5." in page
    assert "Too uncertain to be held to one: noisy." in page
    assert "Cost inside the predicted interval: 1 of 2." in page
    assert "Of 2 of them without their fault still told of it: first-cured." in page
    assert f"Sound, {len(SOUND)}, of which 5 with a false first card and 2 on a machine too busy to judge" in page


@pytest.mark.parametrize("name", SOUND)
def test_a_promise_to_a_sound_training_is_true_where_it_was_kept_by_turns(name: str) -> None:
    found, said = SOUND[name]
    assert causes_page.judgement(found) == said


@pytest.mark.parametrize("path", sorted(causes_page.SOUND.glob("*.py")), ids=lambda path: path.stem)
def test_a_sound_training_is_python_and_one_of_those_measured(path: Path) -> None:
    compile(path.read_text(encoding="utf-8"), path.name, "exec")
    assert f"sound-{path.stem}" in {training.name for training in causes_page.trainings("gpu") if training.sound}


@pytest.mark.long
@pytest.mark.parametrize("path", sorted(causes_page.SOUND.glob("*.py")), ids=lambda path: path.stem)
def test_a_sound_training_trains(path: Path) -> None:
    done = subprocess.run([sys.executable, str(path), "3"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_a_trial_has_measured_is_read_from_its_blocks(tmp_path: Path) -> None:
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / "plain.json").write_text("{}", encoding="utf-8")
    verdict = {"transform": "amp_bf16", "status": "kept", "reason": "faster"}
    blocks = {"off_us": [10.0, 10.1, 9.9], "on_us": [8.0, 8.1, 7.9]}
    (tmp_path / "trials" / "01-amp_bf16.json").write_text(json.dumps({**verdict, "blocks": blocks}), encoding="utf-8")
    found = causes_page.tried("amp_bf16", tmp_path)
    assert found["verdict"] == "kept: faster"
    assert found["share"][1] == pytest.approx(0.2, abs=0.01)
    assert causes_page.tried("compile", tmp_path)["share"] is None
    going_on = {"transform": "fused_optimizer", "blocks": {"off_us": [1.0], "on_us": [1.0]}}
    (tmp_path / "trials" / "03-fused_optimizer.json").write_text(json.dumps(going_on))
    assert causes_page.tried("fused_optimizer", tmp_path) == {
        "change": "fused_optimizer",
        "share": None,
        "verdict": "no trial",
    }


@pytest.mark.parametrize(
    ("fault", "style"),
    [(f, style) for f in causes_catalogue.FAULTS if f.cured is not None for style in f.styles],
    ids=lambda value: getattr(value, "id", value),
)
def test_a_fault_comes_and_goes_in_one_process(fault: causes_catalogue.Fault, style: str) -> None:
    text = causes_catalogue.alternating(fault, style)
    compile(text, fault.id, "exec")
    assert "alternate.faulty" in text
    assert ("alternate.boundary()" in text) != ("alternate.step()" in text)


def test_the_cost_is_what_neighbouring_blocks_say() -> None:
    """The machine is three times as slow in the second half: both kinds of block are."""
    order = [alternate.ORDER[n % 4] for n in range(40)]
    blocks = [(ill, (1.25 if ill else 1.0) * (3.0 if n >= 20 else 1.0)) for n, ill in enumerate(order)]
    low, middle, high = alternate.cost(blocks) or ()
    assert (low, middle, high) == pytest.approx((0.2, 0.2, 0.2))
    assert alternate.cost(blocks[: 2 * alternate.LEAST - 1]) is None


def test_a_cost_is_read_from_what_the_training_prints(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('loss 1')\nprint('{\"cost\": [0.1, 0.2, 0.3]}')\n", encoding="utf-8")
    assert causes_page.cost(script, {}, []) == [0.1, 0.2, 0.3]
    script.write_text("raise SystemExit(1)\n", encoding="utf-8")
    assert causes_page.cost(script, {}, []) is None


def test_the_page_is_what_is_on_record() -> None:
    if causes_page.RECORDS.exists():
        assert causes_page.PAGE.read_text(encoding="utf-8") == causes_page.page()


def test_kept_run_folders_are_read(tmp_path: Path) -> None:
    run = tmp_path / "lane-0" / "a"
    run.mkdir(parents=True)
    card = {"rule": "recompiles", "reasons": ["graph-breaks"], "predicted": {"low": 0.1, "high": 0.25}}
    (run / "findings.json").write_text(json.dumps({"cards": [card]}), encoding="utf-8")
    environment = {"gpu_name": "A GPU", "torch": "2.11"}
    (run / "profile.json").write_text(
        json.dumps({"step_us": {"median": 1234.56}, "environment": environment}), encoding="utf-8"
    )
    found = causes_page.read(causes_page.Training("a", "", ("graph-breaks",)), run)
    assert (found["rank"], found["step_us"], found["expected"]["predicted"]) == (1, 1234.6, [0.1, 0.25])
    assert causes_page.device(run) == ("A GPU", "2.11")


def test_a_record_made_elsewhere_joins_that_of_its_device_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causes_page, "RECORDS", tmp_path)
    made = {"device": "A", "torch": "2", "date": "d", "trainings": {"b": {"rank": 1}}}
    causes_page.join("gpu", made)
    causes_page.join("gpu", {**made, "trainings": {"a": {"rank": 2}}})
    assert list(json.loads((tmp_path / "gpu.json").read_text())["trainings"]) == ["a", "b"]
    causes_page.join("gpu", {**made, "device": "B", "trainings": {"a": {"rank": 2}}})
    assert list(json.loads((tmp_path / "gpu.json").read_text())["trainings"]) == ["a"]


def test_what_an_interrupted_run_has_measured_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the thread that waits while the second training is measured."""
    begun = threading.Event()

    class Lane(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            begun.wait()
            raise KeyboardInterrupt

    def measured(training: causes_page.Training, *_: object) -> dict[str, object]:
        if training.name == "second":
            begun.set()
            threading.Event().wait()
        return {"rank": 1}

    monkeypatch.setattr(causes_page.threading, "Thread", Lane)
    monkeypatch.setattr(causes_page, "measured", measured)
    chosen = [causes_page.Training(name, "", ("a",)) for name in ("first", "second", "third")]
    kept: list[dict[str, object]] = []
    assert causes_page.run("cpu", chosen, keep=kept.append) == {"first": {"rank": 1}}
    assert kept == [{"first": {"rank": 1}}]


def test_lanes_on_a_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes_page.os, "sched_getaffinity", lambda pid: {4, 5, 6, 7}, raising=False)
    prefixes = [prefix for _, prefix in causes_page._lanes("cpu", 2)]
    assert prefixes == [["taskset", "-c", "4,5"], ["taskset", "-c", "6,7"]]
    assert [prefix for _, prefix in causes_page._lanes("cpu")] == [[]]
