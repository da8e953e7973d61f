from __future__ import annotations

import re
from dataclasses import replace

import pytest
import samples

from advisor.core.findings import Finding, Findings, Interval, Outcome
from advisor.core.profile import StepProfile
from advisor.reporting import machine, terminal, terminal_kernels, terminal_trials
from advisor.reporting.compare import compare_profiles
from advisor.reporting.html import report_html
from advisor.rules import cards

ANSI = re.compile(r"\x1b\[[\d;]*m")


def _texts(width: int, color: bool) -> list[str]:
    profile, findings, trials = samples.resnet50(), samples.findings(), samples.trials()
    return [
        terminal.profile_text(profile, findings, width, color, explain=True),
        terminal_trials.trials_text(trials, width, color),
        terminal.comparison_text(compare_profiles(profile, samples.cpu_run()), width, color),
        terminal.recommendations_text(None, findings, width, color),
        terminal.profile_text(samples.cpu_run(), None, width, color),
    ]


@pytest.mark.parametrize("width", [72, 80, 160])
def test_no_line_is_wider_than_the_terminal(width):
    for text in _texts(width, True):
        for line in ANSI.sub("", text).splitlines():
            is_command = line.startswith("  advisor ")  # commands are never cut: they are there to be copied
            assert len(line) <= width or is_command, line


def test_one_ranks_rate_is_told_as_such_and_keeps_within_the_width():
    base = samples.resnet50()
    spread = replace(base.step_us, p10=973.4, p90=184_978.0)  # in units of their own
    ranks = replace(base, step_us=spread, model=replace(base.model, world_size=8))
    for width in (72, 100):
        text = terminal.profile_text(ranks, None, width)
        assert "2,191 samples/s on one rank" in text
        assert max(map(len, text.splitlines())) <= width
        assert "rank" not in terminal.profile_text(base, None, width)
    assert "2,191 samples/s on one rank" in machine.markdown(ranks, None, None)
    assert "samples/s on one rank" in report_html(ranks, None, None)


def test_cards_are_numbered_without_gaps():
    """Seen: 1, 2, 5. Cards between them save too little to be shown."""
    found = samples.findings()
    told = [replace(card, predicted=Interval(low=0.0, high=0.001)) if card.rank == 2 else card for card in found.cards]
    text = terminal.profile_text(samples.resnet50(), replace(found, cards=tuple(told)), 100)
    numbers = [int(number) for number in re.findall(r"● (\d+)\. ", text)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 2


def test_colour_changes_nothing_but_colour():
    for plain, coloured in zip(_texts(80, False), _texts(80, True), strict=True):
        assert "\x1b" not in plain
        assert "\x1b" in coloured
        assert ANSI.sub("", coloured) == plain


def test_profile_says_what_people_came_for():
    text = terminal.profile_text(samples.resnet50(), samples.findings(), 100)
    for part in (
        "116.8 ms   p10–p90 116.5–117.3 ms, n = 20",
        "2,191 samples/s",
        "this step runs at 37 % of this GPU's limit",
        "idle: waiting for copies",
        "train_imagenet.py:81",
        "layer1.*.bn3 ×3",
        "predicted to save 24–58 % of the step · lower precision · apply: amp_bf16",
        "13 rules: 6 fired, 5 quiet, 2 not evaluated",
        "advisor apply --auto train_imagenet.py --arch resnet50 --batch-size 256",
        "each 2.1 % slower than untraced; 99.8 % of launches",
    ):
        assert part in text


def told(*fired, explain=False):
    found = Findings(run="", findings=fired, cards=cards(fired), recommendations=())
    text = terminal.profile_text(samples.resnet50(), found, 100, explain=explain)
    return text[text.index("Largest gaps") :]


def fired(rule, high=None, **more):
    gain = None if high is None else Interval(low=0.0, high=high)
    fields = {"severity": "medium", "area": "launch", "message": f"{rule} is so."} | more
    return Finding(rule=rule, title=f"Title of {rule}", outcome=Outcome.FIRED, gain=gain, **fields)


def test_a_card_is_numbered_and_names_its_other_reasons():
    host = [fired(name, high, cause="host-bound") for name, high in (("busy", 0.2), ("bound", 0.5), ("short", 0.1))]
    text = told(*host, fired("other", 0.05))
    assert "● 1. Title of bound  [bound]" in text
    assert "also: Title of busy; Title of short" in text
    assert "● 2. Title of other  [other]" in text
    assert "[busy]" not in text
    assert "[busy]" in told(*host, explain=True)


def test_what_saves_nothing_is_not_offered_as_help():
    idle = (fired("tiny", 0.004), fired("slow", 0.9, role="description"), fired("hint", severity="low"))
    text = told(*idle)
    assert "What would help" not in text
    assert "No change is known that would save 1 % of the step." in text
    assert "3 more in the report." in text
    assert "[slow]" in told(*idle, explain=True)
    with_help = told(fired("leak", severity="high"), *idle)
    assert "What would help" in with_help
    assert "● 1. Title of leak" in with_help
    assert "[slow]" not in with_help


def test_trials_show_predicted_beside_measured_and_the_stack():
    text = terminal_trials.trials_text(samples.trials(), 160)
    line = next(line for line in text.splitlines() if line.startswith("  fused batch norm"))
    assert "11–32 %" in line
    assert "27–29 %" in line
    assert "kept" in line
    for status in ("reverted", "inconclusive", "failed", "not applicable", "skipped"):
        assert f"  {status}" in text
    for part in (
        "3 of 9 changes kept",
        "3.10× (3.05 to 3.14)",
        "116.6 ms plain, 37.58 ms with the plan",
        "2,196 → 6,809",
        "takes 1.90 s longer, paid back after 181 steps",
        "without it the plan is 25–27 % of the step slower",
    ):
        assert part in text


def test_a_failed_stack_is_not_sold():
    log = samples.trials()
    text = terminal_trials.trials_text(replace(log, stack=replace(log.stack, passed=False, detail="losses part")), 80)
    assert "FAILED: losses part" in text
    assert "advisor run" not in text


def test_incomplete_runs_are_shown_as_far_as_they_go():
    empty = StepProfile(
        script="x.py", argv=(), created="", environment=samples.LAPTOP, step_kind="none", step_us=None, wall_us=None,
        complete=False, notes=("no optimizer step was seen",),
    )  # fmt: skip
    text = terminal.profile_text(empty, None, 80)
    assert "No step could be timed" in text
    assert "incomplete" in text
    assert "No optimizer step was seen." in text


def test_names_cannot_drive_the_terminal():
    profile, findings, log = samples.hostile()
    for text in (
        terminal.profile_text(profile, findings, 80, explain=True),
        terminal_trials.trials_text(log, 80),
        terminal.comparison_text(compare_profiles(profile, profile), 80),
        terminal.recommendations_text(profile, findings, 80),
    ):
        assert "\x1b" not in text
        assert "\u2028" not in text


def test_of_a_verification_what_is_wrong_is_told_and_the_rest_counted():
    def case(family, passed, detail="", name="k3 bfloat16 1x8x5x7"):
        return {"family": family, "case": name, "passed": passed, "detail": detail, "output_error": 1e-3}

    why = "not for this GPU: sm_80 lacks the products of warpgroups that sm_90 has"
    rows = [*[case("conv3x3", None, why)] * 3, case("pooling", True), case("pooling", False, "two runs differ; " * 9)]
    text = terminal_kernels.verification_text(rows, 80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "conv3x3  3 cases: 3 left to PyTorch"
    assert lines[1] == f"    {why}"
    assert lines[2] == "pooling  2 cases: 1 right, 1 wrong"
    assert lines[3].startswith("    k3 bfloat16 1x8x5x7: two runs differ;")
    assert " ".join(text.split()).count("two runs differ") == 9
    assert text.count("sm_80") == 1
    assert lines[-2:] == ["", "5 cases: 1 right, 1 wrong, 3 left to PyTorch"]
    assert "\x1b[31m" in terminal_kernels.verification_text(rows, 80, color=True)


@pytest.mark.parametrize("width", [72, 80, 100, 137])
def test_no_line_ends_between_a_number_and_its_unit(width):
    spent = dict.fromkeys(("first profile", "timed blocks", "numeric gate", "matching", "warm-up of changes"), 11.0)
    log = replace(samples.trials(), spent=spent)
    for line in terminal_trials.trials_text(log, width).splitlines():
        assert not re.match(r" +(s|%|pairs)\b", line), line


def test_columns_of_trials_fit_the_widest_interval():
    wide = replace(
        samples.trials().verdicts[0], gain=Interval(low=-421.95, high=0.9999), predicted=Interval(low=-0.21, high=0.35)
    )
    log = replace(samples.trials(), verdicts=(wide, *samples.trials().verdicts[1:]))
    lines = terminal_trials.trials_text(log, 120).splitlines()
    head = next(line for line in lines if line.startswith("  change"))
    for v in log.verdicts:
        row = next(line for line in lines if line.startswith(f"  {v.title} "))
        assert row[head.index("verdict") :].startswith(v.status), row


def test_notes_of_a_run_and_of_a_search_are_sentences():
    profile = replace(samples.resnet50(), notes=("the script ended early",))
    assert "  The script ended early.\n" in terminal.profile_text(profile, None, 80) + "\n"
    log = replace(samples.trials(), notes=("no time was left for round 2",))
    assert "  No time was left for round 2.\n" in terminal_trials.trials_text(log, 80) + "\n"


def test_a_share_too_small_to_show_is_not_nothing():
    slow = replace(samples.cpu_run(), limit_us=1.0)
    assert "<0.1 % of this machine's limit" in terminal.profile_text(slow, None, 80)


def test_one_rule_is_singular():
    found = samples.findings()
    unknown = next(f for f in found.findings if f.outcome is Outcome.UNKNOWN)
    text = terminal.profile_text(samples.resnet50(), replace(found, findings=(unknown,), cards=()), 80, explain=True)
    assert "Not evaluated  1 rule\n" in text
    assert "1 rule: 0 fired" in text


def test_each_round_is_told_once_also_where_its_last_verdict_comes_later():
    first, second, *_, last = samples.trials().verdicts
    log = replace(samples.trials(), verdicts=(first, replace(second, round=2), replace(last, round=1)))
    text = terminal_trials.trials_text(log, 100)
    assert text.count("Round 1,") == 1
    assert text.index(last.title) < text.index("Round 2")


def test_what_the_script_is_stands_above_how_it_was_looked_at():
    text = terminal.profile_text(replace(samples.cpu_run(), notes=("the script trains nothing",)), None, 100)
    notes = text[text.index("Notes") :]
    assert notes.index("The script trains nothing.") < notes.index("traced")


def test_notes_of_a_search_are_no_files():
    text = terminal_trials.trials_text(replace(samples.trials(), notes=("no time was left for round 3",)), 80)
    assert "(diverted from checkpoint.pth)\n\nNotes of the search\n  No time was left for round 3.\n" in text


def test_a_family_says_once_what_it_replaces():
    shared = {"family": "pooling", "replaces": "max_pool2d, training, " + "channels_last " * 8, "sha256": "ab12"}
    sources = [{**shared, "kernel": f"pooling/{name}.cu", "entries": ", ".join([name] * 9)} for name in ("max", "mean")]
    lines = terminal_kernels.kernels_text([*sources, {**sources[0], "family": "upsample"}], 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if not line.startswith(" ")] == ["pooling  2 sources", "", "upsample  1 source"]
    assert sum("in place of max_pool2d" in line for line in lines) == 2


def test_a_question_says_what_would_be_tried_in_lines_that_fit():
    first = samples.findings().recommendations[0]
    text = terminal.question_text(replace(first, title="bf16 mixed precision", reason="Because of this. " * 9), 80)
    assert text.splitlines()[0] == "bf16 mixed precision  [amp_bf16]"
    assert "predicted to save" in text
    assert max(map(len, text.splitlines())) <= 80


def _where(text: str) -> list[str]:
    """The lines that say where kept changes took effect."""
    _, _, after = text.partition("Where kept changes took effect  ")
    return after.partition("\n\n")[0].splitlines()


def test_places_of_what_is_kept_are_counted_with_reasons_most_frequent_first():
    note, *lines = _where(terminal_trials.trials_text(samples.many_places(), 160))
    assert note == "by path in report.html or --format json"
    assert lines == [
        "  fused batch norm, add and ReLU: 250 places, 120 unchanged",
        "       60  the norm behind it has no use for it, at stages.1.blocks.20.conv, stages.1.blocks.21.conv, …",
        "       35  64–256 channels in, 32 out: cuDNN is faster, at stages.0.blocks.25.conv, stages.0.blocks.26.conv, …",
        "       20  no measurement on file, at stages.0.blocks.5.conv, stages.0.blocks.6.conv, …",
        '        5  left to <Inductor> & "others" {0}, at stages.0.blocks.0.conv, stages.0.blocks.1.conv, …',
    ]


@pytest.mark.parametrize("width", [72, 80, 160])
def test_many_places_take_few_lines_that_fit(width):
    log = samples.many_places()
    fused = next(v for v in log.verdicts if v.unmatched)
    left = (*fused.unmatched, *[f"{'deep.' * 900}: {'because ' * 900}"] * 80, "x: y", "y: z")
    crowded = replace(log, verdicts=(replace(fused, unmatched=left),))
    lines = _where(terminal_trials.trials_text(crowded, width))
    assert len(lines) < 14
    assert lines[2].startswith("       80  because because ")
    assert max(map(len, lines[1:])) <= width
    assert lines[-1] == "       27  for 4 other reasons"


def test_without_places_nothing_is_said_of_them():
    log = samples.many_places(0, 0)
    assert "Where kept changes" not in terminal_trials.trials_text(log, 80)
    reverted = [replace(v, status="reverted") for v in samples.many_places().verdicts]
    text = " ".join(terminal_trials.trials_text(replace(log, verdicts=tuple(reverted)), 80).split())
    assert "Where kept changes" not in text
    assert "120 places unchanged" in text


def test_a_proof_has_no_page_to_look_places_up_in():
    text = terminal_trials.trials_text(samples.many_places(), 80, listed_in="trials.json")
    assert _where(text)[0] == "by path in trials.json or --format json"


def test_a_long_place_is_wrapped_and_keeps_its_end():
    place = "src/project/with/long/names/training_loop.py:1234 Sequential.23.b: aten::convolution_backward (backward, 1.01 ms, 5×)"
    found = samples.findings()
    found = replace(found, findings=tuple(replace(finding, sites=(place,)) for finding in found.findings))
    page = terminal.profile_text(samples.resnet50(), found, 80)
    assert place in " ".join(page.split())
    assert max(map(len, page.splitlines())) <= 80
