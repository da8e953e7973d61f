"""Bias + activation and layer scale + drop path + add: reference, what is supported, graph matching, emulated kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emulation.compiler import INCLUDE
from emulation.planted import passes_with
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.bench import ops, tune
from advisor.ops import catalog, channel_tiles, dispatch, dynamo, match, sources, verify
from advisor.ops.bias_act import api, cases, cuda, reference, rewrite, spec
from advisor.resources import kernels_dir

FAMILY = catalog.get("bias_act")


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "leaky_relu"])
@pytest.mark.parametrize(("residual", "dim"), [(False, 1), (True, 1), (False, -1)])
def test_reference_passes_gradcheck(activation: str, residual: bool, dim: int) -> None:
    torch.manual_seed(0)
    x, r = (torch.randn(2, 3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias = torch.randn(x.shape[dim], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, b, r: reference.bias_act(x, b, r if residual else None, activation, 0.1, dim=dim), (x, bias, r)
    )


@pytest.mark.parametrize("twin", [False, True])
def test_scale_reference_passes_gradcheck(twin: bool) -> None:
    torch.manual_seed(0)
    x, r = (torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scale = torch.randn(3, 1, 1, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True)
    keep = torch.tensor([0.0, 1.25], dtype=torch.float64).view(2, 1, 1, 1)
    assert torch.autograd.gradcheck(
        lambda x, s, r, b: reference.scale_add(x, s, keep, r, b, twin=twin), (x, scale, r, bias)
    )


CALL = {
    "shape": (2, 64, 8, 8),
    "dim": 1,
    "dense": True,
    "dtype": "bfloat16",
    "activation": "relu",
    "slope": 0.01,
    "bias": True,
    "residual": False,
    "arch": 90,
}
SCALE_CALL = {
    "shape": (2, 64, 8, 8),
    "channels_last": True,
    "dtype": "bfloat16",
    "residual": "float32",
    "result": "float32",
    "variant": spec.Scaled(True, True),
    "arch": 90,
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"arch": 75}, "older"),
        ({"dtype": "float64"}, "dtype"),
        ({"shape": (2, 64, 8)}, "3-D"),
        ({"shape": (0, 64, 8, 8)}, "empty"),
        ({"dense": False}, "channels_last"),
        ({"shape": (2, 60, 8, 8)}, "no multiple of 8"),
        ({"dim": -1}, ""),
        ({"dim": -1, "shape": (2, 5, 64)}, ""),
        ({"dim": -1, "shape": (64, 2, 60)}, "60 channels are no multiple of 8"),
        ({"dim": -1, "shape": (64,)}, "1-D"),
        ({"dim": -1, "dense": False}, "not contiguous"),
        ({"activation": "none"}, "activation none"),
        ({"activation": "silu", "residual": True}, "residual with silu"),
        ({"bias": False}, "neither"),
        ({"activation": "leaky_relu", "slope": -0.5}, "negative"),
        ({"shape": (2**15, 8, 2**8, 2**8)}, "2^31 vectors"),
    ],
)
def test_unsupported_says_why(change: dict, reason: str) -> None:
    answer = spec.unsupported(**{**CALL, **change})
    assert reason in answer if reason else answer == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"dtype": "float32"}, ""),
        ({"residual": "float16"}, "beside"),
        ({"dtype": "float32", "residual": "bfloat16"}, "beside"),
        ({"variant": spec.Scaled(False, False)}, "neither"),
        ({"variant": spec.Scaled(False, True)}, ""),
        ({"variant": spec.Scaled(True, True, bias=True, twin=True)}, ""),
        ({"variant": spec.Scaled(False, True, bias=True)}, "a bias without"),
        ({"variant": spec.Scaled(True, True, mixed=True)}, "a residual in float32"),
        ({"variant": spec.Scaled(True, True, mixed=True), "residual": "bfloat16"}, ""),
        ({"variant": spec.Scaled(False, True, mixed=True), "residual": "bfloat16"}, "without a scale"),
        ({"residual": "bfloat16"}, "a sum in float32"),
        ({"residual": "bfloat16", "result": "bfloat16"}, ""),
        ({"variant": spec.Scaled(True, True, twin=True), "dtype": "float32"}, "second result"),
        ({"variant": spec.Scaled(True, True, twin=True), "residual": "bfloat16", "result": "bfloat16"}, "a sum in"),
        ({"shape": (2**15, 8, 2**8, 2**8)}, "2^31 vectors"),
        ({"shape": (2**15, 8, 2**8, 2**8 - 1)}, ""),
        ({"shape": (2, 6, 8, 8)}, "no multiple"),
    ],
)
def test_scale_unsupported_says_why(change: dict, reason: str) -> None:
    answer = spec.scale_unsupported(**{**SCALE_CALL, **change})
    assert reason in answer if reason else answer == ""


def test_nothing_is_dispatched_without_a_measurement(
    emulated, monkeypatch: pytest.MonkeyPatch, unmeasured: None
) -> None:
    monkeypatch.setattr(dispatch, "refusal", lambda unsupported, wins: unsupported or wins)
    dispatch.clear()
    x = torch.randn(2, 8, 3, 3).contiguous(memory_format=torch.channels_last)
    bias, scale = torch.randn(8), torch.randn(8, 1, 1)
    assert torch.equal(api.bias_act(x, bias, None, "relu"), reference.bias_act(x, bias, None, "relu"))
    assert torch.equal(api.scale_add(x, scale, None, x), reference.scale_add(x, scale, None, x))
    assert FAMILY.fell_back == {dispatch.UNMEASURED: 2}
    assert not emulated.launches


class Plain(nn.Module):
    """Convolutions with bias and activations as people write them, an addition before one, and one transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.SiLU(),
        )
        self.a, self.b = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1, bias=False)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.Conv2d(8, 5, 1)
        self.gate = nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        out = self.a(x)
        out += x
        out = F.relu(out)
        out = torch.relu(self.b(out) + out)
        out = F.leaky_relu(self.up(out), 0.2)
        gate = F.relu(self.gate(out.mean((2, 3), keepdim=True)))
        return F.relu(self.last(out * gate))


class Linears(nn.Module):
    """Linear layers before activations: over tokens, over an image with its channels last, and over a vector a sample."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)
        self.tokens = nn.Linear(8, 16)
        self.plain = nn.Linear(16, 8, bias=False)
        self.head = nn.Linear(8, 8)
        self.gelu = nn.GELU(approximate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.narrow(self.gelu(self.wide(x.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)
        x = F.silu(self.plain(F.relu(self.tokens(x.flatten(2).transpose(1, 2)))))
        return F.relu(self.head(x.mean(1)))


class Scaled(nn.Module):
    """Blocks with a factor a channel and stochastic depth, in the forms that torchvision and timm write."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.layer_scale = nn.Parameter(torch.randn(8, 1, 1))
        self.gamma = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.layer_scale * self.first(x)
        noise = torch.empty([x.shape[0], 1, 1, 1], dtype=result.dtype, device=x.device)
        noise = noise.bernoulli_(0.5)
        noise.div_(0.5)
        result = result * noise
        result += x
        y = self.second(result).mul(self.gamma.reshape(1, -1, 1, 1))
        result = y + result
        keep = result.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.5)
        return result + self.third(result) * keep


def capture(model: nn.Module, mode: str | None = None):
    torch._dynamo.reset()
    report = match.MatchReport()
    return report, torch.compile(model.forward, backend=dynamo.backend({FAMILY.id: report}, mode=mode), dynamic=False)


PATTERNS = {
    "features.0": "bias+relu",
    "features.2": "bias+silu",
    "a": "bias+add+relu",
    "an addition in forward": "add+relu",
    "up": "bias+leaky_relu",
}


def test_convolutions_and_additions_are_found_by_path() -> None:
    with dispatch.everything():
        report, run = capture(Plain())
        run(torch.randn(2, 3, 8, 8))
    modules = {name for name, _ in Plain().named_modules()}
    found = {(path if path in modules else "an addition in forward"): label for path, label in report.matched.items()}
    assert found == PATTERNS
    assert list(report.unmatched) == ["last"]
    assert "5 channels" in report.unmatched["last"]


@pytest.mark.parametrize(("approximate", "gelu"), [("none", "gelu"), ("tanh", "gelu_tanh")])
def test_linear_layers_are_found_by_path(approximate: str, gelu: str) -> None:
    with dispatch.everything():
        report, run = capture(Linears(approximate))
        run(torch.randn(2, 8, 4, 4))
    assert report.matched == {"wide": f"linear bias+{gelu}", "tokens": "linear bias+relu"}
    assert report.unmatched == {}  # one vector a sample is not worth a word


def test_a_linear_layer_s_activation_is_left_to_inductor() -> None:
    report, model = match.MatchReport(), Linears()
    seen: list[torch.fx.GraphModule] = []

    def backend(graph_module: torch.fx.GraphModule, _: object):
        rewrite.rewrite(graph_module, report, compiled=True)
        seen.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    with dispatch.everything():
        torch.compile(model.forward, backend=backend, dynamic=False)(torch.randn(2, 8, 4, 4))
    assert report.matched == {}
    assert set(report.unmatched) == {"wide", "tokens"}
    assert all("Inductor" in reason for reason in report.unmatched.values())
    assert {F.linear, F.gelu} <= {node.target for node in seen[0].graph.nodes}


def test_factors_and_additions_are_found() -> None:
    with dispatch.everything():
        report, run = capture(Scaled())
        run(torch.randn(2, 8, 8, 8))
    assert sorted(report.matched.values()) == ["bias+scale+add", "bias+scale+drop+add", "drop+add"]


def test_a_variant_that_is_not_measured_gives_way_to_one_that_is() -> None:
    with pytest.MonkeyPatch.context() as patch:
        wins = {"scale+drop+add", "scale+add"}
        patch.setattr(spec, "wins", lambda kind, dtype: "" if kind in wins else dispatch.UNMEASURED)
        report, run = capture(Scaled())
        run(torch.randn(2, 8, 8, 8))
    assert sorted(report.matched.values()) == ["scale+add", "scale+drop+add"]
    assert list(report.unmatched.values()) == [f"drop+add: {dispatch.UNMEASURED}"]


class Block(nn.Module):
    """ConvNeXt's: a convolution, two Linear layers, a factor a channel, stochastic depth and what went in."""

    def __init__(self, after: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)
        self.last = after == "scaled with channels last"  # as in ConvNeXt's own code
        self.gamma = nn.Parameter(torch.randn(8) if self.last else torch.randn(8, 1, 1))
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.narrow(F.gelu(self.wide(self.conv(x).permute(0, 2, 3, 1))))
        z = (self.gamma * z).permute(0, 3, 1, 2) if self.last else self.gamma * z.permute(0, 3, 1, 2)
        z = z * torch.ones((x.shape[0], 1, 1, 1), dtype=z.dtype).bernoulli_(0.5).div_(0.5)
        z += x
        if self.after == "changed in place":
            z.mul_(2.0)
        return z


class Blocks(nn.Module):
    """Under autocast a convolution's result goes into the first sum, in half precision, and the first sum into a convolution."""

    def __init__(self, after: str = "") -> None:
        super().__init__()
        self.stem = nn.Conv2d(8, 8, 1)
        self.first, self.second = Block(after), Block(after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.stem(x))).square().sum()


def trained(function, model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss and the gradients of one step under autocast."""
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
        loss = function(x)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("form", ["", "scaled with channels last"])
@pytest.mark.parametrize("kernels", [True, False])
def test_convnext_s_blocks_train_as_the_plain_ones(request: pytest.FixtureRequest, kernels: bool, form: str) -> None:
    torch.manual_seed(0)
    if kernels:
        request.getfixturevalue("emulated")
    dispatch.clear()
    rewritten = Blocks(form).to(memory_format=torch.channels_last)
    plain, exact = Blocks(form), Blocks(form).double()
    for model in (plain, exact):
        model.load_state_dict(rewritten.state_dict())
    x = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    with dispatch.everything():
        report, run = capture(rewritten)
        mine = trained(run, rewritten, x)
    assert report.matched == {
        "first.wide": "linear bias+gelu",
        "second.wide": "linear bias+gelu",
        "first": "bias+scale+drop+add+cast of 16 bits",
        "second": "bias+scale+drop+add",
    }
    assert sum(FAMILY.engaged.values()) == (4 if kernels else 0)
    beside, want = trained(plain, plain, x), trained(exact, exact, x.double())
    for name, value in want.items():
        error = (mine[name].double() - value).norm() / value.norm()
        assert error < 1.5 * (beside[name].double() - value).norm() / value.norm() + 2e-3, name


def test_a_sum_that_is_changed_later_has_no_twin() -> None:
    model = Blocks("changed in place")
    x = torch.randn(2, 8, 4, 4)
    with dispatch.everything(), torch.autocast("cpu", torch.bfloat16):
        report, run = capture(model)
        run(x)
    assert report.matched["first"] == "bias+scale+drop+add of 16 bits"


def test_of_a_sum_s_two_results_either_may_be_the_only_one_used(emulated) -> None:
    case = next(c for c in cases.VERIFICATION if c.name.startswith("bias+scale+drop+add+cast of"))
    arguments = case.inputs(torch.Generator().manual_seed(1), case.shape[0])
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    for which in (0, 1):
        gradients = [
            torch.autograd.grad(function(*arguments)[which].float().square().sum(), leaves)
            for function in (case.ours, case.reference)
        ]
        for mine, other in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, other, rtol=0.05, atol=0.02 * float(other.abs().max()))


def test_without_a_measurement_the_graph_stays_and_the_report_says_so(unmeasured: None) -> None:
    report, run = capture(Scaled())
    run(torch.randn(2, 8, 8, 8))
    assert report.matched == {}
    assert {reason.split(": ")[1] for reason in report.unmatched.values()} == {dispatch.UNMEASURED}


INPUTS = {Plain: (2, 3, 8, 8), Scaled: (2, 8, 8, 8), Linears: (2, 8, 8, 8)}
LAUNCHES = {Plain: 5, Scaled: 3, Linears: 2}


@pytest.mark.parametrize("model", [Plain, Scaled, Linears])
def test_a_rewritten_model_trains_as_the_plain_one_where_kernels_cannot_run(model) -> None:
    torch.manual_seed(0)
    rewritten = model()
    plain = model()
    plain.load_state_dict(rewritten.state_dict())
    FAMILY.fell_back.clear()
    with dispatch.everything():
        _, run = capture(rewritten)
        for _ in range(2):
            x = torch.randn(INPUTS[model])
            for function in (run, plain):
                torch.manual_seed(1)
                function(x).square().sum().backward()
    assert FAMILY.fell_back["not on a CUDA device"] == 2 * LAUNCHES[model]
    for (name, mine), other in zip(rewritten.named_parameters(), plain.parameters(), strict=True):
        rounding = 1e-6 * float(other.grad.abs().max())  # oneDNN adds up otherwise, and otherwise on other CPUs
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=rounding, msg=name)


@pytest.mark.parametrize("model", [Plain, Scaled, Linears])
def test_a_rewritten_model_trains_on_the_kernels_as_the_plain_one(emulated, model) -> None:
    torch.manual_seed(0)
    rewritten = model().to(memory_format=torch.channels_last)
    plain = model().double()
    plain.load_state_dict(rewritten.state_dict())
    _, run = capture(rewritten)
    x = torch.randn(INPUTS[model]).contiguous(memory_format=torch.channels_last)
    for function, data in ((run, x), (plain, x.double())):
        torch.manual_seed(1)
        function(data).square().sum().backward()
    (entry,) = spec.KERNELS[spec.SCALE_FORWARD if model is Scaled else spec.FORWARD]
    assert emulated.launches[entry] == LAUNCHES[model]
    for (name, mine), other in zip(rewritten.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), other[1].grad, msg=name, rtol=1e-4, atol=1e-3)


def hazard(kind: str):
    class Hazard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)
            self.gamma = nn.Parameter(torch.randn(8, 1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.conv(x)
            if kind == "output used twice":
                return F.relu(h) + h
            if kind == "operand changed before the activation":
                z = x * 1.0
                y = z + h.sigmoid()
                z.mul_(2.0)
                return F.relu(y) + z
            if kind == "sum written into a tensor that is used again":
                z = x * 1.0
                y = z.add_(h.sigmoid())
                return F.relu(y) + z
            if kind == "factor changed before the addition":
                g = self.gamma * 1.0
                y = g * h.sigmoid()
                g.mul_(2.0)
                return y + x + g
            y = self.gamma * h.sigmoid()  # "product used twice"
            return (y + x) + y

    return Hazard()


@pytest.mark.parametrize(
    "kind",
    [
        "output used twice",
        "operand changed before the activation",
        "sum written into a tensor that is used again",
        "factor changed before the addition",
        "product used twice",
    ],
)
def test_what_is_used_or_changed_elsewhere_is_left_alone(kind: str) -> None:
    model = hazard(kind)
    x = torch.randn(2, 8, 4, 4)
    want = model(x.clone())
    with dispatch.everything():
        report, run = capture(model)
        got = run(x.clone())
    assert report.matched == {}
    assert torch.equal(got, want)


def test_where_the_output_shows_the_slope_its_memory_is_the_convolution_s(emulated) -> None:
    x = torch.randn(2, 8, 3, 3).contiguous(memory_format=torch.channels_last)
    bias = torch.randn(8)
    kept, where = x.clone(), x.data_ptr()
    assert api.bias_act(x, bias, None, "silu", in_place=True).data_ptr() != where
    y = api.bias_act(x, bias, None, "relu", in_place=True)
    assert y.data_ptr() == where
    assert torch.equal(y, F.relu(kept + bias.view(1, -1, 1, 1)))


def test_an_infinite_gradient_does_not_pass_a_slope_of_zero(emulated) -> None:
    x = torch.tensor([-1.0, 1.0] * 4).view(1, 8, 1, 1).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = api.bias_act(x, torch.zeros(8), None, "relu")
    (dx,) = torch.autograd.grad(y, x, torch.full_like(y, float("inf")))
    assert dx.flatten().tolist() == [0.0, float("inf")] * 4


@pytest.mark.parametrize(("activation", "dim"), [("relu", 1), ("silu", 1), ("gelu", -1)])
def test_second_derivative_matches(emulated, activation: str, dim: int) -> None:
    torch.manual_seed(3)
    x = torch.randn(2, 8, 3, 8).contiguous(memory_format=torch.channels_last if dim == 1 else torch.contiguous_format)
    bias, dy = torch.randn(8), torch.randn(2, 8, 3, 8)
    found = []
    for function, dtype in ((api.bias_act, torch.float32), (reference.bias_act, torch.float64)):
        leaf, b = x.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_()
        y = function(leaf * 1.0, b, None, activation, dim=dim)
        gradients = torch.autograd.grad(y, (leaf, b), dy.to(dtype), create_graph=True)
        total = sum(g.square().sum() for g in gradients) + leaf.sum()
        found.append(torch.autograd.grad(total, (leaf, b), allow_unused=True, materialize_grads=True))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)


def test_bits_are_kept_for_a_backward_alone(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    memory = cuda.mask_memory
    monkeypatch.setattr(cuda, "mask_memory", lambda *of: made.append(of) or memory(*of))
    x, bias = torch.randn(2, 8, 3, 5).contiguous(memory_format=torch.channels_last), torch.randn(8)
    y = api.bias_act(x, bias, None, "relu")
    assert not made
    again = api.bias_act(x, bias.requires_grad_(), None, "relu")
    assert torch.equal(y, again)
    assert len(made) == 1
    kept = [t.dtype for t in again.grad_fn.saved_tensors if t is not None]
    assert kept == [torch.float32, torch.uint8]  # neither x nor y


def test_second_derivative_of_a_sum_without_a_bias_matches(emulated) -> None:
    torch.manual_seed(3)
    x, r, dy = (torch.randn(2, 8, 3, 8).contiguous(memory_format=torch.channels_last) for _ in range(3))
    found = []
    for function, dtype in ((api.bias_act, torch.float32), (reference.bias_act, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (x, r)]
        y = function(leaves[0] * 1.0, None, leaves[1], "relu")
        gradients = torch.autograd.grad(y, leaves, dy.to(dtype).requires_grad_(), create_graph=True)
        found.append(
            torch.autograd.grad(sum((g * leaf).sum() for g, leaf in zip(gradients, leaves, strict=True)), leaves)
        )
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)


def test_second_derivative_of_scale_add_matches(emulated) -> None:
    torch.manual_seed(4)
    x, r, dy = (torch.randn(2, 8, 3, 3).contiguous(memory_format=torch.channels_last) for _ in range(3))
    scale, keep = torch.randn(8, 1, 1), torch.tensor([0.0, 2.0]).view(2, 1, 1, 1)
    found = []
    for function, dtype in ((api.scale_add, torch.float32), (reference.scale_add, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (x, scale, r, torch.arange(8.0))]
        y = function(leaves[0], leaves[1], keep.to(dtype), leaves[2], leaves[3])
        gradients = torch.autograd.grad(y, leaves, dy.to(dtype), create_graph=True)
        total = sum(g.square().sum() for g in gradients) + sum(t.sum() for t in leaves)
        found.append(torch.autograd.grad(total, leaves))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_a_sum_and_its_twin_have_the_gradients_of_those_that_are_used(emulated, used: tuple[int, ...]) -> None:
    torch.manual_seed(5)
    x, r = (torch.randn(2, 64, 4, 4).contiguous(memory_format=torch.channels_last) for _ in range(2))
    scale, keep, dy = torch.randn(64, 1, 1), torch.tensor([0.5, 2.0]).view(2, 1, 1, 1), torch.randn(2, 64, 4, 4)
    found = []
    for function, branch, rest in (
        (api.scale_add, torch.bfloat16, torch.float32),
        (reference.scale_add, torch.float64, torch.float64),
    ):
        leaves = [x.bfloat16().to(branch), scale.to(rest), r.to(rest)]
        leaves = [t.detach().requires_grad_() for t in leaves]
        with dispatch.everything():
            results = function(leaves[0], leaves[1], keep.to(rest), leaves[2], twin=True)
        total = sum((results[i].to(rest) * dy.to(rest)).sum() for i in used)
        found.append(torch.autograd.grad(total, leaves))
    assert emulated.launches
    for mine, other in zip(*found, strict=True):
        assert float((mine.double() - other).norm() / other.norm()) < 0.02


@pytest.mark.parametrize("name", ["bias+add+relu", "bias+silu", "scale+drop+add", "drop+add to float32"])
def test_the_torch_library_operations_give_the_same_as_the_functions(emulated, name: str) -> None:
    case = next(c for c in cases.VERIFICATION if c.name == name and c.dtype == "bfloat16")
    operation = torch.ops.advisor.scale_add if "scale" in name or "drop" in name else torch.ops.advisor.bias_act
    arguments = case.inputs(torch.Generator().manual_seed(1), case.shape[0])
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    found, plain = operation(*arguments), case.ours(*arguments)
    y = found[0] if isinstance(found, tuple) else found  # and the bits that its backward reads
    assert torch.equal(y, plain)
    dy = torch.randn_like(y)
    for mine, other in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(plain, leaves, dy), strict=True):
        assert torch.equal(mine, other)
    torch.library.opcheck(operation, arguments, test_utils=("test_schema", "test_faketensor"))


GELU = """
#include "vector.cuh"
#include "gelu.cuh"

extern "C" __global__ void gelu(const float* z, float* y, float* dy) {
  y[threadIdx.x] = activate_streaming(z[threadIdx.x], 0.f);
  dy[threadIdx.x] = through_streaming(1.f, z[threadIdx.x], 0.f);
}
"""


@pytest.mark.parametrize(("form", "code"), [("none", 6), ("tanh", 7)])
def test_gelu_is_right_far_below_what_16_bits_round_away(emulated, tmp_path: Path, form: str, code: int) -> None:
    (tmp_path / "gelu.cu").write_text(GELU)
    text = sources.inlined(tmp_path / "gelu.cu", (INCLUDE, kernels_dir() / "include"))
    kernel = emulated.compiled(text, "gelu", {"STORAGE": 1, "ACT": code})
    z = torch.cat([torch.linspace(-13.0, 13.0, 505), torch.tensor([0.0, -0.0, 1e4, 1e18, -1e4, 7e-6, -7e-6])])
    y, slope = torch.empty_like(z), torch.empty_like(z)
    kernel((1,), (z.numel(),), (z.data_ptr(), y.data_ptr(), slope.data_ptr()))
    exact = z.double().requires_grad_()
    want = F.gelu(exact, approximate=form)
    (gradient,) = torch.autograd.grad(want.sum(), exact)
    if form == "none":  # 0.5 (1 + erf) loses its digits in fp64 too
        want = exact.detach() * 0.5 * torch.erfc(exact.detach() * -(0.5**0.5))
    # fp16 rounds by up to 2.4e-4, and to zero below -5.5.
    for farthest, relative in ((2.0, 6e-6), (4.5, 4e-5), (6.0, 1.2e-4), (1e30, 2.5e-3)):
        near = z.abs() <= farthest
        torch.testing.assert_close(y[near].double(), want.detach()[near], rtol=relative, atol=1e-15)
    torch.testing.assert_close(slope.double(), gradient.nan_to_num(0.0), rtol=6e-6, atol=6e-6)


def test_gelu_of_what_is_not_finite_is_pytorch_s(emulated) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0] * 2).bfloat16()[None]
    got = api.bias_act(x, torch.zeros(8), None, "gelu", dim=-1)
    want = torch.tensor([float("nan"), float("inf"), float("nan"), 0.0] * 2)[None]  # -inf times zero
    torch.testing.assert_close(got.float(), want, rtol=0, atol=0, equal_nan=True)


# What is taken out or changed in a source, and the case that must show it.
FAULTS = {
    "bias of the neighbour": ("f[4 * q] = v.x, f[4 * q + 1] = v.y", "f[4 * q] = v.y, f[4 * q + 1] = v.x"),
    "slope of the neighbour": ("(bits[u] >> j) & 1u", "(bits[u] >> (j ^ 1)) & 1u"),
    "bits of another vector": ("mask[at] = (unsigned char)bits;", "mask[at ^ 1] = (unsigned char)bits;"),
    "bits of the input": ("bits |= (steep(z) ? 1u : 0u) << j;", "bits |= (steep(f[j]) ? 1u : 0u) << j;"),
    "a row left out of the sum": ("sum[j] += g[j];", "if (row - u * stride > 0) sum[j] += g[j];"),
    "first vector left out": (
        "const unsigned int at = first + u * THREADS;",
        "const unsigned int at = first + u * THREADS + 1;",
    ),
    "channels of the row behind": ("at % vectors", "(at + THREADS) % vectors"),
    "past the last vector": ("if (at >= total) continue;", "if (at > total) continue;"),
    "first row left out": ("row - u * stride < 0", "row - u * stride <= 0"),
    "tail of the wrong side": ("return z > 0.f ? 1.f - tail : tail;", "return z < 0.f ? 1.f - tail : tail;"),
    "density without its square": ("z * -0.72134752044448170f * z", "fabsf(z) * -0.72134752044448170f"),
    "gradient not stored": ("store(dx + last - u * step, narrow(g));", "if (u == 0) store(dx + last, narrow(g));"),
    "one row too far": ("if (row - u * stride < 0) continue;", "if (row - u * stride < -1) continue;"),
}
SCALE_FAULTS = {
    "sample of the neighbour": (
        "at / sample",
        "(at + 1) / sample",
    ),
    "factor missing in the gradient": ("g[j] *= factor[j];", ""),
    "half of a wide vector": ("load(p + i * parts + k)", "load(p + i * parts)"),
    "bias forgotten": ("(f[j] + offset[j]) * factor[j]", "f[j] * factor[j]"),
    "bias missing in the scale's gradient": ("bias ? total[o] + bias[c] * d : total[o]", "total[o]"),
    "scale missing in the bias's gradient": ("(float)(scale[c] * d)", "(float)d"),
    "gradient of the twin lost": ("g[j] += h[j];", "g[j] += 0.f * h[j];"),
    "residual's gradient without the twin's": ("store(dresidual + last - u * step, narrow(g));", ""),
    "twin not stored": ("store(half + at, narrow(g));", ""),
    "sum before the drop path": ("g[j] *= k[u];", "sum[j] += 0.f;"),
    "unwritten half": ("*(float4*)second =", "if (false) *(float4*)second ="),
    "the other half exchanged": ("odd ? a[j] : b[j]", "odd ? b[j] : a[j]"),
    "exchanged with a thread that is not here": ("total % 2 == 0", "true"),
    "residual not added": ("g[j] += f[j] * k;", "g[j] = f[j] * k;"),
}


@pytest.mark.parametrize(
    ("name", "fault"),
    [("linear bias+gelu" if "tail" in f or "density" in f else "bias+add+relu", f) for f in FAULTS]
    + [
        (
            "bias+scale+drop+add+cast of 16 bits to float32"
            if "bias" in f or "twin" in f
            else "scale+drop+add to float32",
            f,
        )
        for f in SCALE_FAULTS
    ],
)
def test_a_fault_planted_in_a_kernel_is_found(emulated, monkeypatch: pytest.MonkeyPatch, name: str, fault: str) -> None:
    before, after = {**FAULTS, **SCALE_FAULTS}[fault]
    channels = 48 if fault == "the other half exchanged" else 72
    case = next(c for c in cases.VERIFICATION if c.name == name and channels in c.shape and c.dtype == "bfloat16")
    assert verify.check(FAMILY, case, "cpu")["passed"]
    emulated.use()
    assert not passes_with(monkeypatch, FAMILY, case, before, after)


def test_a_tensor_that_begins_between_vectors_is_not_taken(emulated) -> None:
    dispatch.clear()
    flat = torch.randn(2 * 3 * 3 * 8 + 1)
    x = flat[1:].view(2, 3, 3, 8).permute(0, 3, 1, 2)
    bias = torch.randn(8)
    assert torch.equal(api.bias_act(x, bias, None, "relu"), reference.bias_act(x, bias, None, "relu"))
    assert FAMILY.fell_back == {"input is not channels_last": 1}
    y = api.bias_act(x.clone().requires_grad_(), bias, None, "relu")
    assert y.grad_fn is not None
    y.backward(x)  # nor a gradient: it is copied
    assert emulated.launches == {"bias_act_forward": 1, "bias_act_backward": 1}


@pytest.mark.parametrize(("threads", "unroll"), [(128, 2), (256, 4)])
def test_flat_passes_are_right_however_many_vectors_a_thread_has(
    emulated, monkeypatch: pytest.MonkeyPatch, threads: int, unroll: int
) -> None:
    monkeypatch.setattr(ops, "DEVICE", "cpu")
    family = catalog.get("bias_act")
    labels = (
        "add+relu bfloat16 5x24x28x26",
        "scale+drop+add to float32 bfloat16 2x1016x5x3",
        "drop+add float16 3x72x9x7",
    )
    named = {case.label.removeprefix("bias+"): case for case in family.verification}
    setting = tune.Setting(family, {"FLAT_THREADS": threads, "FLAT_UNROLL": unroll})
    assert [tune.what_is_wrong(family, named[label], setting) for label in labels] == ["", "", ""]


@given(vectors=st.integers(1, 10_000_000), unroll=st.sampled_from((1, 2, 4)))
def test_flat_passes_have_as_many_blocks_as_there_are_vectors_for(vectors: int, unroll: int) -> None:
    blocks = channel_tiles.flat_blocks(vectors, threads=128, unroll=unroll)
    assert (blocks - 1) * 128 * unroll < vectors <= blocks * 128 * unroll


class Casts(TorchDispatchMode):
    """How many tensors were cast."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("keep", "casts"), [("bfloat16", 0), ("float32", 0), ("float16", 1)])
def test_factors_of_a_drop_path_are_read_as_they_are(emulated, scaled: bool, keep: str, casts: int) -> None:
    """A cast would be a launch more, forward and backward."""
    dispatch.clear()
    branch, residual = (
        torch.randn(3, 8, 4, 5).bfloat16().contiguous(memory_format=torch.channels_last) for _ in range(2)
    )
    branch.requires_grad_()
    scale = torch.randn(8, 1, 1, requires_grad=True) if scaled else None
    factors = torch.tensor([0.0, 1.25, 1.25]).view(3, 1, 1, 1).to(getattr(torch, keep))
    with Casts() as forward:
        y = api.scale_add(branch, scale, factors, residual)
    assert not FAMILY.fell_back
    expected = reference.scale_add(branch.double(), scale, factors.double(), residual.double())
    assert torch.allclose(y.double(), expected.double(), rtol=1e-2, atol=1e-2)
    with Casts() as backward:
        (dbranch,) = torch.autograd.grad(y, branch, torch.ones_like(y))
    assert torch.allclose(
        dbranch[1:].double(), torch.full((), 1.25, dtype=torch.float64) * (scale.double() if scaled else 1.0), rtol=1e-2
    )
    assert not dbranch[0].any()
    assert (forward.made, backward.made) == (casts, casts)


@given(rows=st.integers(1, 100_000), vectors=st.integers(1, 1000), unroll=st.sampled_from((1, 2, 4)))
def test_short_blocks_cover_every_row_and_channel(rows: int, vectors: int, unroll: int) -> None:
    shape = channel_tiles.one_pass(rows, vectors, threads=128, unroll=unroll, otherwise=16)
    assert 1 <= shape.tile <= 128
    assert shape.tile * (shape.tiles - 1) < vectors == shape.vectors <= shape.tile * shape.tiles
    in_a_block = 128 // shape.tile * unroll
    assert (shape.row_blocks - 1) * in_a_block < rows <= shape.row_blocks * in_a_block


@pytest.mark.parametrize(
    ("vectors", "tile"),
    [
        (9, 9),  # the whole row
        (24, 8),  # lines that leave no thread idle: the whole row would leave 8
        (96, 32),  # the widest such lines
        (68, 68),  # no lines: the whole row
        (384, 128),
        (300, 15),  # neither: the widest divisor
    ],
)
def test_tiles_of_short_blocks_are_whole_rows_or_lines(vectors: int, tile: int) -> None:
    assert channel_tiles.fullest_tile(vectors, 128, 16) == tile


@pytest.mark.parametrize(
    ("vectors", "piece"),
    [
        (9, 9),  # no longer than two lines: whole
        (96, 16),  # two lines
        (24, 8),  # a line, where twelve would split one
        (84, 14),  # whole sectors
        (36, 12),
        (18, 18),  # nothing divides it but what splits sectors: the row
        (27, 27),
        (45, 45),
        (189, 16),  # and of a longer one two lines and a rest
        (54, 16),
    ],
)
def test_pieces_of_a_row_split_as_little_as_can_be(vectors: int, piece: int) -> None:
    assert channel_tiles.piece(vectors) == piece


@given(vectors=st.integers(1, 5000))
def test_a_piece_fits_the_kernels_and_the_launch(vectors: int) -> None:
    piece = channel_tiles.piece(vectors)
    assert 1 <= piece <= min(vectors, channel_tiles.WIDEST_PIECE)
    assert piece == vectors or piece % 2 == 0  # else two blocks share sectors
    assert spec.geometry(10_000, 8 * vectors, "bfloat16", 132, {"THREADS": 512, "UNROLL": 3}).tile == piece
