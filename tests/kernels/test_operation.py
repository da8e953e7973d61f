"""One declaration makes an operation that PyTorch's own checks take: schema, fake kernels, autograd, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from advisor.ops import dispatch
from advisor.ops.operation import Arguments, Gradients, Operation, Saved


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


def _spread(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    assert saved[0] == 1.0
    shape, (rows, columns) = arguments
    dx = dy.new_zeros(shape)
    dx[::rows, ::columns] = dy
    return (dx,)


@pytest.fixture(scope="module")
def shaped() -> Iterator[Operation]:
    """One whose backward needs its tensor's shape alone."""
    yield Operation(
        name="shaped_in_a_test",
        forward=_strided,
        backward=_spread,
        shaped=True,
        pytorch=lambda x, steps: x[:: steps[0], :: steps[1]].clone(),
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
    assert [t.shape for t in y.grad_fn.saved_tensors] == [()]  # x is not among them


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
