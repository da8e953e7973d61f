from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.core.plan import Plan, PlanHashes, PlanItem
from advisor.trials import planfile

PLAN = Plan(
    script="train.py",
    argv=("--lr", "0.1", "--name", "a: b # c", "ünï\n"),
    created="2026-01-02T03:04:05Z",
    run="advisor-runs/x",
    speedup="3.10× (3.05 to 3.14)",
    hashes=PlanHashes(script="ab", model="cd", environment="NVIDIA H200 sm_90 torch 2.11", kernels="ef"),
    items=(
        PlanItem(transform="amp_bf16", status="kept", semantics="precision", predicted="30–50 %", measured="42 %"),
        PlanItem(transform="loader_workers", status="reverted", parameters={"workers": "8"}, reason="slower: -3 %"),
    ),
)


def test_a_plan_comes_back_as_it_was_and_twice_the_same(tmp_path):
    path = tmp_path / "plan.yaml"
    planfile.write(path, PLAN)
    first = path.read_text()
    assert planfile.read(path) == PLAN
    planfile.write(path, planfile.read(path))
    assert path.read_text() == first
    assert first.startswith("# A plan of")


@given(text=some.text(max_size=40))
def test_no_text_can_become_syntax(tmp_path_factory, text):
    text = text.encode("utf-8", "ignore").decode()
    path = tmp_path_factory.mktemp("p") / "plan.yaml"
    plan = Plan(
        script=text,
        argv=(text,),
        created=text,
        items=(PlanItem(transform="tf32", status="kept", reason=text, parameters={text: text}),),
    )
    planfile.write(path, plan)
    assert planfile.read(path) == plan


BROKEN = {
    "items: [\n": ("not YAML", 2),
    "just text": ("the plan is 'just text'", 1),
    "schema_version: 2\nitems: []\n": ("schema_version is '2'", 1),
    "items: []\n": ("schema_version is missing", 1),
    "schema_version: 1\n": ("items is missing", 1),
    "schema_version: 1\nitem: []\n": ("no key 'item'", 2),
    "schema_version: 1\nitems: 3\n": ("items is '3'", 2),
    "schema_version: 1\nitems: []\nitems: []\n": ("stands twice", 3),
    "schema_version: 1\nitems:\n - transform: amp_bf61\n   status: kept\n": ("'amp_bf61'", 3),
    "schema_version: 1\nitems:\n - transform: tf32\n   status: kpet\n": ("'kpet'", 4),
    "schema_version: 1\nitems:\n - transform: tf32\n": ("no status", 3),
    "schema_version: 1\nitems:\n - transform: tf32\n   status: kept\n   parameters: [1]\n": ("parameters of item 1", 5),
    "schema_version: 1\nitems:\n - transform: tf32\n   status: kept\n   semantics: fast\n": ("semantics of item 1", 5),
    "schema_version: 1\nhashes: none\nitems: []\n": ("hashes", 2),
    "a: &a [*a]\n": ("no key 'a'", 1),
    "": ("the plan is empty", None),
}


@pytest.mark.parametrize("text", BROKEN)
def test_an_edited_plan_is_answered_with_the_line(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    found, line = BROKEN[text]
    with pytest.raises(AdvisorError) as caught:
        planfile.read(path)
    assert found in str(caught.value)
    if line:
        assert f"plan.yaml:{line}:" in str(caught.value)


def test_a_typing_error_is_answered_with_what_was_meant(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("schema_version: 1\nitems:\n - transform: amp_bf61\n   status: kept\n")
    with pytest.raises(AdvisorError, match="Did you mean 'amp_bf16'"):
        planfile.read(path)


def test_unreadable_missing_and_huge_files(tmp_path):
    with pytest.raises(AdvisorError, match="no plan"):
        planfile.read(tmp_path / "none.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(AdvisorError, match="cannot be read"):
        planfile.read(binary)
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b" " * (planfile.MAX_BYTES + 1))
    with pytest.raises(AdvisorError, match="bytes"):
        planfile.read(huge)


def test_what_changed_is_named():
    now = PlanHashes(script="other", model="cd", environment="NVIDIA A100 sm_80 torch 2.11", kernels="ef")
    found = planfile.mismatches(PLAN, "train.py", now)
    assert len(found) == 2
    assert "script" in found[0]
    assert "H200" in found[1]
    assert "A100" in found[1]
    assert planfile.mismatches(PLAN, "train.py", PLAN.hashes) == ()
    assert planfile.mismatches(replace(PLAN, hashes=PlanHashes()), "train.py", now) == ()
    assert planfile.mismatches(PLAN, "train.py", PlanHashes(kernels="new"))
    assert not planfile.mismatches(PLAN, "train.py", PlanHashes(kernels="new"), uses_kernels=False)


def test_model_hash_is_of_the_structure_not_the_values():
    def net(width=4, dtype=torch.float32):
        return torch.nn.Sequential(torch.nn.Conv2d(3, width, 3), torch.nn.BatchNorm2d(width)).to(dtype)

    assert planfile.model_hash([net()]) == planfile.model_hash([net()])
    assert planfile.model_hash([net()]) != planfile.model_hash([net(8)])
    # A plan proved in one process fits the training in several.
    assert planfile.model_hash([torch.nn.DataParallel(net())]) == planfile.model_hash([net()])
    assert planfile.model_hash([net()]) != planfile.model_hash([net(dtype=torch.float64)])


def test_hashes_of_files(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("pass")
    assert len(planfile.script_hash(script)) == 64
    assert planfile.script_hash(tmp_path / "absent.py") == ""
    assert planfile.kernels_hash(tmp_path / "absent") == ""
    (tmp_path / "k").mkdir()
    (tmp_path / "k" / "a.cu").write_text("x")
    before = planfile.kernels_hash(tmp_path / "k")
    (tmp_path / "k" / "a.cu").write_text("y")
    assert planfile.kernels_hash(tmp_path / "k") != before
    assert "sm_90" in planfile.environment_text(
        Environment(device="cuda", gpu_name="NVIDIA H200", sm_arch=90, torch="2.11")
    )
