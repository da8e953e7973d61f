"""One declaration makes an operation that PyTorch's own checks take: schema, fake kernels, autograd, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from advisor.ops import differentiable, dispatch
from advisor.ops.operation import ABOVE, NONE, OWN, Arguments, Gradients, Operation, Saved, Unread, shape_alone


def _forward(
    x: torch.Tensor, power: int, weight: torch.Tensor | None, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    saved = x**power
    return (saved if weight is None else saved * weight) + bias, saved


def _backward(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    x, power, weight, _ = arguments
    dx = dy * power * x ** (power - 1)
    dweight = None if weight is None else (dy * saved[0]).sum(0)
    return dx if weight is None else dx * weight, dweight, dy.sum(0)


def _pytorch(x: torch.Tensor, power: int, weight: torch.Tensor | None, bias: torch.Tensor) -> torch.Tensor:
    return _forward(x, power, weight, bias)[0]


@pytest.fixture(scope="module")
def operation() -> Iterator[Operation]:
    yield Operation(
        name="declared_in_a_test",
        forward=_forward,
        backward=_backward,
        pytorch=_pytorch,
        refusal=lambda x, power, weight, bias: "a power below 1" if power < 1 else "",
        label=lambda x, power, weight, bias: f"power {power}",
        readable=lambda x, power, weight, bias: (x.contiguous(), power, weight, bias),
        fake=lambda x, power, weight, bias: (x.new_empty(x.shape), x.new_empty(x.shape)),
        layout=lambda *_: torch.contiguous_format,
    )
    for counters in (dispatch.engaged, dispatch.fell_back):
        del counters["declared_in_a_test"]


def _strided(x: torch.Tensor, steps: Sequence[int], *, kept: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = steps
    return x[::rows, ::columns].clone(), x.new_tensor(float(kept))


def _every(x: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
    return x[:: steps[0], :: steps[1]].clone()


def _spread(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    assert saved[0] == 1.0
    x, (rows, columns) = arguments
    dx = dy.new_zeros(x.shape)
    dx[::rows, ::columns] = dy
    return (dx,)


@pytest.fixture(scope="module")
def shaped() -> Iterator[Operation]:
    """One whose backward needs its tensor's shape alone."""
    yield Operation(
        name="shaped_in_a_test",
        forward=_strided,
        backward=_spread,
        reads=shape_alone,
        twice=lambda dy, arguments, _saved: differentiable.shaped(dy, _every, arguments[0].shape, arguments[1]),
        pytorch=_every,
        refusal=lambda *_: "",
        label=lambda *_: "strided",
        fake=lambda x, steps: (x.new_empty(_strided(x, steps)[0].shape), x.new_empty(())),
        layout=lambda *_: torch.contiguous_format,
    )
    for counters in (dispatch.engaged, dispatch.fell_back):
        del counters["shaped_in_a_test"]


def test_an_operation_that_keeps_a_shape_alone(shaped: Operation) -> None:
    x = torch.rand(4, 6, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(shaped.compiled, (x, (2, 3)))
    for function in (shaped, lambda *args: shaped.compiled(*args)[0]):
        assert torch.autograd.gradcheck(lambda x, of=function: of(x, (2, 3)), x)
    assert torch.autograd.gradgradcheck(lambda x: shaped(x, (2, 3)), x)
    y = shaped(x, (2, 3))
    assert [t if t is None else t.shape for t in y.grad_fn.saved_tensors] == [None, ()]  # x is not among them


def _counted(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    running: torch.Tensor,
    scale: float,
    in_place: bool = False,
    twin: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """relu(x * scale + residual), of which the twin is a copy; `running` counts what came."""
    y, _, mask, new = _counted_pure(x, residual, running, scale, twin=twin)
    running.copy_(new)
    y = x.copy_(y) if in_place else y
    return y, y.detach() if twin else None, mask, new


def _counted_pure(
    x: torch.Tensor, residual: torch.Tensor | None, running: torch.Tensor, scale: float, *, twin: bool = False
) -> Any:
    z = x * scale if residual is None else x * scale + residual
    mask = None if residual is None else z > 0
    return z.relu(), twin, mask, running + x.sum()


def _counted_backward(above: Any, arguments: Arguments, saved: Saved) -> Gradients:
    x, residual, running, scale, *_ = arguments
    dy = sum(one for one in above if one is not None)
    assert isinstance(x, Unread)
    assert isinstance(running, Unread)
    if residual is None:
        return dy * scale, None, None
    assert residual == Unread((4, 3), torch.float64)
    g = dy.where(saved[0], 0)
    return g * scale, g, None


def _library(
    x: torch.Tensor, residual: torch.Tensor | None, running: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, _, mask, new = _counted_pure(x, residual, running, scale)
    return y, mask, new  # type: ignore[return-value]  # without a residual there are no bits


@pytest.fixture(scope="module")
def counted() -> Iterator[Operation]:
    """One that changes running statistics, may write over its input, keeps a mask where it needs one, and gives its result twice."""
    yield Operation(
        name="counted_in_a_test",
        forward=_counted,
        results=2,
        pure=_library,
        backward=_counted_backward,
        reads=lambda *_: (False, False, False),
        flows=lambda x, residual, running, scale, *_: (OWN, OWN if residual is not None else ABOVE, NONE),
        twice=_counted_backward,
        pytorch=lambda x, residual, *_: x,
        refusal=lambda *_: "",
        label=lambda *_: "counted",
        fake=lambda x, residual, running, scale: (
            torch.empty_like(x),
            x.new_empty(0, dtype=torch.uint8) if residual is None else torch.empty_like(x, dtype=torch.bool),
            torch.empty_like(running),
        ),
        layout=lambda *_: torch.contiguous_format,
    )
    for counters in (dispatch.engaged, dispatch.fell_back):
        del counters["counted_in_a_test"]


@pytest.mark.parametrize("added", [True, False])
def test_running_statistics_change_in_eager_calls_alone(counted: Operation, *, added: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    x, residual = (torch.rand(4, 3, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    running, leaves = torch.zeros((), dtype=torch.float64), (x, residual) if added else (x,)
    arguments = x, residual if added else None, running, 2.0
    torch.library.opcheck(counted.compiled, arguments)
    y, _, new = counted.compiled(*arguments)
    assert running == 0
    plain = counted(*arguments)
    assert torch.equal(y, plain)
    assert running == new == x.sum()
    dy = torch.rand(4, 3, dtype=torch.float64)
    for mine, other in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(plain, leaves, dy), strict=True):
        assert torch.equal(mine, other)
    assert torch.autograd.gradcheck(lambda *given: counted(given[0], given[1] if added else None, running, 2.0), leaves)


def test_a_result_may_lie_where_the_input_lay_and_come_twice(counted: Operation) -> None:
    leaf, running = torch.rand(4, 3, dtype=torch.float64, requires_grad=True), torch.zeros((), dtype=torch.float64)
    x = leaf * 1
    y, twin = counted(x, None, running, 3.0, True, True)
    assert y is x
    assert twin.data_ptr() == y.data_ptr()
    for used, times in (((y, twin), 6.0), ((y,), 3.0), ((twin,), 3.0)):
        (dx,) = torch.autograd.grad(sum(one.sum() for one in used), leaf, retain_graph=True)
        assert torch.equal(dx, torch.full_like(dx, times))


def _arguments(*, weighted: bool) -> tuple[torch.Tensor, int, torch.Tensor | None, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (
        torch.rand(shape, dtype=torch.float64, generator=generator).add_(0.5).requires_grad_()
        for shape in ((4, 3), (3,), (3,))
    )
    return x, 3, weight if weighted else None, bias


@pytest.mark.parametrize("weighted", [True, False])
def test_pytorch_takes_the_operation(operation: Operation, *, weighted: bool) -> None:
    torch.library.opcheck(operation.compiled, _arguments(weighted=weighted))


@pytest.mark.parametrize("weighted", [True, False])
def test_first_and_second_gradients_are_right(operation: Operation, *, weighted: bool) -> None:
    x, power, weight, bias = _arguments(weighted=weighted)
    leaves = (x, bias) if weight is None else (x, weight, bias)

    def eager(*given: torch.Tensor) -> torch.Tensor:
        return operation(given[0], power, given[1] if weighted else None, given[-1])

    def compiled(*given: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = operation.compiled(given[0], power, given[1] if weighted else None, given[-1])[0]
        return y

    assert torch.autograd.gradcheck(eager, leaves)
    assert torch.autograd.gradgradcheck(eager, leaves)
    assert torch.autograd.gradcheck(compiled, leaves)


def test_what_ran_is_counted(operation: Operation) -> None:
    engaged, fell_back = dispatch.counters("declared_in_a_test")
    dispatch.clear()
    x, _, weight, bias = _arguments(weighted=True)
    operation(x, 2, weight, bias)
    operation.compiled(x, 2, weight, bias)
    assert operation(x, 0, weight, bias).requires_grad
    assert (dict(engaged), dict(fell_back)) == ({"power 2": 2}, {"a power below 1": 1})
