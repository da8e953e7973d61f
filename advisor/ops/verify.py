"""Any family's kernels against their fp64 reference, beside PyTorch's own operation: for `advisor kernels verify`, the
benchmarks and the tests, on a GPU or, under an emulator, on CPU tensors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from advisor.core.errors import first_line
from advisor.ops import dispatch
from advisor.ops.family import Case, Family

# Relative L2 error of an output that is right but for one rounding to this dtype (half a unit in the last place, at the
# bottom of a binade); for fp32 with room for sums in another order. A gradient may be rounded at up to three places.
NOISE = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2e-6}
GRADIENT_NOISE = 3.0
# A single element, against its own size plus the root mean square of all: L2 alone would not see one wrong in a million.
ELEMENT_NOISE = 8.0
# PyTorch's own operation rounds elsewhere; from run to run of it errors differ by less than this.
SLACK = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Largest errors against fp64 of outputs (and changed buffers) and of gradients, relative, of the whole and of one element."""

    output: float
    gradient: float
    output_element: float
    gradient_element: float


def seeded(device: str | torch.device, seed: int) -> torch.Generator:
    """A generator on `device`."""
    return torch.Generator(device).manual_seed(seed)


def tensors(result: Any) -> tuple[torch.Tensor, ...]:
    """A result, a tensor or a sequence of them, as a tuple."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def _floating(arguments: Sequence[Any]) -> list[torch.Tensor]:
    return [a for a in arguments if isinstance(a, torch.Tensor) and a.is_floating_point()]


def copies(arguments: Sequence[Any], wide: bool) -> tuple[Any, ...]:
    """The same values in the same memory layout, independent of the originals; in fp64 if `wide`."""

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        kind = torch.float64 if wide and value.is_floating_point() else value.dtype
        return value.detach().to(kind, copy=True).requires_grad_(value.requires_grad)

    return tuple(copy(value) for value in arguments)


def upstream(
    case: Case, arguments: Sequence[Any], outputs: Sequence[torch.Tensor], generator: torch.Generator
) -> list[torch.Tensor]:
    """Random gradients like `outputs`, zero where rounding alone would decide what becomes of them."""
    given = [
        torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype).to(memory_format=_format(y))
        for y in outputs
    ]
    if case.steady is not None:
        with torch.no_grad():
            masks = tensors(case.steady(*copies(arguments, wide=True)))
        given[: len(masks)] = [dy * mask.to(dy.dtype) for dy, mask in zip(given, masks, strict=False)]
    return given


def _format(tensor: torch.Tensor) -> torch.memory_format:
    nhwc = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if nhwc else torch.contiguous_format


@dataclass(frozen=True, slots=True)
class Computed:
    """Outputs followed by the buffers, and gradients of the leaves."""

    outputs: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor, ...]


def run(
    case: Case, function: Callable[..., Any], arguments: Sequence[Any], above: Sequence[torch.Tensor] | None
) -> Computed:
    """Call `function` on copies of `arguments`; the gradients only with `above`."""
    mine = copies(arguments, wide=False)
    return run_with(case, function, mine, above)


def run_with(
    case: Case, function: Callable[..., Any], mine: tuple[Any, ...], above: Sequence[torch.Tensor] | None
) -> Computed:
    leaves = [t for t in _floating(mine) if t.requires_grad]
    outputs = tensors(function(*mine))
    buffers = tuple(t for t in _floating(mine) if not t.requires_grad)
    gradients: tuple[torch.Tensor, ...] = ()
    if above is not None and leaves and "backward" in case.passes:
        gradients = torch.autograd.grad(outputs, leaves, list(above))
    return Computed((*(y.detach() for y in outputs), *buffers), gradients)


def _posed(
    case: Case, device: str | torch.device, *, batch: int, seed: int
) -> tuple[Sequence[Any], list[torch.Tensor], Computed]:
    """Fresh random inputs of `batch` in place of shape[0], gradients from above, and what the fp64 reference makes of both."""
    generator = seeded(device, seed)
    arguments = case.inputs(generator, batch)
    with torch.no_grad():
        like = tensors(case.eager(*copies(arguments, wide=False)))
    above = upstream(case, arguments, like, generator)
    want = run_with(case, case.reference, copies(arguments, wide=True), [dy.double() for dy in above])
    return arguments, above, want


def errors(
    case: Case, functions: Sequence[Callable[..., Any]], device: str | torch.device, *, batch: int, seed: int
) -> tuple[Errors, ...]:
    """Errors of each of `functions`, the case's own, on the same fresh random inputs of `batch` in place of shape[0]."""
    arguments, above, want = _posed(case, device, batch=batch, seed=seed)
    return tuple(compare(case, run(case, function, arguments, above), want, above) for function in functions)


def compare(case: Case, got: Computed, want: Computed, above: Sequence[torch.Tensor]) -> Errors:
    """Relative errors of `got` against `want`, which is in fp64. What is not finite in `got` alone makes them infinite."""
    floor = case.gradient_floor * float(above[0].double().norm()) if above else 0.0
    outputs = [_relative(a, b, 0.0) for a, b in zip(got.outputs, want.outputs, strict=True)]
    gradients = [_relative(a, b, floor) for a, b in zip(got.gradients, want.gradients, strict=True)]
    return Errors(
        output=max((whole for whole, _ in outputs), default=0.0),
        gradient=max((whole for whole, _ in gradients), default=0.0),
        output_element=max((one for _, one in outputs), default=0.0),
        gradient_element=max((one for _, one in gradients), default=0.0),
    )


def _relative(got: torch.Tensor, want: torch.Tensor, floor: float) -> tuple[float, float]:
    if got.shape != want.shape:
        return float("inf"), float("inf")
    if not want.numel():
        return 0.0, 0.0
    finite = torch.isfinite(want)
    if not bool((torch.isfinite(got) == finite).all()):
        return float("inf"), float("inf")
    difference = torch.where(finite, got.double() - want, 0.0)
    size = torch.where(finite, want, 0.0)
    norm = max(float(size.norm()), floor, 1e-30)
    typical = norm / want.numel() ** 0.5
    return float(difference.norm()) / norm, float((difference.abs() / (size.abs() + typical)).max())


def accepted(dtype: str, mine: Errors, theirs: Errors) -> str:
    """What is wrong with `mine` beside PyTorch's own errors; empty when it is no worse, or within rounding."""
    noise = NOISE[dtype]
    for name, bound in (
        ("output", noise),
        ("gradient", GRADIENT_NOISE * noise),
        ("output_element", ELEMENT_NOISE * noise),
        ("gradient_element", GRADIENT_NOISE * ELEMENT_NOISE * noise),
    ):
        value, other = getattr(mine, name), getattr(theirs, name)
        if not value <= max(SLACK * other, bound):  # a NaN is wrong too
            return f"{name.replace('_', ' ')} error {value:.2g}, PyTorch's own {other:.2g}, rounding {bound:.2g}"
    return ""


@contextmanager
def _strict_fp32() -> Iterator[None]:
    """Inside, cuDNN does not compute fp32 in TF32: its errors would excuse ours."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def poison(device: str | torch.device) -> None:
    """Fill the allocator's free blocks with NaN, so that an element which a kernel leaves out is seen. A GPU only."""
    if torch.device(device).type == "cuda":
        blocks = [torch.full((1 << size,), float("nan"), device=device) for size in range(8, 24) for _ in range(4)]
        del blocks


def check(family: Family, case: Case, device: str | torch.device, *, seed: int = 0) -> dict[str, object]:
    """Run all checks of one case with its kernels forced on.

    Checked: the kernels ran; outputs, changed buffers and gradients against fp64, beside PyTorch's own; every element
    written; the same bits twice; NaN and Inf in the input come out where PyTorch's own lets them; sliced inputs.

    Returns:
        family, case, errors, `passed`, and `detail`: what failed. Of a case that is left to PyTorch on this GPU's architecture no
        errors, None for `passed`, and why.
    """
    wrong: list[str] = []
    with dispatch.everything(), _strict_fp32():
        before, left = sum(family.engaged.values()), Counter(family.fell_back)
        arguments, above, want = _posed(case, device, batch=case.shape[0], seed=seed)
        poison(device)
        got = run(case, case.ours, arguments, above)
        ran = sum(family.engaged.values()) - before
        refusal = _of_the_architecture(family.fell_back - left)
        if ran < 1 and refusal:
            return {"family": family.id, "case": case.label, "passed": None, "detail": f"not for this GPU: {refusal}"}
        mine = compare(case, got, want, above)
        theirs = compare(case, run(case, case.eager, arguments, above), want, above)
        if ran < 1:
            wrong.append("the kernels did not run: " + dispatch.told(family.id))
        wrong += filter(None, [accepted(case.dtype, mine, theirs)])
        if family.deterministic:
            poison(device)
            again = run(case, case.ours, arguments, above)
            if not all(map(_same, (*got.outputs, *got.gradients), (*again.outputs, *again.gradients))):
                wrong.append("two runs differ")
        wrong += _not_finite(case, arguments)
        wrong += _elsewhere(family, case, arguments, above, want, theirs)
    return {
        "family": family.id,
        "case": case.label,
        "output_error": mine.output,
        "gradient_error": mine.gradient,
        "pytorch_output_error": theirs.output,
        "pytorch_gradient_error": theirs.gradient,
        "passed": not wrong,
        "detail": "; ".join(wrong),
    }


def _of_the_architecture(reasons: Iterable[str]) -> str:
    """These reasons, where each is about the GPU's architecture, which it names: sm_80. Else empty."""
    told = sorted(set(reasons))
    return ", ".join(told) if all(re.search(r"\bsm_\d+\b", reason) for reason in told) else ""


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))


def _not_finite(case: Case, arguments: Sequence[Any]) -> list[str]:
    """NaN and Inf in the first input: not finite where PyTorch's own is not finite, or the definition, and nowhere else.

    PyTorch's own alone will not do: cuDNN multiplies by zeros that it pads with, and so spreads them over tiles and groups.
    """
    wrong = []
    for value in (float("nan"), float("inf")):
        dirty = list(copies(arguments, wide=False))
        first = next(i for i, a in enumerate(dirty) if isinstance(a, torch.Tensor) and a.is_floating_point())
        with torch.no_grad():
            spot = tuple(size // 2 for size in dirty[first].shape)
            dirty[first][spot] = value
            ours = tensors(case.ours(*copies(dirty, wide=False)))
            others = (
                tensors(function(*copies(dirty, wide=wide)))
                for function, wide in ((case.eager, False), (case.reference, True))
            )
            alike = any(
                all(torch.equal(torch.isfinite(a), torch.isfinite(b)) for a, b in zip(ours, other, strict=True))
                for other in others
            )
        if not alike:
            wrong.append(f"{value} in the input comes out elsewhere than from PyTorch's own")
    return wrong


def _elsewhere(
    family: Family,
    case: Case,
    arguments: Sequence[Any],
    above: Sequence[torch.Tensor],
    want: Computed,
    theirs: Errors,
) -> list[str]:
    """The first input, or all others, and what comes from above, in slices of larger tensors or off 16-byte alignment."""

    def slice_of(value: torch.Tensor) -> torch.Tensor:
        wider = torch.empty((*value.shape[:-1], value.shape[-1] + 1), dtype=value.dtype, device=value.device)
        return _filled(wider[..., 1:], value)

    def shifted(value: torch.Tensor) -> torch.Tensor:
        flat = torch.empty(value.numel() + 1, dtype=value.dtype, device=value.device)
        return _filled(flat.as_strided(value.shape, value.stride(), 1), value)

    first, *others = [i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor) and a.is_floating_point()]
    wrong = []
    for what, places, move in (
        ("sliced input", [first], slice_of),
        ("misaligned input", [first], shifted),
        ("misaligned parameters and gradient", others, shifted),
    ):
        before = sum(family.engaged.values())

        def there(function: Callable[..., Any], places: Sequence[int] = places, move: Any = move) -> Errors:
            mine = list(copies(arguments, wide=False))
            for i in places:
                mine[i] = move(mine[i])
            return compare(case, run_with(case, function, tuple(mine), [move(dy) for dy in above]), want, above)

        try:
            found = there(case.ours)
            # Where PyTorch's own ran it may be another algorithm of its than in place.
            beside = theirs if sum(family.engaged.values()) > before else there(case.eager)
            reason = accepted(case.dtype, found, beside)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        wrong += [f"{what}: {reason}"] if reason else []
    return wrong


def _filled(place: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    place.copy_(value.detach())
    return place.requires_grad_(value.requires_grad)


def verify(families: Sequence[Family], device: str, say: Callable[[str], None]) -> list[dict[str, object]]:
    """`check` over the families' verification cases; a case that raises is a row that did not pass, and the rest goes on.

    Not so after an error that leaves the GPU unusable for this process: what comes later is a row that says so.
    """
    rows: list[dict[str, object]] = []
    lost = ""
    for family in families:
        cases = family.verification
        for number, case in enumerate(cases):
            row: dict[str, object] = {"family": family.id, "case": case.label, "passed": False}
            if lost:
                rows.append({**row, "detail": f"not checked: {lost} has left the GPU unusable for this process"})
                continue
            say(f"verifying {family.id}: case {number + 1} of {len(cases)}")
            try:
                rows.append(check(family, case, device, seed=number))
            except Exception as error:
                rows.append({**row, "detail": first_line(error)})
            if unusable(device):
                lost = f"{family.id} {case.label}"
    return rows


def unusable(device: str) -> bool:
    """Whether an earlier fault (an illegal or misaligned address) has ended this process's use of the GPU."""
    if torch.device(device).type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
