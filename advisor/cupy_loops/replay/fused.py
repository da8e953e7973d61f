"""CUDA source of kernels that do the work of many elementwise calls. Shapes and strides are constants of the source."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from advisor.cupy_loops.replay.calls import Cluster, Element, Operand, Step
from advisor.cupy_loops.replay.elementwise import C_TYPES

THREADS = 256
MOST_BLOCKS = 2112  # of one kernel: 16 on each of 132 SMs, which then take more elements each
_PREAMBLE = "#define NOT_A_NUMBER __int_as_float(0x7fffffff)\n"


@dataclass(frozen=True, slots=True)
class Body:
    """A device function: its source and what it is given, in order."""

    source: str
    arguments: tuple[str, ...]  # their types
    places: tuple[int, ...]  # arrays by place; below zero: the number of a scalar, from -1 down
    blocks: int


def body(cluster: Cluster, arrays: dict[int, Any] | list[Any], scalar_types: list[str]) -> Body:
    """The function of one cluster over these arrays.

    Args:
        scalar_types: of the program's scalars.
    """
    gathered = list(dict.fromkeys(place for e in cluster.elements for place in e.looked_through))
    places = list(dict.fromkeys([*cluster.reads, *gathered, *cluster.writes]))
    scalars = sorted({op.scalar for e in cluster.elements for op in e.operands if op.scalar >= 0})
    lying = {place: arrays[place] for place in [*cluster.reads, *cluster.writes]}
    lies = _Lies(cluster.shape, lying, cluster.writes, whole=bool(gathered))
    arguments, lines, names = [], [], {}
    for i, place in enumerate(places):
        kind = C_TYPES[str(arrays[place].dtype)]
        written = place in cluster.writes
        arguments.append(f"{kind}* p{i}" if written else f"const {kind}* __restrict__ p{i}")
        if place in cluster.reads:
            lines.append(f"const {kind} r{i} = p{i}[{lies.at(place)}];")
            names[place] = f"r{i}"
    for i, number in enumerate(scalars):
        kind = C_TYPES[scalar_types[number]]
        arguments.append(f"const {kind}* __restrict__ s{i}")
        lines.append(f"const {kind} n{i} = *s{i};")
    called = {number: f"n{i}" for i, number in enumerate(scalars)}
    pointers = {p: f"p{n}" for n, p in enumerate(places)}
    for i, each in enumerate(cluster.elements):
        if each.windows:
            lines += _windows(each, f"v{i}", pointers, arrays, lies)
        elif each.reduced:
            lines += _largest(each, f"v{i}", pointers, arrays, lies)
        else:
            lines.append(f"const {C_TYPES[each.gives]} v{i} = {_expression(each, names, called)};")
        names[each.place] = f"v{i}"
    lines += [f"p{i}[{lies.at(place)}] = {names[place]};" for i, place in enumerate(places) if place in cluster.writes]
    size, index = lies.size, lies.index_type
    loop = f"for ({index} i = ({index})block * {THREADS} + threadIdx.x; i < {size}; i += ({index})blocks * {THREADS})"
    text = "\n    ".join([*lies.lines, *lines])
    parts = tuple(argument.rpartition(" ")[0] for argument in arguments)
    source = f"(unsigned block, unsigned blocks, {', '.join(arguments)}) {{\n  {loop} {{\n    {text}\n  }}\n}}\n"
    blocks = min(MOST_BLOCKS, -(-size // THREADS))
    return Body(source, parts, (*places, *(-1 - s for s in scalars)), blocks)


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """A kernel whose blocks are shared out between functions. `functions`: their sources by name."""

    name: str
    functions: dict[str, str]
    source: str
    blocks: int


def kernel(bodies: list[Body]) -> FusedKernel:
    """The kernel that runs these functions side by side."""
    functions: dict[str, str] = {}
    calls: list[str] = []
    parameters: list[str] = []
    first = 0
    for each in bodies:
        name = "f" + hashlib.sha256(each.source.encode()).hexdigest()[:12]
        functions[name] = f"static __device__ __forceinline__ void {name}{each.source}"
        own = [f"a{len(parameters) + i}" for i in range(len(each.arguments))]
        parameters += [f"{kind} {argument}" for kind, argument in zip(each.arguments, own, strict=True)]
        inside = ", ".join([f"blockIdx.x - {first}u", f"{each.blocks}u", *own])
        calls.append(f"if (blockIdx.x < {first + each.blocks}u) {{ {name}({inside}); return; }}")
        first += each.blocks
    text = "\n  ".join(calls)
    rest = f"({', '.join(parameters)}) {{\n  {text}\n}}\n"
    name = "advisor_fused_" + hashlib.sha256(rest.encode()).hexdigest()[:12]
    return FusedKernel(name, functions, f'extern "C" __global__ __launch_bounds__({THREADS}) void {name}{rest}', first)


class Kernels:
    """Kernels of a program's steps, compiled as one module."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._known: dict[str, Any] = {}  # by name

    def compile(self, steps: list[Step], arrays: dict[int, Any], scalar_types: list[str]) -> None:
        """All kernels that these steps need and that are not there yet."""
        wanted: dict[str, FusedKernel] = {}
        for step in steps:
            if step.kernels:
                made = kernel([body(cluster, arrays, scalar_types) for cluster in step.kernels])
                wanted[made.name] = made
        wanted = {name: made for name, made in wanted.items() if name not in self._known}
        if wanted:
            raw = self.module.RawModule(code=source(list(wanted.values())))
            self._known |= {name: raw.get_function(name) for name in wanted}

    def launch(self, step: Step, arrays: list[Any], scalars: list[Any]) -> None:
        """Do the work of the step's clusters on these arrays, on the current stream."""
        bodies = [body(cluster, arrays, [str(scalar.dtype) for scalar in scalars]) for cluster in step.kernels]
        made = kernel(bodies)
        values = [arrays[p] if p >= 0 else scalars[-1 - p] for each in bodies for p in each.places]
        self._known[made.name]((made.blocks,), (THREADS,), tuple(values))


def source(kernels: list[FusedKernel]) -> str:
    """The text of a module; functions that kernels have in common are there once."""
    functions = {name: text for each in kernels for name, text in each.functions.items()}
    return _PREAMBLE + "".join(functions.values()) + "".join(each.source for each in kernels)


def _windows(each: Element, name: str, pointers: dict[int, str], arrays: Any, lies: _Lies) -> list[str]:
    """What the windows over an element hold, added up."""
    kind = C_TYPES[each.gives]
    add = "__fadd_rn" if kind == "float" else "__dadd_rn"
    lines = [f"{kind} {name} = 0;"]
    for window in each.windows:
        value = arrays[window.place]
        strides = _spread(value, len(each.shape), window.lengths, window.dims)
        tests, terms = [], ["0"]
        for d, (start, step, length) in enumerate(zip(window.starts, window.steps, window.lengths, strict=True)):
            at = f"({lies.coordinate(d)} - {start}u)"
            if (start, step, length) != (0, 1, each.shape[d]):  # below the start it wraps round, and is too large
                tests.append(f"{at} < {step * (length - 1) + 1}u" + (f" && {at} % {step} == 0" if step > 1 else ""))
            if strides[d]:
                terms.append(f"{at} / {step} * {strides[d]}" if step > 1 else f"{at} * {strides[d]}")
        found = f"{pointers[window.place]}[{' + '.join(terms)}]"
        value = found if window.put else f"{add}({name}, {found})"
        lines.append(f"if ({' && '.join(tests) or 'true'}) {name} = {value};")
    return lines


def _largest(each: Element, name: str, pointers: dict[int, str], arrays: Any, lies: _Lies) -> list[str]:
    """The largest or smallest of the elements over some dimensions; a NaN among them is it, as CuPy has it."""
    assert each.reduced is not None
    place, axes = each.reduced
    value, kind = arrays[place], C_TYPES[each.gives]
    strides = [stride // value.dtype.itemsize for stride in value.strides]
    kept = [d for d in range(value.ndim) if d not in axes]
    own = [d for d in range(len(each.shape)) if len(each.shape) == value.ndim or d < len(kept)]
    at = kept if len(each.shape) == len(kept) else range(value.ndim)
    terms = [
        f"{lies.coordinate(d)} * {strides[k]}" for d, k in zip(own, at, strict=True) if strides[k] and k not in axes
    ]
    lines = [
        f"const {kind}* const q{name} = {pointers[place]} + ({' + '.join(terms) or '0'});",
        f"{kind} {name} = *q{name};",
    ]
    loops = "".join(f"for (int a{d} = 0; a{d} < {value.shape[d]}; ++a{d}) " for d in axes)
    offset = " + ".join(f"a{d} * {strides[d]}" for d in axes) or "0"
    look = f"const {kind} w = q{name}[{offset}]; if (w {each.code} {name} || w != w) {name} = w;"
    return [*lines, f"{loops}{{ {look} }}"]


def _expression(each: Element, names: dict[int, str], called: dict[int, str]) -> str:
    inside = C_TYPES[each.inside]
    operands = [f"({inside})({_operand(op, names, called)})" for op in each.operands]
    return f"({C_TYPES[each.gives]})({each.code.format(*operands)})"


def _operand(op: Operand, names: dict[int, str], called: dict[int, str]) -> str:
    if op.place >= 0:
        return names[op.place]
    if op.scalar >= 0:
        return called[op.scalar]
    value = op.value
    if isinstance(value, int) or (hasattr(value, "dtype") and value.dtype.kind in "iub"):
        return f"{int(value)}LL"
    return float(value).hex()


class _Lies:
    """How the arrays of a cluster lie: its dimensions joined where no array minds, or `whole`; and offsets as expressions of `i`."""

    def __init__(self, shape: tuple[int, ...], arrays: dict[int, Any], writes: list[int], *, whole: bool) -> None:
        strides = {place: _spread(value, len(shape), shape) for place, value in arrays.items()}
        leader = strides[writes[0]] if writes else next(iter(strides.values()))
        order = range(len(shape)) if whole else sorted(range(len(shape)), key=lambda d: -leader[d])
        dims = [(shape[d], {place: s[d] for place, s in strides.items()}) for d in order if shape[d] != 1]
        if not whole:
            dims = _joined(dims)
        self._numbers = {d: n for n, d in enumerate(d for d in order if shape[d] != 1)}
        self.dims = dims or [(1, dict.fromkeys(strides, 0))]
        self.size = 1
        for length, _ in self.dims:
            self.size *= length
        reach = max((sum(abs(s[p]) * (n - 1) for n, s in self.dims) for p in strides), default=0)
        self.index_type = "unsigned" if max(self.size, reach) < 1 << 31 and self._positive() else "long long"
        self.lines: list[str] = []
        if len(self.dims) > 1:
            rest = "i"
            for d in range(len(self.dims) - 1, 0, -1):
                self.lines.append(
                    f"const {self.index_type} i{d} = {rest} % {self.dims[d][0]}, q{d} = {rest} / {self.dims[d][0]};"
                )
                rest = f"q{d}"
            self.lines.append(f"const {self.index_type} i0 = {rest};")

    def _positive(self) -> bool:
        return all(s >= 0 for _, strides in self.dims for s in strides.values())

    def coordinate(self, dimension: int) -> str:
        """Where the element is in one of the cluster's dimensions, which are kept whole."""
        if dimension not in self._numbers:
            return "0u"
        return f"i{self._numbers[dimension]}" if len(self.dims) > 1 else "i"

    def at(self, place: int) -> str:
        """The offset of the array's element."""
        if len(self.dims) == 1:
            stride = self.dims[0][1][place]
            return "i" if stride == 1 else f"i * {stride}" if stride else "0"
        terms = [f"i{d} * {s[place]}" for d, (_, s) in enumerate(self.dims) if s[place]]
        return " + ".join(terms) or "0"


def _spread(value: Any, ndim: int, shape: tuple[int, ...], dims: tuple[int, ...] | None = None) -> list[int]:
    """Strides in elements over the cluster's shape; 0 where the array is broadcast, and in dimensions that are not among `dims`."""
    if dims is not None:
        found, inside = [0] * ndim, _spread(value, len(dims), tuple(shape[d] for d in dims))
        for d, stride in zip(dims, inside, strict=True):
            found[d] = stride
        return found
    own = [0] * (ndim - value.ndim) + [s // value.dtype.itemsize for s in value.strides]
    lengths = [1] * (ndim - value.ndim) + list(value.shape)
    return [s if length == wanted and length != 1 else 0 for s, length, wanted in zip(own, lengths, shape, strict=True)]


def _joined(dims: list[tuple[int, dict[int, int]]]) -> list[tuple[int, dict[int, int]]]:
    """Neighbours that are one dimension for every array, as one."""
    found: list[tuple[int, dict[int, int]]] = []
    for length, strides in dims:
        if found and all(found[-1][1][p] == s * length for p, s in strides.items()):
            found[-1] = found[-1][0] * length, strides
        else:
            found.append((length, strides))
    return found
