"""The bundled rules: every case of every rule, and what must hold for all of them."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.core.findings import Outcome, Semantics
from advisor.core.metrics import SPECS, MetricTable
from advisor.core.transform_row import Stage
from advisor.core.transform_table import ROWS
from advisor.ops import catalog
from advisor.resources import rules_dir
from advisor.rules import evaluate, load, recommend, run_cases
from advisor.rules.cases import read_cases
from advisor.rules.conditions import comparisons
from advisor.rules.docs import page
from advisor.rules.json_schema import schema, text
from advisor.rules.rule import AREAS
from advisor.trials import planner

RULES = load()
REPOSITORY = Path(__file__).parents[2]
by_id = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)


@by_id
def test_every_case_of_the_rule_holds(rule):
    failed = [f"{result.case}: {result.detail}" for result in run_cases([rule]) if not result.passed]
    assert not failed


@by_id
def test_the_message_of_a_firing_case_shows_every_value(rule):
    for case in read_cases(rule):
        if case.expect is Outcome.FIRED:
            (finding,) = evaluate([rule], case.table())
            assert "(not measured)" not in finding.message, case.name


@by_id
def test_the_rule_is_complete(rule):
    assert Path(rule.path).parent.name == rule.area
    assert rule.counter_examples, "say when the rule is wrong"
    assert rule.references
    assert not rule.title.endswith(".")
    assert rule.message.endswith(".")
    assert len(rule.rationale) > 60
    if rule.transform:
        assert rule.semantics is not Semantics.TRAINING, "a change of recipe is only ever advice"
        assert rule.sites or rule.area in ("optimizer", "machine"), "say where"


def test_there_are_enough_rules_in_every_area():
    assert len(RULES) >= 60
    assert {rule.area for rule in RULES} == set(AREAS)


def test_every_transform_exists_and_every_one_is_asked_for():
    options = (Stage.ASKED, Stage.MEMORY, Stage.RANKS)  # --background-saves, --goal memory, --gpus N
    unasked = {name for name, row in ROWS.items() if row.stage in options}
    # By name (--only) until a GPU has timed what they gain (docs/decisions/0099).
    unasked |= {"conv_choice", "conv_choice_precision"}
    assert {rule.transform for rule in RULES} - {""} == set(ROWS) - unasked


def test_rules_that_ask_for_one_change_are_of_one_cause_or_name_none():
    """Then their findings are one card. `compile` is asked for by the causes of many: there a cause stays together."""
    for transform in set(ROWS) - {"compile"}:
        causes = [rule.cause for rule in RULES if rule.transform == transform]
        named = {cause for cause in causes if sum(rule.cause == cause for rule in RULES) > 1}
        assert not named or set(causes) == named, transform
        assert len(named) <= 1, transform


def test_machine_state_gates_the_rest():
    gating = {rule.id for rule in RULES if rule.gates}
    assert {"gpu-shared", "gpu-throttled", "trace-incomplete", "too-few-steps", "launch-blocking"} <= gating
    assert all(rule.area in ("machine", "profiler") for rule in RULES if rule.gates)


def test_the_committed_page_is_current():
    committed = (REPOSITORY / "docs/reference/rules.md").read_text(encoding="utf-8")
    assert committed == page(RULES), "python -m advisor.rules.docs > docs/reference/rules.md"


def test_the_committed_schema_is_current():
    committed = (rules_dir() / "rule.schema.json").read_text(encoding="utf-8")
    assert committed == text(), "python -m advisor.rules.json_schema > rules/rule.schema.json"


def test_the_schema_accepts_every_bundled_rule():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema())
    validator = jsonschema.Draft202012Validator(schema())
    for rule in RULES:
        document = yaml.safe_load(Path(rule.path).read_text(encoding="utf-8"))
        assert not [error.message for error in validator.iter_errors(document)], rule.path


def _values(spec):
    if spec.kind == "flag":
        return st.booleans()
    if spec.kind == "text":
        return st.sampled_from(["", "SGD", "ddp", "bf16", "nccl", "{x.__class__}", "\u0000", "é"])
    edge = [0.0, -1.0, 1.0, 1e-300, 1e300, -1e300, float("nan"), float("inf")]
    return st.sampled_from(edge) | st.floats(allow_nan=True, allow_infinity=True)


@st.composite
def tables(draw):
    table = MetricTable()
    for spec in SPECS:
        if draw(st.booleans()):
            table.set(spec.name, draw(_values(spec)))
    return table


# A table draws some four hundred values; few examples of that size find what many small ones would.
@settings(max_examples=40)
@given(tables())
def test_no_metric_table_makes_a_rule_raise(table):
    findings = evaluate(RULES, table)
    assert len(findings) == len(RULES)
    for finding in findings:
        if finding.gain is not None:
            assert 0.0 <= finding.gain.low <= finding.gain.high <= 1.0
        assert (finding.outcome is Outcome.UNKNOWN) == bool(finding.missing)
    for recommendation in recommend(findings, table):
        assert recommendation.predicted is None or 0.0 <= recommendation.predicted.low <= recommendation.predicted.high


def test_an_empty_table_evaluates_nothing():
    assert {finding.outcome for finding in evaluate(RULES, MetricTable())} == {Outcome.UNKNOWN}


CPU = {
    "on_gpu": False, "cpu_count": 8.0, "gpu_count": 0.0, "bf16_supported": True, "fixed_shapes": True,
    "cupy_available": False, "step_us": 2e5, "step_spread_frac": 0.05, "steps_measured": 20.0, "conv_frac": 0.6,
    "grouped_conv_frac": 0.0, "max_conv_kernel": 3.0, "channels_last": False, "weights_channels_last": False, "tensor_eligible_frac": 0.65,
    "half_frac": 0.0, "autocast": "", "amp_capable_loss": True, "elementwise_frac": 0.15, "norm_frac": 0.15,
    "pool_frac": 0.02, "layout_frac": 0.0, "compiled": False, "optimizer": "SGD", "optimizer_fused": False,
    "optimizer_frac": 0.05, "zero_grad_to_none": False, "memset_frac": 0.01, "conv_bias_bn_count": 3.0,
    "reduce_frac": 0.02, "bias_act_frac": 0.01, "loader": "DataLoader", "workers": 0.0, "loader_frac": 0.3,
    "memory_bound_frac": 0.3, "batchnorm_frac": 0.15, "grad_clipping": False, "distributed": "",
}  # fmt: skip


def _table(values):
    table = MetricTable()
    for name, value in values.items():
        table.set(name, value)
    return table


def test_a_laptop_without_a_gpu_gets_what_works_there():
    findings = evaluate(RULES, _table(CPU))
    wanted = [recommendation.transform for recommendation in recommend(findings, _table(CPU))]
    assert {
        "amp_bf16", "channels_last", "compile", "conv_bias", "fused_optimizer", "loader_workers", "set_to_none",
    } == set(wanted)  # fmt: skip
    unknown = [finding for finding in findings if finding.outcome is Outcome.UNKNOWN]
    assert any("needs a CUDA GPU" in text for finding in unknown for text in finding.missing)


KERNELS = {family.transform for family in catalog.FAMILIES}


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.transform in KERNELS], ids=lambda rule: rule.id)
def test_no_kernels_are_asked_for_on_a_cpu_whatever_else_is_measured(rule):
    for case in read_cases(rule):
        values = {name: value for name, value in case.given.items() if name != "arch"}  # a GPU's own
        (finding,) = evaluate([rule], _table({**values, "on_gpu": False, "cupy_available": True}))
        assert finding.outcome is not Outcome.FIRED, case.name


H200_RESNET50 = {
    **CPU, "on_gpu": True, "arch": 90.0, "gpu_count": 1.0, "cupy_available": True, "loader_frac": 0.01,
    "idle_data_frac": 0.0, "idle_launch_frac": 0.01, "idle_sync_frac": 0.0, "idle_copy_frac": 0.0, "busy_frac": 0.98,
    "batchnorm_frac": 0.3, "bn_act_frac": 0.35, "bn_act_count": 49.0, "norm_efficiency": 0.4, "graphed": False,
    "advisor_kernel_frac": 0.0, "fixed_shapes": True, "cudnn_benchmark": False, "cudnn_deterministic": False,
    "conv_efficiency": 0.4, "steps_measured": 20.0, "tf32_conv": True, "tf32_matmul": False, "gemm_frac": 0.01,
    "optimizer_kernels": 20.0, "layout_frac": 0.08, "gpu_shared": False, "winograd_eligible_frac": 0.0,
}  # fmt: skip


def test_a_plain_resnet_on_a_large_gpu_gets_layout_then_precision_then_compilers():
    found = recommend(evaluate(RULES, _table(H200_RESNET50)), _table(H200_RESNET50))
    wanted = [item.transform for item in planner.order(found)]
    order = [wanted.index(name) for name in ("channels_last", "fused_bn_act", "amp_bf16", "cudnn_benchmark", "compile")]
    assert order == sorted(order)
    assert "cuda_graphs" not in wanted
    assert "loader_workers" not in wanted
    assert "tf32" not in wanted


def test_a_shared_gpu_marks_every_recommendation():
    table = _table({**H200_RESNET50, "gpu_shared": True})
    found = recommend(evaluate(RULES, table), table)
    assert found
    for item in found:
        assert item.gated_by == ("gpu-shared",)
        assert "Another process uses this GPU" in item.reason


COUNTER_EXAMPLES = [
    ("channels_last", {"grouped_conv_frac": 0.4}, "grouped convolutions lose by channels_last (pytorch#34977)"),
    ("channels_last", {"max_conv_kernel": 31.0}, "large depthwise kernels lose by channels_last"),
    ("cudnn_benchmark", {"fixed_shapes": False}, "each new shape is searched (pytorch#2759)"),
    ("amp_bf16", {"bf16_supported": False}, "no faster products in bf16 here"),
    ("amp_bf16", {"amp_capable_loss": False}, "BCELoss is refused under autocast"),
    ("amp_fp16", {"grad_clipping": True}, "clipping before unscale_ (pytorch#40907)"),
    ("fused_bn_act", {"cupy_available": False}, "nothing to compile the kernels with"),
    ("compile", {"fixed_shapes": False}, "each new shape would compile anew"),
    ("fused_optimizer", {"optimizer": "RMSprop"}, "has no fused implementation"),
]


@pytest.mark.parametrize(("transform", "change", "why"), COUNTER_EXAMPLES)
def test_known_counter_examples_are_not_recommended(transform, change, why):
    before, after = _table(H200_RESNET50), _table({**H200_RESNET50, **change})
    assert transform in [item.transform for item in recommend(evaluate(RULES, before))]
    assert transform not in [item.transform for item in recommend(evaluate(RULES, after))], why


def test_in_memory_data_with_a_fed_gpu_is_not_nagged_about_workers():
    table = _table({**H200_RESNET50, "loader": "DataLoader", "workers": 0.0, "idle_data_frac": 0.01})
    assert "loader_workers" not in [item.transform for item in recommend(evaluate(RULES, table))]


def test_every_threshold_of_a_rule_is_crossed_by_some_case():
    """No comparison is decoration: in the rule's cases each one is met at least once as true."""
    idle = []
    for rule in RULES:
        values = [case.given for case in read_cases(rule)]
        for leaf in comparisons(rule.when):
            if not any(leaf.metric in given and leaf.judge(given[leaf.metric]) for given in values):
                idle.append(f"{rule.id}: {leaf.metric} {leaf}")
    assert not idle


def test_the_engine_never_imports_torch():
    for path in (REPOSITORY / "advisor/rules").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {name for name in names if name.split(".")[0] in ("torch", "cupy", "click")}
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not called & {"eval", "exec", "compile", "__import__"}


def test_the_page_lists_every_rule_and_json_is_plain():
    committed = page(RULES)
    assert all(f"### {rule.id}\n" in committed for rule in RULES)
    assert json.loads(text())["type"] == "object"
