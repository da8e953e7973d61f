from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_trace import Builder

from advisor import rules
from advisor.analysis import metrics
from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.core.findings import Outcome
from advisor.core.profile import InputStats, ModelFacts, Spread
from advisor.core.provenance import Provenance
from advisor.loop.records import FactsRecord, StepsRecord, Window, save_trace
from advisor.loop.session import Session
from advisor.profiling.after.assemble import assemble
from advisor.profiling.beside.sampler import SampledRecording

MACHINE = Environment(device="cuda", copy_gbps=1000.0, matrix_tflops={"fp32": 50.0, "tf32": 400.0})
STEP = Spread(median=80.0, p10=79.0, p90=82.0, n=3, raw=(79.0, 80.0, 82.0))
TIMED = Window(start_unix_ns=100, end_unix_ns=200, start_monotonic_ns=0, end_monotonic_ns=100)


def traced() -> Builder:
    b = Builder()
    b.steps(0, 100)
    b.op("aten::convolution", 1, 20, shapes="[[256, 512, 9, 9], [512, 512, 3, 3]]", dtypes="float,float",
         arguments="[null, null, null, [1, 1], [0, 0], [1, 1], false, [0, 0], 1]")  # fmt: skip
    b.launch("sm80_xmma_fprop", 2, 10, 70)
    b.sample(10, 70, 5000.0, 1000.0)
    return b


@pytest.fixture
def run(tmp_path: Path) -> Path:
    storage.save(
        tmp_path / "session.json", Session(mode="profile", run_dir=str(tmp_path), script="train.py", argv=("--lr", "1"))
    )
    steps = StepsRecord(kind="optimizer", device="cuda", step_us=STEP, wall_us=STEP, steps_seen=40, timed=TIMED,
                        losses=(2.0, 1.0), phase="done", complete=True, excluded={"evaluation": 1})  # fmt: skip
    storage.save(tmp_path / "steps.json", steps)
    storage.save(tmp_path / "facts.json", FactsRecord(model=ModelFacts(roots=("ResNet",), flags={"tf32_conv": True})))
    storage.save(
        tmp_path / "samples.json",
        SampledRecording(time_ns=[150], monotonic_ns=[150], columns={"power_w": [300.0], "foreign_processes": [1.0]}),
    )
    save_trace(tmp_path / "trace.json", traced().trace())
    return tmp_path


def test_a_limit_beyond_the_step_is_a_note(run: Path) -> None:
    slow, fast = replace(MACHINE, copy_gbps=1.0), replace(MACHINE, copy_gbps=1e9, matrix_tflops={"tf32": 1e9})
    assert any("rates were measured" in note for note in assemble(run, slow).notes)
    assert not any("rates were measured" in note for note in assemble(run, fast).notes)


def test_a_step_on_the_cpu_beside_a_gpu_is_one_on_the_cpu(run: Path) -> None:
    machine = replace(MACHINE, gpu_name="NVIDIA H200", gpu_count=1, sm_arch=90)
    steps = storage.load(run / "steps.json", StepsRecord)
    storage.save(run / "steps.json", replace(steps, device="cpu"))
    storage.save(run / "facts.json", FactsRecord(model=ModelFacts(roots=("ResNet",), parameters=1000)))
    profile = assemble(run, machine)
    assert (profile.environment.device, profile.environment.gpu_count) == ("cpu", 1)
    assert profile.limit_us == 0.0  # its rates are the GPU's
    assert not profile.environment.shared_gpu
    fired = [f.rule for f in rules.evaluate(rules.load(()), metrics(profile)) if f.outcome is Outcome.FIRED]
    assert "gpu-not-used" in fired
    assert "gpu-shared" not in fired
    # Without parameters of torch's (CuPy) nobody can tell where it ran.
    storage.save(run / "facts.json", FactsRecord())
    assert assemble(run, machine).environment.device == "cuda"


def test_the_first_step_stands_beside_the_others(run: Path) -> None:
    assert "first_step_ratio" not in assemble(run, MACHINE).utilization
    steps = storage.load(run / "steps.json", StepsRecord)
    storage.save(run / "steps.json", replace(steps, first_step_us=4000.0))
    assert assemble(run, MACHINE).utilization["first_step_ratio"].value == 50.0
    # The warm-up's own steps are no others to stand beside.
    storage.save(run / "steps.json", replace(steps, first_step_us=4000.0, provisional=True))
    assert "first_step_ratio" not in assemble(run, MACHINE).utilization


def test_a_complete_run_has_everything(run: Path) -> None:
    profile = assemble(run, MACHINE, exit_code=0)
    assert profile.complete, profile.notes
    assert (profile.script, profile.argv, profile.exit_code) == ("train.py", ("--lr", "1"), 0)
    assert profile.step_us == STEP
    assert (profile.step_kind, profile.steps_seen, profile.excluded) == ("optimizer", 40, {"evaluation": 1})
    assert [r.op for r in profile.kernels] == ["aten::convolution"]
    assert profile.busy_us == 60.0
    assert profile.model.roots == ("ResNet",)
    assert profile.losses == (2.0, 1.0)
    assert profile.cost.traced_step_us == 100.0
    assert profile.cost.overhead_frac == pytest.approx(0.25)
    assert profile.cost.coverage_frac == 1.0
    assert profile.cost.analyse_s > 0
    assert profile.utilization["dram_gb_per_step"].value == 6000.0
    assert profile.utilization["dram_gb_per_step"].provenance is Provenance.MEASURED
    assert profile.utilization["power_w"].value == 300.0
    assert profile.environment.shared_gpu
    assert profile.created.endswith("Z")


def test_waiting_for_data_is_told_at_the_line_that_iterates_the_loader(run: Path) -> None:
    b = traced()
    b.op("next", 71, 95, annotation="user:enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
    save_trace(run / "trace.json", b.trace())
    storage.save(run / "facts.json", FactsRecord(input=InputStats(source="train.py:30")))
    data = next(i for i in assemble(run, MACHINE).idle if i.cause == "data")
    assert data.time_us == 24.0
    assert data.sites[0].source == "train.py:30"


def test_a_loader_that_catches_up_while_steps_are_traced_is_told(run: Path) -> None:
    b = traced()
    b.op("next", 71, 75, annotation="user:enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
    save_trace(run / "trace.json", b.trace())
    storage.save(run / "facts.json", FactsRecord(input=InputStats(loader="DataLoader", next_us=40.0)))
    profile = assemble(run, MACHINE)
    assert profile.cost.traced_next_us == 4.0
    assert any("the loader catches up" in note for note in profile.notes)
    assert (
        profile.utilization["host_frac"].value == 0.5
    )  # of a step of 80 us; in the trace the host is away for 4 of 100
    storage.save(run / "facts.json", FactsRecord(input=InputStats(loader="DataLoader", next_us=6.0)))
    assert not any("the loader catches up" in note for note in assemble(run, MACHINE).notes)


def test_the_scripts_tf32_setting_decides_the_rate(run: Path) -> None:
    allowed = assemble(run, MACHINE).limit_us
    storage.save(run / "facts.json", FactsRecord())
    assert assemble(run, MACHINE).limit_us == pytest.approx(8 * allowed)


@pytest.mark.parametrize("missing", ["steps.json", "facts.json", "trace.json"])
def test_a_killed_child_leaves_what_it_had(run: Path, missing: str) -> None:
    (run / missing).unlink()
    profile = assemble(run, MACHINE)
    assert not profile.complete
    told = "no steps were traced" if missing == "trace.json" else missing
    assert any(told in note for note in profile.notes)
    assert bool(profile.kernels) == (missing != "trace.json")
    assert (profile.step_us is None) == (missing == "steps.json")


def test_samples_are_not_vital(run: Path) -> None:
    (run / "samples.json").unlink()
    assert assemble(run, MACHINE).complete


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 1, "ops": 3}', '{"schema_version": 99}', "[]"])
def test_a_broken_trace_is_a_note(run: Path, text: str) -> None:
    (run / "trace.json").write_text(text)
    profile = assemble(run, MACHINE)
    assert not profile.complete
    assert profile.step_us == STEP
    assert any("trace.json" in note for note in profile.notes)


def test_values_of_the_wrong_type_in_a_trace_are_a_note(run: Path) -> None:
    trace = traced().trace()
    trace.ops.start_ns[0] = "soon"
    trace.step_bounds_ns[1] = "late"
    save_trace(run / "trace.json", trace)
    assert any("not those of a trace" in note for note in assemble(run, MACHINE).notes)


def test_an_unfinished_run_says_where_it_ended(run: Path) -> None:
    storage.save(run / "steps.json", StepsRecord(kind="optimizer", phase="timed", step_us=STEP))
    profile = assemble(run, MACHINE)
    assert not profile.complete
    assert any("'timed'" in note for note in profile.notes)


def test_no_session_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(AdvisorError, match=r"session\.json"):
        assemble(tmp_path, MACHINE)


def test_it_survives_the_profiles_own_file(run: Path) -> None:
    profile = assemble(run, MACHINE)
    storage.save(run / "profile.json", profile)
    assert storage.load(run / "profile.json", type(profile)) == profile
