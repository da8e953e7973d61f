"""One transform a kernel family: where it applies, what it installs, and what shows that it is there."""

from __future__ import annotations

import pytest
import torch
from loops import check_undo_is_exact, make_loop, twins
from torch import nn
from torch.nn import functional as F

from advisor.core.profile import KernelRow
from advisor.ops import catalog, dispatch
from advisor.ops.family import Family
from advisor.transforms import capture, kernels, registry
from advisor.transforms.kernels import KernelTransform


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    dispatch.clear()
    yield
    torch._dynamo.reset()
    dispatch.clear()


@pytest.fixture
def fused() -> KernelTransform:
    found = registry.get("fused_bn_act")
    assert isinstance(found, KernelTransform)
    return found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if kernels could run here."""
    monkeypatch.setattr(kernels.nvrtc, "unavailable", lambda: "")


def on_gpu(loop):
    loop.training.device = torch.device("cuda")
    return loop


def test_it_matches_the_modules_it_looks_for(fused, gpu) -> None:
    found = fused.match(on_gpu(make_loop()).training, {})
    assert found.applies
    assert found.sites == ("bn1", "bn2")


def test_of_the_modules_only_those_that_can_have_the_pattern(gpu, monkeypatch) -> None:
    monkeypatch.setattr(Family, "not_dispatched", lambda self: "")
    depthwise = Family(
        id="depthwise", replaces="", transform="depthwise", modules=("Conv2d",), having=lambda c: c.groups > 1
    )
    assert kernels.of(depthwise)().match(on_gpu(make_loop()).training, {}).sites == ("conv2",)


class Functional(nn.Module):
    """Normalises without a module for it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 5)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.batch_norm(self.conv(x), self.mean, self.var, training=True))
        return self.head(x.mean((2, 3)))


def test_it_matches_functions_where_no_module_tells(fused, gpu) -> None:
    loop = on_gpu(make_loop(model=Functional))
    before = loop.model.mean.clone()
    assert fused.match(loop.training, {}).sites == ("batch_norm() x 1",)
    assert torch.equal(loop.model.mean, before)  # looking leaves no trace


class Blurred(nn.Module):
    """Before it takes every second pixel, with a filter that is no parameter; padded by itself once, and by zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)
        self.register_buffer("blur", torch.ones(8, 1, 3, 3) / 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(
            F.pad(self.conv(F.pad(x, (1, 1, 1, 1))), (1, 1, 1, 1), mode="reflect"), self.blur, groups=8, stride=2
        )
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize(("transform", "site"), [("depthwise_conv", "conv2d() x 1"), ("fused_padding", "pad() x 1")])
def test_of_a_functions_calls_those_count_that_a_family_takes(gpu, transform: str, site: str) -> None:
    with dispatch.everything():
        found = registry.get(transform).match(on_gpu(make_loop(model=Blurred)).training, {})
    assert found.sites == (site,)


def test_functions_are_put_in_place_in_a_model_whose_calls_nobody_saw(fused) -> None:
    loop = make_loop(model=Functional)
    for root in loop.training.roots:
        root.args, root.kwargs = (), {}
    undo = fused.apply(loop.training, {})
    loop.run(1)
    assert len(fused.sites(loop.training)[0]) == 1
    undo.run()
    assert capture.current(loop.model) is None


def test_a_model_without_any_is_told(fused, gpu) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x.mean((2, 3)))

    found = fused.match(on_gpu(make_loop(model=Bare)).training, {})
    assert not found.applies
    assert found.reason == "the model has no BatchNorm2d, BatchNorm3d, batch_norm()"


def test_a_family_that_nothing_dispatches_does_not_match(fused, gpu, monkeypatch) -> None:
    monkeypatch.setattr(Family, "not_dispatched", lambda self: dispatch.UNMEASURED)
    found = fused.match(on_gpu(make_loop()).training, {})
    assert not found.applies
    assert found.reason == dispatch.UNMEASURED
    with dispatch.everything():
        assert fused.match(on_gpu(make_loop()).training, {}).applies


def test_without_a_gpu_it_does_not_match(fused) -> None:
    assert "GPU" in fused.match(make_loop().training, {}).reason


def test_what_launches_kernels_is_compiled_ahead_of_the_steps_and_said(fused, monkeypatch, capsys) -> None:
    compiled: list[bool] = []
    monkeypatch.setattr(kernels.native, "pending", lambda: not compiled)
    monkeypatch.setattr(kernels.native, "module", lambda: compiled.append(True))
    for _ in range(2):
        fused.apply(make_loop().training, {}).run()
    assert compiled == [True]
    assert capsys.readouterr().err == "[advisor] compiling what launches the kernels: half a minute, once\n"


def test_undo_is_exact(fused) -> None:
    loop, twin = twins()
    check_undo_is_exact(fused, loop, twin)


def test_families_and_inductor_share_one_layer() -> None:
    model = make_loop().model
    first = capture.set_family([model], "batchnorm_act")
    second = capture.set_family([model], "pooling")
    mode = capture.set_mode([model], "default")
    layer = capture.current(model)
    assert (layer.families, layer.mode) == ({"batchnorm_act", "pooling"}, "default")
    assert set(layer.reports) == layer.families
    first.run()
    assert (capture.current(model).families, capture.current(model).mode) == ({"pooling"}, "default")
    mode.run()
    second.run()
    assert capture.current(model) is None
    again = capture.set_family([model], "batchnorm_act")
    assert capture.current(model) is not layer
    again.run()


def test_effect_says_what_was_replaced_and_what_ran(fused, profile) -> None:
    loop = make_loop()
    assert fused.effect(loop.training, None, None).passed is False
    fused.apply(loop.training, {})
    loop.run(1)
    found = fused.effect(loop.training, None, None)
    assert found.passed is False  # on a CPU the kernels fall back
    assert "2 places replaced; the kernels ran 0 times" in found.detail
    assert "not on a CUDA device" in found.detail
    assert fused.sites(loop.training) == (("bn1: bn+relu", "bn2: bn+relu"), ())
    row = KernelRow(name="batchnorm_act_apply", kind="norm", calls=4.0, time_us=1.0)
    found = fused.effect(loop.training, None, profile(row))
    assert found.passed
    assert found.numbers == {"matched": 2, "launches": 4.0}
    other = KernelRow(name="elementwise_kernel", kind="elementwise", calls=4.0, time_us=1.0)
    assert fused.effect(loop.training, None, profile(other)).passed is False


def _averaging_cumulatively(loop):
    for norm in (loop.model.bn1, loop.model.bn2):
        norm.momentum = None
    return loop


def test_a_cumulative_average_stays_in_one_graph(fused, monkeypatch) -> None:
    """PyTorch's own reads the counter on the host, in the middle of the model."""
    loop, twin = map(_averaging_cumulatively, twins())
    undo = fused.apply(loop.training, {})
    with monkeypatch.context() as reading:
        reading.setattr(torch.Tensor, "__float__", lambda _: pytest.fail("the host reads a value"))
        loop.run(3)
    twin.run(3)
    assert fused.sites(loop.training) == (("bn1: bn+relu", "bn2: bn+relu"), ())
    layer = capture.current(loop.model)
    assert layer is not None
    assert layer.graphs == 1
    for (name, mine), want in zip(loop.model.state_dict().items(), twin.model.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, want, msg=name)
    undo.run()
    assert "forward" not in vars(loop.model.bn1)


def test_undoing_a_cumulative_average_is_exact(fused) -> None:
    loop, twin = map(_averaging_cumulatively, twins())
    check_undo_is_exact(fused, loop, twin)


@pytest.mark.parametrize("change", ["eval", "untracked", "momentum", "subclass"])
def test_what_is_no_cumulative_average_runs_its_own_forward(change: str) -> None:
    class Own(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    norm = (Own if change == "subclass" else nn.BatchNorm2d)(8, momentum=None)
    if change == "eval":
        norm.eval()
    elif change == "untracked":
        norm.track_running_stats = False
    elif change == "momentum":
        norm.momentum = 0.1
    called = []
    catalog.get("batchnorm_act").module("forward").layer(called.append, norm)(torch.ones(2, 8, 1, 1))
    assert len(called) == 1


def test_a_rewrite_runs_in_the_catalogs_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from advisor.ops import dynamo, match

    order: list[str] = []
    families = [Family(id=name, replaces="", transform=name, modules=()) for name in ("b", "a")]
    monkeypatch.setattr(catalog, "FAMILIES", tuple(families))
    monkeypatch.setattr(Family, "rewrite", property(lambda self: lambda *_, **__: order.append(self.id)))
    monkeypatch.setattr(Family, "finish", None)
    reports = {name: match.MatchReport() for name in ("a", "b")}
    torch.compile(lambda x: x + 1, backend=dynamo.backend(reports, mode=None))(torch.ones(2))
    assert order == ["b", "a"]
    assert [report.graphs for report in reports.values()] == [1, 1]
