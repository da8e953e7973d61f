"""The bench of real trainings without a GPU: runners that leave what a search and fresh runs leave."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from advisor.bench import real, results
from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.core.findings import Interval
from advisor.core.profile import StepProfile
from advisor.core.verdict import StackVerdict, TrialLog, Verdict
from advisor.pipeline import shared
from advisor.runs import PROFILE_FILE
from advisor.trials import records
from advisor.trials.records import Measurement

# What $PREFIX starts, in the place of Python: it finds its folder among the words and leaves what it would have left there.
ADVISOR = """
import json, os, sys
words, left = sys.argv[1:], json.load(open(os.environ["LEFT"]))
out = words[words.index("-o" if "-o" in words else "--out") + 1]
kind = "apply" if "-o" in words else (words[words.index("--with") + 1] if "--with" in words else "plain")
os.makedirs(out)
print("step 1", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
for name, text in left.get(kind, {}).items():
    open(os.path.join(out, name), "w").write(text)
if kind not in left:
    print("it went wrong")
    sys.exit(1)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    (tmp_path / "A").mkdir()
    (tmp_path / "advisor.py").write_text(ADVISOR)
    runner = f'exec "{sys.executable}" "{tmp_path}/advisor.py" ${{PREFIX#* }} train.py --lr 1\n'
    for name in ("run_one.sh", "run_two.sh"):
        (tmp_path / "A" / name).write_text(runner)
    return tmp_path


def leave(place: Path, monkeypatch: pytest.MonkeyPatch, **kinds: dict[str, object]) -> None:
    left: dict[str, dict[str, str]] = {kind: {} for kind in kinds}
    for kind, files in kinds.items():
        for name, value in files.items():
            storage.save(place / "made.json", value)
            left[kind][name] = (place / "made.json").read_text()
    (place / "left.json").write_text(json.dumps(left))
    monkeypatch.setenv("LEFT", str(place / "left.json"))


def bench(place: Path, **options: object) -> dict[str, dict[str, object]]:
    said: list[str] = []
    defaults = {"baselines": (), "max_time_s": 60.0, "limit_s": 60.0, "runs": place / "runs", "say": said.append}
    code = real.run(place, out=place / "real.json", **{**defaults, **options})
    assert code == 0
    return {row["name"]: row for row in results.on_file(place / "real.json")}


SEARCHED = TrialLog(
    script="/somewhere/train.py",
    argv=("--lr", "1"),
    seconds=100.0,
    proved_s=55.0,
    verdicts=(
        Verdict(transform="amp_bf16", status="kept", reason="30 % saved", gain=Interval(low=0.2, high=0.4)),
        Verdict(transform="tf32", status="reverted", reason="no gain"),
    ),
    stack=StackVerdict(
        passed=True, detail="losses alike", plain_us=(8000.0,), stack_us=(4000.0,), speedup=2.0, speedup_low=1.9,
        speedup_high=2.1,
    ),
)  # fmt: skip


def measured(step_us: float) -> Measurement:
    steps = tuple(step_us + i % 3 for i in range(30))
    return Measurement(step_us=steps, every_us=steps, wall_us=steps)


def test_a_row_holds_what_the_search_proved_and_the_best_by_hand(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(
        place,
        monkeypatch,
        apply={records.TRIALS_FILE: SEARCHED},
        plain={records.MEASURE_FILE: measured(8100.0)},
        **{
            ",".join(real.BY_HAND["eager"]): {records.MEASURE_FILE: measured(5400.0)},
            ",".join(real.BY_HAND["compile"]): {records.MEASURE_FILE: measured(6000.0)},
        },
    )
    rows = bench(place, baselines=("eager", "compile"))
    assert set(rows) == {"one", "two"}
    row = rows["one"]
    assert row["script"] == "train.py --lr 1"  # names, and nothing of where it lies
    assert (row["proved"], row["first_proof_s"], row["apply_s"]) == (True, 55.0, 100.0)
    assert (row["speedup"], row["kept"]) == (2.0, ["amp_bf16"])
    assert row["not_kept"] == ["tf32: reverted, no gain"]
    assert row["hand"]["eager"] == pytest.approx(5.401, abs=0.01)
    assert row["hand_speedup"] == pytest.approx(1.5, abs=0.01)  # of the better of the two
    log = (place / "runs" / "one" / "apply" / real.LOG_FILE).read_text().split()
    assert log[1:3] == ["step", "1"]
    gpus = {(place / "runs" / name / "apply" / real.LOG_FILE).read_text().split()[3] for name in rows}
    assert gpus <= {"4", "5"}


def test_a_script_that_chooses_its_gpu_itself_has_no_result(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A published training sets CUDA_VISIBLE_DEVICES=0, and was measured on the GPU of another one, five times."""
    notes = shared.other_gpu({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "2"})
    assert notes == ("the script sets CUDA_VISIBLE_DEVICES to '0' itself, and you asked for '2'",)
    assert not shared.other_gpu({"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "2"})
    assert not shared.other_gpu({"CUDA_VISIBLE_DEVICES": "0"}, {})  # nobody asked for another
    profile = StepProfile(
        script="train.py", argv=(), created="", environment=Environment(), step_kind="none", step_us=None, wall_us=None,
        notes=notes,
    )  # fmt: skip
    leave(place, monkeypatch, apply={records.TRIALS_FILE: SEARCHED, PROFILE_FILE: profile})
    row = bench(place)["one"]
    assert (row["fault"], row["proved"], row["kept"], row["speedup"]) == (notes[0], False, [], None)


def test_one_that_fails_says_why_and_the_others_go_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(place, monkeypatch)
    (place / "A" / "run_two.sh").write_text("echo no such data; exit 3\n")
    rows = bench(place, baselines=("eager",))
    assert rows["one"]["fault"] == "it went wrong"
    assert rows["two"]["fault"] == "no such data"
    assert not rows["one"]["proved"]
    assert not (place / "runs" / "one" / "plain").exists()  # nothing to hold it against


def test_one_that_takes_too_long_is_interrupted_and_what_it_has_is_kept(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(place, monkeypatch, apply={records.TRIALS_FILE: SEARCHED})
    slow = 'trap "kill %1; exit 130" INT; {0} & wait; sleep 1000 & wait\n'
    run = (place / "A" / "run_one.sh").read_text().removeprefix("exec ").strip()
    (place / "A" / "run_one.sh").write_text(slow.format(run))
    left = place / "runs" / "one" / "apply" / "run" / records.TRIALS_FILE

    class Clock:
        """No time passes until the search has left something; then more than there is."""

        @staticmethod
        def monotonic() -> float:
            return 100.0 if left.exists() else 0.0

    monkeypatch.setattr(real, "time", Clock)
    rows = bench(place, pattern="one", limit_s=60.0)
    assert set(rows) == {"one"}
    assert rows["one"]["proved"]


def test_rows_of_earlier_runs_stay(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(place, monkeypatch, apply={records.TRIALS_FILE: SEARCHED})
    bench(place, pattern="two")
    assert set(bench(place, pattern="one")) == {"one", "two"}


def test_a_folder_without_runners_is_told(tmp_path: Path) -> None:
    with pytest.raises(AdvisorError, match="no runner in"):
        real.runners(tmp_path)
    (tmp_path / "run_raft.sh").touch()
    assert set(real.runners(tmp_path, "raft,cut")) == {"raft"}
    with pytest.raises(AdvisorError, match="part of raft"):
        real.runners(tmp_path, "deeplab")
