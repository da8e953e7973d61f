"""What a kernel family is, and one case of it: what bench, verify, tests, capture and transforms read instead of knowing families.

Importing this module, or a `Family` made of it, needs neither torch nor CuPy; a family's own modules are imported when asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

from advisor.core import architectures
from advisor.ops import dispatch, dispatch_table, sources

if TYPE_CHECKING:
    import torch
    from torch import fx

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one pass of a case must do: the floor that its time is held against.

    Attributes:
        kernels: sources that this pass runs, as `<family>/<file>.cu`. A result on file is tied to their hash.
        nbytes: bytes to and from device memory, each input read once and each output written once.
        flops: floating-point operations; 0 where bytes alone bound the pass.
        unit: which measured rate bounds `flops`: "matrix", that of products in the case's dtype; "vector", the fp32 pipes'; or that of products
            in another dtype, by its name.
    """

    kernels: tuple[str, ...]
    nbytes: int
    flops: int = 0
    unit: str = "vector"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation at one shape and dtype, as it occurs in training.

    Attributes:
        name: the operation's variant in reports and results, "bn+add+relu". Name, shape and dtype are a case's identity.
        shape: of the operation's input, [N, C, H, W].
        dtype: storage, "bfloat16", "float16" or "float32".
        passes: "forward" and, where the operation has one, "backward", with what each must do.
        inputs: `inputs(generator, n)`: fresh random arguments on the generator's device, for batch n in place of shape[0].
            Tensors that require a gradient are its leaves; floating tensors that do not may be changed in place (running
            statistics), and what they are afterwards is compared too.
        ours, eager: take these arguments and return a tensor or a tuple of tensors. `ours` is the public function of the
            family's api, `eager` what people write today.
        reference: the definition, called with every floating tensor in fp64.
        wins: why the family is not dispatched for this case; empty where it is measured to win.
        steady: of the arguments in fp64, a mask like the (first) output, or one for each of them: False where rounding alone
            decides the gradient (at the kink of an activation). There no gradient is sent. None: everywhere steady.
        gradient_floor: relative errors of gradients are taken of the larger of the gradient and this share of the norm of
            what comes from above. For gradients that are what cancellation leaves (batch norm's dx on few rows).
        layout: of the input.
        kind: its name in the spec's `kinds`: the operation without sizes; empty for what no call is, a comparison.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    passes: Mapping[str, Work]
    inputs: Callable[[torch.Generator, int], Arguments]
    ours: Callable[..., Any]
    eager: Callable[..., Any]
    reference: Callable[..., Any]
    wins: Callable[[], str]
    steady: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]] | None = None
    gradient_floor: float = 0.0
    layout: str = "nhwc"
    kind: str = ""

    @property
    def label(self) -> str:
        """`bn+relu bfloat16 256x64x112x112`."""
        return f"{self.name} {self.dtype} {'x'.join(map(str, self.shape))}"


@dataclass(frozen=True, slots=True)
class Producer:
    """Takes the place of a function in the graph, and leaves a batch norm the moments of what it makes (ops/moments.py).

    Attributes:
        function: the same arguments; returns the same result and its moments, or None for these.
        wins: of the node in the graph, why its moments are not asked for; empty where a benchmark shows that they save time.
    """

    function: Callable[..., Any]
    wins: Callable[[fx.Node], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One folder of advisor/ops: spec, reference, cuda, api, rewrite, cases.

    Attributes:
        id: the folder's name. Its operations in torch.library begin with `advisor::`.
        replaces: the PyTorch operations whose place it takes.
        transform: id of the transform that puts it in place; its row in core/transform_table.py has its title.
        modules: class names; a model is looked at when a module of it has one of these in its class's ancestry.
        having: of those modules only the ones for which this holds (a depthwise convolution is a Conv2d with many groups).
        restated: of those modules the ones whose forward no graph can hold; `layer` in the folder's forward.py makes one that a
            graph can.
        functions: names in torch.nn.functional, or else in torch; a model without such a module is looked at when its forward
            calls one of these.
        taking: of those calls only the ones with arguments for which this holds.
        deterministic: two runs on the same inputs are bit-equal.
        holds: what a pass holds while it runs beyond PyTorch's own, in words; empty for nothing that grows with the batch.
        captured: its operations stand in the graph of the model's forward, where `rewrite` finds them. Otherwise it has no
            `rewrite`, and its transform is a class of its own.
    """

    id: str
    replaces: str
    transform: str
    modules: tuple[str, ...]
    having: Callable[[Any], bool] | None = None
    restated: Callable[[Any], bool] | None = None
    functions: tuple[str, ...] = ()
    taking: Callable[..., bool] | None = None
    deterministic: bool = True
    captured: bool = True
    holds: str = ""

    def module(self, name: str) -> Any:
        """`advisor.ops.<id>.<name>`, imported now. All but `spec` need torch."""
        return import_module(f"advisor.ops.{self.id}.{name}")

    @property
    def spec(self) -> Any:
        """What it supports, where it wins, launch geometry: plain arithmetic."""
        return self.module("spec")

    @property
    def kernels(self) -> dict[str, tuple[str, ...]]:
        """Kernel source → its entries."""
        found: dict[str, tuple[str, ...]] = self.spec.KERNELS
        return found

    def variants(self, arch: int = architectures.MEASURED.sm) -> tuple[tuple[str, dict[str, int]], ...]:
        """Every (source, macros) that a launch on this architecture can ask for."""
        return tuple((source, defines) for source in self.kernels for defines in self.variants_of(source, arch))

    def variants_of(self, source: str, arch: int = architectures.MEASURED.sm) -> tuple[dict[str, int], ...]:
        """Those macros of one source. A spec whose `variants` takes an architecture has others for another."""
        others = {"arch": arch} if "arch" in signature(self.spec.variants).parameters else {}
        found: tuple[dict[str, int], ...] = self.spec.variants(source, **others)
        return found

    @property
    def kinds(self) -> frozenset[dispatch.Kind]:
        """Every kind of call that is dispatched at some size."""
        return dispatch_table.read()[self.id].kinds

    @property
    def inferred(self) -> tuple[dispatch.Inferred, ...]:
        """Those of them without a row on file."""
        return dispatch_table.read()[self.id].like

    @property
    def sizes(self) -> tuple[dispatch_table.SizeAsked, ...]:
        """What is asked of a call's size."""
        return dispatch_table.read()[self.id].sizes

    @property
    def benchmark(self) -> tuple[Case, ...]:
        """The shapes that networks train, at full size."""
        found: tuple[Case, ...] = self.module("cases").BENCHMARK
        return found

    @property
    def verification(self) -> tuple[Case, ...]:
        """Small and odd shapes over all variants and dtypes."""
        found: tuple[Case, ...] = self.module("cases").VERIFICATION
        return found

    @property
    def rewrite(self) -> Callable[..., None]:
        """`rewrite(graph_module, report, *, compiled)`: put the operation in where the captured graph has its pattern."""
        found: Callable[..., None] = self.module("rewrite").rewrite
        return found

    @property
    def finish(self) -> Callable[..., None] | None:
        """`finish(graph_module, report, *, compiled)`: a last look at the graph, after all families' rewrites; or None."""
        found: Callable[..., None] | None = getattr(self.module("rewrite"), "finish", None)
        return found

    @property
    def produces(self) -> Mapping[Any, Producer]:
        """Its functions whose kernels can leave a batch norm the moments of what they make."""
        found: Mapping[Any, Producer] = getattr(self.module("rewrite"), "PRODUCES", {}) if self.captured else {}
        return found

    @property
    def engaged(self) -> Counter[str]:
        """How often the kernels ran, by variant."""
        return dispatch.counters(self.id)[0]

    @property
    def fell_back(self) -> Counter[str]:
        """How often PyTorch's own operation ran instead, by reason."""
        return dispatch.counters(self.id)[1]

    def not_dispatched(self) -> str:
        """Why no benchmarked case is dispatched (the commonest reason); empty when some is."""
        reasons = [case.wins() for case in self.benchmark]
        if not all(reasons):
            return ""
        return Counter(reasons).most_common(1)[0][0] if reasons else dispatch.UNMEASURED


def kernel_sha(work: Work) -> str:
    """Hash of the sources of this pass, with everything they include."""
    return sources.sha256(*work.kernels)
