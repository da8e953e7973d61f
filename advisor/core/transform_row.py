"""What a row of the table of transforms says, and when a transform's turn comes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Literal

from advisor.core.findings import Semantics

TOGETHER = " + "  # between the ids of transforms that were tried as one

# How a change is found and what it is left out with: see `Row`.
Together = Literal["", "bundle", "graph"]
Part = Literal["", "precision", "kernels", "graphs", "layout", "host"]


class Stage(IntEnum):
    """When a transform's turn comes in a step that the GPU's work bounds. Within a stage predicted gains compete."""

    BATCHES = auto()
    HOST = auto()
    TF32 = auto()
    # Layout before precision: in NCHW half precision can lose what it gains in NHWC (MobileNetV3 on an H200: 2,930
    # img/s in fp32, 2,536 in bf16, both NCHW; 12,992 in bf16 NHWC with fused batch norms).
    LAYOUT = auto()
    # Batch norm before precision: PyTorch's bf16 kernels for it in NHWC are no faster than fp32's, and can hide what
    # bf16 gains.
    NORMS = auto()
    HALF = auto()
    GUIDES = auto()
    # Graphs before what gains a few per cent: a short step that the host launches is the noisiest (ResNet-50 in bf16 on
    # an H200: a kernel's gain between −4 and 6 % of the eager step, another's between 5.7 and 7.2 % of the replayed
    # one, six pairs each).
    GRAPHS = auto()
    # The other kernels are dispatched by dtype, and most win in 16-bit storage only: there they are tried once.
    KERNELS = auto()
    CASTS = auto()  # behind the kernels, which read some weights as they are
    OPTIMIZER = auto()
    GRADIENTS = auto()  # of the kernels that the backward has by then
    # Fresh processes, which take longest: behind all that the running loop can tell.
    LOADERS = auto()
    ALGORITHMS = auto()
    COMPILER = auto()
    AUTOTUNING = auto()
    ASKED = auto()  # by `run --background-saves`: what no block of steps shows
    MEMORY = auto()  # for `--goal memory` alone (trials/memory.py)
    RANKS = auto()  # in all ranks of `--gpus N` (trials/across.py), behind what one of them can be searched for


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One transform.

    Attributes:
        title: what people call it.
        code: "module:class" under advisor.transforms; "kernels" makes the class of the kernel family that names this
            transform.
        predictor: "module:function" under advisor.analysis.predictions; "" where nobody can say what it gains.
        stage: when it is tried.
        semantics: what it does to the numbers of the training.
        after: transforms that it is tried behind where its stage leaves that open.
        conflicts: transforms that cannot be on together with it; they say so too.
        waits_for: beside these in a plan it goes on right behind the last of them that fits, and not before: they
            decide what it acts on.
        live: it can be switched between two steps of a running loop. What cannot is tried in fresh processes, on top of
            the proven stack, whose runs it is compared with: two more then suffice, where pairs of its own take six or
            more.
        loaders: it changes how data loaders are made.
        needs_gpu: it finds nothing to do on a CPU.
        everywhere: it reaches models that run without gradients too: a flag of the process, or what is for them.
        untraced: the timed steps tell what it gains, where the run ended before any was traced.
        dear: it takes half a minute and more, and what it gains hangs on what else is kept: beside kernels and graphs
            `compile` lost in every net tried on an H200 (20 to 40 s each). It waits until the step with what is kept
            has been profiled, and is tried if the middle of its prediction for that step is a gain.
        together: "graph": it is put into the one captured graph; "bundle": it is not. Either has results on file that
            it wins wherever it is dispatched: neighbours of these are tried as one, with one capture, one gate and one
            set of blocks, and one by one only where that fails or gains nothing. What gains less than a trial can tell
            by itself is found so too: one cast of all weights and the fused optimizer gained ResNet-50 on an H200 0.7
            and 0.8 %. "": it is tried alone.
        nhwc: what it puts in place runs on NHWC tensors alone: in a model that is in NCHW it is tried with channels_last, or not at all.
        part: what it is left out with where all that is recommended does not hold together; "" for what is not tried
            so. What the host does between the steps is never left out: it is right by itself, and seldom in the way.
        bare: it looks at the forward as the script has it: in a plan it goes on before what captures that forward, which waits for it.
        cupy: it is for loops of CuPy alone, its code below advisor.cupy_loops; all others are for PyTorch's.
    """

    id: str
    title: str
    code: str
    stage: Stage
    semantics: Semantics = Semantics.REASSOCIATED
    predictor: str = ""
    after: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    waits_for: tuple[str, ...] = ()
    live: bool = True
    loaders: bool = False
    needs_gpu: bool = True
    everywhere: bool = False
    untraced: bool = False
    dear: bool = False
    together: Together = ""
    nhwc: bool = False
    part: Part = ""
    bare: bool = False
    cupy: bool = False

    @property
    def captures(self) -> bool:
        """Whether the forward runs as a captured or compiled graph with it."""
        return not self.cupy and (
            self.family or self.stage in (Stage.GRAPHS, Stage.CASTS, Stage.COMPILER, Stage.AUTOTUNING)
        )

    @property
    def family(self) -> bool:
        """Whether it puts a kernel family's operations into captured graphs."""
        return self.code == "kernels"


def family(
    identifier: str,
    title: str,
    *,
    stage: Stage = Stage.KERNELS,
    semantics: Semantics = Semantics.REASSOCIATED,
    nhwc: bool = True,
) -> Row:
    """The row of a family of kernels."""
    return Row(
        id=identifier,
        title=title,
        code="kernels",
        predictor=f"kernels:{identifier}",
        stage=stage,
        semantics=semantics,
        together="graph",
        nhwc=nhwc,
        part="kernels",
    )


def of_cupy(identifier: str, title: str, stage: Stage, semantics: Semantics, *, part: Part) -> Row:
    """The row of a change to a loop of CuPy's."""
    return Row(
        id=identifier,
        title=title,
        code="cupy",
        stage=stage,
        semantics=semantics,
        live=False,
        part=part,
        cupy=True,
    )
