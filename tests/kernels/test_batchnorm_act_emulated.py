"""The batch-norm kernels emulated, beyond the verification cases: planted faults, other devices, compiled and captured graphs."""

from __future__ import annotations

import pytest
import torch
from emulation.planted import passes_with
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, match, verify
from advisor.ops.batchnorm_act import api, cases, cuda, reference, spec

FAMILY = catalog.get("batchnorm_act")


def case(dtype: str, activation: str, residual: bool, shape: tuple[int, ...]):
    return cases._case(shape, dtype, activation, residual)


# What is taken out or changed, and by what the check must see it.
FAULTS = {
    "no barrier before the block's sums": ("    }\n  }\n  __syncthreads();\n  for (int o", "    }\n  }\n  for (int o"),
    "last block's barrier": ("scratch[threadIdx.x] = sum;\n    __syncthreads();", "scratch[threadIdx.x] = sum;"),
    "one row less": ("row < rows; row += UNROLL", "row < rows - 1; row += UNROLL"),
    "one row more": ("if (row + u * stride >= rows) continue;", "if (row + u * stride >= rows + stride) continue;"),
    "one channel of a vector": ("const float d = f[j] - shift[j];", "const float d = f[j & ~1] - shift[j];"),
    "ticket left": ("ticket[blockIdx.y] = 0u", "ticket[blockIdx.y] = 1u"),
    "blocks' partials overwritten": ("((i64)blockIdx.x * 2 + stat)", "((i64)(blockIdx.x & ~1u) * 2 + stat)"),
    "mask of the neighbour": ("mask[at] = (unsigned char)bits", "mask[at + 1] = (unsigned char)bits"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_kernel_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    before, after = FAULTS[fault]
    assert not passes_with(monkeypatch, FAMILY, case("bfloat16", "relu", True, (4, 64, 28, 28)), before, after)


@pytest.mark.parametrize("sm_count", [1, 2, 132])
def test_every_number_of_blocks_gives_the_same_result(emulated, sm_count: int) -> None:
    emulated.use(sm_count=sm_count)
    for dtype, activation, residual in (("bfloat16", "relu", True), ("float32", "silu", False)):
        row = verify.check(FAMILY, case(dtype, activation, residual, (4, 64, 28, 28)), "cpu")
        assert row["passed"], row["detail"]


def test_mean_far_from_zero_does_not_cancel(emulated) -> None:
    generator = torch.Generator().manual_seed(5)
    x = (torch.randn(4, 28, 28, 64, generator=generator) + 3000.0).permute(0, 3, 1, 2)
    weight, bias, running = torch.ones(64), torch.zeros(64), [torch.zeros(64), torch.ones(64)]
    y, _, _ = cuda.forward(x, None, *running, weight, bias, 0.1, 1e-5, "none", 0.0)
    wide = [torch.zeros(64).double(), torch.ones(64).double()]
    want = reference.batchnorm_act(x.double(), None, *wide, weight.double(), bias.double(), 0.1, 1e-5)
    assert (y - want).norm() / want.norm() < 1e-3
    assert (running[1] - wide[1]).norm() / wide[1].norm() < 1e-4


class Block(nn.Module):
    """A residual block: three batch norms, an addition and two activations, and one that nothing can be done about."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.short, self.bn3 = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(F.hardswish(self.bn1(self.conv1(x)))))
        return F.relu(out + self.bn3(self.short(x)))


def test_a_captured_model_trains_on_the_kernels_as_the_plain_one(emulated) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, plain = Block().to(memory_format=torch.channels_last), Block().double()
    plain.load_state_dict(model.state_dict())
    reports = {FAMILY.id: match.MatchReport()}
    run = torch.compile(model.forward, backend=match.backend(reports, mode=None), dynamic=False)
    for _ in range(2):
        x = torch.randn(4, 8, 6, 6).contiguous(memory_format=torch.channels_last)
        run(x).square().sum().backward()
        plain(x.double()).square().sum().backward()
    assert reports[FAMILY.id].matched == {"bn1": "bn+hardswish", "bn2": "bn+add+relu", "bn3": "bn"}
    assert emulated.launches == dict.fromkeys(sum(spec.KERNELS.values(), ()), 6)
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, msg=name, rtol=1e-3, atol=1e-3)
    for (name, mine), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), other.double(), msg=name, rtol=1e-5, atol=1e-6)


def test_the_torch_library_operation_gives_the_same_as_the_function(emulated) -> None:
    arguments = case("bfloat16", "relu", True, (3, 72, 9, 7)).inputs(torch.Generator().manual_seed(1), 3)
    x, residual, mean, variance, weight, bias, *_ = arguments
    y, statistics, _ = torch.ops.advisor.batchnorm_act(*arguments)
    before = mean.clone()
    plain = api.batchnorm_act(*arguments)
    assert torch.equal(y, plain)
    assert torch.equal(statistics[2:], torch.stack([mean, variance]))
    assert not torch.equal(before, mean)
    leaves = (x, residual, weight, bias)
    for mine, other in zip(torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(plain.sum(), leaves), strict=True):
        assert torch.equal(mine, other)
