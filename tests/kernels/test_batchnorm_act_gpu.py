"""The BatchNorm(+add)+activation kernels against their fp64 reference, on a GPU."""

from __future__ import annotations

import pytest
import torch

from advisor.ops import catalog, dispatch
from advisor.ops.batchnorm_act import api, cuda, reference, spec
from advisor.ops.batchnorm_act.norm import Norm

FAMILY = catalog.get("batchnorm_act")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Relative L2 error against fp64 that rounding each output once allows (half an ulp of the mantissa), times two.
OUTPUT_BOUND = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}
SHAPES = [
    (2, 8, 1, 1),
    (3, 16, 5, 7),
    (4, 24, 14, 14),
    (2, 64, 56, 56),
    (1, 72, 9, 9),
    (5, 200, 7, 7),
    (8, 960, 7, 7),
    (2, 1016, 3, 3),  # 127 vectors: a prime number
    (16, 2048, 7, 7),
    (32, 64, 112, 112),
]
VARIANTS = [(a, False) for a in spec.ACTIVATIONS] + [(a, True) for a in sorted(spec.RESIDUAL_ACTIVATIONS)]


@pytest.fixture(autouse=True)
def forced():
    with dispatch.everything():
        yield


def relative(got: torch.Tensor, want: torch.Tensor, floor: float = 1e-30) -> float:
    assert torch.isfinite(got).all()
    return ((got.double() - want).norm() / want.norm().clamp_min(floor)).item()


def case(shape: tuple[int, ...], dtype: torch.dtype, residual: bool, seed: int, offset: float = 0.5):
    g = torch.Generator("cuda").manual_seed(seed)
    n, c, h, w = shape

    def tensor() -> torch.Tensor:
        t = torch.randn(n, h, w, c, device="cuda", generator=g) * 1.5 + offset
        return t.to(dtype).permute(0, 3, 1, 2)

    weight = torch.rand(c, device="cuda", generator=g) + 0.5
    bias = torch.randn(c, device="cuda", generator=g)
    running = [torch.zeros(c, device="cuda"), torch.ones(c, device="cuda")]
    dy = (torch.randn(n, h, w, c, device="cuda", generator=g)).to(dtype).permute(0, 3, 1, 2)
    return tensor(), tensor() if residual else None, running, weight, bias, dy


def poison() -> None:
    """Fill the allocator's free blocks with NaN, so that an element that a kernel leaves out is seen."""
    blocks = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(24)]
    del blocks


def expected(x, residual, running, weight, bias, dy, activation):
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    r = residual.detach().double().requires_grad_() if residual is not None else None
    buffers = [b.double().clone() for b in running]
    z = reference.batchnorm_act(
        leaves[0], r, *[b.clone() for b in buffers], leaves[1], leaves[2], 0.1, 1e-5, "none"
    ).detach()
    for kink in (-3.0, 0.0, 3.0, 6.0):  # where the slope jumps, fp32 rounding of z decides: no gradient there
        dy[(z - kink).abs() < 1e-3] = 0
    y = reference.batchnorm_act(leaves[0], r, *buffers, leaves[1], leaves[2], 0.1, 1e-5, activation, 0.01)
    grads = torch.autograd.grad(y, [*leaves, *([r] if r is not None else [])], dy.double())
    return y.detach(), buffers, grads


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "residual"), VARIANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(shape, activation, residual, dtype):
    x, r, running, weight, bias, dy = case(shape, dtype, residual, seed=sum(shape))
    want_y, want_running, want_grads = expected(x, r, running, weight, bias, dy, activation)
    poison()
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    rr = r.detach().requires_grad_() if r is not None else None
    before = sum(FAMILY.engaged.values())
    y = api.batchnorm_act(leaves[0], rr, *running, leaves[1], leaves[2], 0.1, 1e-5, activation, 0.01)
    assert sum(FAMILY.engaged.values()) == before + 1, FAMILY.fell_back
    assert y.is_contiguous(memory_format=torch.channels_last)
    poison()
    got = torch.autograd.grad(y, [*leaves, *([rr] if rr is not None else [])], dy)
    bound = OUTPUT_BOUND[dtype]
    assert relative(y, want_y) < bound
    for mine, want in zip(running, want_running, strict=True):
        assert relative(mine, want) < 1e-5
    # With few rows a channel dx is what cancellation leaves of dy: judge it against dy's size then.
    floor = 0.05 * dy.double().norm().item()
    for mine, want in zip(got, want_grads, strict=True):
        assert relative(mine, want, floor) < max(3 * bound, 1e-5), (activation, residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_runs_are_bit_equal(dtype):
    outputs = []
    for _ in range(2):
        x, r, running, weight, bias, dy = case((8, 128, 28, 28), dtype, True, seed=3)
        poison()
        y, saved, mask = cuda.forward(x, r, Norm(*running, weight, bias, 0.1, 1e-5, "relu"))
        outputs.append(
            [
                y,
                saved,
                mask,
                *running,
                *cuda.backward(dy, None, x, saved, mask, Norm(*running, weight, bias, 0.1, 1e-5, "relu"), True),
            ]
        )
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_mean_far_from_zero_does_not_cancel():
    x, _, running, weight, bias, dy = case((16, 64, 28, 28), torch.float32, False, seed=5, offset=3000.0)
    want_y, want_running, _ = expected(x, None, running, weight, bias, dy, "none")
    y, _, _ = cuda.forward(x, None, Norm(*running, weight, bias, 0.1, 1e-5))
    assert relative(y, want_y) < 1e-3
    assert relative(running[1], want_running[1]) < 1e-4


@pytest.mark.parametrize("poisoned", [float("nan"), float("inf")])
def test_nan_and_inf_reach_the_output(poisoned):
    x, _, running, weight, bias, _ = case((2, 64, 8, 8), torch.bfloat16, False, seed=6)
    x[0, 3, 2, 2] = poisoned
    y, _, _ = cuda.forward(x, None, Norm(*running, weight, bias, 0.1, 1e-5, "relu"))
    assert torch.isnan(y[:, 3]).any()
    assert torch.isfinite(y[:, :3]).all()


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("residual", [False, True])
def test_second_derivative_matches(activation, residual):
    if residual and activation not in spec.RESIDUAL_ACTIVATIONS:
        pytest.skip("not supported with a residual")
    x, r, running, weight, bias, dy = case((2, 8, 5, 5), torch.float32, residual, seed=8)

    def penalty(function, dtype):
        leaf = x.detach().to(dtype).requires_grad_()
        res = r.detach().to(dtype) if r is not None else None
        y = function(
            leaf,
            res,
            *[b.to(dtype).clone() for b in running],
            weight.to(dtype),
            bias.to(dtype),
            0.1,
            1e-5,
            activation,
            0.0,
        )
        (g,) = torch.autograd.grad(y, leaf, dy.to(dtype), create_graph=True)
        return torch.autograd.grad(g.square().sum(), leaf)[0]

    assert relative(penalty(api.batchnorm_act, torch.float32), penalty(reference.batchnorm_act, torch.float64)) < 1e-4


def test_unsupported_calls_run_torch_and_say_so():
    x = torch.randn(2, 8, 4, 4, device="cuda")  # NCHW
    w = torch.ones(8, device="cuda")
    FAMILY.fell_back.clear()
    y = api.batchnorm_act(x, None, w.clone(), w.clone(), w, w, 0.1, 1e-5, "relu")
    assert y.shape == x.shape
    assert FAMILY.fell_back["input is not channels_last"] == 1


def test_captured_in_a_graph_and_replayed():
    x, r, running, weight, bias, _ = case((4, 64, 14, 14), torch.bfloat16, True, seed=9)
    cuda.forward(x, r, Norm(*running, weight, bias, 0.1, 1e-5, "relu"))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y, _, _ = cuda.forward(x, r, Norm(*running, weight, bias, 0.1, 1e-5, "relu"))
    x.copy_(torch.randn_like(x))
    for _ in range(3):
        graph.replay()
    want = reference.batchnorm_act(
        x.double(), r.double(), *[b.double() for b in running], weight.double(), bias.double(), 0.1, 1e-5, "relu"
    )
    assert relative(y, want) < OUTPUT_BOUND[torch.bfloat16]


def test_compiled_op_matches_the_function():
    x, r, running, weight, bias, dy = case((4, 64, 14, 14), torch.bfloat16, True, seed=10)

    def f(x, r, w, b):
        return torch.ops.advisor.batchnorm_act(x, r, *running, w, b, 0.1, 1e-5, "relu", 0.0)[0] * 2

    leaves = [t.detach().requires_grad_() for t in (x, r, weight, bias)]
    y = torch.compile(f)(*leaves)
    got = torch.autograd.grad(y, leaves, dy)
    plain = api.batchnorm_act(leaves[0], leaves[1], *running, leaves[2], leaves[3], 0.1, 1e-5, "relu") * 2
    want = torch.autograd.grad(plain, leaves, dy)
    assert torch.equal(y, plain)
    for mine, other in zip(got, want, strict=True):
        assert relative(mine, other.double()) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "residual"), VARIANTS)
@pytest.mark.parametrize(
    "shape", [(2, 8, 1, 1), (3, 72, 9, 9), (128, 512, 4, 4), (64, 128, 16, 16), (120, 64, 32, 32)], ids=str
)
@pytest.mark.parametrize("way", [spec.CLUSTER, spec.GRID])
def test_one_launch_gives_what_two_give(shape, activation, residual, dtype, way):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs thread-block clusters")
    x, r, running, weight, bias, dy = case(shape, dtype, residual, seed=sum(shape))
    found = []
    for one in (spec.TWO, way, way):
        buffers = [b.clone() for b in running]
        poison()
        norm = Norm(*buffers, weight, bias, 0.1, 1e-5, activation, 0.01)
        y, saved, mask = cuda.forward(x, r, norm, way=one)
        gradients = cuda.backward(dy, None, x, saved, mask, norm, residual, way=one)
        found.append([y, *buffers, *(g for g in gradients if g is not None)])
    two, first, second = found
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for mine, other in zip(first, two, strict=True):
        # A sum in another order moves a value of z across a kink of the activation now and then: one in many.
        assert relative(mine, other.double(), 0.05 * dy.double().norm().item()) < 2 * OUTPUT_BOUND[dtype] + 1e-4


@pytest.mark.parametrize("way", [spec.CLUSTER, spec.GRID])
def test_one_launch_is_captured_in_a_graph_and_replayed(way):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs thread-block clusters")
    x, r, running, weight, bias, _ = case((32, 512, 4, 4), torch.bfloat16, True, seed=9)
    arguments = (x, r, Norm(*running, weight, bias, 0.1, 1e-5, "relu"))
    cuda.forward(*arguments, way=way)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y, _, _ = cuda.forward(*arguments, way=way)
    x.copy_(torch.randn_like(x))
    for _ in range(3):
        graph.replay()
    want = reference.batchnorm_act(
        x.double(), r.double(), *[b.double() for b in running], weight.double(), bias.double(), 0.1, 1e-5, "relu"
    )
    assert relative(y, want) < OUTPUT_BOUND[torch.bfloat16]


def test_launches_on_two_streams_at_once_and_of_all_sizes_keep_their_sums_apart():
    """Each stream has an exchange of its own, in which a launch finds nothing of the one before it, of another size."""
    shapes = [(128, 512, 4, 4), (64, 128, 16, 16), (120, 64, 32, 32), (256, 256, 14, 14)]
    made = [case(shape, torch.bfloat16, True, seed=sum(shape)) for shape in shapes]

    def run(number: int) -> list[torch.Tensor]:
        x, r, running, weight, bias, dy = made[number]
        buffers = [b.clone() for b in running]
        norm = Norm(*buffers, weight, bias, 0.1, 1e-5, "relu")
        y, saved, mask = cuda.forward(x, r, norm, way=spec.GRID)
        gradients = cuda.backward(dy, None, x, saved, mask, norm, True, way=spec.GRID)
        return [y, *buffers, *gradients]

    want = [run(number) for number in range(len(shapes))]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for turn in range(50):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                number = (turn + which) % len(shapes)
                found.append((number, run(number)))
    torch.cuda.synchronize()
    for number, got in found:
        assert all(torch.equal(a, b) for a, b in zip(got, want[number], strict=True))
