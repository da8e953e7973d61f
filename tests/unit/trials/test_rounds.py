"""What is tried in a later round, and when there is one. The children leave what they are told; profiles are handed over."""

from __future__ import annotations

import dataclasses
import functools
import signal
from pathlib import Path

import pytest
import searches

from advisor.analysis import metrics
from advisor.analysis.predict import predict
from advisor.core import storage, transform_table
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.core.findings import Interval, Recommendation
from advisor.core.profile import IdleCause, KernelRow, ModelFacts, Spread, StepProfile
from advisor.core.verdict import Blocks, Check, Round, TrialLog, Verdict
from advisor.loop.records import STEPS_FILE, StepsRecord
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.launcher import Exit
from advisor.rules import evaluate, load, recommend
from advisor.trials import ledger, planfile, planner, records, rounds
from advisor.trials.choosing import Answer

COMMAND = ScriptCommand(argv=("python", "train.py"), name="train.py", arguments=())
STOPPED = Exit(code=0, stopped_by_advisor=True)
GOOD = Check(passed=True, detail="")


def profile(step_us: float = 1000.0) -> StepProfile:
    return StepProfile(
        script="train.py",
        argv=(),
        created="",
        environment=Environment(device="cuda", gpu_name="NVIDIA H200", sm_arch=90, torch="2.11.0"),
        step_kind="optimizer",
        step_us=Spread(median=step_us, p10=step_us, p90=step_us, n=8),
        wall_us=None,
        kernels=(KernelRow(name="k", kind="norm", calls=1.0, time_us=0.5 * step_us),),
    )


def candidate(name: str, high: float = 0.5) -> Recommendation:
    return Recommendation(transform=name, title=f"title of {name}", predicted=Interval(low=0.0, high=high))


class Script:
    """The launcher and the script in one: `status` says what comes of each trial, `anew` what each profile asks for."""

    def __init__(self, run_dir) -> None:
        self.run_dir, self.launches, self.said = run_dir, [], []
        self.status: dict[str, str] = {}
        self.anew: list[list[Recommendation]] = []
        self.profiled: list[StepProfile] = [profile(250.0), profile(200.0), profile(150.0)]
        self.profile_ends = STOPPED
        self.gain = Interval(low=0.1, high=0.2)  # of what is kept

    def __call__(self, command, session, *, on_progress=None, timeout_s=None, environment=None, output=None):
        self.launches.append(session)
        assert session.protect_files
        assert session.protecting == self.run_dir
        if session.mode == "profile":
            return self.profile_ends
        names = [item.transform for item in session.kept]
        if session.mode == "measure":
            step = 1000.0 / 2 ** len(names)
            steps = tuple(step * (1 + 0.01 * (i % 3)) for i in range(30))
            found = records.Measurement(
                step_us=steps, every_us=steps, losses=(1.0,) * 42, batch_size=32, applied=tuple(names), complete=True
            )
            storage.save(self.run_dir / records.MEASURE_FILE, found)
            return STOPPED
        for item in session.candidates:
            verdict = Verdict(
                transform=item.transform,
                status=self.status[item.transform],
                reason="as told",
                round=item.round,
                predicted=item.predicted,
                gain=self.gain if self.status[item.transform] == "kept" else Interval(low=-0.2, high=-0.1),
                numerics=GOOD,
                effect=GOOD,
                timing=GOOD,
                blocks=Blocks(off_us=(1000.0,)),
            )
            records.save_verdict(self.run_dir, verdict)
        storage.save(self.run_dir / records.SEARCH_FILE, records.SearchRecord(complete=True, model_hash="m"))
        return STOPPED

    def recommend(self, again: StepProfile, folder) -> list[Recommendation]:
        assert folder.is_dir()
        return self.anew.pop(0)

    def modes(self) -> list[str]:
        return [s.mode for s in self.launches if s.mode != "measure"]


@pytest.fixture
def script(tmp_path, monkeypatch) -> Script:
    made = Script(tmp_path)
    monkeypatch.setattr(rounds, "assemble", lambda folder, machine, exit_code: made.profiled.pop(0))
    return made


def apply(script: Script, *first: Recommendation, **more: object) -> tuple[TrialLog, dict[tuple[str, int], Verdict]]:
    log, _, _ = searches.searched(
        COMMAND,
        first,
        profile(),
        run_dir=script.run_dir,
        say=script.said.append,
        launch=script,
        recommend=script.recommend,
        **more,
    )
    assert storage.load(script.run_dir / "trials.json", TrialLog) == log
    return log, {(v.transform, v.round): v for v in log.verdicts}


def forget(script: Script) -> None:
    """The run folder has no verdict any more."""
    for path in records.verdict_files(script.run_dir):
        path.unlink()


def test_a_second_round_finds_what_the_first_could_not(script) -> None:
    script.status = {"amp_bf16": "kept", "prefetch": "reverted", "fused_layer_norm": "kept"}
    # Again among the recommendations: what is kept, what was reverted. Neither is tried once more for that.
    script.anew = [[candidate("fused_layer_norm", 0.4), candidate("amp_bf16"), candidate("prefetch")], []]
    log, verdicts = apply(script, candidate("amp_bf16"), candidate("prefetch"))
    assert {key: v.status for key, v in verdicts.items()} == {
        ("amp_bf16", 1): "kept",
        ("prefetch", 1): "reverted",
        ("fused_layer_norm", 2): "kept",
    }
    assert script.modes() == ["search", "profile", "search"]
    second = next(s for s in script.launches if s.mode == "profile")
    assert [i.transform for i in second.kept] == ["amp_bf16"]
    assert not second.counters
    assert (second.folder.parent, second.deadline_unix_s > 0) == (script.run_dir, True)
    assert log.rounds == (
        Round(number=1, step_us=1000.0, tried=("prefetch", "amp_bf16")),
        Round(number=2, step_us=250.0, kept=("amp_bf16",), tried=("fused_layer_norm",), folder="round-2"),
    )
    assert any("round 2" in text and transform_table.title("amp_bf16") in text for text in script.said)
    plan = planfile.read(script.run_dir / "plan.yaml")
    assert [i.transform for i in plan.items if i.status == "kept"] == ["amp_bf16", "fused_layer_norm"]
    assert plan.items[1].predicted.endswith("of the step as profiled for round 2")
    assert log.stack.passed
    # The gain was measured with the step at 1000 us, but predicted from one of 250 us: no share is above the whole.
    entries = {e.transform: e for e in ledger.entries(log, profile(2000.0))}
    assert entries["amp_bf16"].measured.high == pytest.approx(0.1)
    assert entries["fused_layer_norm"].measured.high == pytest.approx(0.2)


def test_the_casts_that_half_precision_brings_are_found_in_the_next_round() -> None:
    def asked_for(step: StepProfile) -> list[Recommendation]:
        table = metrics(step)
        found = evaluate(load(), table, step, functools.partial(predict, step))
        return [r for r in recommend(found, table) if r.transform == "fused_casts"]

    plain = dataclasses.replace(
        profile(2370.0),
        environment=dataclasses.replace(profile().environment, copy_gbps=4244.0),
        busy_us=2370.0,
        model=ModelFacts(batch_size=128),
        idle=(IdleCause(cause="launch", time_us=0.0),),
    )
    cast = KernelRow(name="bfloat16_copy_kernel_cuda", kind="copy", op="aten::_to_copy", phase="forward", calls=22.0,
                     time_us=48.0, dtype="fp32", shapes="[[64, 3, 3, 3], []]", modelled_bytes=6.6e7)  # fmt: skip
    kept = dataclasses.replace(
        plain, kernels=(*plain.kernels, cast, dataclasses.replace(cast, phase="backward", time_us=77.0))
    )
    assert asked_for(plain) == []
    amp = candidate("amp_bf16")
    verdict = Verdict(transform="amp_bf16", status="kept", reason="", round=1, gain=Interval(low=0.3, high=0.4))
    (found,) = rounds.candidates(2, [verdict], [amp], [amp, *asked_for(kept)], kept, 0.01)
    assert (found.transform, found.round) == ("fused_casts", 2)
    assert 0.01 < found.predicted.high < 1.0


def test_nothing_kept_means_no_second_round(script) -> None:
    script.status = {"amp_bf16": "reverted"}
    log, _ = apply(script, candidate("amp_bf16"))
    assert script.modes() == ["search"]
    assert [r.number for r in log.rounds] == [1]


def test_a_round_that_keeps_nothing_is_the_last(script) -> None:
    script.status = {"amp_bf16": "kept", "first_conv": "reverted"}
    script.anew = [[candidate("first_conv")]]
    apply(script, candidate("amp_bf16"))
    assert script.modes() == ["search", "profile", "search"]


def test_a_round_that_hardly_moved_the_step_is_not_followed_by_another(script) -> None:
    script.status, script.gain = {"fused_optimizer": "kept"}, Interval(low=0.02, high=0.04)
    log, _ = apply(script, candidate("fused_optimizer"))
    assert script.modes() == ["search"]
    assert log.stack.passed


def test_rounds_come_to_an_end(script, declare) -> None:
    names = ["a", "b", "c", "d", "e"]
    for name in names:
        declare(name)
    script.status = dict.fromkeys(names, "kept")
    script.anew, script.gain = [[candidate(name)] for name in names[1:]], Interval(low=0.3, high=0.4)
    log, _ = apply(script, candidate("a"))
    assert len(log.rounds) == rounds.MOST
    assert script.modes().count("profile") == rounds.MOST - 1


@pytest.mark.parametrize(("gain", "profiles"), [(0.05, 0), (0.2, 1), (0.4, 2)])
def test_a_later_round_needs_a_step_that_has_become_much_shorter(script, declare, gain: float, profiles: int) -> None:
    for name in "abc":
        declare(name)
    script.status = dict.fromkeys("abc", "kept")
    script.anew, script.gain = [[candidate("b")], [candidate("c")]], Interval(low=gain - 0.01, high=gain + 0.01)
    apply(script, candidate("a"))
    assert script.modes().count("profile") == profiles


def test_what_is_kept_leaves_later_rounds_more_time(script) -> None:
    """The runs of the stack are shorter by then. A ConvNeXt's second round had no time, for runs as long as the plain script's."""
    script.status, script.gain, script.anew = {"amp_bf16": "kept"}, Interval(low=0.8, high=0.9), [[]]
    searches.searched(
        COMMAND, [candidate("amp_bf16")], profile(0.4e6), run_dir=script.run_dir, say=script.said.append, launch=script,
        recommend=script.recommend, time_s=300.0,
    )  # fmt: skip
    first, second = (s.deadline_unix_s for s in script.launches if s.mode in ("search", "profile"))
    assert second - first == pytest.approx(1.1 * (8 + 18) * 0.4 * 0.85, abs=1.0)  # of the one that is enough at first


def test_without_time_there_is_no_further_round_but_the_stack_is_proved(script) -> None:
    script.status = {"amp_bf16": "kept"}
    # Of 60 s the stack keeps 20 at least: what is left is less than a round and its step need.
    log, _ = apply(script, candidate("amp_bf16"), time_s=40.0)
    assert script.modes() == ["search"]
    assert any("no time was left for round 2" in note for note in log.notes)
    assert log.stack.passed
    assert log.complete


def test_a_profile_that_fails_is_a_note_and_the_second_look_stays(script) -> None:
    script.status = {"fused_bn_act": "reverted", "amp_bf16": "kept"}
    for ends in (Exit(code=1), Exit(code=143, timed_out=True)):
        script.profile_ends, script.launches = ends, []
        log, verdicts = apply(script, candidate("fused_bn_act"), candidate("amp_bf16"))
        assert any("could not be profiled" in note for note in log.notes)
        assert log.complete
        assert log.stack.passed
        assert verdicts["fused_bn_act", 2].predicted is None  # no profile to predict from
        assert log.rounds[1] == Round(number=2, kept=("amp_bf16",), tried=("fused_bn_act",))
        for path in records.verdict_files(script.run_dir):
            path.unlink()


def test_a_profile_that_dies_beside_graphs_is_made_without_them(script) -> None:
    script.status = {"amp_bf16": "kept", "cuda_graphs": "kept", "fused_layer_norm": "reverted"}
    script.anew = [[candidate("fused_layer_norm", 0.4)]]
    inner, script.profiled = script.__call__, [profile(), profile(250.0)]

    def launch(command, session, **more):
        ended = inner(command, session, **more)
        graphed = "cuda_graphs" in [item.transform for item in session.kept]
        return Exit(code=139, signal=int(signal.SIGSEGV)) if session.mode == "profile" and graphed else ended

    log, _, _ = searches.searched(
        COMMAND,
        [candidate("amp_bf16"), candidate("cuda_graphs")],
        profile(),
        run_dir=script.run_dir,
        say=script.said.append,
        launch=launch,
        recommend=script.recommend,
    )
    profiles = [[i.transform for i in s.kept] for s in script.launches if s.mode == "profile"]
    assert profiles == [["amp_bf16", "cuda_graphs"], ["amp_bf16"]]
    assert log.rounds[1].step_us == 250.0
    assert log.rounds[1].tried == ("fused_layer_norm",)
    assert any("profiled without CUDA graphs" in note for note in log.notes)


@pytest.mark.parametrize(("complete", "number"), [(True, 1), (False, 2)])
def test_a_profile_that_was_whole_when_its_process_aborted_counts(script, complete, number) -> None:
    """It had written everything: no second start without graphs, and no round lost."""
    script.status = {"amp_bf16": "kept", "cuda_graphs": "kept", "fused_layer_norm": "reverted"}
    script.anew, script.profiled = [[candidate("fused_layer_norm", 0.4)]], [profile(250.0)] * number
    script.profile_ends = Exit(code=134, signal=int(signal.SIGABRT), stopped_by_advisor=True)
    inner = script.__call__

    def launch(command, session, **more):
        if session.mode == "profile":
            storage.save(Path(session.run_dir) / STEPS_FILE, StepsRecord(kind="optimizer", complete=complete))
        return inner(command, session, **more)

    log, _, _ = searches.searched(
        COMMAND, [candidate("amp_bf16"), candidate("cuda_graphs")], profile(), run_dir=script.run_dir,
        say=script.said.append, launch=launch, recommend=script.recommend,
    )  # fmt: skip
    assert script.modes().count("profile") == number
    assert any("could not be profiled" in note for note in log.notes) is not complete
    assert [r.step_us for r in log.rounds[1:]] == ([250.0] if complete else [])


def test_a_profile_that_cannot_be_read_is_a_note(script, monkeypatch) -> None:
    def unreadable(folder, machine, exit_code):
        raise AdvisorError("no session.json")

    monkeypatch.setattr(rounds, "assemble", unreadable)
    script.status = {"amp_bf16": "kept"}
    log, _ = apply(script, candidate("amp_bf16"))
    assert any("no session.json" in note for note in log.notes)
    assert log.stack.passed


def test_a_profile_without_kernels_asks_for_nothing(script) -> None:
    script.status = {"amp_bf16": "kept"}
    script.profiled = [dataclasses.replace(profile(), kernels=())]
    log, _ = apply(script, candidate("amp_bf16"))
    assert any("too little was measured" in note for note in log.notes)


def test_ctrl_c_in_the_second_profile_keeps_what_is_proved(script) -> None:
    script.status = {"amp_bf16": "kept"}
    script.profile_ends = Exit(code=130, signal=int(signal.SIGINT))
    log, verdicts = apply(script, candidate("amp_bf16"))
    assert verdicts["amp_bf16", 1].status == "unconfirmed"
    assert not log.complete
    assert script.modes() == ["search", "profile"]


def test_later_rounds_ask_as_the_first_does(script) -> None:
    script.status = {"amp_bf16": "kept", "fused_pooling": "kept"}
    script.anew = [[candidate("fused_pooling"), candidate("first_conv")], [candidate("first_conv")]]
    asked = []

    def ask(item: Recommendation) -> Answer:
        asked.append((item.transform, item.round))
        return Answer.NO if item.transform == "first_conv" else Answer.YES

    _, verdicts = apply(script, candidate("amp_bf16"), ask=ask)
    assert sorted(asked) == [("amp_bf16", 1), ("first_conv", 2), ("fused_pooling", 2)]  # a no is not asked about again
    assert (verdicts["first_conv", 2].status, verdicts["first_conv", 2].reason) == ("declined", "you said no")


def test_who_quits_is_asked_no_more_and_no_round_follows(script) -> None:
    script.status = dict.fromkeys(("amp_bf16", "fused_pooling", "conv_bias"), "kept")
    script.anew = [[candidate("first_conv")]]
    answers = [Answer.YES, Answer.QUIT]
    log, _ = apply(script, *map(candidate, ("amp_bf16", "fused_pooling", "conv_bias")), ask=lambda item: answers.pop(0))
    assert script.modes()[0] == "search"
    assert not answers
    assert "profile" not in script.modes()
    assert sorted(v.status for v in log.verdicts) == ["declined", "declined", "kept"]
    assert {v.reason for v in log.verdicts if v.status == "declined"} == {"you quit before its turn"}


def test_all_asks_no_further_in_any_round(script) -> None:
    script.status = {"amp_bf16": "kept", "fused_pooling": "kept"}
    script.anew = [[candidate("fused_pooling")], []]
    asked = []

    def ask(item: Recommendation) -> Answer:
        asked.append(item.transform)
        return Answer.ALL

    _, verdicts = apply(script, candidate("amp_bf16"), ask=ask)
    assert len(asked) == 1
    assert verdicts["fused_pooling", 2].status == "kept"


def test_what_cannot_reach_the_least_gain_has_no_place_in_a_later_round() -> None:
    found = rounds.candidates(2, [], [], [candidate("tf32", 0.004), candidate("prefetch", 0.02)], profile(), 0.01)
    assert [(c.transform, c.round) for c in found] == [("prefetch", 2)]


@pytest.mark.parametrize(
    ("beside", "tried"),
    [
        (("conv3x3", 0.05), ["conv3x3", "fused_pooling"]),
        (("conv3x3", 0.008), []),  # a trial of two small ones is still one of small ones
        (("tf32", 0.05), ["tf32"]),  # of what is not put into the captured graph it is no neighbour
    ],
)
def test_a_small_kernel_goes_along_with_others(beside: tuple[str, float], tried: list[str]) -> None:
    asked = [candidate("fused_pooling", 0.006), candidate("grouped_conv", 0.004), candidate(*beside)]
    assert [c.transform for c in rounds.candidates(2, [], [], asked, profile(), 0.01)] == tried


def test_what_had_its_turn_gets_another_with_the_new_prediction(monkeypatch) -> None:
    before = [
        Verdict(transform="depthwise_conv", status="reverted", reason="", numerics=GOOD),
        Verdict(transform="amp_bf16", status="kept", reason=""),
    ]
    known = [candidate("depthwise_conv", 0.03), candidate("amp_bf16")]
    again = candidate("depthwise_conv", 0.3)
    found = rounds.candidates(2, before, known, [again], profile(), 0.01)
    assert found == (dataclasses.replace(again, round=2),)
    # No rule asks for it any more: what the new profile predicts decides.
    for high, tried in ((0.2, ["depthwise_conv"]), (0.0, [])):
        monkeypatch.setattr(rounds, "predict", lambda *a, high=high: Interval(low=0.0, high=high))
        assert [c.transform for c in rounds.candidates(2, before, known, [], profile(), 0.01)] == tried


@pytest.mark.parametrize(
    ("step_us", "high", "tried"), [(250.0, 0.004, 1), (700.0, 0.004, 0), (250.0, -0.001, 0), (0.0, 0.004, 0)]
)
def test_what_was_too_small_for_a_long_step_is_tried_on_a_shorter_one(step_us, high, tried) -> None:
    small = Verdict(
        transform="fused_optimizer",
        status="reverted",
        reason="",
        gain=Interval(low=-0.002, high=high),
        **dict.fromkeys(("effect", "numerics", "timing"), GOOD),
        blocks=Blocks(off_us=(1000.0, 1010.0)),
    )
    assert len(planner.second_look([small], [candidate("fused_optimizer")], step_us)) == tried


def test_the_gain_of_several_tried_as_one_moves_the_step_once() -> None:
    def kept(name: str, other: str, gain: float) -> Verdict:
        timing = Check(passed=True, detail="", numbers={"gain": gain})
        return Verdict(transform=name, status="kept", reason="", together=(other,), timing=timing)

    for gain, moved in ((0.06, False), (0.12, True)):  # twice 6 % would be more than a tenth
        assert rounds.moved([kept("a", "b", gain), kept("b", "a", gain)], 1, rounds.LEAST_MOVED) is moved


def test_compile_waits_until_the_rest_is_settled_and_must_still_promise_a_gain(script, monkeypatch) -> None:
    script.status = {"amp_bf16": "kept", "compile": "reverted"}
    for middle, status, modes in (
        (0.2, "reverted", ["search", "profile", "search"]),
        (0.0, "skipped", ["search", "profile"]),
    ):
        predicted = Interval(low=middle - 0.1, high=middle + 0.1)
        monkeypatch.setattr(rounds, "predict", lambda *a, predicted=predicted: predicted)
        script.launches, script.anew = [], [[]]
        log, _ = apply(script, candidate("compile", 0.5), candidate("amp_bf16"))
        assert script.modes() == modes
        (found,) = [v for v in log.verdicts if v.transform == "compile"]
        assert found.status == status
        assert [v.transform for v in log.verdicts].count("amp_bf16") == 1
        forget(script)
    assert "with the kept changes" in found.reason


def test_compile_is_tried_at_once_where_nothing_else_is_or_helps(script) -> None:
    script.status, script.anew = {"amp_bf16": "reverted", "compile": "kept"}, [[]]
    log, verdicts = apply(script, candidate("compile", 0.5), candidate("amp_bf16"))
    assert verdicts["compile", 1].status == "kept"
    assert script.modes()[:2] == ["search", "search"]
    assert log.rounds[0].tried == ("amp_bf16", "compile")
    assert log.stack.passed


@pytest.mark.parametrize(
    ("kernels", "left", "compiled", "modes"),
    [
        ("kept", 0.0, ("skipped", 2), ["search", "profile", "search", "profile"]),
        ("kept", 0.2, ("kept", 3), ["search", "profile", "search", "profile", "search"]),
        ("reverted", 0.0, ("kept", 2), ["search", "profile", "search", "search"]),
    ],
)
def test_in_a_later_round_too_compile_waits_for_the_step_that_the_rest_leaves(
    script, monkeypatch, kernels, left, compiled, modes
) -> None:
    script.status = {"amp_bf16": "kept", "first_conv": kernels, "compile": "kept"}
    script.anew = [[candidate("compile", 0.5), candidate("first_conv")], []]
    monkeypatch.setattr(rounds, "predict", lambda *a: Interval(low=left - 0.1, high=left + 0.1))
    _, verdicts = apply(script, candidate("amp_bf16"))
    assert script.modes()[: len(modes)] == modes
    (found,) = [v for v in verdicts.values() if v.transform == "compile"]
    assert (found.status, found.round) == compiled
