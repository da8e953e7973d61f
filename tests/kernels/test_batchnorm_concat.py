"""Norms over a growing concatenation without a GPU: definition, bytes, emulated kernels, autograd, graph matching."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from emulation.planted import passes_with
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, dynamo, match, nvrtc
from advisor.ops.batchnorm_concat import api, cases, cuda, reference, spec

FAMILY = catalog.get("batchnorm_concat")
CASE = next(c for c in cases.VERIFICATION if c.dtype == "bfloat16" and "relu" in c.name)


def nhwc(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    n, c, h, w = shape
    values = torch.randn(n, h, w, c, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).permute(0, 3, 1, 2)


class Layer(nn.Module):
    """DenseNet's: norm, activation, 1x1 convolution, norm, activation, 3x3 convolution."""

    def __init__(self, channels: int, growth: int, activation: Callable[..., nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.norm1, self.act1 = nn.BatchNorm2d(channels), activation(inplace=True)
        self.conv1 = nn.Conv2d(channels, 16, 1, bias=False)
        self.norm2, self.act2 = nn.BatchNorm2d(16), activation(inplace=True)
        self.conv2 = nn.Conv2d(16, growth, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv2(self.act2(self.norm2(self.conv1(self.act1(self.norm1(x))))))


class DenseNet(nn.Module):
    """Two blocks with a transition between them, as torchvision writes them, or nested, behind or in front, as others do."""

    def __init__(self, form: str = "listed", growth: int = 8) -> None:
        super().__init__()
        self.form = form
        self.stem = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.block1 = nn.ModuleList(Layer(16 + i * growth, growth) for i in range(3))
        self.norm = nn.BatchNorm2d(16 + 3 * growth)
        self.conv = nn.Conv2d(16 + 3 * growth, 16, 1, bias=False)
        self.block2 = nn.ModuleList(Layer(16 + i * growth, growth, nn.SiLU) for i in range(2))
        self.last = nn.BatchNorm2d(16 + 2 * growth)

    def block(self, layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        if self.form != "listed":
            for layer in layers:
                x = torch.cat((x, layer(x)) if self.form == "behind" else [layer(x), x], dim=1)
            return x
        features = [x]
        for layer in layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(self.block1, self.stem(x))
        x = F.avg_pool2d(self.conv(F.relu(self.norm(x))), 2)
        return F.relu(self.last(self.block(self.block2, x))).mean((2, 3))


def _capture(
    model: nn.Module, mode: str | None = None, families: tuple[str, ...] = (FAMILY.id,)
) -> tuple[dict[str, match.MatchReport], Callable[..., torch.Tensor]]:
    reports = {family: match.MatchReport() for family in families}
    return reports, torch.compile(model.forward, backend=dynamo.backend(reports, mode=mode), dynamic=False)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.reset()
    dispatch.clear()


def test_the_definition_passes_gradcheck() -> None:
    features = [nhwc(3, c, 2, 1, seed=c).double() for c in (2, 1)]
    affine = [(torch.linspace(0.5, 1.5, c).double(), torch.zeros(c).double()) for c in (2, 3)]

    def f(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights, biases = leaves[2::2], leaves[3::2]
        norms = [
            (torch.zeros(len(w)).double(), torch.ones(len(w)).double(), w, b)
            for w, b in zip(weights, biases, strict=True)
        ]
        return reference.batchnorm_concat(leaves[:2], norms, 0.1, 1e-5, "silu")

    leaves = [t.requires_grad_() for t in (*features, *(p for pair in affine for p in pair))]
    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"shape": (2, 60, 8, 8)}, "no multiple of 8"),
        ({"channels": 100}, "100 channels are no multiple of 8"),
        ({"channels": 32}, "in a concatenation of 32"),
        ({"shape": (2, 64, 8)}, "3-D"),
        ({"shape": (1, 64, 1, 1)}, "fewer than two"),
        ({"channels_last": False}, "channels_last"),
        ({"dtype": "float64"}, "dtype float64"),
        ({"arch": 75}, "older"),
    ],
)
def test_unsupported_says_why(change: dict, reason: str) -> None:
    call = {"shape": (2, 64, 8, 8), "channels": 128, "channels_last": True, "dtype": "bfloat16", "arch": 90}
    answer = spec.unsupported(**{**call, **change})
    assert reason in answer if reason else answer == ""


def test_a_block_of_densenet_moves_a_third_of_the_bytes() -> None:
    """Block 2 of DenseNet-121 at batch 256 in bf16. PyTorch: cat 2, norm 3 and ReLU 2 forward; 5, 3 and at least 3 of adds back."""
    rows, widths = 256 * 28 * 28, [128 + 32 * k for k in range(13)]
    forward, backward = spec.bytes_moved(rows=rows, widths=widths, itemsize=2)
    assert forward == pytest.approx(2 * rows * 2 * (sum(widths) + 512))
    assert forward + backward < 0.37 * (7 + 11) * sum(widths) * rows * 2


def test_nothing_is_dispatched_without_a_measurement(monkeypatch: pytest.MonkeyPatch, unmeasured: None) -> None:
    monkeypatch.setattr(nvrtc, "on_device", lambda tensor: "")
    monkeypatch.setattr(nvrtc, "arch", lambda device: 90)
    feature = nhwc(2, 8, 4, 4)
    tensor, moments = api.features(feature, 16)
    assert tensor is feature
    assert moments is None
    assert FAMILY.fell_back == {dispatch.UNMEASURED: 1}


def _block(dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, ...]]]:
    features = [nhwc(2, c, 5, 4, seed=c, dtype=dtype).requires_grad_() for c in (24, 8, 16)]
    norms = []
    for c in (24, 32, 48):
        weight = torch.linspace(0.5, 1.5, c).requires_grad_()
        norms.append((torch.zeros(c), torch.ones(c), weight, torch.linspace(-1.0, 1.0, c).requires_grad_()))
    return features, norms


def _chained(features: list[torch.Tensor], norms: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    there, found = api.features(features[0], 48), []
    for k, norm in enumerate(norms):
        there = api.extended(*there, features[k]) if k else there
        y, *there = api.batchnorm_act(*there, *norm, 0.1, 1e-5, "silu")
        found.append(y)
    return found


def test_all_feature_maps_lie_in_one_tensor_and_are_written_once(emulated) -> None:
    features, _ = _block()
    with dispatch.everything():
        there = api.features(features[0], 48)
        first = there[0].data_ptr()
        for feature in features[1:]:
            there = api.extended(*there, feature)
    tensor, moments = there
    assert tensor.data_ptr() == first
    assert torch.equal(tensor, torch.cat(features, 1))
    assert emulated.launches == {"batchnorm_concat_append": 3}
    x = torch.cat([f.detach() for f in features], 1).double()
    torch.testing.assert_close(moments[0].double(), x.mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moments[1].double(), x.var((0, 2, 3), correction=0), rtol=1e-5, atol=1e-6)


def test_gradients_of_only_some_outputs(emulated) -> None:
    """Norms whose result nobody uses, the last and one between, pass on what comes from behind."""
    for used in ([0], [1], [0, 2], [2]):
        found = []
        for function in (_chained, lambda f, n: reference.batchnorm_concat(f, n, 0.1, 1e-5, "silu")):
            features, norms = _block()
            with dispatch.everything():
                ys = function(features, norms)
                loss = sum(ys[i].square().sum() * (i + 1) for i in used)
                found.append(torch.autograd.grad(loss, features, allow_unused=True))
        for mine, other in zip(*found, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None:
                torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_the_concatenation_is_a_tensor_for_others_too(emulated) -> None:
    found = []
    for ours in (True, False):
        features, norms = _block()
        with dispatch.everything():
            if ours:
                there = api.extended(*api.features(features[0], 48), features[1])
                y, *there = api.batchnorm_act(*there, *norms[1], 0.1, 1e-5, "relu")
                x = there[0]
            else:
                x = torch.cat(features[:2], 1)
                y = F.relu(F.batch_norm(x, *norms[1][:2], *norms[1][2:], training=True))
            found.append(torch.autograd.grad(y.square().sum() + x.sigmoid().sum(), features[:2]))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_a_feature_map_that_does_not_fit_is_concatenated(emulated) -> None:
    features, norms = _block()
    with dispatch.everything():
        there = api.extended(*api.features(features[0], 24), features[1])  # 32 channels
        y, tensor, moments = api.batchnorm_act(*there, *norms[1], 0.1, 1e-5, "silu")
    assert moments is None
    assert torch.equal(tensor, torch.cat(features[:2], 1))
    assert sum(FAMILY.fell_back.values()) == 1
    mine = torch.autograd.grad(y.sum() + tensor.square().sum(), features[:2])
    assert all(g.shape == f.shape for g, f in zip(mine, features, strict=False))


def test_gradients_that_come_back_may_be_kept(emulated) -> None:
    """Two backwards through the same graph give the same: nothing is added up in memory that somebody else holds."""
    features, norms = _block()
    with dispatch.everything():
        loss = sum(y.square().sum() for y in _chained(features, norms))
        once = torch.autograd.grad(loss, features, retain_graph=True)
        kept = [g.clone() for g in once]
        again = torch.autograd.grad(loss, features)
    for a, b, c in zip(once, kept, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_one_concatenation_is_kept_for_the_backward(emulated) -> None:
    """PyTorch keeps each: with as many layers as here 104 channels where one tensor has 48."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 4:
            memory = tensor.untyped_storage()
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    features, norms = _block()
    with dispatch.everything(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        there = api.features(features[0], 48)
        for k, norm in enumerate(norms):
            there = api.extended(*there, features[k]) if k else there
            _, *there = api.batchnorm_act(*there, *norm, 0.1, 1e-5)
    assert list(kept.values()) == [4 * 2 * 48 * 5 * 4]


FAULTS = {
    "a feature's gradient without its correction": ("g[j] -= constant[j] + ", "g[j] -= 0.f * constant[j] + "),
    "what comes from behind forgotten": ("g[j] += f[j];", "g[j] += 0.f * f[j];"),
    "corrections from behind forgotten": ("b[c] = later_b[c] + mine_b;", "b[c] = mine_b;"),
    "rows at the wrong distance": ("load(x + row * pitch + t.vector)", "load(x + row * vectors + t.vector)"),
    "running variance is biased": ("variance[c] * unbiased", "variance[c] * 1.0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_a_kernel_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    before, after = FAULTS[fault]
    assert not passes_with(monkeypatch, FAMILY, CASE, before, after)


@pytest.mark.parametrize("form", ["listed", "behind", "in front"])
def test_a_densenet_trains_on_the_kernels_as_the_plain_one(emulated, form: str) -> None:
    torch.manual_seed(0)
    model = DenseNet(form).to(memory_format=torch.channels_last)
    plain = DenseNet(form).double()
    plain.load_state_dict(model.state_dict())
    names = list(model.state_dict())
    x, wide = nhwc(2, 8, 6, 6).requires_grad_(), nhwc(2, 8, 6, 6).double().requires_grad_()
    reports, run = _capture(model)
    with dispatch.everything():
        y = run(x)
        y.square().sum().backward()
    want = plain(wide)
    want.square().sum().backward()
    first = int(form != "listed")  # a block's first norm reads no concatenation there
    matched = reports[FAMILY.id].matched
    assert matched == {
        **{f"block1.{i}.norm1": f"bn+relu over {i + 1} feature maps" for i in range(first, 3)},
        "norm": "bn+relu over 4 feature maps",
        **{f"block2.{i}.norm1": f"bn+silu over {i + 1} feature maps" for i in range(first, 2)},
        "last": "bn+relu over 3 feature maps",
    }
    assert emulated.launches["batchnorm_concat_apply"] == emulated.launches["batchnorm_concat_backward"] == len(matched)
    assert emulated.launches["batchnorm_concat_append"] == emulated.launches["batchnorm_concat_append_backward"] == 7
    torch.testing.assert_close(y.double(), want, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-3, atol=1e-4)
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, msg=name, rtol=1e-3, atol=1e-4)
    for (name, mine), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), other.double(), msg=name, rtol=1e-5, atol=1e-6)
    assert list(model.state_dict()) == names


def test_a_rewritten_densenet_on_pytorchs_own_operations() -> None:
    """On a machine where the kernels cannot run the rewritten graph computes what it did."""
    torch.manual_seed(0)
    model, plain = DenseNet(), DenseNet()
    plain.load_state_dict(model.state_dict())
    reports, run = _capture(model)
    x = nhwc(2, 8, 6, 6)
    with dispatch.everything():
        y = run(x)
    want = plain(x)
    y.sum().backward()
    want.sum().backward()
    assert len(reports[FAMILY.id].matched) == 7
    torch.testing.assert_close(y, want)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_left_alone_without_a_measurement(unmeasured: None) -> None:
    reports, run = _capture(DenseNet())
    run(nhwc(2, 8, 6, 6))
    assert not reports[FAMILY.id].matched
    assert set(reports[FAMILY.id].unmatched.values()) == {dispatch.UNMEASURED}


class Others(nn.Module):
    """Concatenations that are not read in place, each for a reason of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.a, self.b, self.c, self.d = (nn.BatchNorm2d(c) for c in (16, 16, 24, 16, 18))
        self.e, self.f = nn.BatchNorm2d(16), nn.BatchNorm2d(24)
        self.frozen = nn.BatchNorm2d(24).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        alone = self.alone(torch.cat((x, x * 3), 1)).mean()
        two = torch.cat((x, x + 1), 1)
        used = self.a(two).mean() + two.sum()  # used elsewhere
        changed = x * 5
        one = self.c(torch.cat((x, changed), 1)).mean()
        changed.add_(1.0)
        narrow = self.d(torch.cat((x, x * 4, x[:, :2]), 1)).mean()
        twice = torch.cat((x, x * 2), 1)
        wider = torch.cat((x * 7, twice), 1)
        late = self.b(wider).mean() + self.e(twice).mean()  # in the other order
        return alone + used + one + narrow + late + self.frozen(torch.cat((twice, x), 1)).mean()


def test_what_is_left_alone_says_why() -> None:
    model = Others().train()
    model.frozen.eval()
    reports, run = _capture(model)
    with dispatch.everything():
        run(nhwc(2, 8, 6, 6))
    assert not reports[FAMILY.id].matched
    assert reports[FAMILY.id].unmatched == {
        "alone": "no other norm sees the same feature maps",
        "a": "the concatenation is used elsewhere too",
        "c": "a feature map is changed in place",
        "d": "a feature map of 2 channels, no multiple of 4",
        "b": "no other norm sees the same feature maps",
        "e": "no other norm sees the same feature maps",
        "frozen": "frozen: the norm by itself",
    }


def test_a_graph_for_inductor_is_left_alone() -> None:
    model = DenseNet()
    report = match.MatchReport()

    def backend(graph_module, inputs):
        FAMILY.rewrite(graph_module, report, compiled=True)
        return graph_module.forward

    with dispatch.everything():
        torch.compile(model.forward, backend=backend, dynamic=False)(nhwc(2, 8, 6, 6))
    assert set(report.unmatched.values()) == {"left to Inductor"}


def test_rows_at_one_distance_are_read_where_they_are() -> None:
    whole = nhwc(2, 24, 3, 4)
    assert cuda.rows(whole[:, 8:]).data_ptr() == whole[:, 8:].data_ptr()
    for other in (whole[:, 3:], whole[:, :, 1:], whole.contiguous(), whole[:, :20]):
        rows = cuda.rows(other)
        assert torch.equal(rows, other)
        _, c, h, w = other.shape
        pitch = rows.stride(3)
        assert rows.stride() == (h * w * pitch, 1, w * pitch, pitch)
        assert (rows.data_ptr() == other.data_ptr()) == (other.data_ptr() == whole.data_ptr() and c == 20)
