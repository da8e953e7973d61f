"""Each command hands the pipeline what the user asked for, shows what comes back, and exits as documented."""

from __future__ import annotations

import importlib
import io
import json
from pathlib import Path

import pytest
import samples

from advisor.bench.op_rows import RowChoice
from advisor.cli import ask as asking
from advisor.cli import output
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.findings import Interval, Recommendation
from advisor.trials.choosing import Answer
from advisor.trials.options import SearchOptions


def test_script_arguments_pass_through_untouched(invoke, pipeline):
    result = invoke("profile", "--steps", "7", "train.py", "--help", "-o", "x", "--steps", "9", "--", "-m")
    assert result.exit_code == 0, result.output
    (words,), kwargs = pipeline.calls["profile"]
    assert words == ("train.py", "--help", "-o", "x", "--steps", "9", "--", "-m")
    assert (kwargs["steps"], kwargs["module"], kwargs["out"]) == (7, False, None)


def test_module_is_a_flag_so_its_own_options_stay_its_own(invoke, pipeline):
    assert invoke("profile", "-m", "pkg.train", "--lr", "0.1").exit_code == 0
    (words,), kwargs = pipeline.calls["profile"]
    assert words == ("pkg.train", "--lr", "0.1")
    assert kwargs["module"] is True


def test_torchrun_after_a_double_dash(invoke, pipeline):
    assert invoke("profile", "--", "torchrun", "--nproc-per-node", "4", "train.py").exit_code == 0
    assert pipeline.calls["profile"][0][0] == ("torchrun", "--nproc-per-node", "4", "train.py")


def test_profile_keeps_stdout_for_the_script(invoke):
    result = invoke("profile", "train.py")
    assert result.stdout == ""
    assert "this step runs at 37 % of this GPU's limit" in result.stderr
    assert "[advisor] step 3 of 20" in result.stderr


def test_profile_json_goes_to_stdout_and_parses(invoke):
    result = invoke("profile", "--format", "json", "train.py")
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1
    assert document["summary"]["steps_measured"] == 20


@pytest.mark.parametrize("code", [0, 7, 137])
def test_profile_ends_with_the_scripts_exit_code(invoke, pipeline, code):
    pipeline.exit_code = code
    assert invoke("profile", "train.py").exit_code == code


@pytest.mark.parametrize(("severity", "code"), [("high", 1), ("info", 1), (None, 0)])
def test_fail_on(invoke, severity, code):
    options = ["--fail-on", severity] if severity else []
    assert invoke("profile", *options, "train.py").exit_code == code
    assert invoke("recommend", *options, "last").exit_code == code


def test_fail_on_does_not_hide_the_scripts_own_failure(invoke, pipeline):
    pipeline.exit_code = 9
    assert invoke("profile", "--fail-on", "high", "train.py").exit_code == 9


def test_an_exit_code_says_whose_it_is(invoke, pipeline):
    found = invoke("profile", "--fail-on", "high", "train.py")
    assert "advisor: exit code 1: --fail-on high, and" in found.stderr
    assert "exit code" in invoke("recommend", "--fail-on", "high", "last").stderr
    assert "exit code" not in invoke("profile", "train.py").stderr
    for code in (1, 4):
        pipeline.exit_code = code
        found = invoke("profile", "--fail-on", "high", "-q", "train.py")
        assert found.exit_code == code
        assert found.stderr.strip() == f"advisor: exit code {code} is the script's own"
    pipeline.exit_code = 9  # none of advisor's
    assert "exit code" not in invoke("profile", "train.py").stderr


def test_a_fault_in_the_report_does_not_hide_the_scripts_own_failure(invoke, pipeline, monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("planted")

    monkeypatch.setattr("advisor.reporting.terminal.profile_text", fail)
    pipeline.exit_code = 9
    result = invoke("profile", "train.py")
    assert result.exit_code == 9
    assert "the report could not be made (ValueError)" in result.stderr
    pipeline.exit_code = 0
    assert invoke("profile", "train.py").exit_code == ExitCode.OWN_FAULT


def test_streams_that_cannot_write_every_character():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    output.say("3.10× faster, 12 µs", stream)
    stream.seek(0)
    assert stream.read() == "3.10? faster, 12 ?s\n"


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), (None, None)])
def test_colour_only_on_a_willing_terminal(monkeypatch, variable, value):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if variable:
        monkeypatch.setenv(variable, value)
    assert output.color(Terminal()) is (variable is None)
    assert output.color(io.StringIO()) is False


def test_quiet_profile_says_nothing(invoke):
    result = invoke("profile", "-q", "train.py")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_no_script_is_a_usage_error_in_one_line(invoke, pipeline):
    for command in (["profile"], ["apply"]):
        result = invoke(*command)
        assert result.exit_code == ExitCode.USAGE
        assert result.stderr.startswith("advisor: no script")
        assert result.stderr.count("\n") == 1
    assert not pipeline.calls


def test_unknown_option_before_the_script_is_named(invoke):
    result = invoke("profile", "--stepps", "3", "train.py")
    assert result.exit_code == ExitCode.USAGE
    assert "--stepps" in result.stderr
    assert result.stderr.count("\n") == 1


def test_recommend_passes_selection_and_overrides(invoke, pipeline, tmp_path):
    result = invoke(
        "recommend", "--rules", str(tmp_path), "--select", "a", "--ignore", "b", "--ignore", "c",
        "--set", "launch-bound.idle_launch_frac=0.1", "last",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (run,), kwargs = pipeline.calls["recommend"]
    assert run == "last"
    assert kwargs == {
        "rules_dirs": (tmp_path,),
        "select": ("a",),
        "ignore": ("b", "c"),
        "overrides": {"launch-bound.idle_launch_frac": "0.1"},
    }
    assert "[fp32-convolutions]" in result.stdout


def test_recommend_explain_shows_conditions_and_what_is_missing(invoke):
    short, long = invoke("recommend", "last").stdout, invoke("recommend", "--explain", "last").stdout
    for text in (
        "fp32_conv_frac = 53 % (condition: > 0.2; measured)",
        "comm_exposed_frac: needs more than one process",
    ):
        assert text not in short
        assert text in long


@pytest.mark.parametrize("text", ["rule=3", "rule.metric", ".metric=3", "rule.metric="])
def test_malformed_override(invoke, text):
    result = invoke("recommend", "--set", text, "last")
    assert result.exit_code == ExitCode.USAGE
    assert "RULE.METRIC=VALUE" in result.stderr


def test_apply_auto(invoke, pipeline):
    result = invoke(
        "apply", "--auto", "--min-gain", "2%", "--max-time", "1h30m", "--skip", "compile", "--max-pairs", "4", "train.py",
        "--lr", "1",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (words,), kwargs = pipeline.calls["apply"]
    assert words == ("train.py", "--lr", "1")
    assert kwargs["ask"] is None
    assert kwargs["options"] == SearchOptions(min_gain=0.02, time_s=5400.0, skip=("compile",), max_pairs=4)
    assert "3.10× (3.05 to 3.14)" in result.stderr


def test_apply_auto_needs_no_script(invoke, pipeline):
    assert invoke("apply", "--auto").exit_code == 0
    assert pipeline.calls["apply"][0][0] == ()


def test_apply_asks_without_auto(invoke, pipeline, monkeypatch, tmp_path):
    _terminal(monkeypatch, tmp_path, "y")
    assert invoke("apply", "train.py").exit_code == 0
    assert pipeline.calls["apply"][1]["ask"] is asking.ask


def test_apply_says_before_any_work_that_nobody_is_there_to_answer(invoke, pipeline, monkeypatch):
    def no_terminal(path, *_, **__):
        raise OSError(path)

    monkeypatch.setattr(asking, "open", no_terminal, raising=False)
    result = invoke("apply", "train.py", stdin="y\n")
    assert result.exit_code == ExitCode.USAGE
    assert "--auto" in result.stderr
    assert not pipeline.calls
    assert invoke("apply", "--dry-run", "train.py").exit_code == 0


def test_apply_dry_run_lists_and_does_not_ask(invoke, pipeline):
    result = invoke("apply", "--dry-run", "train.py")
    assert pipeline.calls["apply"][1]["ask"] is None
    assert "Would try, in this order" in result.stderr
    assert "[amp_bf16]" in result.stderr


def test_apply_refuses_contradictions(invoke, pipeline):
    result = invoke("apply", "--auto", "--only", "tf32", "--skip", "tf32", "train.py")
    assert result.exit_code == ExitCode.USAGE
    assert not pipeline.calls


def test_apply_plan_proves_and_asks_nothing(invoke, pipeline, tmp_path):
    result = invoke("apply", "--plan", "plan.yaml", "--skip", "compile", "--max-time", "90s", "train.py", "--lr", "1")
    assert result.exit_code == 0, result.output
    (words,), kwargs = pipeline.calls["prove"]
    assert words == ("train.py", "--lr", "1")
    assert (kwargs["plan"], kwargs["module"]) == (Path("plan.yaml"), False)
    assert kwargs["options"] == SearchOptions(skip=("compile",), time_s=90.0)
    assert "3.10× (3.05 to 3.14)" in result.stderr
    assert "apply" not in pipeline.calls
    assert invoke("apply", "--auto", "--plan", "plan.yaml").exit_code == 0  # the plan's own script
    pipeline.exit_code = 4
    found = invoke("apply", "--plan", "plan.yaml", "--format", "json", "train.py")
    assert (found.exit_code, json.loads(found.stdout)["profile"]) == (4, None)
    assert json.loads(found.stdout)["trials"]["stack"]["passed"]
    markdown = invoke("apply", "--plan", "plan.yaml", "--format", "md", "train.py").stdout
    assert markdown.startswith("## advisor: ")
    assert "### Trials" in markdown


@pytest.mark.parametrize(
    "words",
    [
        ("--dry-run",),
        ("--min-gain", "2%"),
        ("--max-pairs", "4"),
        ("--rules", "."),
        ("--only", "tf32", "--skip", "tf32"),
    ],
)
def test_apply_plan_refuses_what_belongs_to_a_search(invoke, pipeline, words):
    result = invoke("apply", "--plan", "plan.yaml", *words, "train.py")
    assert result.exit_code == ExitCode.USAGE
    assert words[0] in result.stderr or "--only and --skip" in result.stderr
    assert not pipeline.calls


def test_run_defaults_to_the_last_plan(invoke, pipeline):
    pipeline.exit_code = 3
    result = invoke("run", "--strict", "train.py", "--plan", "scripts-own")
    assert result.exit_code == 3
    (words,), kwargs = pipeline.calls["run"]
    assert words == ("train.py", "--plan", "scripts-own")
    assert (kwargs["plan"], kwargs["strict"]) == (Path("last"), True)


def test_run_alone_takes_all_from_the_last_plan(invoke, pipeline):
    assert invoke("run").exit_code == 0
    assert pipeline.calls["run"][0] == ((),)


def test_report_formats(invoke):
    assert "Trials" in invoke("report", "last").stdout
    assert json.loads(invoke("report", "last", "--format", "json").stdout)["trials"]["verdicts"]
    assert invoke("report", "last", "--format", "md").stdout.startswith("## advisor: ")
    assert invoke("report", "last", "--format", "html").stdout.startswith("<!doctype html>")


def test_report_html_dash_is_stdout(invoke, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = invoke("report", "last", "--html", "-")
    assert result.exit_code == 0
    assert result.stdout.startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == []
    refused = invoke("report", "last", "--html", "x.html", "--format", "md")
    assert (refused.exit_code, refused.stderr.count("\n")) == (ExitCode.USAGE, 1)


@pytest.mark.parametrize(
    "words",
    [
        ("recommend", "last"),
        ("report", "last"),
        ("compare", "a", "b"),
        ("doctor",),
        ("runs",),
        ("kernels", "list"),
        ("kernels", "verify"),
        ("rules", "list"),
        ("rules", "metrics"),
        ("rules", "show", "launch-bound"),
        ("rules", "lint"),
        ("rules", "test"),
    ],
    ids=" ".join,
)
def test_json_is_format_json(invoke, checks, monkeypatch, words):
    monkeypatch.setattr("advisor.trials.ledger.told_here", lambda: "17 of 20 measured gains lay where predicted")
    short, long = invoke(*words, "--json"), invoke(*words, "--format", "json")
    assert json.loads(short.stdout) == json.loads(long.stdout)
    assert (short.exit_code, long.exit_code) == (0, 0)
    both = invoke(*words, "--json", "--format", "text")
    assert (both.exit_code, json.loads(both.stdout)["type"], both.stderr.count("\n")) == (ExitCode.USAGE, "error", 1)
    assert invoke(*words, "--format", "json", "--json").exit_code == 0


def test_json_before_the_script_is_ours_and_behind_it_the_scripts(invoke, pipeline):
    assert json.loads(invoke("profile", "--json", "train.py").stdout)["schema_version"] == 1
    assert invoke("profile", "train.py", "--json").stdout == ""
    assert pipeline.calls["profile"][0][0] == ("train.py", "--json")
    assert json.loads(invoke("apply", "--auto", "--json", "train.py").stdout)["trials"]


def test_report_of_a_proof_has_no_page(invoke, pipeline):
    pipeline.proofs["proof"] = samples.trials()
    assert "All kept changes together" in invoke("report", "proof").stdout
    assert json.loads(invoke("report", "proof", "--format", "json").stdout)["findings"] is None
    assert invoke("report", "proof", "--format", "md").stdout.startswith("## advisor: ")
    for words in (("--format", "html"), ("--html", "x.html"), ("--open",)):
        result = invoke("report", "proof", *words)
        assert result.exit_code == ExitCode.USAGE
        assert "no page" in result.stderr


def test_places_are_looked_up_in_the_page_where_there_is_one(invoke, pipeline):
    pipeline.proofs["proof"] = samples.trials()
    (pipeline.run_dir / "report.html").touch()
    assert "by path in report.html or --format json" in invoke("report", "last").stdout
    assert "by path in trials.json or --format json" in invoke("report", "proof").stdout


def test_report_html_file(invoke, tmp_path):
    target = tmp_path / "out" / "r.html"
    result = invoke("report", "last", "--html", str(target))
    assert result.exit_code == 0, result.output
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert result.stdout == ""


def test_report_open_writes_the_file_in_the_run_folder(invoke, pipeline, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    assert invoke("report", "last", "--open").exit_code == 0
    assert opened == [(pipeline.run_dir / "report.html").resolve().as_uri()]
    assert (pipeline.run_dir / "report.html").exists()


def test_files_that_exist_are_named(invoke, pipeline):
    (pipeline.run_dir / "plan.yaml").write_text("x")
    err = invoke("apply", "--auto", "train.py").stderr
    assert f"Plan   {pipeline.run_dir / 'plan.yaml'}" in err
    assert f"advisor run --plan {pipeline.run_dir / 'plan.yaml'} train_imagenet.py --arch" in err
    assert "report.html" not in err


@pytest.mark.parametrize(("scale", "code"), [(1.0, 0), (1.10, 1), (0.9, 0)])
def test_compare_fails_on_regression(invoke, pipeline, scale, code):
    pipeline.runs = {"a": samples.resnet50(), "b": samples.resnet50(scale=scale)}
    result = invoke("compare", "a", "b", "--fail-on-regression", "3%")
    assert result.exit_code == code, result.output
    assert invoke("compare", "a", "b").exit_code == 0


def test_compare_between_machines_is_inconclusive(invoke, pipeline):
    pipeline.runs = {"a": samples.resnet50(), "b": samples.resnet50(environment=samples.LAPTOP)}
    result = invoke("compare", "a", "b", "--fail-on-regression", "3%")
    assert result.exit_code == ExitCode.INCONCLUSIVE
    assert "not comparable" in result.stdout


def test_compare_json_and_markdown(invoke, pipeline):
    pipeline.runs = {"a": samples.resnet50(), "b": samples.resnet50(scale=0.5)}
    document = json.loads(invoke("compare", "a", "b", "--format", "json").stdout)
    assert document["ratio"] == pytest.approx(0.5)
    assert "| step time |" in invoke("compare", "a", "b", "--format", "md").stdout


def test_kernels(invoke, pipeline):
    assert "batchnorm_act_fwd" in invoke("kernels", "list").stdout
    assert json.loads(invoke("kernels", "list", "--format", "json").stdout)["kernels"][0]["sha256"] == "ab12"
    assert invoke("kernels", "verify").exit_code == 0
    assert pipeline.calls["kernels_verify"] == (("",), {})
    assert invoke("kernels", "verify", "batchnorm_act").exit_code == 0
    assert pipeline.calls["kernels_verify"] == (("batchnorm_act",), {})
    pipeline.kernel_rows = [{"family": "f", "case": "k", "passed": None, "detail": "not for this GPU: sm_80 lacks it"}]
    assert invoke("kernels", "verify").exit_code == 0
    assert "not for this GPU" in invoke("kernels", "verify").stdout
    pipeline.kernel_rows = [{"family": "f", "case": "k", "passed": False, "detail": "two runs differ"}]
    assert invoke("kernels", "verify").exit_code == ExitCode.FINDINGS
    pipeline.error = AdvisorError("no CUDA GPU was found", exit_code=ExitCode.GPU_REQUIRED)
    assert invoke("kernels", "verify").exit_code == ExitCode.GPU_REQUIRED


@pytest.mark.parametrize("what", ["ops", "models"])
def test_bench(invoke, monkeypatch, tmp_path, what):
    called = []
    for name in ("ops", "models"):
        module = importlib.import_module(f"advisor.bench.{name}")
        monkeypatch.setattr(module, "run", lambda *of, name=name, **options: called.append((name, of, options)) or 0)
    out = tmp_path / "x.json"
    assert invoke("bench", what, "--filter", "bn", "--out", str(out), "--baseline", "eager").exit_code == 0
    ((name, of, options),) = called
    options.pop("say")
    more = (
        {"pattern": "bn", "changed": False, "max_time_s": 600.0, "runs": None}
        if what == "models"
        else {"counters": False, "host_only": False}
    )
    assert (name, of) == (what, () if what == "models" else (RowChoice(pattern="bn"),))
    assert options == {"out": out, "baselines": ("eager",), **more}
    assert invoke("bench", what, "--changed", "--short", "--counters").exit_code == 0
    _, of, options = called[1]
    assert (options["changed"] if what == "models" else of == (RowChoice(changed=True, short_only=True),)) is True
    assert invoke("bench", what, "--baseline", "cudnn").exit_code == ExitCode.USAGE
    assert invoke("bench", "ops", "--part", "2/4").exit_code == 0
    assert called[-1][1] == (RowChoice(part=(2, 4)),)
    for wrong in ("0/2", "3/2", "2", "a/b"):
        refused = invoke("bench", "ops", "--part", wrong)
        assert (refused.exit_code, "write 1/4 to 4/4" in refused.output) == (ExitCode.USAGE, True)
    assert invoke("bench", "ops", "--counters").exit_code == 0
    assert called[-1][2]["counters"] is True
    assert invoke("bench", "ops", "--host-only").exit_code == 0
    assert called[-1][2]["host_only"] is True
    refused = invoke("bench", "ops", "--host-only", "--changed")
    assert (refused.exit_code, "neither --changed nor --counters" in refused.output) == (ExitCode.USAGE, True)


def test_bench_hosts(invoke, monkeypatch, tmp_path):
    from advisor.bench import hosts

    called = []
    monkeypatch.setattr(hosts, "run", lambda **options: called.append(options) or 0)
    out = tmp_path / "hosts.json"
    assert invoke("bench", "hosts", "--filter", "resnet", "--out", str(out)).exit_code == 0
    (options,) = called
    options.pop("say")
    assert options == {"pattern": "resnet", "out": out}


@pytest.fixture
def checks(monkeypatch):
    from advisor.cli.examination import Examined, Health

    found = (
        Examined(name="GPU", status=Health.OK, found="NVIDIA H200"),
        Examined(
            name="counters", status=Health.WARN, found="refused", fix="Set NVreg_RestrictProfilingToAdminUsers=0."
        ),
    )
    monkeypatch.setattr("advisor.cli.examination.checks", lambda *, measure, say: found)


def test_doctor_recovers_one_run_or_all_that_are_here(invoke, pipeline):
    asked = []

    def recover(run_dir, say):
        asked.append(run_dir)
        say("told")
        return run_dir is None

    pipeline.recover = recover
    assert invoke("doctor", "--recover").stdout == "told\n"
    failed = invoke("doctor", "--recover", "advisor-runs/one")
    assert asked == [None, Path("advisor-runs/one")]
    assert failed.exit_code == 2
    assert "not every file could be put back" in failed.stderr


def test_wrong_usage_is_one_line(invoke):
    found = invoke("bench")
    assert found.exit_code == 2
    assert found.stderr.count("\n") == 1
    assert "ops, models, real, hosts, tune" in found.stderr


def test_doctor(invoke, checks, monkeypatch):
    monkeypatch.setattr("advisor.trials.ledger.told_here", lambda: "17 of 20 measured gains lay where predicted")
    text = invoke("doctor").stdout
    assert "17 of 20" in text
    assert "✓ GPU" in text
    assert "NVreg_RestrictProfilingToAdminUsers=0" in text
    assert [c["status"] for c in json.loads(invoke("doctor", "--format", "json").stdout)["checks"]] == [
        "ok",
        "warn",
        "ok",
    ]


RECOMMENDATION = Recommendation(
    transform="tf32", title="TF32 products", predicted=Interval(low=0.1, high=0.2), reason="Why."
)


def _terminal(monkeypatch, tmp_path: Path, answers: str):
    (tmp_path / "in").write_text(answers)
    questions = open(tmp_path / "out", "w")  # noqa: SIM115 – open on purpose
    monkeypatch.setattr(asking, "terminal", lambda: (open(tmp_path / "in"), questions))  # noqa: SIM115 – open on purpose
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ("y\n", Answer.YES),
        ("n\n", Answer.NO),
        ("A\n", Answer.ALL),
        ("quit\n", Answer.QUIT),
        ("", Answer.QUIT),  # Ctrl-D
        ("maybe\nYES\n", Answer.YES),
        ("\nno\n", Answer.NO),
    ],
)
def test_ask(monkeypatch, tmp_path, answers, expected):
    shown = _terminal(monkeypatch, tmp_path, answers)
    assert asking.ask(RECOMMENDATION) is expected
    assert "10–20 % of the step" in shown.read_text()
    assert (asking.MEANS in shown.read_text()) is (answers.count("\n") > 1)
    assert ("'maybe' is no answer" in shown.read_text()) is ("maybe" in answers)


def test_a_trace_is_read_in_place_of_a_script(invoke, pipeline):
    assert invoke("profile", "--trace", "rank0.json").exit_code == 0
    assert str(pipeline.calls["profile_trace"][0][0]) == "rank0.json"
    both = invoke("profile", "--trace", "rank0.json", "train.py")
    assert (both.exit_code, "exclude each other" in both.stderr) == (ExitCode.USAGE, True)


def test_try_wants_one_change_or_one_patch_and_a_script(invoke, pipeline):
    for words in ((), ("--change", "tf32", "--patch", "x"), ("--change", "tf32")):
        assert invoke("try", *words).exit_code == ExitCode.USAGE
    assert invoke("try", "--patch", "idea.patch", "train.py", "--json").exit_code == 0
    (words,), kwargs = pipeline.calls["try_patch"]
    assert (words, str(kwargs["patch"]), kwargs["min_gain"]) == (("train.py", "--json"), "idea.patch", 0.01)


def test_try_of_a_change_is_a_search_for_it_alone(invoke, pipeline):
    result = invoke("try", "--change", "channels_last", "--json", "train.py")
    assert pipeline.calls["apply"][1]["options"].only == ("channels_last",)
    document = json.loads(result.stdout)
    assert (document["name"], document["kind"], document["exit_code"]) == ("channels_last", "change", result.exit_code)


def test_operators_of_a_run_are_listed_to_be_repeated(invoke):
    result = invoke("repro", "last")
    assert result.exit_code == 0
    assert "aten::convolution" in result.stdout


PLAN_TEXT = """\
schema_version: 1
script: "train.py"
speedup: "1.50× (1.40 to 1.60)"
items:
  - transform: cudnn_benchmark
    status: kept
    reason: "faster"
  - transform: cuda_graphs
    status: kept
"""


@pytest.fixture
def planned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text(PLAN_TEXT, encoding="utf-8")
    (tmp_path / "train.py").write_text("import torch\n\nprint(1)\n")
    return tmp_path


def test_a_plan_is_shown_and_written_as_python(invoke, planned):
    text = invoke("plan", "show", "plan.yaml").stdout
    assert "train.py: 1.50× (1.40 to 1.60)" in text
    assert "cudnn_benchmark" in text
    assert 'advisor.enable("plan.yaml")' in invoke("plan", "show", "plan.yaml", "--as-python").stdout
    assert invoke("plan", "show", "plan.yaml", "--diff", "--write").exit_code == ExitCode.USAGE


def test_of_a_plan_that_keeps_nothing_there_is_no_python(invoke, planned):
    (planned / "plan.yaml").write_text(PLAN_TEXT.replace("status: kept", "status: reverted"), encoding="utf-8")
    found = invoke("plan", "show", "plan.yaml", "--as-python")
    assert (found.stdout, "no Python to write" in found.stderr) == ("", True)


def test_a_plans_diff_changes_the_script_only_with_write(invoke, planned):
    before = (planned / "train.py").read_text()
    found = invoke("plan", "show", "plan.yaml", "--diff")
    assert "+torch.backends.cudnn.benchmark = True" in found.stdout
    assert "not in the diff: cuda_graphs" in found.stderr
    assert (planned / "train.py").read_text() == before
    assert invoke("plan", "show", "plan.yaml", "--write").exit_code == 0
    assert "torch.backends.cudnn.benchmark = True" in (planned / "train.py").read_text()
    assert (planned / "train.py.orig").read_text() == before
    again = invoke("plan", "show", "plan.yaml", "--write")
    assert (again.exit_code, "is there already" in again.stderr) == (ExitCode.USAGE, True)


def test_undo_takes_back_what_was_written_and_nothing_else(invoke, planned):
    script, before = planned / "train.py", (planned / "train.py").read_text()
    assert "nothing to undo" in invoke("undo", "plan.yaml").stderr
    invoke("plan", "show", "plan.yaml", "--write")
    written = script.read_text()
    script.write_text(written + "# mine\n")
    refused = invoke("undo", "plan.yaml")
    assert (refused.exit_code, script.read_text()) == (ExitCode.USAGE, written + "# mine\n")
    script.write_text(written)
    assert invoke("undo", "plan.yaml").exit_code == 0
    assert (script.read_text(), (planned / "train.py.orig").exists()) == (before, False)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("matrix-work-in-fp32", "Why:"),
        ("amp_bf16", "with torch.autocast"),
        ("last", "condition: "),
    ],
)
def test_explain_takes_a_rule_a_change_or_a_run(invoke, word, told):
    found = invoke("explain", word)
    assert (found.exit_code, told in found.stdout) == (0, True), found.output


def test_a_run_is_explained_by_what_fired(invoke):
    """Conditions of 160 quiet rules stood between a reader and those that fired."""
    text = invoke("explain", "last").stdout
    assert "fp32_conv_frac = 53 % (condition: > 0.2; measured)" in text
    assert "comm_exposed_frac: needs" not in text
    assert "recommend RUN --explain" in text


def test_explain_offers_the_nearest_word(invoke, pipeline):
    pipeline.error = AdvisorError("no such run")
    found = invoke("explain", "chanels_last")
    assert found.exit_code == ExitCode.USAGE
    assert "Did you mean 'channels_last'?" in found.stderr
