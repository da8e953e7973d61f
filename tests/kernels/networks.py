"""The networks that docs/networks.md tells of: which, how they are made, and the batch they are given."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pipelines
import pytest
import torch
from torch import nn

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
CLASSIFIED = (64, 3, 224, 224)
LARGER = (64, 3, 299, 299)  # what Inception and Xception were written for
SEGMENTED = (16, 3, 256, 256)
VOLUME = (2, 1, 96, 96, 96)


@dataclass(frozen=True, slots=True)
class Network:
    """One row of the page.

    Attributes:
        name: of the row.
        make: makes it.
        shape: of the batch.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = CLASSIFIED

    def build(self) -> nn.Module:
        """The network in training mode, without memory: nothing is initialised."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with torch.device("meta"):
                    return self.make().train()
            except NotImplementedError:  # it reads a value while it is made
                return self.make().train()


@dataclass(frozen=True, slots=True)
class Library:
    """One table of the page.

    Attributes:
        id: its record's file name.
        title: of the section.
        packages: by the names they are installed by: their versions are the page's to tell.
        module: what is imported of it; empty for the examples of this repository.
        names: of its networks.
        network: by name.
    """

    id: str
    title: str
    packages: tuple[str, ...]
    module: str
    names: tuple[str, ...]
    network: Callable[[str], Network]

    @property
    def networks(self) -> list[Network]:
        return [self.network(name) for name in self.names]

    def missing(self) -> str:
        """Why its networks cannot be made here; empty when they can."""
        try:
            _package(self.module)
        except pytest.skip.Exception as why:
            return str(why.msg)
        return ""

    def versions(self) -> dict[str, str]:
        """Of torch and of its packages, as installed."""
        return {"torch": torch.__version__} | {package: metadata.version(package) for package in self.packages}


def _package(name: str) -> ModuleType | None:
    return pipelines.package(name) if name else None


# name of the row → the network, and a batch of its own
_BATCHES = {"resnet50 (256 images)": ("resnet50", (256, *CLASSIFIED[1:])), "inception_v3": ("inception_v3", LARGER)}


def _torchvision(name: str) -> Network:
    zoo = pipelines.package("torchvision.models")
    kind, shape = _BATCHES.get(name, (name, CLASSIFIED))
    return Network(name, getattr(zoo, kind), shape)


_TIMM_LARGER = ("inception_v3", "inception_v4", "legacy_xception", "xception41")


def _timm(name: str) -> Network:
    zoo = pipelines.package("timm")
    return Network(name, partial(zoo.create_model, name), LARGER if name in _TIMM_LARGER else CLASSIFIED)


def _segmentation(name: str) -> Network:
    zoo = pipelines.package("segmentation_models_pytorch")
    return Network(name, partial(getattr(zoo, name), "resnet34", encoder_weights=None), SEGMENTED)


_MEDICAL: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "AttentionUnet": ("AttentionUnet", {"out_channels": 2, "channels": (32, 64, 128), "strides": (2, 2)}, SEGMENTED),
    "BasicUNet": ("BasicUNet", {"out_channels": 2}, SEGMENTED),
    "DenseNet121_2D": ("DenseNet121", {"out_channels": 10}, CLASSIFIED),
    "SegResNet2D": ("SegResNet", {"out_channels": 2}, SEGMENTED),
    "UNet2D": (
        "UNet",
        {"out_channels": 2, "channels": (32, 64, 128, 256), "strides": (2, 2, 2), "num_res_units": 2},
        SEGMENTED,
    ),
    "UNet3D": (
        "UNet",
        {"out_channels": 2, "channels": (16, 32, 64), "strides": (2, 2), "num_res_units": 2},
        VOLUME,
    ),
}


def _medical(name: str) -> Network:
    zoo = pipelines.package("monai.networks.nets")
    kind, given, shape = _MEDICAL[name]
    sizes = {"spatial_dims": len(shape) - 2, "in_channels": shape[1]}
    return Network(name, partial(getattr(zoo, kind), **sizes, **given), shape)


# script → what makes the network, its arguments, and the batch, as the script's own defaults have them
_SCRIPTS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "cifar.py's ResNet-18": ("ResNet18", (), (128, 3, 32, 32)),
    "gan.py's discriminator": ("Discriminator", (64, 64), (128, 3, 64, 64)),
    "unet.py's UNet": ("UNet", (), (32, 3, 256, 256)),
}


def _example(name: str) -> Network:
    kind, given, shape = _SCRIPTS[name]
    script = EXAMPLES / name.partition("'")[0]
    spec = importlib.util.spec_from_file_location(f"example_{script.stem}", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Network(name, partial(getattr(module, kind), *given), shape)


LIBRARIES = (
    Library(
        "torchvision",
        "torchvision",
        ("torchvision",),
        "torchvision.models",
        (
            "alexnet",
            "convnext_base",
            "convnext_tiny",
            "densenet121",
            "densenet201",
            "efficientnet_b0",
            "efficientnet_b3",
            "efficientnet_v2_s",
            "googlenet",
            "inception_v3",
            "mnasnet1_0",
            "mobilenet_v2",
            "mobilenet_v3_large",
            "mobilenet_v3_small",
            "regnet_x_3_2gf",
            "regnet_y_3_2gf",
            "regnet_y_400mf",
            "resnet101",
            "resnet18",
            "resnet50",
            "resnet50 (256 images)",
            "resnext50_32x4d",
            "shufflenet_v2_x1_0",
            "squeezenet1_1",
            "vgg11",
            "vgg16",
            "vgg16_bn",
            "wide_resnet50_2",
        ),
        _torchvision,
    ),
    Library(
        "timm",
        "timm",
        ("timm",),
        "timm",
        (
            "convnext_tiny",
            "convnextv2_tiny",
            "cspdarknet53",
            "cspresnet50",
            "darknet53",
            "densenet121",
            "densenetblur121d",
            "dla34",
            "dm_nfnet_f0",
            "dpn68",
            "ecaresnet50t",
            "edgenext_small",
            "efficientnet_b0",
            "efficientnet_lite0",
            "ese_vovnet19b_dw",
            "fastvit_t8",
            "gernet_s",
            "ghostnet_100",
            "hardcorenas_a",
            "hrnet_w18_small",
            "inception_next_tiny",
            "inception_v3",
            "inception_v4",
            "lcnet_100",
            "legacy_xception",
            "mnasnet_100",
            "mobilenetv2_100",
            "mobilenetv3_large_100",
            "mobilenetv4_conv_small",
            "mobileone_s0",
            "nf_resnet50",
            "poolformer_s12",
            "regnetx_032",
            "regnety_032",
            "repvgg_a2",
            "res2net50_26w_4s",
            "resnest14d",
            "resnet50",
            "resnet50d",
            "resnetv2_50",
            "resnetv2_50x1_bit",
            "resnext50_32x4d",
            "rexnet_100",
            "selecsls42b",
            "senet154",
            "seresnet50",
            "skresnet18",
            "tf_efficientnet_b0",
            "tf_efficientnetv2_s",
            "vgg16_bn",
            "vovnet39a",
            "xception41",
        ),
        _timm,
    ),
    Library(
        "segmentation-models-pytorch",
        "segmentation-models-pytorch, encoder resnet34",
        ("segmentation-models-pytorch",),
        "segmentation_models_pytorch",
        ("DeepLabV3Plus", "FPN", "Linknet", "MAnet", "PSPNet", "Unet", "UnetPlusPlus"),
        _segmentation,
    ),
    Library("monai", "MONAI", ("monai",), "monai.networks.nets", tuple(_MEDICAL), _medical),
    Library("examples", "This repository's examples", (), "", tuple(_SCRIPTS), _example),
)
