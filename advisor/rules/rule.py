"""What a rule is, after its file was read and checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from advisor.core.findings import Semantics
from advisor.rules.conditions import Condition, always_read, comparisons
from advisor.rules.estimate import Gain
from advisor.rules.messages import metrics_in

# In the order in which causes are to be removed: what bounds the step comes before what it hides. A GPU that waits for
# data or for the host gains nothing from a faster kernel; precision and layout decide which kernels there are to speed up.
AREAS: dict[str, str] = {
    "machine": "the state of the machine and of the measurement's surroundings",
    "profiler": "how complete and how faithful the recording is",
    "input": "data loading",
    "transfer": "copies between host and device",
    "sync": "the host waiting for the device",
    "launch": "the device waiting for the host; launch configuration",
    "precision": "number formats and tensor cores",
    "layout": "memory layout of activations",
    "convolution": "convolution algorithms",
    "fusion": "several passes over memory where one would do",
    "kernels": "single kernels far from their limit",
    "simplify": "work that can be left out or reordered",
    "optimizer": "the optimizer step",
    "memory": "memory use and allocation",
    "parallel": "many GPUs",
    "cupy": "CuPy and custom kernels",
    "roofline": "how far the step is from what the machine can do",
}
SEVERITIES = ("info", "low", "medium", "high")
ROLES = ("cause", "description")
STATUSES = ("experimental", "stable", "deprecated")


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterExample:
    """A case in which following the rule would be wrong, and who saw it."""

    text: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One defect: when it is there, what it costs, what to do.

    `requires` names the metrics without which the rule says nothing. `transform` is the id of the transform it asks for, whose gain
    `analysis.predict` tells and whose semantics are its row's; it is "" when the advice is for a person, and `gain` says what that may save. A fired rule with `gates` puts every measurement of the run in doubt. Fired rules of
    one `cause` are told as one; a rule whose `role` is "description" tells what a step looks like, not why.
    """

    id: str
    title: str
    area: str
    severity: str
    status: str
    semantics: Semantics
    requires: tuple[str, ...]
    when: Condition
    message: str
    rationale: str
    gain: Gain | None = None
    transform: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    gates: bool = False
    sites: str = ""
    counter_examples: tuple[CounterExample, ...] = ()
    references: tuple[str, ...] = ()
    path: str = ""
    cause: str = ""  # the rule's own id where the file names none
    role: str = "cause"

    def metrics(self) -> tuple[str, ...]:
        """Every metric that the rule can read."""
        gain = (*self.gain.low.metrics(), *self.gain.high.metrics()) if self.gain else ()
        read = (leaf.metric for leaf in comparisons(self.when))
        return tuple(dict.fromkeys((*read, *gain, *metrics_in(self.message))))

    def needed(self) -> tuple[str, ...]:
        """Metrics that the condition reads outside any `any`; `requires` has them all."""
        return tuple(dict.fromkeys(always_read(self.when)))
