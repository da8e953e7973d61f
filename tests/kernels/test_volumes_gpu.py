"""On a GPU: networks of volumes and signals, and generators with padding, run the kernels in channels_last and train as in plain fp32."""

from __future__ import annotations

import copy

import pytest
import torch
from test_dimensions import Diffusing, Half, Signals, Volumes
from test_padding import Generator
from torch import nn

from advisor.loop.training import RootModule, Training
from advisor.ops import catalog, dispatch, nvrtc
from advisor.transforms import registry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(reason := nvrtc.unavailable()), reason=reason or "")]

# The net, the input's shape, and the families whose kernels must run.
NETS = {
    "volumes": (Volumes, (2, 1, 16, 24, 24), {"batchnorm_act", "group_norm", "bias_act", "volume_pooling"}),
    "signals": (Signals, (4, 4, 256), {"batchnorm_act"}),
    "padding": (Generator, (2, 8, 32, 32), {"padding"}),
    "norms between casts": (Diffusing, (2, 3, 32, 32), {"group_norm"}),
}


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = model(x)
    y.float().square().mean().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", NETS)
def test_the_kernels_run_and_a_step_is_as_in_plain_fp32(name: str) -> None:
    make, shape, families = NETS[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().cuda().train()
    # A net that casts to fp32 itself has no fp64: its reference is fp32 without TF32.
    exact = torch.float32 if make is Diffusing else torch.float64
    plain, reference = copy.deepcopy(model), copy.deepcopy(model).to(exact)
    x = torch.randn(shape, device="cuda")
    training = Training(device=torch.device("cuda"), roots=[RootModule(module=model, name="Net", args=(x,))])
    undo = [registry.get("channels_last").apply(training, {})]
    with dispatch.everything():
        undo += [registry.get(catalog.get(family).transform).apply(training, {}) for family in sorted(families)]
        dispatch.clear()
        got = step(model, x)
    assert {family for family in families if not catalog.get(family).engaged} == set()
    assert {family: dict(catalog.get(family).fell_back) for family in families} == {family: {} for family in families}
    for change in reversed(undo):
        change.run()
    theirs = step(plain, x)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        wanted = step(reference, x.to(exact))
    for mine, plainly, want in zip(got, theirs, wanted, strict=True):
        error, usual = ((one.double() - want.double()).norm() / want.norm().clamp_min(1e-6) for one in (mine, plainly))
        assert error < 2e-2 + 2 * usual, (name, float(error), float(usual))  # convolutions in TF32


def test_norms_that_are_half_run_the_kernels() -> None:
    torch._dynamo.reset()
    model = Half().cuda().half().to(memory_format=torch.channels_last).train()
    x = torch.randn(8, 3, 32, 32, device="cuda").half().to(memory_format=torch.channels_last)
    training = Training(device=torch.device("cuda"), roots=[RootModule(module=model, name="Net", args=(x,))])
    undo = registry.get("fused_bn_act").apply(training, {})
    with dispatch.everything():
        dispatch.clear()
        step(model, x)
    assert sum(catalog.get("batchnorm_act").engaged.values()) == 2
    assert not catalog.get("batchnorm_act").fell_back
    assert model.bn.running_mean.dtype == torch.float16
    assert bool(model.bn.running_mean.any())
    undo.run()
