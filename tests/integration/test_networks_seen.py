"""What the bundled kernels find in a library's network, the rules' metrics see in its profile: else nothing recommends them.

Which families a network's capture finds stands in docs/networks. Its shares of time are a CPU's here: only whether they are above zero is asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pipelines
import pytest

from advisor.analysis import metrics
from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.profile import StepProfile

FOUND = Path(__file__).parents[2] / "docs" / "networks"
SEEN_BY = {
    "batchnorm_act": ("bn_act_count",),
    "depthwise": ("depthwise_frac",),
    "grouped": ("grouped_conv_frac",),
    "squeeze_excite": ("se_frac",),
    "pooling": ("pool_frac", "reduce_frac"),
    "layer_norm": ("layernorm_frac",),
    "group_norm": ("groupnorm_frac",),
    "bias_add": ("bias_frac",),
    "bias_act": ("bias_act_frac", "unnormed_elementwise_frac"),
    "first_conv": ("first_conv_frac",),
    "conv3x3": ("narrow_3x3_frac",),
    "winograd": ("wide_3x3_frac",),
    "pointwise": ("pointwise_bn_frac",),
    "strided_pointwise": ("strided_1x1_frac",),
    "batchnorm_concat": ("concat_frac",),
    "batchnorm_max_pool": ("pool_frac",),
}
SCRIPT = """
import sys
import pipelines
import torch
library, name = sys.argv[1:]
if library == "timm":
    model = pipelines.package("timm").create_model(name, num_classes=10)
else:
    model = getattr(pipelines.package("torchvision.models"), name)(num_classes=10)
optimizer = torch.optim.SGD(model.parameters(), 0.001)
x, y = torch.randn(2, 3, 64, 64), torch.randint(0, 10, (2,))
while True:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("timm", "efficientnet_b0"),  # norms that hold their activations
        ("timm", "regnety_032"),
        ("timm", "ghostnet_100"),
        ("timm", "poolformer_s12"),
        ("torchvision", "convnext_tiny"),
        ("torchvision", "densenet121"),
        ("torchvision", "mobilenet_v3_large"),
    ],
)
def test_what_kernels_find_the_rules_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, name: str
) -> None:
    pipelines.package(library)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    run = tmp_path / "run"
    words = ["--warmup", "4", "--steps", "3", "--detail-steps", "1", "-o", str(run), str(script), library, name]
    monkeypatch.setenv("PYTHONPATH", str(Path(pipelines.__file__).parent), prepend=os.pathsep)
    subprocess.run([sys.executable, "-m", "advisor", "profile", *words], check=True, capture_output=True)
    profile = storage.load(run / "profile.json", StepProfile)
    # Shares of time are asked for on a GPU alone.
    table = metrics(replace(profile, environment=Environment(device="cuda", gpu_name="a GPU", gpu_count=1, sm_arch=90)))
    networks = json.loads((FOUND / f"{library}.json").read_text(encoding="utf-8"))["networks"]
    unseen = [
        family for family in networks[name]["found"] if not any(table.number(metric) for metric in SEEN_BY[family])
    ]
    assert networks[name]["found"]
    assert not unseen
