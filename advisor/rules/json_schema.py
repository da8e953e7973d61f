"""rules/rule.schema.json, for editors: completion and red underlines while a rule is written.

    python -m advisor.rules.json_schema > rules/rule.schema.json

The engine checks more (metric names, units, expressions, cross-references); a test holds the two together.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from advisor.core.findings import Semantics
from advisor.rules.conditions import OPERATORS
from advisor.rules.rule import AREAS, ROLES, SEVERITIES, STATUSES
from advisor.rules.schema import OPTIONAL, REQUIRED, SCHEMA
from advisor.rules.sites import SELECTORS

_TEXT = {"type": "string", "minLength": 1, "pattern": r"\S"}
_METRIC = {"type": "string", "pattern": "^[a-z0-9_]+$", "description": "a metric of `advisor rules metrics`"}
_TRANSFORM = {"type": "string", "pattern": "^[a-z][a-z0-9]*(_[a-z0-9]+)*$"}
_EXPRESSION = {
    "type": ["string", "number"],
    "maxLength": 400,
    "description": "numbers, metrics, + - * / ( ) min max known",
}


def _comparison() -> dict[str, Any]:
    value = {
        "number": {
            "type": ["string", "number"],
            "description": 'with the metric\'s unit: "15 %", "30 us", "1 GiB", 20',
        },
        "flag": {"type": ["boolean", "string"]},
        "text": {"type": "string"},
    }
    operators: dict[str, Any] = {name: value[kinds[0]] for name, kinds in OPERATORS.items()}
    operators["in"] = {"type": "array", "items": value["text"], "minItems": 1}
    return {
        "type": "object",
        "properties": {"metric": _METRIC, "because": _TEXT, **operators},
        "required": ["metric"],
        "oneOf": [{"required": [name]} for name in OPERATORS],
        "additionalProperties": False,
    }


_CONDITION = {"$ref": "#/$defs/condition"}


def _properties() -> dict[str, Any]:
    """Of each key of a rule file, what may stand there."""
    return {
        "schema": {"const": SCHEMA},
        "id": {
            "type": "string",
            "pattern": "^[a-z][a-z0-9]*(-[a-z0-9]+)*$",
            "description": "the file's name; the defect",
        },
        "title": _TEXT,
        "area": {"enum": list(AREAS)},
        "severity": {"enum": list(SEVERITIES)},
        "status": {"enum": list(STATUSES)},
        "semantics": {"enum": [member.value for member in Semantics]},
        "requires": {"type": "array", "items": _METRIC, "uniqueItems": True},
        "when": _CONDITION,
        "message": {**_TEXT, "description": "{metric} or {metric:pct|time|bytes|rate|count|times}"},
        "rationale": _TEXT,
        "cause": {
            "type": "string",
            "pattern": "^[a-z][a-z0-9]*(-[a-z0-9]+)*$",
            "description": "findings of one cause are one card; without it the rule's id",
        },
        "role": {"enum": list(ROLES), "description": "a description tells what a step looks like, not why"},
        "gain": {
            "type": "object",
            "properties": {"low": _EXPRESSION, "high": _EXPRESSION, "basis": _TEXT},
            "required": ["low", "high", "basis"],
            "additionalProperties": False,
        },
        "transform": _TRANSFORM,
        "parameters": {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z][a-z0-9_]*$"},
            "additionalProperties": {"type": "string"},
        },
        "gates": {"type": "boolean"},
        "sites": {"enum": list(SELECTORS)},
        "counter_examples": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"text": _TEXT, "source": _TEXT},
                "required": ["text", "source"],
                "additionalProperties": False,
            },
        },
        "references": {"type": "array", "items": _TEXT, "uniqueItems": True},
    }


def schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a rule file."""
    several = {"type": "array", "items": _CONDITION, "minItems": 1}
    groups = [
        {"type": "object", "properties": {name: inner}, "required": [name], "additionalProperties": False}
        for name, inner in (("all", several), ("any", several), ("not", _CONDITION))
    ]
    properties = _properties()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "advisor rule",
        "type": "object",
        "properties": {name: properties[name] for name in (*REQUIRED, *OPTIONAL)},
        "required": list(REQUIRED),
        "oneOf": [{"required": ["transform"]}, {"required": ["semantics"]}],  # a transform has its own
        "not": {"required": ["transform", "gain"]},
        "additionalProperties": False,
        "$defs": {"condition": {"anyOf": [_comparison(), *groups]}},
    }


def text() -> str:
    """The file's content."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
