"""The kernel that casts many tensors: the bits of torch's own copies, whatever the sizes, and torch's own where it cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulation.device import only_what_wins
from emulation.planted import passes_with
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.analysis.predictions import optimizer
from advisor.ops import catalog, dispatch, dispatch_table, nvrtc
from advisor.ops.casts import api, cases, spec
from advisor.ops.dispatch_table import Bound, SizeAsked

FAMILY = catalog.get("casts")
HALVES = [torch.bfloat16, torch.float16]
CHUNK = spec.THREADS * 4 * spec.UNROLL


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype in HALVES else torch.int32)


@pytest.mark.parametrize("dtype", HALVES)
def test_bit_equal_to_torchs_own_casts_both_ways(emulated, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    every = torch.randint(-(2**31), 2**31, (3 * CHUNK + 7,), generator=generator).to(torch.int32).view(torch.float32)
    every = torch.where(
        every.isnan(), 1.0, every
    )  # which bits a NaN has is the device's; that it stays one, see verify
    filters = torch.randn(5, 4, 3, 3, generator=generator).contiguous(memory_format=torch.channels_last)
    wide = (every, filters, torch.tensor([float("inf"), -float("inf"), -0.0, 1e-45, 3.4e38]))
    narrow = api.copies(dtype, wide)
    back = api.copies(torch.float32, narrow)
    assert emulated.launches["cast_tensors"] == 2
    for x, y, z in zip(wide, narrow, back, strict=True):
        assert torch.equal(bits(y), bits(x.to(dtype)))
        assert torch.equal(bits(z), bits(y.float()))
        assert x.stride() == y.stride() == z.stride()


def test_gradients_are_cast_in_one_launch_and_absent_ones_left_out(emulated) -> None:
    weights = [torch.randn(n, requires_grad=True) for n in (3, 8, 5)]
    used, _, also = api.cast(torch.bfloat16, *weights)
    (used.square().sum() + also.square().sum()).backward()
    assert emulated.launches["cast_tensors"] == 2
    assert weights[1].grad is None
    for weight in (weights[0], weights[2]):
        assert torch.equal(weight.grad, (2 * weight.detach().bfloat16()).float())


def test_gradients_in_batches_and_second_derivatives_are_torchs_own(emulated) -> None:
    weights = [torch.randn(3, requires_grad=True), torch.randn(2, 2, requires_grad=True)]
    copies = api.cast(torch.bfloat16, *weights)
    batches = [torch.randn(4, 3).bfloat16(), torch.randn(4, 2, 2).bfloat16()]
    found = torch.autograd.grad(copies, weights, batches, is_grads_batched=True)
    assert all(torch.equal(x.float(), y) for x, y in zip(batches, found, strict=True))
    (first,) = torch.autograd.grad(
        api.cast(torch.bfloat16, *weights)[0].float().pow(3).sum(), weights[0], create_graph=True
    )
    (second,) = torch.autograd.grad(first.sum(), weights[0])
    assert torch.equal(second, (6 * weights[0].detach().bfloat16().float()).bfloat16().float())
    assert emulated.launches["cast_tensors"] == 3  # the two forwards, and the last, plain backward


def test_who_looks_on_as_pytorch_dispatches_sees_the_cast(emulated) -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    weight = torch.randn(5)
    with Seen():
        (found,) = api.copies(torch.bfloat16, (weight,))
    assert "advisor.cast_into.default" in seen
    assert torch.equal(found, weight.bfloat16())


def test_small_weights_wait_for_a_capture_with_the_kernel_loaded(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA loads no kernel while a graph is captured."""
    of = dispatch_table.read()["casts"]
    least = SizeAsked(kinds=(spec.WEIGHTS,), any_of=((Bound(quantity="mean_elements", least=100),),))
    loaded = []
    function = emulated.function
    monkeypatch.setattr(
        nvrtc, "function", lambda *given, **named: loaded.append(given[:2]) or function(*given, **named)
    )
    with only_what_wins(), dispatch_table.instead("casts", replace(of, sizes=(least,))):
        for size in (99, 101):
            weights = [torch.randn(size), torch.randn(99), torch.randn(100)]
            assert torch.equal(api.copies(torch.bfloat16, weights)[-1], weights[-1].bfloat16())
            assert loaded == [(spec.CAST, "cast_tensors")]
            assert emulated.launches["cast_tensors"] == (size == 101)
    assert spec.wins(1000, 1, "bfloat16", captured=True) == ""


def shifted(n: int) -> torch.Tensor:
    return torch.randn(n + 1)[1:]


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(4, 6).t(), torch.randn(6, 6)[:, 1:], shifted(8), torch.empty(0, 3), torch.ones(1).expand(5)],
    ids=["transposed", "sliced", "misaligned", "empty", "expanded"],
)
def test_what_the_kernel_cannot_read_is_torchs_own_among_the_others(emulated, tensor: torch.Tensor) -> None:
    dispatch.clear()
    tensors = (torch.randn(4), tensor, torch.randn(7))
    found = api.copies(torch.bfloat16, tensors)
    assert emulated.launches["cast_tensors"] == 1
    assert list(api.fell_back) == ["no dense memory in vectors"]
    for x, y in zip(tensors, found, strict=True):
        assert torch.equal(x.to(torch.bfloat16), y)
        assert y.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("tensor", "dtype", "reason"),
    [
        (torch.randn(8), torch.float64, "float64"),
        (torch.randn(8).double(), torch.bfloat16, "float64"),
        (torch.randn(8).half(), torch.bfloat16, "float16 and bfloat16"),
    ],
)
def test_other_dtypes_are_torchs_own(emulated, tensor: torch.Tensor, dtype: torch.dtype, reason: str) -> None:
    dispatch.clear()
    (found,) = api.copies(dtype, (tensor,))
    assert not emulated.launches
    assert reason in next(iter(api.fell_back))
    assert torch.equal(tensor.to(dtype), found)


def test_the_operation_of_the_library(emulated) -> None:
    sources = [torch.randn(3, 5), torch.randn(7)]
    copies = [torch.zeros_like(source, dtype=torch.bfloat16) for source in sources]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.advisor.cast_into.default, (copies, sources), test_utils=tests)
    torch.ops.advisor.cast_into(copies, sources)
    assert all(torch.equal(copy, source.bfloat16()) for copy, source in zip(copies, sources, strict=True))


def test_an_old_gpu_is_left_to_torch(emulated) -> None:
    emulated.use(arch=75)
    assert torch.equal(api.copies(torch.bfloat16, (torch.ones(3),))[0], torch.ones(3, dtype=torch.bfloat16))
    assert not emulated.launches


def test_blocks_of_a_launch() -> None:
    assert optimizer.TENSORS_A_LAUNCH == spec.TENSORS
    assert spec.first_blocks((1, CHUNK, CHUNK + 1, 3)) == (0, 1, 2, 4, 5)
    assert spec.launches((1,) * (2 * spec.TENSORS + 1)) == (
        (0, spec.TENSORS),
        (spec.TENSORS, 2 * spec.TENSORS),
        (2 * spec.TENSORS, 2 * spec.TENSORS + 1),
    )


FAULTS = {
    "a tensor too far": ("table.begin[t + step] <= block", "table.begin[t + step] <= block + 1"),
    "the last tensor's block": ("step = TENSORS / 2", "step = TENSORS / 4"),
    "the rest begins late": ("rest = fours * 4 + threadIdx.x", "rest = fours * 4 + 1 + threadIdx.x"),
    "one vector more": ("fours = elements / 4;", "fours = elements / 4 + 1;"),
    "no rest": ("if (rest >= first && rest < elements", "if (rest > first && rest < elements - 1"),
    "the same vector again": ("first / 4 + i * THREADS + threadIdx.x;\n    if (at < fours) v[i]", "first / 4 + threadIdx.x;\n    if (at < fours) v[i]"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_kernel_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    before, after = FAULTS[fault]
    many = next(case for case in cases.VERIFICATION if "two launches" in case.name)
    passed = []
    for case in (cases.VERIFICATION[0], many):
        emulated.use(seed=1)  # the kernel is compiled anew
        passed.append(passes_with(monkeypatch, FAMILY, case, before, after))
    assert not all(passed)
