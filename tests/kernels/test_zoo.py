"""Which sites of torchvision's and timm's networks the families' rewrites find. Captured on the meta device: nothing is computed.

The zoo's packages come with `make test`; without them these tests are skipped.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pipelines
import pytest
import torch
from torch import nn

from advisor.ops import catalog, dispatch, dynamo, match
from advisor.ops.batchnorm_act import api as batchnorm_act
from advisor.ops.conv3x3 import spec as conv3x3
from advisor.ops.convolution_support import Sizes
from advisor.ops.fft_conv import spec as fft_conv
from advisor.ops.first_conv import spec as first_conv
from advisor.ops.grouped import spec as grouped
from advisor.ops.large_depthwise import spec as large_depthwise
from advisor.ops.pointwise import spec as pointwise
from advisor.ops.strided_pointwise import spec as strided_pointwise
from advisor.ops.winograd import spec as winograd

TORCHVISION = (
    "resnet18",
    "resnext50_32x4d",
    "regnet_y_400mf",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "convnext_tiny",
    "densenet121",
    "vgg11",
    "vgg11_bn",
    "googlenet",
    "shufflenet_v2_x0_5",
)
TIMM = (
    "resnetv2_50",
    "regnety_002",
    "mobilenetv3_small_050",
    "convnext_atto",
)


def _count(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> int:
    return sum(wanted(module) for module in model.modules())


_SQUEEZE_EXCITE = {"SqueezeExcitation", "SqueezeExcite", "SEModule"}


def _norms(model: nn.Module) -> int:
    return _count(model, lambda m: isinstance(m, nn.BatchNorm2d))


def _stems(model: nn.Module) -> int:
    """Max-poolings right behind a norm and its activation."""
    everywhere = _count(model, lambda m: isinstance(m, nn.MaxPool2d)) if _norms(model) else 0
    return {"GoogLeNet": 2, "ResNetV2": 0}.get(type(model).__name__, everywhere)


def _pools(model: nn.Module) -> int:
    """Poolings that are no stem's and no squeeze-and-excite's: modules, and what forwards write as functions."""
    modules = _count(model, lambda m: isinstance(m, (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)))
    functions = {"DenseNet": 1, "MobileNetV2": 1, "ShuffleNetV2": 1}.get(type(model).__name__, 0)
    squeezes = _count(model, lambda m: type(m).__name__ == "SqueezeExcitation")
    return modules - _stems(model) + functions - squeezes


def _bias_act_sites(model: nn.Module) -> int:
    """Convolutions and Linear layers with a bias before an activation, unless max-pooling has both in it; ConvNeXt's blocks; MBConv
    blocks that drop paths."""
    modules = list(model.modules())
    sequences = [[*module, None] for module in modules if isinstance(module, nn.Sequential)]
    triples = [triple for sequence in sequences for triple in zip(sequence, sequence[1:], sequence[2:], strict=False)]
    plain = sum(
        isinstance(a, nn.Conv2d) and a.bias is not None and isinstance(b, nn.ReLU) and not isinstance(c, nn.MaxPool2d)
        for a, b, c in triples
    )
    names = [type(module).__name__ for module in modules]
    dropped = [m.stochastic_depth.p > 0 for m in modules if type(m).__name__ == "MBConv" and m.use_res_connect]
    # ConvNeXt's: a wide Linear layer, or convolution, before a GELU, and a scaled sum.
    return plain + 2 * names.count("CNBlock") + 2 * names.count("ConvNeXtBlock") + sum(dropped)


def _is_depthwise(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and 1 < module.groups == module.in_channels == module.out_channels


def _known_to(spec: Any, module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d):
        return False
    spaces = module.stride, module.padding, module.dilation
    sizes = Sizes((1, module.in_channels, 1, 1), tuple(module.weight.shape), *spaces, module.groups)
    return not spec.SUPPORTS.another(sizes)


def _sites_3x3(model: nn.Module, spec: Any) -> int:
    """A bias is taken off by the family of biases; one before a norm waits for the change that drops it (conv_bias)."""
    norms = _count(model, lambda module: isinstance(module, nn.BatchNorm2d))
    return _count(model, lambda module: _known_to(spec, module) and (module.bias is None or not norms))


def _sees_an_image(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and module.in_channels == 3


def _is_grouped(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and 1 < module.groups < module.in_channels == module.out_channels


def _pointwise_before_norms(model: nn.Module) -> int:
    """1 x 1 convolutions whose batch norm comes next, as modules are written down; of ResNetV2 those that widen go into a sum."""
    leaves = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AvgPool2d))]
    sums = type(model).__name__ == "ResNetV2"
    return sum(
        isinstance(norm, nn.BatchNorm2d)
        and isinstance(conv, nn.Conv2d)
        and not (sums and conv.out_channels > conv.in_channels)
        and conv.kernel_size == conv.stride == (1, 1)
        and conv.groups == 1
        and conv.bias is None
        and conv.in_channels <= pointwise.MAX_IN_CHANNELS
        for conv, norm in itertools.pairwise(leaves)
    )


# Networks with an activation behind each norm and the convolution behind that.
PRE_ACTIVATION = {"densenet121", "resnetv2_50"}
# Norms whose result a block and its shortcut take: the blocks' ends but the last, before which nothing else stands.
TWICE_USED = {
    "resnet18": 7,
    "resnext50_32x4d": 15,
    "regnet_y_400mf": 16,
    "mobilenet_v2": 10,
    "mobilenet_v3_small": 6,
    "efficientnet_b0": 5,  # blocks that drop paths end in no norm
    "densenet121": 0,
}


def _dense_layers(model: nn.Module) -> int:
    """Norms over a concatenation: the first of each layer, and the one behind each block."""
    names = [type(module).__name__ for module in model.modules()]
    return names.count("_DenseLayer") + names.count("_DenseBlock")


# family → how many sites of a model its rewrite must find
SITES: dict[str, Callable[[nn.Module], int]] = {
    "batchnorm_max_pool": _stems,
    "batchnorm_concat": _dense_layers,
    "batchnorm_act": lambda model: _norms(model) - _stems(model) - _dense_layers(model),
    "pooling": _pools,
    "volume_pooling": lambda model: 0,
    "upsample": lambda model: 0,
    "padding": lambda model: 0,
    "squeeze_excite": lambda model: _count(model, lambda m: type(m).__name__ in _SQUEEZE_EXCITE),
    "layer_norm": lambda model: _count(model, lambda m: isinstance(m, nn.LayerNorm)),
    "group_norm": lambda model: _count(model, lambda m: isinstance(m, nn.GroupNorm | nn.InstanceNorm2d)),
    "large_depthwise": lambda model: _count(model, lambda module: _known_to(large_depthwise, module)),
    "depthwise": lambda model: _count(model, _is_depthwise),
    "fft_conv": lambda model: _count(model, lambda module: _known_to(fft_conv, module)),
    "exact_conv": lambda model: 0,  # under autocast no convolution is computed in fp32
    "grouped": lambda model: _count(model, _is_grouped),
    "bias_act": _bias_act_sites,
    "first_conv": lambda model: _count(model, _sees_an_image),
    "few_channels": lambda model: 0,  # in half precision
    "prelu": lambda model: 0,
    "conv3x3": lambda model: _sites_3x3(model, conv3x3),
    "winograd": lambda model: _sites_3x3(model, winograd),
    "pointwise": _pointwise_before_norms,
    "strided_pointwise": lambda model: _count(model, lambda module: _known_to(strided_pointwise, module)),
}


# Counted in test_bias_add.py: here it would take the bias of every convolution, which others then take that want none.
ELSEWHERE = {"bias_add"}


def build(package: str, name: str) -> nn.Module:
    zoo = pipelines.package("timm") if package == "timm" else pipelines.package("torchvision.models")

    def make() -> nn.Module:
        model: nn.Module = zoo.create_model(name) if package == "timm" else getattr(zoo, name)()
        return model.to("meta").train()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.device("meta"):
                return make()
        except NotImplementedError:  # it reads a value while it is made
            return make()


@pytest.fixture(autouse=True)
def _kernels_wherever_they_could(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The sites are those of autocast, which meta tensors have none of.
    monkeypatch.setattr(catalog.get("exact_conv").module("rewrite"), "COMPUTED", "nothing")
    monkeypatch.setattr(first_conv, "COMPUTE", (*first_conv.COMPUTE, "float32"))
    for family in (grouped, conv3x3, pointwise, strided_pointwise):
        monkeypatch.setattr(family, "STORAGE", {**family.STORAGE, "float32": 0})
    monkeypatch.setattr(
        batchnorm_act.spec, "takes_moments", lambda nbytes, residual: ""
    )  # in batches of two nothing is large
    monkeypatch.setattr(winograd, "DTYPE", "float32")
    with dispatch.everything():
        yield


# 1 x 1 convolutions right behind norms, into at most 512 channels: of ResNeXt's blocks those that open them but the first, which
# stands behind a pooling, and the last stage's; and those that close them in the first two stages.
BEHIND_NORMS = {"resnext50_32x4d": 12 + 7}


@pytest.mark.parametrize("name", BEHIND_NORMS)
def test_convolutions_behind_norms_are_found(name: str) -> None:
    model = build("torchvision", name)
    reports = {name: match.MatchReport() for name in ("batchnorm_concat", "batchnorm_act", "pointwise")}
    captured = torch.compile(model.forward, backend=dynamo.backend(reports, mode=None), dynamic=False)
    captured(torch.randn(2, 3, 224, 224, device="meta"))
    found = [what for what in reports["pointwise"].matched.values() if "bn" in what]
    assert len(found) == BEHIND_NORMS[name], found


# Those whose blocks are other networks' too, in another order or size, or have tests of their own.
LONG = {
    *("densenet121", "convnext_tiny", "shufflenet_v2_x0_5"),
    *("resnet18", "mobilenet_v2", "vgg11_bn", "googlenet", "regnety_002", "convnext_atto"),
    *("efficientnet_b0", "mobilenetv3_small_050", "resnetv2_50", "regnet_y_400mf"),
}


@pytest.mark.parametrize(
    ("package", "name"),
    [
        pytest.param(package, name, marks=[pytest.mark.long] if name in LONG else [])
        for package, names in (("torchvision", TORCHVISION), ("timm", TIMM))
        for name in names
    ],
)
def test_every_site_is_found(monkeypatch: pytest.MonkeyPatch, package: str, name: str) -> None:
    monkeypatch.setattr(pointwise, "unsupported_gradient", lambda **call: "counted by itself")
    catalog.get("pointwise").module("rewrite")  # imported later it would know the function that follows for good
    model = build(package, name)
    calls: list[object] = []
    forked = batchnorm_act.forked_batchnorm_act
    monkeypatch.setattr(
        batchnorm_act, "forked_batchnorm_act", lambda *given, **named: calls.append(given) or forked(*given, **named)
    )
    reports = {family: match.MatchReport() for family in SITES}
    captured = torch.compile(model.forward, backend=dynamo.backend(reports, mode=None), dynamic=False)
    captured(torch.randn(2, 3, 224, 224, device="meta"))
    for family, report in reports.items():
        assert report.graphs == 1, "the model was not captured whole"
        assert len(report.matched) == SITES[family](model), (family, report.matched, report.unmatched)
    if name in PRE_ACTIVATION:
        assert set(reports["batchnorm_act"].matched.values()) == {"bn+relu"}
    if package == "torchvision" and name in TWICE_USED:
        assert len(calls) == TWICE_USED[name]


def test_every_family_says_how_many_sites_it_expects() -> None:
    assert set(SITES) | ELSEWHERE == {family.id for family in catalog.FAMILIES if family.captured}
