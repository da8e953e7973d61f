"""A StepProfile with what several questions need worked out once: device rows, shares, convolution geometry."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from advisor.analysis.rows import (
    gates,
    inner_path,
    is_batchnorm,
    is_cast,
    is_own,
    is_squeeze_excite,
    like_squeeze_excite,
    parent,
    shapes_of,
)
from advisor.core.profile import ConvFact, KernelRow, StepProfile

# Copies between host and device are in StepProfile.copies; a row with one of these names would count them twice.
_HOST_COPY = re.compile(r"^Memcpy (HtoD|DtoH|HtoH)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A convolution's shape. `stride` and `dilation` are empty when neither the module nor a like module tells them."""

    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    groups: int
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    transposed: bool = False

    @property
    def depthwise(self) -> bool:
        """One input channel a group."""
        return self.groups > 1 and self.groups == self.in_channels

    @property
    def grouped(self) -> bool:
        """Several groups of several input channels."""
        return 1 < self.groups < self.in_channels

    @property
    def unit_stride(self) -> bool:
        """Known to have stride 1 in each dimension."""
        return bool(self.stride) and all(step == 1 for step in self.stride)


@dataclass(frozen=True, slots=True)
class View:
    """`rows` are device rows without host copies; `device_us` is their sum; `step_us` is 0.0 when no step was timed."""

    profile: StepProfile
    rows: tuple[KernelRow, ...]
    device_us: float
    step_us: float
    _by_module: dict[str, list[ConvFact]] = field(repr=False)
    _by_size: dict[tuple[int, int, tuple[int, ...], int], list[ConvFact]] = field(repr=False)
    _weight_shapes: frozenset[tuple[int, ...]] = field(repr=False)

    @classmethod
    def of(cls, profile: StepProfile) -> View:
        """Index the profile. Rows without time and convolution facts without channels are left out."""
        rows = tuple(row for row in profile.kernels if row.time_us > 0 and not _HOST_COPY.match(row.name))
        by_module: dict[str, list[ConvFact]] = {}
        by_size: dict[tuple[int, int, tuple[int, ...], int], list[ConvFact]] = {}
        for fact in profile.model.convs:
            if fact.module:
                by_module.setdefault(inner_path(fact.module), []).append(fact)
            by_size.setdefault((fact.in_channels, fact.out_channels, fact.kernel, fact.groups), []).append(fact)
        return cls(
            profile,
            rows,
            sum(row.time_us for row in rows),
            profile.typical_us,
            by_module,
            by_size,
            frozenset(_weight_shape(fact) for fact in profile.model.convs),
        )

    @property
    def on_gpu(self) -> bool:
        """The training step ran on a CUDA GPU."""
        return self.profile.environment.device == "cuda"

    def time_us(self, wanted: Callable[[KernelRow], bool]) -> float:
        """Microseconds per step in the rows wanted."""
        return sum(row.time_us for row in self.rows if wanted(row))

    def of_guides(self) -> View:
        """The same step with these rows alone."""
        return replace(self, rows=tuple(row for row in self.rows if self.profile.guided(row)))

    def without_guides(self) -> View:
        """The same step, without the rows of models that run without gradients."""
        return replace(self, rows=tuple(row for row in self.rows if not self.profile.guided(row)))

    def share(self, wanted: Callable[[KernelRow], bool]) -> float:
        """Share of device time (operator time on a CPU) in the rows wanted, 0 to 1; 0.0 without rows."""
        return self.time_us(wanted) / self.device_us if self.device_us > 0 else 0.0

    def fact(self, row: KernelRow) -> ConvFact | None:
        """The convolution module that a row belongs to; None when two roots have one of that path and shapes do not tell."""
        found = self._by_module.get(inner_path(row.module)) or self._by_module.get(
            inner_path(row.module.partition(".")[2]), []
        )
        if len(found) > 1:
            shape = _from_shapes(row)
            found = [
                fact
                for fact in found
                if shape is not None
                and (fact.in_channels, fact.out_channels, fact.kernel)
                == (shape.in_channels, shape.out_channels, shape.kernel)
            ]
        return found[0] if len(found) == 1 else None

    def alike(self, row: KernelRow) -> list[ConvFact]:
        """The convolution module that a row belongs to; where no module is known, as in a captured forward, those of its size."""
        fact = self.fact(row)
        if fact is not None:
            return [fact]
        found = _from_shapes(row) if row.kind == "conv" else None
        return self._of_size(found) if found is not None else []

    def _of_size(self, found: Geometry) -> list[ConvFact]:
        return self._by_size.get((found.in_channels, found.out_channels, found.kernel, found.groups), [])

    def geometry(self, row: KernelRow) -> Geometry | None:
        """The convolution that a row computes: from its module, else from its recorded shapes; None if neither tells."""
        return self._geometry(row) if row.kind == "conv" else None

    def _geometry(self, row: KernelRow) -> Geometry | None:
        fact = self.fact(row)
        if fact is not None:
            return _from_fact(fact)
        found = _from_shapes(row)
        if found is None:
            return None
        like = self._of_size(found)
        strides, dilations = {f.stride for f in like}, {f.dilation for f in like}
        return Geometry(
            in_channels=found.in_channels,
            out_channels=found.out_channels,
            kernel=found.kernel,
            groups=found.groups,
            stride=strides.pop() if len(strides) == 1 else (),
            dilation=dilations.pop() if len(dilations) == 1 else (),
            transposed=found.transposed,
        )

    def conv(self, wanted: Callable[[Geometry], bool]) -> Callable[[KernelRow], bool]:
        """A row predicate: a convolution by no kernel of advisor's own, whose geometry is known and wanted."""

        def predicate(row: KernelRow) -> bool:
            geometry = self.geometry(row)
            return geometry is not None and not is_own(row) and wanted(geometry)

        return predicate

    def conv_layout(self, wanted: Callable[[Geometry], bool]) -> Callable[[KernelRow], bool]:
        """A row predicate: a kernel that slices, pads or transposes for a convolution, whose geometry is known and wanted."""

        def predicate(row: KernelRow) -> bool:
            if row.kind != "layout" or "convolution" not in row.op:
                return False
            geometry = self._geometry(row)
            return geometry is not None and wanted(geometry)

        return predicate

    def is_weight_cast(self, row: KernelRow) -> bool:
        """A cast of a parameter, or of its gradient, by shape: a convolution's weight, or whatever has no batch dimension, that of a whole
        step or of one of its backward passes.

        Not seen where an operator of one module casts an activation with the same kernel: the longest names the row's shape.
        """
        if row.phase not in ("forward", "backward") or not is_cast(row):
            return False
        shape = next(iter(shapes_of(row)), [])
        model = self.profile.model
        batch = model.batch_size or self.profile.input.batch_size
        if not shape:
            return False
        batches = (batch, batch // max(1, model.backwards))
        return tuple(shape) in self._weight_shapes or (batch > 0 and shape[0] not in batches)

    def normalised_containers(self) -> set[str]:
        """Paths of modules with a batch norm directly inside, where an add or activation follows one, and of those norms, which may hold
        their activation themselves (timm's BatchNormAct2d).
        """
        norms = {row.module for row in self.rows if is_batchnorm(row) and row.module}
        return norms | {parent(norm) for norm in norms}

    def written_norm(self) -> Callable[[KernelRow], bool]:
        """A row predicate: work of norms that are written out in single operations."""
        classes = self.profile.written_norms()
        return lambda row: row.module_type in classes and row.phase in ("forward", "backward")

    def unnormed(self) -> Callable[[KernelRow], bool]:
        """A row predicate: elementwise work of the model beside no batch norm, in no norm that is written out and in no squeeze-and-excite
        block: biases, activations, layer scale, drop path, residual additions.

        An addition in backward sums the gradients of a fork, and stays.
        """
        containers, in_block, in_norm = self.normalised_containers(), self.squeeze_excite(), self.written_norm()

        def predicate(row: KernelRow) -> bool:
            if row.kind not in ("activation", "elementwise") or row.phase not in ("forward", "backward") or is_own(row):
                return False
            summed = row.phase == "backward" and row.kind == "elementwise" and row.op.startswith("aten::add")
            return not (summed or is_cast(row) or self.is_after_norm(row, containers) or in_block(row) or in_norm(row))

        return predicate

    def squeeze_excite(self) -> Callable[[KernelRow], bool]:
        """A row predicate: work of a squeeze-and-excite block whose own forward runs a kernel.

        By the paths of the blocks. A captured forward is all its root's; there, in a model with such blocks, it is what gates
        channels, pools them, and does the same backward, by operator and shapes.
        """
        blocks = frozenset(row.module for row in self.rows if row.module and is_squeeze_excite(row.module_type))
        inside = tuple(f"{path}." for path in blocks)
        if blocks:
            return lambda row: row.module in blocks or row.module.startswith(inside)
        captured = not any("." in row.module for row in self.rows)
        if captured and any(map(is_squeeze_excite, self.profile.model.module_counts)) and any(map(gates, self.rows)):
            return like_squeeze_excite
        return lambda row: False

    def is_after_norm(self, row: KernelRow, containers: set[str]) -> bool:
        """An activation, or an add, that stands in a module beside a batch norm.

        `self.relu` and `nn.Sequential` members are attributed to themselves, so their parent counts; `F.relu(...)` and
        `out += x` are attributed to the block that calls them. An add in backward sums gradients, and stays.
        """
        if row.kind == "activation":
            return bool(row.module) and (row.module in containers or parent(row.module) in containers)
        return (
            row.kind == "elementwise"
            and row.phase == "forward"
            and row.op.startswith(("aten::add", "aten::add_"))
            and row.module in containers
            and self.fact(row) is None
        )


def _weight_shape(fact: ConvFact) -> tuple[int, ...]:
    outer, inner = fact.out_channels, fact.in_channels
    if fact.transposed:
        outer, inner = inner, outer
    return (outer, inner // max(1, fact.groups), *fact.kernel)


def _from_fact(fact: ConvFact) -> Geometry:
    return Geometry(
        in_channels=fact.in_channels,
        out_channels=fact.out_channels,
        kernel=fact.kernel,
        groups=fact.groups,
        stride=fact.stride,
        dilation=fact.dilation,
        transposed=fact.transposed,
    )


def _from_shapes(row: KernelRow) -> Geometry | None:
    """Input N,C,… and weight K,C/groups,… (C,K/groups,… when transposed) of an aten convolution, forward or backward."""
    shapes = shapes_of(row)
    if "backward" in row.op:
        shapes = shapes[1:]  # the output's gradient comes first
    if len(shapes) < 2 or len(shapes[0]) < 3 or len(shapes[0]) != len(shapes[1]) or 0 in shapes[1]:
        return None
    channels, weight = shapes[0][1], shapes[1]
    transposed = "transpose" in row.op or "Transpose" in row.module_type
    groups = 1 if transposed else max(1, channels // weight[1])
    return Geometry(
        in_channels=channels,
        out_channels=weight[1] if transposed else weight[0],
        kernel=tuple(weight[2:]),
        groups=groups,
        transposed=transposed,
    )
