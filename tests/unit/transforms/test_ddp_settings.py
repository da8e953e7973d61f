"""DDP's settings, of the DistributedDataParallel that `--gpus N` has put around a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from advisor.distributed.gradients import Gradients
from advisor.distributed.shards import Loaders
from advisor.loop.patches import Patches
from advisor.loop.training import RootModule, Training
from advisor.transforms import registry
from advisor.transforms.forward import REPLICATED, ForwardStack

pytestmark = pytest.mark.usefixtures("process_group")


def stepped(net: nn.Module, optimizer: torch.optim.Optimizer, passes: int = 1) -> None:
    optimizer.zero_grad()
    for at in range(passes):
        net(torch.full((4, 3), 1.0 + at)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # bf16 goes over NCCL alone
        ("ddp_bucket_views", {}),
        ("ddp_buckets", {"mb": "10"}),
        ("ddp_static_graph", {}),
        pytest.param(
            "ddp_bf16_gradients", {}, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL's")
        ),
        ("ddp_fp16_gradients", {}),
        ("ddp_no_sync", {"passes": "2"}),
    ],
)
def test_a_setting_is_on_in_training_that_goes_on_and_taken_back(name: str, parameters: dict[str, str]) -> None:
    patches, loaders = Patches(), Loaders(0, 1)
    loaders.divided, loaders.share = True, 1.0
    Gradients(loaders).install(patches)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    training = Training(device=torch.device("cpu"), roots=[RootModule(module=net, name="Net")])
    transform = registry.get(name)
    try:
        assert not transform.match(training, parameters).applies
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, twin)]
        stepped(net, optimizers[0], 2)
        layer = ForwardStack.of(net).get(REPLICATED)
        before = dict(layer.settings)
        assert transform.match(training, parameters).applies
        undo = transform.apply(training, parameters)
        for _ in range(2):
            stepped(net, optimizers[0], 2)
        assert transform.effect(training, None, None).passed
        undo.run()
        assert layer.settings == before
        stepped(net, optimizers[0], 2)
    finally:
        patches.restore_all()
    for _ in range(4):
        stepped(twin, optimizers[1], 2)
    tolerance = 2e-2 if "16" in name else 1e-6
    for ours, plain in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)
