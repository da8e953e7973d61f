"""1 x 1 convolution of stride 2 without a GPU: definition, launch geometry, what is supported, emulated kernels, matching."""

from __future__ import annotations

import pytest
import torch
from emulation.device import only_what_wins
from emulation.planted import passes_with
from emulation.supports import unsupported
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, match, shared_memory
from advisor.ops.strided_pointwise import api, cases, cuda, reference, spec

FAMILY = catalog.get("strided_pointwise")


def nhwc(*shape: int, seed: int = 0) -> torch.Tensor:
    n, c, h, w = shape
    return torch.randn(n, h, w, c, generator=torch.Generator().manual_seed(seed)).permute(0, 3, 1, 2)


def test_the_definition_is_pytorchs_and_passes_gradcheck() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, 1, 1, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(reference.strided_pointwise_conv2d(x, weight), F.conv2d(x, weight, None, 2))
    assert torch.autograd.gradcheck(reference.strided_pointwise_conv2d, (x, weight), fast_mode=True)


@given(
    call=st.builds(
        spec.StridedConv,
        batch=st.integers(1, 300),
        inputs=st.integers(1, 300).map(lambda octets: 8 * octets),
        outputs=st.integers(1, 300).map(lambda octets: 8 * octets),
        height=st.integers(1, 300),
        width=st.integers(1, 300),
    ),
    gradient=st.booleans(),
    sm_count=st.integers(1, 200),
    arch=st.sampled_from((80, 86, 89, 90, 100, 120)),
)
def test_a_plan_covers_every_row_and_channel_within_shared_memory(
    call: spec.StridedConv, gradient: bool, sm_count: int, arch: int
) -> None:
    plan = spec.plan(call, sm_count, arch, gradient=gradient)
    depth, wide = (call.outputs, call.inputs) if gradient else (call.inputs, call.outputs)
    assert plan.rows * plan.grid[0] >= call.rows > plan.rows * (plan.grid[0] - 1)
    assert plan.columns * plan.grid[1] >= wide > plan.columns * (plan.grid[1] - 1)
    assert 2 <= plan.stages <= max(2, spec.MAX_STAGES)
    chunks = -(-depth // spec.CHUNK)
    units = spec.CHUNK // 8 + 1
    weights = spec.CHUNK * (plan.columns // 8 + 1) if gradient else plan.columns * units
    # A stage for each chunk under way, and room for the results in their place.
    assert plan.shared_bytes >= 16 * min(plan.stages, chunks) * (plan.rows * units + weights)
    assert plan.shared_bytes >= 16 * plan.rows * (plan.columns // 8 + 1)
    assert plan.shared_bytes <= shared_memory.of_a_block(arch)
    blocks = spec.gather_blocks(call)
    threads = spec.GATHER_THREADS * spec.GATHER_UNROLL
    assert blocks * threads >= call.rows * call.inputs // 8 > (blocks - 1) * threads


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"arch": 75}, "sm_75 is older than sm_80"),
        ({"shape": (2, 64, 8)}, "3-D input"),
        ({"weight_shape": (128, 32, 1, 1), "groups": 2}, "2 groups of 32 channels"),
        ({"weight_shape": (128, 64, 3, 3)}, "3 x 3 taps"),
        ({"stride": (1, 1)}, "stride 1 x 1"),
        ({"stride": (2, 1)}, "stride 2 x 1"),
        ({"padding": (1, 1)}, "padding 1 x 1"),
        ({"shape": (2, 12, 8, 8), "weight_shape": (128, 12, 1, 1)}, "12 channels are no multiple of 8"),
        ({"weight_shape": (100, 64, 1, 1)}, "100 channels are no multiple of 8"),
        ({"dtype": "float32", "weight_dtype": "float32"}, "dtype float32"),
        ({"weight_dtype": "float16"}, "weight dtype float16"),
        ({"channels_last": False}, "input is not channels_last"),
        ({"shape": (0, 64, 8, 8)}, "empty input"),
        ({"shape": (1, 64, 65536, 65536)}, "more pixels than 32 bits count"),
    ],
)
def test_what_is_supported(changed: dict[str, object], reason: str) -> None:
    call = {
        "shape": (2, 64, 8, 8), "channels_last": True, "dtype": "bfloat16", "weight_shape": (128, 64, 1, 1),
        "weight_dtype": "bfloat16", "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "arch": 90,
    }  # fmt: skip
    assert unsupported(spec, **{**call, **changed}) == reason


@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (2, 24, 5, 6), (3, 136, 4, 7)])
def test_the_pixels_are_gathered_as_they_are(emulated, shape: tuple[int, ...]) -> None:
    x = nhwc(*shape).bfloat16()
    assert torch.equal(cuda.gather(x, spec.call(shape, 8)), x[:, :, ::2, ::2])


def test_pixels_that_no_result_has_read_get_no_gradient(emulated) -> None:
    x, weight = nhwc(2, 16, 5, 6).bfloat16().requires_grad_(), torch.randn(24, 16, 1, 1).bfloat16()
    (dx,) = torch.autograd.grad(api.strided_pointwise_conv2d(x, weight).float().square().sum(), x)
    read = torch.zeros(5, 6, dtype=torch.bool)
    read[::2, ::2] = True
    assert bool((dx[:, :, ~read] == 0).all())
    assert bool((dx[:, :, read] != 0).any())
    assert emulated.launches == {"strided_pointwise": 2}


@pytest.mark.parametrize("product", [spec.FORWARD, spec.GRADIENT, spec.WEIGHT])
def test_each_product_is_dispatched_by_itself(emulated, monkeypatch: pytest.MonkeyPatch, product: str) -> None:
    monkeypatch.setattr(spec, "product_wins", lambda call, of: "" if of == product else "slower")
    x, weight = nhwc(2, 64, 5, 6).bfloat16().requires_grad_(), torch.randn(128, 64, 1, 1).bfloat16().requires_grad_()
    with only_what_wins():
        y = api.strided_pointwise_conv2d(x, weight)
        ours = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert emulated.launches == {"gather_pixels" if product == spec.WEIGHT else "strided_pointwise": 1}
    plain = F.conv2d(x, weight, None, 2)
    for mine, theirs in zip(ours, torch.autograd.grad(plain, (x, weight), torch.ones_like(y)), strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 0.01


def test_elsewhere_pytorchs_own_runs(emulated) -> None:
    x, weight = nhwc(1, 64, 5, 4), torch.randn(64, 64, 1, 1)
    assert torch.equal(api.strided_pointwise_conv2d(x, weight), F.conv2d(x, weight, None, 2))
    assert api.fell_back["dtype float32"]
    assert not emulated.launches


# In the place of what, what; and the shape at which it shows.
FAULTS = {
    "pixels of the row below": ("(n * height + 2 * i) * width", "(n * height + i) * width", (3, 64, 9, 13)),
    "one pixel too few across": (
        "across = (width + 1) / 2, down = (height + 1) / 2;\n    const unsigned int line",
        "across = width / 2 + 1, down = (height + 1) / 2;\n    const unsigned int line",
        (1, 24, 8, 33 - 1),
    ),
    "no zeros to the right": ("if (right) store", "if (false) store", (3, 64, 9, 13)),
    "no zeros below": ("if (below) store", "if (false) store", (3, 64, 9, 13)),
    "no zeros at the corner": ("if (right && below) store", "if (false) store", (3, 64, 9, 13)),
    "zeros beyond the last row": ("(2 * i + 1 < (unsigned int)height) << 1", "2", (3, 64, 9, 13)),
    "zeros beyond the last pixel": ("(2 * j + 1 < (unsigned int)width)", "1", (3, 64, 9, 13)),
    "a chunk read before it is there": ("cp_async_wait<STAGES - 2>();", "cp_async_wait<STAGES - 1>();", (5, 320, 6, 5)),
    "results over a chunk that is being read": (
        "cp_async_wait<0>();\n  __syncthreads();",
        "cp_async_wait<0>();",
        (5, 320, 6, 5),
    ),
    "channels behind the last": ("at + u < depth", "true", (2, 136, 7, 9)),
    "a column for another": ("wn * (BN_UNITS / 2) + n", "wn * (BN_UNITS / 2)", (3, 64, 9, 13)),
    "gathered from the next pixel": ("+ 2 * j) * units + u", "+ 2 * j + 1) * units + u", (3, 64, 9, 13)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_kernels_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    before, after, shape = FAULTS[fault]
    case = next((case for case in cases.VERIFICATION if case.shape == shape), None) or cases.case_of(shape, 72)
    assert not passes_with(monkeypatch, FAMILY, case, before, after)


class Net(nn.Module):
    """1 x 1 convolutions of stride 2 as modules and as a function, beside ones that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.shortcut = nn.Conv2d(64, 128, 1, stride=2, bias=False)
        self.biased = nn.Conv2d(64, 128, 1, stride=2)
        self.plain = nn.Conv2d(64, 128, 1, bias=False)
        self.odd = nn.Conv2d(64, 12, 1, stride=2, bias=False)
        self.taps = nn.Parameter(torch.randn(32, 128, 1, 1) / 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.shortcut(x) + self.biased(x) + F.avg_pool2d(self.plain(x), 2, ceil_mode=True)
        return torch.cat([F.conv2d(y, self.taps, None, 2).mean((2, 3)), self.odd(x).mean((2, 3))], 1)


@pytest.mark.parametrize("compiled", [False, True])
def test_patterns_are_found_and_train_as_before(compiled: bool) -> None:
    torch.manual_seed(0)
    model, plain = Net().train(), Net().train()
    plain.load_state_dict(model.state_dict())
    report = match.MatchReport()
    x = torch.randn(2, 3, 9, 8)

    def backend(graph_module: torch.fx.GraphModule, inputs: object) -> object:
        FAMILY.rewrite(graph_module, report, compiled=compiled)
        graph_module.recompile()
        return graph_module.forward

    torch._dynamo.reset()
    with dispatch.everything(), torch.autocast("cpu", dtype=torch.bfloat16):
        run = torch.compile(model.forward, backend=backend, dynamic=False)
        ours, theirs = run(x), plain(x)
        ours.float().square().sum().backward()
    theirs.float().square().sum().backward()
    assert report.matched.pop("shortcut") == "1x1 s2 64->128"
    assert list(report.matched.values()) == ["1x1 s2 128->32"]
    assert report.unmatched == {"biased": "has a bias"}
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype == other.grad.dtype
        assert float((mine.grad - other.grad).norm() / other.grad.norm()) < 0.05
