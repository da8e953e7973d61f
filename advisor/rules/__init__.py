"""The rule engine: rules are YAML data in top-level rules/, read safely, evaluated over a MetricTable."""

from advisor.rules.cards import cards
from advisor.rules.cases import CaseResult, run_cases
from advisor.rules.catalog import check, load
from advisor.rules.engine import evaluate, recommend
from advisor.rules.rule import Rule
from advisor.rules.selection import apply_overrides

__all__ = ["CaseResult", "Rule", "apply_overrides", "cards", "check", "evaluate", "load", "recommend", "run_cases"]
