"""The checks of a kernel, on CPU tensors, with each fault planted that they are there to find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from advisor.ops import dispatch, verify
from advisor.ops.family import Case, Family, Work

FAMILY = Family(id="toy", replaces="", transform="toy", modules=())


@pytest.fixture(autouse=True)
def _own_counters(monkeypatch):
    monkeypatch.setattr(dispatch, "engaged", {})
    monkeypatch.setattr(dispatch, "fell_back", {})


def eager(x: torch.Tensor, w: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Scaled SiLU that counts in a buffer."""
    with torch.no_grad():
        seen += x.float().mean((0, 2, 3)).to(seen.dtype)
    return F.silu(x * w.view(1, -1, 1, 1).to(x.dtype))


class Kernel(torch.autograd.Function):
    """A stand-in for kernels, with faults."""

    fault = ""
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        Kernel.calls += 1
        ctx.save_for_backward(x, w)
        if Kernel.fault != "buffer":
            seen += x.float().mean((0, 2, 3)).to(seen.dtype)
        if Kernel.fault == "strides" and not x.is_contiguous(memory_format=torch.channels_last):
            x = x.as_strided(
                x.shape, torch.empty_like(x, memory_format=torch.channels_last).stride(), x.storage_offset()
            )
        z = (x.float() * w.view(1, -1, 1, 1)).to(x.dtype)
        y = F.silu(z)
        if Kernel.fault == "alignment" and x.data_ptr() % 16:
            raise RuntimeError("misaligned address")
        if Kernel.fault == "parameter alignment" and w.data_ptr() % 16:
            raise RuntimeError("misaligned address")
        if Kernel.fault == "element":
            y[0, 0, 0, 0] += 6e-5
        if Kernel.fault == "noise":
            y *= 1 + 0.01 * torch.randn(y.shape).to(y.dtype)
        if Kernel.fault == "nan swallowed":
            y = torch.nan_to_num(y)
        if Kernel.fault == "unwritten":
            y[-1, -1, -1, -1] = float("nan")
        if Kernel.fault == "random":
            y[0, 0, 0, 0] *= 1 + 1e-3 * Kernel.calls
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        if Kernel.fault == "gradient alignment" and dy.data_ptr() % 16:
            raise RuntimeError("misaligned address")
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (x, w)]
            y = F.silu(leaves[0].float() * leaves[1].view(1, -1, 1, 1))
        dx, dw = torch.autograd.grad(y, leaves, dy.float())
        return (dx * 1.05 if Kernel.fault == "gradient" else dx), dw, None


def ours(x: torch.Tensor, w: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    if dispatch.refusal("", dispatch.UNMEASURED) or Kernel.fault == "fell back":
        FAMILY.fell_back["planted"] += 1
        return eager(x, w, seen)
    if Kernel.fault.startswith("sm_"):
        for reason in Kernel.fault.split(" and "):
            FAMILY.fell_back[reason] += 1
        return eager(x, w, seen)
    FAMILY.engaged["silu"] += 1
    return Kernel.apply(x, w, seen)


def inputs(generator: torch.Generator, n: int) -> tuple[torch.Tensor, ...]:
    x = torch.randn(n, 5, 7, 8, generator=generator).permute(0, 3, 1, 2).requires_grad_()
    return x, torch.rand(8, generator=generator).add(0.5).requires_grad_(), torch.zeros(8)


CASE = Case(
    name="silu",
    shape=(30, 8, 5, 7),
    dtype="float32",
    passes={kind: Work(kernels=(), nbytes=1) for kind in ("forward", "backward")},
    inputs=inputs,
    ours=ours,
    eager=eager,
    reference=eager,
    wins=lambda: dispatch.UNMEASURED,
)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    torch.manual_seed(0)
    monkeypatch.setattr(Kernel, "calls", 0)
    return lambda fault: monkeypatch.setattr(Kernel, "fault", fault)


def test_a_right_kernel_passes(plant) -> None:
    plant("")
    row = verify.check(FAMILY, CASE, "cpu")
    assert row["passed"], row
    assert row["detail"] == ""
    assert 0 < row["output_error"] < 1e-6
    assert FAMILY.engaged["silu"] > 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("element", "output element error"),
        ("noise", "output error"),
        ("gradient", "gradient error"),
        ("buffer", "output error"),
        ("unwritten", "output error inf"),
        ("random", "two runs differ"),
        ("nan swallowed", "nan in the input"),
        ("strides", "sliced input"),
        ("alignment", "misaligned input: RuntimeError"),
        ("parameter alignment", "misaligned parameters and gradient: RuntimeError"),
        ("gradient alignment", "misaligned parameters and gradient: RuntimeError"),
        ("fell back", "did not run: the kernels ran 0 times"),
    ],
)
def test_a_planted_fault_is_found(plant, fault: str, said: str) -> None:
    plant(fault)
    row = verify.check(FAMILY, CASE, "cpu")
    assert not row["passed"]
    assert said in row["detail"]


def test_what_is_for_other_architectures_is_not_wrong(plant) -> None:
    plant("sm_80 lacks what it uses")
    row = verify.check(FAMILY, CASE, "cpu")
    assert row["passed"] is None
    assert row["detail"] == "not for this GPU: sm_80 lacks what it uses"
    plant("sm_80 lacks what it uses and dtype float32")
    assert verify.check(FAMILY, CASE, "cpu")["passed"] is False


def test_no_gradient_is_sent_to_where_rounding_decides() -> None:
    def steady(x: torch.Tensor, *_: Any) -> torch.Tensor:
        assert x.dtype == torch.float64
        return x > 0

    case = replace(CASE, steady=steady)
    arguments = inputs(verify.seeded("cpu", 0), 3)
    (dy,) = verify.upstream(case, arguments, [arguments[0].detach()], verify.seeded("cpu", 1))
    assert torch.equal(dy != 0, arguments[0] > 0)
    assert dy.is_contiguous(memory_format=torch.channels_last)


def test_a_case_that_raises_is_a_row_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, plant) -> None:
    plant("")

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    faulty = replace(CASE, ours=broken, name="broken")
    monkeypatch.setattr(Family, "module", lambda self, name: SimpleNamespace(VERIFICATION=(faulty, CASE)))
    said: list[str] = []
    first, second = verify.verify([FAMILY], "cpu", said.append)
    assert not first["passed"]
    assert "out of memory" in first["detail"]
    assert second["passed"]
    assert said == ["verifying toy: case 1 of 2", "verifying toy: case 2 of 2"]


def test_nothing_is_checked_on_a_gpu_that_a_case_has_lost(monkeypatch: pytest.MonkeyPatch, plant) -> None:
    plant("")
    monkeypatch.setattr(Family, "module", lambda self, name: SimpleNamespace(VERIFICATION=(CASE, CASE)))
    monkeypatch.setattr(verify, "unusable", lambda device: True)
    other = replace(FAMILY, id="other")
    rows = verify.verify([FAMILY, other], "cpu", lambda said: None)
    assert [row["passed"] for row in rows] == [True, False, False, False]
    assert all(f"toy {CASE.label} has left the GPU unusable" in str(row["detail"]) for row in rows[1:])


def test_an_error_like_pytorchs_own_is_accepted_and_a_nan_is_not() -> None:
    def made(value: float) -> verify.Errors:
        return verify.Errors(output=value, gradient=0.0, output_element=0.0, gradient_element=0.0)

    assert verify.accepted("float32", made(1e-3), made(0.9e-3)) == ""
    assert verify.accepted("float32", made(1e-3), made(0.5e-3)) != ""
    assert verify.accepted("float32", made(float("nan")), made(0.5e-3)) != ""


def test_pytorchs_own_errors_are_those_of_strict_fp32(plant) -> None:
    plant("")
    seen: list[bool] = []

    def watched(*arguments: Any) -> torch.Tensor:
        seen.append(torch.backends.cudnn.allow_tf32)
        return eager(*arguments)

    before = torch.backends.cudnn.allow_tf32
    case = replace(CASE, eager=watched)
    verify.check(FAMILY, case, "cpu")
    assert seen
    assert not any(seen)
    assert torch.backends.cudnn.allow_tf32 == before
