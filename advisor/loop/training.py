"""The live training loop as hooks have found it: the objects that transforms act on and trials replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class RootModule:
    """A module that the script calls itself (not from inside another module) and that owns parameters.

    `args` and `kwargs` are those of the latest training-mode call with gradients (references, not copies); `output` the
    value it returned; `output_grads` the gradients that arrived at its output tensors in backward, in the order of the
    tensors in the output, kept only while `Training.keep_gradients` is True. `calls` counts such calls in a step.
    """

    module: torch.nn.Module
    name: str  # class name, with "#2" for a second of the class
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    output_grads: tuple[torch.Tensor | None, ...] = ()
    calls: int = 1


@dataclass(slots=True, eq=False)
class Draw:
    """A batch drawn from a loader: before its `next()` and after, each as a CUDA timing event (None on a CPU) and the host's
    `perf_counter_ns`.
    """

    before: tuple[torch.cuda.Event | None, int]
    after: tuple[torch.cuda.Event | None, int]


@dataclass(slots=True, eq=False)
class StepEvent:
    """One finished training step (see steps.py for what a step is).

    `event` is a CUDA timing event recorded at the boundary (None on a CPU). `clean` is False when the interval since the
    last boundary holds anything but one training step: an epoch boundary, evaluation, another batch size, a compile;
    `reason` then says which. `loss` is the detached loss tensor of the step's last backward, or None. `elements` is how many
    the tensors have together that the script gave its models in training mode; 0 where that was not seen. `draws` are the batches
    drawn since the last boundary, where somebody wants them (`Training.draws`). `cpu_ns` is what all threads of this process have computed
    until then; 0 where that was not seen.
    """

    index: int
    host_ns: int
    event: torch.cuda.Event | None
    clean: bool
    reason: str = ""
    loss: torch.Tensor | None = None
    elements: int = 0
    draws: tuple[Draw, ...] = ()
    cpu_ns: int = 0


@dataclass(slots=True, eq=False)
class Training:
    """Everything found so far. Lists grow as the script runs; identity of the objects never changes."""

    device: torch.device
    roots: list[RootModule] = field(default_factory=list)
    # Modules called in every step without gradients: a teacher, a momentum encoder. Of these only `module` and `name` are filled.
    guides: list[RootModule] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)  # torch.amp.GradScaler
    loaders: list[torch.utils.data.DataLoader[Any]] = field(default_factory=list)  # iterated in training mode
    batch_size: int = 0
    fixed_shapes: bool = True
    keep_gradients: bool = False
    zeroes_gradients: bool = False  # a `zero_grad` has left gradients in place
    updates_compiled: bool = False  # an `Optimizer.step` ran inside a call of what torch.compile was given
    draws: list[Draw] | None = None  # of the step that runs; None: nobody wants them
    # The boundary handlers run inside the user's last `Optimizer.step()` of a step, in order of registration.
    on_step: list[Callable[[StepEvent], None]] = field(default_factory=list)

    def let_go(self) -> None:
        """Hold nothing of the script's any more: what torch remembers of a hook (`torch.overrides`) may hold this for good."""
        for found in (self.roots, self.guides, self.optimizers, self.scalers, self.loaders, self.on_step):
            found.clear()

    @property
    def models(self) -> tuple[RootModule, ...]:
        """Roots and guides: all that has a name."""
        return (*self.roots, *self.guides)
