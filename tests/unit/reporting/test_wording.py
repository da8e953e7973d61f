from __future__ import annotations

from dataclasses import replace

import pytest
import samples

from advisor.core.cache import is_cell
from advisor.core.environment import Environment
from advisor.core.findings import Evidence, Finding, Findings, Interval, Outcome
from advisor.core.metrics import BY_NAME
from advisor.core.plan import Plan
from advisor.core.profile import InputStats, Spread, StepProfile
from advisor.core.units import bounds_text
from advisor.core.verdict import Round, Status, TrialLog, Verdict
from advisor.profiling.beside import notebooks
from advisor.reporting import breakdown, html, machine, numbers, terminal, terminal_trials, unexplained, wording
from advisor.reporting.html import report_html
from advisor.rules import cards
from advisor.trials import outcome, planfile


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.24, 0.58, "24–58 %"),
        (0.0, 0.012, "0–1.2 %"),
        (-0.031, -0.024, "−3.1 to −2.4 %"),
        (-0.004, 0.016, "−0.4 to 1.6 %"),
        (0.2, 0.2, "20 %"),
        (-0.0001, 0.0001, "0 %"),
        (0.0, 0.0002, "<0.1 %"),
        (-421.95, 1.0, "<−1000 to 100 %"),
    ],
)
def test_interval(low, high, text):
    assert numbers.interval(low, high) == text


@pytest.mark.parametrize(
    ("us", "text"), [(116_580, "116.6 ms"), (42_970, "42.97 ms"), (870, "870.0 µs"), (1.2e6, "1.200 s")]
)
def test_duration_keeps_four_digits(us, text):
    assert numbers.duration(us) == text


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, Add<float> >(int)", "vectorized_elementwise_kernel<…>"),
        ("void at::native::(anonymous namespace)::max_pool_forward_nchw<float, long>(int)", "max_pool_forward_nchw<…>"),
        ("sm90_xmma_fprop_implicit_gemm__5x_cudnn", "sm90_xmma_fprop_implicit_gemm__5x_cudnn"),
        ("aten::convolution_backward", "aten::convolution_backward"),
        ("void (anonymous namespace)::softmax_warp_forward<float>(float*)", "softmax_warp_forward<…>"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        ("", ""),
    ],
)
def test_kernel_name(name, short):
    assert numbers.kernel_name(name) == short


def test_headline_of_a_profile_names_the_limit_and_the_best_finding():
    text = wording.headline(samples.resnet50(), samples.findings(), None)
    assert "37 % of this GPU's limit" in text
    assert "convolutions run in fp32 where bf16 is faster (could save 24–58 % of the step)" in text


def test_a_limit_that_is_not_known_stands_beside_the_verdict_not_in_it():
    unknown = replace(samples.resnet50(), limit_us=0.0)
    assert wording.headline(unknown, samples.findings(), None).startswith("First to fix: ")
    assert "is not known" not in wording.headline(unknown, samples.findings(), None)
    assert "is not known" in wording.headline(unknown, None, None)
    assert "limit is not known.</p>" in report_html(unknown, samples.findings(), None)


def test_headline_says_when_there_is_nothing_to_do():
    profile = samples.resnet50()
    near = replace(profile, limit_us=0.9 * profile.step_us.median)
    none = Findings(run="", findings=(), cards=(), recommendations=())
    assert wording.headline(near, none, None).endswith("There is nothing to do.")
    assert "nothing to do" not in wording.headline(near, None, None)  # no rules were asked
    assert "nothing to do" not in wording.headline(profile, none, None)  # far from the limit is not done


def starved(profile, frac=0.7):
    return replace(profile, input=replace(profile.input, next_us=frac * profile.step_us.median))


def test_a_large_slice_that_no_card_explains_is_said_on_a_cpu_and_without_a_trace_too():
    none = Findings(run="", findings=(), cards=(), recommendations=())
    laptop = starved(samples.cpu_run())
    assert "Not explained by any finding: 70 % waiting for data." in wording.headline(laptop, none, None)
    untraced = starved(replace(samples.resnet50(), kernels=(), idle=(), busy_us=0.0, limit_us=0.0), 0.97)
    assert "97 % waiting for data" in wording.headline(untraced, none, None)
    assert "explains" not in wording.headline(starved(samples.cpu_run(), 0.2), none, None)
    near = starved(replace(samples.cpu_run(), limit_us=0.9 * samples.cpu_run().step_us.median))
    assert "nothing to do" not in wording.headline(near, none, None)


def test_what_tells_of_a_slice_exists_as_a_metric():
    told = {name for names in unexplained.ALSO_TOLD_BY.values() for name in names}
    told |= {f"{key}_frac" for key in unexplained.ALSO_TOLD_BY} - {"copy_frac", "other_frac"}
    assert told <= set(BY_NAME)


def test_what_a_card_is_about_is_not_said_to_be_unexplained():
    fired = Finding(
        rule="slow-loader", title="The loader is slow", area="input", severity="medium", outcome=Outcome.FIRED,
        gain=Interval(low=0.0, high=0.7), evidence=(Evidence(metric="loader_frac", value=0.7, unit="frac", provenance="measured"),),
    )  # fmt: skip
    found = Findings(run="", findings=(fired,), cards=cards([fired]), recommendations=())
    text = wording.headline(starved(samples.cpu_run()), found, None)
    assert "explains" not in text
    assert text.endswith("First to fix: the loader is slow (could save up to 70 % of the step).")
    quiet = replace(fired, outcome=Outcome.QUIET)
    said = wording.headline(starved(samples.cpu_run()), replace(found, findings=(quiet,), cards=()), None)
    assert "70 % waiting for data" in said, "a quiet rule explains nothing"
    described = (replace(fired, role="description"),)
    said = wording.headline(
        starved(samples.cpu_run()), replace(found, findings=described, cards=cards(described)), None
    )
    assert "70 % waiting for data" in said, "nor does a description"


def test_the_first_card_leads_the_headline_also_where_its_cost_is_not_known():
    leak = Finding(rule="leak", title="Memory grows", area="memory", severity="high", outcome=Outcome.FIRED)
    hint = replace(leak, rule="hint", title="The batch is odd", severity="low")
    some = replace(leak, rule="some", title="Kernels are slow", severity="low", gain=Interval(low=0.0, high=0.2))
    for told, end in (
        ((leak, some, hint), "First to fix: memory grows."),
        ((some, hint), "kernels are slow (could save up to 20 % of the step)."),
    ):
        found = Findings(run="", findings=told, cards=cards(told), recommendations=())
        assert wording.headline(samples.resnet50(), found, None).endswith(end)


@pytest.mark.parametrize(
    ("passed", "start"), [(True, "Proved: 3.10×"), (None, "3 of 9 changes kept; the plan was not proved")]
)
def test_headline_of_trials_claims_only_what_was_proved(passed, start):
    log = samples.trials()
    changed = replace(log, stack=replace(log.stack, passed=passed))
    assert wording.headline(samples.resnet50(), None, changed).startswith(start)
    assert wording.usable(changed) is (passed is True)


def test_what_was_faster_in_the_loop_alone_has_a_verdict_and_a_command_of_its_own():
    log = samples.trials()
    left_open = tuple(replace(v, status="unconfirmed") if v.status == "kept" else v for v in log.verdicts)
    stack = replace(log.stack, passed=None, detail="not faster beyond noise in fresh runs (1.02×, 0.98 to 1.06)")
    log = replace(log, verdicts=left_open, stack=stack)
    told = wording.trials_headline(log)
    assert told.startswith("Not confirmed in fresh runs: 3 changes faster in the running loop. Fresh runs: not faster")
    assert not wording.usable(log)
    command = "advisor apply --plan p.yaml train_imagenet.py --arch resnet50 --batch-size 256"
    assert wording.next_of_trials(log, "advisor", "p.yaml") == command
    assert command in terminal_trials.trials_text(log, 200, plan="p.yaml")
    assert "advisor apply --plan last" in machine.markdown(samples.resnet50(), None, log)
    assert "advisor apply --plan last" in samples.whole(html.report_html(samples.resnet50(), None, log))


def test_what_no_block_has_timed_is_not_told_as_faster():
    log = samples.trials()
    kept = [v for v in log.verdicts if v.status == "kept"]
    untimed = tuple(replace(v, status="unconfirmed", gain=None) for v in kept)
    told = wording.trials_headline(replace(log, verdicts=untimed, stack=replace(log.stack, passed=None)))
    assert told.startswith(
        "Not confirmed in fresh runs: 3 changes that the loop had too little time to measure. Fresh runs:"
    )
    told = wording.trials_headline(
        replace(log, verdicts=(replace(kept[0], status="unconfirmed"), *untimed[1:]), stack=None)
    )
    assert "1 change faster in the running loop and 2 that the loop had too little time to measure." in told


def test_what_is_proved_is_told_before_what_is_not():
    log = samples.trials()
    first, *others = log.verdicts
    log = replace(log, verdicts=(replace(first, status="unconfirmed"), *others))
    told = wording.trials_headline(log)
    assert told.startswith("Proved: 3.10×")
    assert "; not confirmed in fresh runs: 1 change faster in the running loop" in told
    assert wording.next_of_trials(log, "advisor").startswith("advisor run train_imagenet.py")


def test_the_headline_tells_a_no_from_a_rejection():
    settled = replace(samples.trials(), stack=None)
    no = replace(settled.verdicts[0], status="declined", reason="you said no")
    passed_over, rejected = (next(v for v in settled.verdicts if v.status == s) for s in ("skipped", "reverted"))

    def told(*verdicts):
        return wording.trials_headline(replace(settled, verdicts=verdicts))

    second = replace(no, transform="tf32")
    assert told(no) == "Nothing was tried: you declined it. The plain script stays as it is."
    assert told(no, second, passed_over).startswith("Nothing was tried: you declined 2 changes.")
    assert told(passed_over).startswith("Nothing was tried: each change was skipped, with a reason.")
    assert told(no, rejected).startswith(
        "Nothing is kept: each tried change was rejected, with a reason, and you declined 1"
    )
    assert told(rejected, passed_over).startswith("Nothing helps here: each tried change")
    assert ", 1 declined by you" in wording.trials_headline(
        replace(samples.trials(), verdicts=(*samples.trials().verdicts, second))
    )


def test_where_the_time_went_is_told_most_first():
    log = TrialLog(script="a", argv=(), spent={"numeric gate": 30.2, "timed blocks": 41.0, "rest": 0.3})
    assert wording.spent(log) == "timed blocks 41 s, numeric gate 30 s"


def test_headline_without_a_kept_change():
    rejected = tuple(v for v in samples.trials().verdicts if v.status in ("reverted", "failed", "not applicable"))
    settled = replace(samples.trials(), verdicts=rejected, stack=None)
    assert wording.trials_headline(settled).startswith("Nothing helps here")
    assert "plain script stays as it is" in wording.trials_headline(settled)
    noisy = replace(settled, verdicts=(*rejected, replace(rejected[0], status="inconclusive")))
    assert "1 change could not be settled" in wording.trials_headline(noisy)
    assert "did not finish" in wording.trials_headline(replace(settled, complete=False))


def test_next_command_can_be_pasted():
    profile = replace(samples.resnet50(), argv=("--name", "a b", "--x=$HOME"))
    assert wording.next_apply(profile, "advisor") == "advisor apply --auto train_imagenet.py --name 'a b' '--x=$HOME'"
    alone = wording.next_apply(replace(profile, argv=()), "advisor", "tf32")
    assert alone == "advisor apply --auto --only tf32 train_imagenet.py"


def test_no_command_is_recommended_that_would_be_refused():
    profile = replace(samples.resnet50(), step_kind="forward")
    assert wording.next_apply(profile, "advisor") == wording.next_apply(profile, "advisor", "tf32") == ""
    for report in (
        terminal.profile_text(profile, samples.findings(), 200),
        terminal.recommendations_text(profile, samples.findings(), 200),
        machine.markdown(profile, samples.findings(), None),
        html.report_html(profile, samples.findings(), None),
    ):
        assert "apply --auto" not in report
    assert wording.refused(profile, "advisor")[1:] in terminal.profile_text(profile, samples.findings(), 1000)


def test_a_training_in_several_processes_is_searched_by_the_same_command():
    profile = samples.resnet50()
    several = replace(profile, model=replace(profile.model, world_size=2))
    assert wording.next_apply(several, "advisor") == wording.next_apply(profile, "advisor") != ""


def test_a_module_or_launcher_is_found_in_the_plan():
    log = samples.trials()
    assert wording.next_of_trials(log, "advisor", "p.yaml").startswith(
        "advisor run --plan p.yaml train_imagenet.py --arch"
    )
    assert wording.next_of_trials(replace(log, script="pkg.train"), "advisor") == "advisor run"
    assert wording.next_of_trials(replace(log, script="torchrun"), "advisor", "p.yaml") == "advisor run --plan p.yaml"


def test_what_tracing_cost_is_told_in_words_that_fit():
    cost = samples.resnet50().cost
    assert wording.tracing(cost) == "3 steps traced, each 2.1 % slower than untraced"
    once = replace(cost, traced_steps=1, overhead_frac=-0.66)
    assert wording.tracing(once) == "1 step traced, no slower than untraced"


def test_one_time_has_no_spread():
    only = Spread(median=410_200.0, p10=410_200.0, p90=410_200.0, n=1)
    assert numbers.spread(only) == "n = 1"


def test_bursts_of_batches_show_in_what_a_step_takes():
    steady = samples.resnet50()
    assert "bursts" not in wording.step_sentence(steady)
    spread = Spread(median=10_000.0, p10=10_000.0, p90=40_000.0, n=4, raw=(40_000.0, 10_000.0, 10_000.0, 10_000.0))
    bursts = replace(steady, step_us=spread, input=replace(steady.input, burst_us=7_500.0))
    assert wording.step_sentence(bursts).endswith("n = 4, mean 17.50 ms (batches come in bursts)")
    rate, plain = breakdown.samples_per_s(bursts), breakdown.samples_per_s(replace(bursts, input=steady.input))
    assert rate == pytest.approx(plain * 10 / 17.5)


def test_notes_are_sentences_and_names_stay_as_they_are():
    assert wording.sentence("the script ended after 7 steps") == "The script ended after 7 steps."
    assert wording.sentence("torch was not seen.") == "torch was not seen."
    assert wording.sentence("amp_bf16, kept before, was left out") == "amp_bf16, kept before, was left out."


def test_a_round_names_what_is_kept_as_people_call_it():
    log = replace(samples.trials(), rounds=(Round(number=2, step_us=5e4, kept=("amp_bf16", "tf32")),))
    assert wording.round_headline(log, 2).endswith("profiled again with bf16 autocast, tf32: 50.00 ms a step")


def test_what_is_predicted_to_save_nothing_says_so():
    texts = [numbers.saves(Interval(low=low, high=high)) for low, high in ((0.0, 0.0), (0.0, 0.2), (-0.1, -0.02))]
    assert texts == ["nothing", "up to 20 % of the step", "−10 to −2 % of the step"]


def test_what_may_lose_is_not_told_as_if_it_could_only_gain():
    """docs/reading-a-report.md: "up to 22 %" means that the low end is zero."""
    told = [numbers.saves(Interval(low=low, high=0.22)) for low in (-0.47, -0.004)]
    assert told == ["up to 22 % of the step, or cost up to 47 %", "up to 22 % of the step"]


def test_a_bound_that_noise_has_made_is_cut_off():
    assert [bounds_text(1.55, 4.881), bounds_text(0.0, 17184.71)] == ["1.55 to 4.88", "0.00 to above 100"]


def test_where_the_step_waits_for_its_loader_every_report_tells_the_devices_time() -> None:
    log = samples.trials()
    assert log.stack is not None
    waiting = replace(log.stack, device_speedup=1.62, device_speedup_low=1.58, device_speedup_high=1.66)
    told = replace(log, stack=waiting)
    words = "the device's time 1.62× shorter (1.58 to 1.66): this step waits for its loader"
    assert words in wording.trials_headline(told)
    assert words in " ".join(terminal_trials.trials_text(told).split())
    assert "1.58 to 1.66" in html.report_html(samples.resnet50(), None, told)
    assert "waits for its loader" not in wording.trials_headline(log)


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        ((0.333, 0.25, 0.5), "the device's time 3.00× as long (2.00 to 4.00): this step waits for its loader"),
        ((1.04, 0.97, 1.10), ""),  # as long, for all that is known
    ],
)
def test_a_devices_time_that_is_no_shorter_is_not_told_as_shorter(bounds, told) -> None:
    """Seen: `the device's time 0.33× shorter (0.27 to 0.41)`."""
    stack = samples.trials().stack
    assert stack is not None
    found, low, high = bounds
    waiting = replace(stack, device_speedup=found, device_speedup_low=low, device_speedup_high=high)
    assert numbers.device_speedup(waiting) == told


def test_a_proof_by_the_devices_time_is_not_told_as_a_proof_of_the_step() -> None:
    """`Proved: 1.04× the plain script's speed (0.58 to 1.89)` was said of a 3-D ResNet: the second half takes the first back."""
    log = samples.trials()
    assert log.stack is not None
    by_device = replace(
        log.stack, speedup=1.04, speedup_low=0.58, speedup_high=1.89, waits_for="its loader",
        device_speedup=1.51, device_speedup_low=1.44, device_speedup_high=1.59,
    )  # fmt: skip
    told = replace(log, stack=by_device)
    headline = wording.trials_headline(told)
    assert headline.startswith(
        "Proved: the device's time 1.51× shorter (1.44 to 1.59): this step waits for its loader, and is not slower for it: 1.04×"
    )
    assert outcome.speedup(told) == (
        "the device's time 1.51× shorter (1.44 to 1.59), the step not slower: 1.04× (0.58 to 1.89)"
    )
    assert "Device time shorter" in html.report_html(samples.resnet50(), None, told)
    assert "Device time shorter" not in html.report_html(samples.resnet50(), None, log)


@pytest.mark.parametrize(
    ("step_us", "next_us", "busy_us", "told"),
    [
        (160e3, 114e3, 68e3, "68.00 ms if every batch were ready: the step waits 57 % of its time for the loader"),
        (
            160e3,
            60e3,
            68e3,
            "100.0 ms if every batch were ready: the step waits 38 % of its time for the loader",
        ),  # the host's part stays
        (160e3, 10e3, 68e3, ""),  # below a tenth
        (160e3, 114e3, 0.0, ""),  # nobody saw the device
    ],
)
def test_what_a_step_would_be_with_its_data_ready(step_us: float, next_us: float, busy_us: float, told: str) -> None:
    profile = StepProfile(
        script="t.py", argv=(), created="", environment=Environment(), step_kind="optimizer", wall_us=None, busy_us=busy_us,
        step_us=Spread(median=step_us, p10=step_us, p90=step_us, n=9), input=InputStats(next_us=next_us, late_us=next_us),
    )  # fmt: skip
    assert wording.fed(profile) == told


def test_the_step_with_its_data_ready_is_an_interval_of_what_was_late_and_how_exactly_it_is_known() -> None:
    base = StepProfile(
        script="t.py", argv=(), created="", environment=Environment(), step_kind="optimizer", wall_us=None, busy_us=60e3,
        step_us=Spread(median=160e3, p10=160e3, p90=160e3, n=9),
        input=InputStats(next_us=80e3, late_us=70e3, next_error_us=4e3),
    )  # fmt: skip
    assert base.fed_within_us == (76e3, 94e3)
    assert wording.fed(base).startswith("76.00 to 94.00 ms if every batch were ready")
    # No less than the device is busy, no more than the step is now.
    assert replace(base, busy_us=78e3).fed_within_us == (78e3, 94e3)
    assert replace(base, input=replace(base.input, late_us=0.0)).fed_within_us == (76e3, 160e3)
    assert replace(base, input=InputStats()).fed_within_us == (0.0, 0.0)


def test_a_long_reason_is_told_once_for_changes_tried_as_one():
    reason = "65 % of the step saved (too few or too noisy for an interval, 3 pairs)"
    first, second, third = (
        Verdict(transform=name, status=Status.KEPT, reason=text)
        for name, text in (("a", reason), ("b", reason), ("c", "faster"))
    )
    assert wording.reasons([first, second, second, third]) == [reason, "as above", "as above", "faster"]
    slow = replace(second, first_step_us=2e6, break_even_steps=9.0)
    assert wording.reasons([first, slow])[1].startswith("as above; its first step takes 2.00 s longer")
    assert wording.reasons([third, third]) == ["faster", "faster"]  # as short as "as above"


def test_a_cell_is_never_told_by_the_path_of_its_script(tmp_path, monkeypatch):
    """The next command was `advisor apply --auto /root/.cache/advisor/notebooks/…/cell.py`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = notebooks.written("cell", ["x = 1"], tmp_path)
    profile = replace(samples.resnet50(), script=str(script), argv=())
    assert wording.script(profile) == "a cell of a notebook"
    assert wording.next_apply(profile, "advisor", "amp_bf16") == "%%advisor apply --auto --only amp_bf16"
    trials = replace(samples.trials(), script=str(script))
    assert wording.next_of_trials(trials, "advisor", "plan.yaml") == 'import advisor; advisor.enable("plan.yaml")'
    assert not is_cell(str(notebooks.written("train", ["x = 1"], tmp_path)))
    of_a_cell, of_a_script = (Plan(script=name, argv=(), created="", items=()) for name in (str(script), "train.py"))
    assert planfile.another_script(of_a_cell, "ipykernel_launcher.py") == ""
    assert "it is the plan of train.py" in planfile.another_script(of_a_script, "other.py")


@pytest.mark.parametrize(
    ("low", "middle", "high", "told"),
    [
        (50_100.0, 132_200.0, 1_599_000.0, "p10–p90 50.10–1,599 ms, n = 20"),
        (998_000.0, 1_020_000.0, 1_100_000.0, "p10–p90 0.998–1.100 s, n = 20"),
    ],
)
def test_a_spread_has_the_unit_of_its_middle(low, middle, high, told):
    assert numbers.spread(Spread(median=middle, p10=low, p90=high, n=20)) == told
