"""Tiny training loops with a Training object filled by hand, for tests of transforms."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from advisor.loop.training import RootModule, Training

BATCH, CHANNELS, SIZE, CLASSES = 4, 3, 8, 5


class ConvNet(nn.Module):
    """Convolutions with and without bias before batch norm, a depthwise one, a pooled head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 2 * width, 1, bias=False)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.head(self.conv3(x).mean((2, 3)))


class Around(nn.Module):
    """Holds what it calls, as a module with the loss in it does."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.held(x)


class ViewNet(nn.Module):
    """Flattens with `view`, which channels_last feature maps refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, 6, 3, padding=1)
        self.head = nn.Linear(6 * SIZE * SIZE, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.conv(x)).view(-1, 6 * SIZE * SIZE))


@dataclass(slots=True)
class Loop:
    """A model in training, its optimizer, and the Training object that hooks would have filled."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    training: Training
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]]
    zero_to_none: bool = True

    def step(self) -> torch.Tensor:
        x, y = next(self.batches)
        self.optimizer.zero_grad(set_to_none=self.zero_to_none)
        output = self.model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        root = self.training.roots[0]
        root.args, root.output = (x,), output
        self.optimizer.step()
        return loss.detach()

    def run(self, steps: int) -> list[float]:
        return [self.step().item() for _ in range(steps)]


def batches(device: torch.device, seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(BATCH, CHANNELS, SIZE, SIZE, generator=generator)
        y = torch.randint(CLASSES, (BATCH,), generator=generator)
        yield x.to(device), y.to(device)


def make_loop(
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    model: Callable[[], nn.Module] = ConvNet,
    device: str = "cpu",
    steps: int = 2,
    zero_to_none: bool = True,
    **options: Any,
) -> Loop:
    """A seeded loop that has already made `steps` steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = model().to(device)
    settings = (
        {"lr": 0.01} | ({"momentum": 0.9, "weight_decay": 1e-2} if optimizer is torch.optim.SGD else {}) | options
    )
    optim = optimizer(net.parameters(), **settings)
    root = RootModule(module=net, name=type(net).__name__)
    training = Training(device=torch.device(device), roots=[root], optimizers=[optim], batch_size=BATCH)
    loop = Loop(net, optim, training, batches(torch.device(device)), zero_to_none)
    loop.run(steps)
    return loop


def values(loop: Loop) -> dict[str, torch.Tensor]:
    """Parameters, buffers and optimizer state by name: copies."""
    state = {name: tensor.detach().clone() for name, tensor in loop.model.state_dict().items()}
    for index, entry in loop.optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                state[f"optimizer.{index}.{key}"] = value.detach().clone()
    return state


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """Close values, but for a convolution bias before batch norm: its gradient is rounding noise, which Adam makes large."""
    assert left.keys() == right.keys()
    noise = ("conv1.bias", "conv2.bias", "running_mean", "optimizer.1.", "optimizer.5.")
    for name in (name for name in left if not any(part in name for part in noise)):
        torch.testing.assert_close(
            left[name], right[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def set_values(loop: Loop, state: dict[str, torch.Tensor]) -> None:
    """Copy the values of another loop into this one, in place."""
    with torch.no_grad():
        for name, tensor in loop.model.state_dict().items():
            tensor.copy_(state[name])
        for index, entry in loop.optimizer.state_dict()["state"].items():
            for key, value in entry.items():
                if isinstance(value, torch.Tensor):
                    value.copy_(state[f"optimizer.{index}.{key}"])


def fingerprint(loop: Loop) -> tuple[str, ...]:
    """Everything but the values that a transform may have left behind: flags, forwards, strides, hooks, patches."""
    gc.collect()  # a model of an earlier test takes what it had patched along, whenever it goes
    facts: list[Any] = []
    for name, module in loop.model.named_modules():
        facts.append((name, type(module).__name__, sorted(module.__dict__), module.training))
        facts += [(name, key, len(value)) for key, value in module.__dict__.items() if key.endswith("hooks")]
    for name, tensor in [*loop.model.named_parameters(), *loop.model.named_buffers()]:
        facts.append((name, id(tensor), tensor.stride(), tensor.dtype, tensor.requires_grad, str(tensor.device)))
        facts.append(None if tensor.grad is None else (tensor.grad.stride(), tensor.grad.dtype))
        facts.append(len(tensor._backward_hooks or ()))
    for group in loop.optimizer.param_groups:
        facts.append({key: value for key, value in group.items() if key != "params"})
    facts.append(loop.optimizer.defaults)
    facts += [(key, len(value)) for key, value in vars(loop.optimizer).items() if key.endswith("hooks")]
    facts.append(sorted(vars(loop.optimizer)))
    for parameter, entry in loop.optimizer.state.items():
        facts += [
            (id(parameter), key, value.stride(), str(value.device), value.dtype)
            for key, value in entry.items()
            if isinstance(value, torch.Tensor)
        ]
    facts += [torch.Tensor.view, torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.item, "view" in vars(torch.Tensor)]
    facts += [torch.autograd.backward, torch.optim.Optimizer.zero_grad, nn.Module.zero_grad]
    facts += [torch.utils.data.DataLoader.__iter__, torch.utils.data.DataLoader.__init__]
    facts += [torch.backends.cudnn.benchmark, nn.Module._replicate_for_data_parallel]
    return tuple(map(repr, facts))


def sharded_net() -> nn.Module:
    """As FSDP2 has it, over a process group of one."""
    return fully_shard(ConvNet(), mesh=init_device_mesh("cpu", (1,)))


def twins(**options: Any) -> tuple[Loop, Loop]:
    """Two loops in the same state."""
    return make_loop(**options), make_loop(**options)


def check_undo_is_exact(transform: Any, loop: Loop, twin: Loop, parameters: dict[str, str] | None = None) -> None:
    """Apply, train, undo: nothing is left behind, and from equal values the next steps are bit-equal to the plain twin's."""
    before = fingerprint(loop)
    undo = transform.apply(loop.training, parameters or {})
    loop.run(2)
    undo.run()
    undo.run()
    assert fingerprint(loop) == before
    set_values(twin, values(loop))
    loop.batches, twin.batches = batches(loop.training.device, 5), batches(loop.training.device, 5)
    assert loop.run(2) == twin.run(2)
    assert_equal(values(loop), values(twin))
