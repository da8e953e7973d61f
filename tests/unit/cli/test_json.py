"""What `--format json` prints fits its published schema, failures included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_exit_codes import CALLS, sound  # noqa: F401 – fixtures

from advisor.cli.main import wants_json
from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode
from advisor.reporting import json_schema

# Of the extra `test`. Where GPU tests alone are run, it may be missing.
jsonschema = pytest.importorskip("jsonschema", exc_type=ImportError)

PAGES = Path(__file__).resolve().parents[3] / "docs" / "reference"
KINDS = {
    "profile": "report",
    "apply": "report",
    "apply --plan": "report",
    "recommend": "report",
    "report": "report",
    "try": "attempt",
    "compare": "comparison",
    "conv": "convolutions",
    "scale": "scaling",
    "memory": "memory",
    "runs": "runs",
    "rules list": "rules",
    "rules metrics": "metrics",
    "rules show": "rule",
    "rules lint": "faults",
    "rules test": "cases",
    "kernels list": "kernels",
    "kernels verify": "verification",
    "doctor": "checks",
}


def valid(text: str, kind: str) -> dict:
    document = json.loads(text)
    assert (document["schema_version"], document["type"]) == (storage.SCHEMA_VERSION, kind)
    jsonschema.validate(document, json_schema.schema(kind))
    return document


@pytest.mark.parametrize("command", KINDS)
def test_each_command_prints_what_its_schema_says(invoke, pipeline, sound, command):  # noqa: F811 – a fixture
    call, at = CALLS[command], len(command.removesuffix(" --plan").split())
    result = invoke(*call[:at], "--json", *call[at:])
    valid(result.stdout, KINDS[command])


@pytest.mark.parametrize("kind", json_schema.DOCUMENTS)
def test_a_document_without_one_of_its_keys_is_no_such_document(kind):
    schema = json_schema.schema(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    with pytest.raises(jsonschema.ValidationError, match="required"):
        jsonschema.validate({"schema_version": 1, "type": kind}, schema)


def test_every_type_of_document_is_printed_by_a_command_of_the_tests():
    assert {*KINDS.values(), "error"} == set(json_schema.DOCUMENTS)


def test_the_published_schemas_are_up_to_date():
    """Mend: python -m advisor.reporting.json_schema."""
    assert (PAGES / "json.md").read_text() == json_schema.page()
    assert {path.name: path.read_text() for path in (PAGES / "json").iterdir()} == {
        f"{name}.schema.json": json_schema.text(name) for name in json_schema.DOCUMENTS
    }


def test_an_error_is_a_document_too(invoke, pipeline):
    pipeline.error = AdvisorError("no run x", expected="a folder", fix="Look.", exit_code=ExitCode.GPU_REQUIRED)
    result = invoke("report", "x", "--format", "json")
    told = valid(result.stdout, "error")
    assert (told["found"], told["fix"], told["exit_code"], result.exit_code) == ("no run x", "Look.", 5, 5)
    assert "no run x" in result.stderr


@pytest.mark.parametrize(
    ("call", "code"),
    [(("report", "--jsn", "--json"), 2), (("compare", "--json", "a"), 2), (("rules", "show", "--json"), 2)],
)
def test_wrong_usage_is_a_document_too(invoke, call, code):
    result = invoke(*call)
    assert valid(result.stdout, "error")["exit_code"] == result.exit_code == code


def test_a_fault_of_advisors_own_is_a_document_too(invoke, pipeline):
    pipeline.error = RuntimeError("broken")
    result = invoke("recommend", "--json", "last")
    assert valid(result.stdout, "error")["exit_code"] == result.exit_code == 3


def test_errors_without_json_leave_stdout_alone(invoke, pipeline):
    pipeline.error = AdvisorError("no run x")
    assert invoke("recommend", "last").stdout == ""


@pytest.mark.parametrize(
    ("words", "wants"),
    [
        (["report", "last", "--json"], True),
        (["report", "--format", "json", "last"], True),
        (["profile", "--format=json", "train.py"], True),
        (["profile", "train.py", "--json"], False),
        (["profile", "--", "torchrun", "--json"], False),
        (["report", "last", "--format", "md"], False),
    ],
)
def test_a_scripts_own_json_option_is_not_ours(words, wants):
    assert wants_json(words) is wants
