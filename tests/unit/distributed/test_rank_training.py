"""Norms, readings and gradients of a rank, in a group of one process; of several: tests/integration/test_several_ranks.py."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from advisor.distributed import gradients as gradients_module
from advisor.distributed import joining, norms, place, shards, shared_weights, stages
from advisor.distributed.gradients import Gradients
from advisor.distributed.readings import Readings
from advisor.distributed.refused import Refused
from advisor.distributed.shards import Loaders
from advisor.loop.patches import Patches
from advisor.ops.batchnorm_act import rewrite
from advisor.transforms import targets

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def patches() -> Iterator[Patches]:
    found = Patches()
    yield found
    found.restore_all()


@pytest.mark.parametrize("affine", [True, False])
def test_a_synchronised_norm_of_one_rank_is_pytorchs(patches: Patches, affine: bool) -> None:
    x, dy = torch.randn(4, 3, 5, 5, dtype=torch.float64), torch.randn(4, 3, 5, 5, dtype=torch.float64)
    found = []
    for synchronised in (False, True):
        if synchronised:
            norms.install(patches)
        norm, given = nn.BatchNorm2d(3, affine=affine).double(), x.clone().requires_grad_()
        norm(given).backward(dy)
        found.append([given.grad, norm.running_mean, norm.running_var, *(p.grad for p in norm.parameters())])
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain)


def test_a_norm_that_does_not_train_is_left_alone(patches: Patches) -> None:
    norms.install(patches)
    norm = nn.BatchNorm2d(3).eval()
    assert (
        norm(torch.ones(1, 3, 1, 1)).grad_fn is None
        or "BatchNorm" in type(norm(torch.ones(1, 3, 1, 1)).grad_fn).__name__
    )


def test_a_number_of_a_divided_batch_is_the_sum_of_weighted_ones(patches: Patches) -> None:
    loaders = Loaders(0, 2)
    inside = [False]
    Readings(loaders, lambda: inside[0]).install(patches)
    loss = torch.tensor(3.0)
    assert loss.item() == 3.0  # before the first batch
    loaders.divided, loaders.share = True, 0.25
    # In a group of one, what this rank weighs is all there is.
    assert (loss.item(), float(loss), loss.tolist(), f"{loss:.2f}") == (0.75, 0.75, 0.75, "0.75")
    assert torch.tensor(3).item() == 3
    inside[0] = True
    assert loss.item() == 3.0
    inside[0], loaders.divided = False, False
    assert loss.item() == 3.0


def _training(patches: Patches) -> tuple[Loaders, Gradients]:
    loaders = Loaders(0, 1)
    loaders.divided, loaders.share = True, 1.0
    gradients = Gradients(loaders)
    gradients.install(patches)
    return loaders, gradients


def test_the_model_that_an_optimizer_trains_gets_a_wrapper_and_stays_itself(patches: Patches) -> None:
    _, gradients = _training(patches)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    names = list(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
    assert gradients.wrapped == [net]
    assert len(targets.data_parallel(net)) == len(targets.data_parallel(net[0])) == 1  # which no CUDA graph may pass by
    assert type(net) is nn.Sequential
    assert list(net.state_dict()) == names


def test_a_loss_of_an_uneven_part_is_weighted(patches: Patches) -> None:
    loaders, _ = _training(patches)
    weight = torch.ones(1, requires_grad=True)
    loaders.share = 0.25
    (2 * weight).sum().backward()
    assert weight.grad.item() == 0.5


def test_several_models_that_an_optimizer_trains_are_refused(
    patches: Patches, capsys: pytest.CaptureFixture[str]
) -> None:
    _, gradients = _training(patches)
    one, other = nn.Linear(3, 3), nn.Linear(3, 1)
    other(one(torch.randn(4, 3))).mean().backward()
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(Refused):
        optimizer.step()
    assert re.search(r"test_rank_training.py:\d+: several models", capsys.readouterr().err)
    assert not gradients.wrapped


def test_batches_of_no_loader_are_refused(patches: Patches, capsys: pytest.CaptureFixture[str]) -> None:
    loaders, _ = _training(patches)
    loaders.divided = None
    loss = nn.Linear(3, 1)(torch.randn(4, 3)).mean()
    with pytest.raises(Refused):
        loss.backward()
    assert re.search(r"test_rank_training.py:\d+: .*not loaded by a DataLoader", capsys.readouterr().err)


def test_state_that_each_rank_keeps_of_its_part_is_refused(
    patches: Patches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _training(patches)
    net = nn.Linear(3, 3)
    net.register_buffer("queue", torch.ones(2))
    monkeypatch.setattr(gradients_module, "differing", lambda values, tolerance: 0 if tolerance else None)
    net(torch.randn(4, 3)).mean().backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(Refused):
        optimizer.step()
    assert "the buffer queue" in capsys.readouterr().err


def test_losses_of_uneven_parts_count_by_their_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joining.mean([2.0, 3.0], [1.0, 1.0]) == [2.0, 3.0]
    monkeypatch.setenv(place.RANKS_VARIABLE, "2")
    assert joining.mean([2.0, 4.0], [0.25, 0.5]) == [0.5, 2.0]  # in a group of one, what this rank adds


def test_kernels_that_know_one_ranks_samples_leave_synchronised_norms_alone(patches: Patches) -> None:
    """Captured graphs hold what stands in `F.batch_norm`'s place: a kernel there would take a part's statistics for the whole's."""

    def told() -> object:
        graph = fx.Graph()
        x, mean, variance = (graph.placeholder(name) for name in ("x", "mean", "variance"))
        return rewrite.batch_norm(graph.call_function(F.batch_norm, (x, mean, variance), {"training": True}))

    because = "its statistics are those of all ranks"
    assert told() != because
    norms.install(patches)
    assert told() == because


def test_a_step_with_a_closure_has_no_share(patches: Patches, capsys: pytest.CaptureFixture[str]) -> None:
    loaders = Loaders(0, 1)
    loaders.divided, loaders.share = True, 1.0
    Gradients(loaders, shard=place.ZERO1).install(patches)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(4, 3)).sum().backward()
    with pytest.raises(Refused):
        optimizer.step(lambda: 0.0)
    assert re.search(r"test_rank_training.py:\d+: .*closure", capsys.readouterr().err)


def test_blocks_to_be_gathered_are_called_and_hold_no_weight_of_others() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
            self.head = nn.Linear(32, 4)

    net = Net()
    assert shared_weights.blocks(net) == [*net.blocks, net.head]  # the stem is too small: the root's
    net.blocks[1].weight = net.blocks[0].weight
    assert shared_weights.blocks(net) == []


def test_a_synchronised_norm_on_a_gpu_does_not_look_for_ranks_without_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would wait for the GPU in each norm's forward. PyTorch has no such norm for a CPU: what it asks is planted."""
    asked: list[tuple[bool, bool]] = []

    def forward(ctx: Any, *args: Any) -> Any:
        with ThreadPoolExecutor(1) as other:
            asked.append((torch.cuda.is_current_stream_capturing(), other.submit(plain).result()))
            assert other.submit(lambda: torch.cuda.is_current_stream_capturing()).result() is False
        raise ValueError("no GPU")

    plain = lambda: False  # noqa: E731  # stands for torch's function
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", plain)
    monkeypatch.setattr(norms.SyncBatchNorm, "forward", staticmethod(forward))
    with pytest.raises(ValueError, match="no GPU"):
        norms.WithoutWaits.forward(None)
    assert asked == [(True, False)]
    assert torch.cuda.is_current_stream_capturing is plain


def test_torchs_own_norm_asks_what_is_answered() -> None:
    """Should PyTorch mask otherwise one day, the answer above is of no use."""
    assert "if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):" in inspect.getsource(
        norms.SyncBatchNorm.forward
    ) or "if not torch.cuda.is_current_stream_capturing():" in inspect.getsource(norms.SyncBatchNorm.forward)


def test_a_models_calls_are_seen_and_traced_through(patches: Patches) -> None:
    _, gradients = _training(patches)
    inside: list[bool] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling():
                inside.append(gradients.inside_model)
            return self.layer(x)

    net = Net()
    net(torch.ones(2, 3))
    assert (inside, gradients.inside_model) == ([True], False)
    assert list(gradients._called.values()) == [net]
    net.layer.forward = lambda x: 1 / 0  # type: ignore[assignment,return-value]  # a fault of the script's
    with pytest.raises(ZeroDivisionError):
        net(torch.ones(2, 3))
    assert not gradients.inside_model
    torch.compile(Net(), backend="eager", fullgraph=True)(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("does", "because"),
    [
        (lambda: torch.distributed.init_process_group("gloo"), "a process group of its own"),
        (lambda: nn.DataParallel(nn.Linear(2, 2), dim=1), "dimension 1 of its inputs"),
    ],
)
def test_a_script_that_trains_in_several_by_itself_is_refused_with_its_line(
    patches: Patches,
    capsys: pytest.CaptureFixture[str],
    does: Callable[[], object],
    because: str,
) -> None:
    joining.refuse_others(patches)
    with pytest.raises(Refused):
        does()
    assert re.search(rf"test_rank_training.py:\d+: .*{because}", capsys.readouterr().err)


def test_data_parallel_over_several_gpus_is_of_the_ranks_own(patches: Patches) -> None:
    """Whatever GPUs the script names, a rank sees one; and what is inside trains by what stands around the wrapper."""
    joining.refuse_others(patches)
    _, gradients = _training(patches)
    model = nn.DataParallel(nn.Linear(3, 2), device_ids=[0, 1, 2], output_device=2)
    assert len(model.device_ids) == torch.cuda.device_count()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert gradients.wrapped == [model]
    assert targets.data_parallel(model.module)


def test_ranks_that_have_drawn_another_split_are_refused(
    patches: Patches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda found, *_: found.add_(torch.tensor([1, 0])))
    with pytest.raises(Refused):
        shards.agree(7, "an epoch")
    assert re.search(r"test_rank_training.py:\d+: ranks have drawn different samples", capsys.readouterr().err)


@pytest.mark.parametrize("own", [True, False], ids=["each rank's statistics", "synchronised"])
def test_rank_0s_statistics_are_everybodys_before_an_evaluation_and_not_in_each_step(
    monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(gradients_module.distributed, "broadcast", lambda tensor, source: sent.append(source))
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    layer = gradients_module.Replicated(net, Loaders(0, 1), {}, synchronised=not own)
    called = layer(net.forward, net)
    x = torch.randn(2, 3, 5, 5)
    for _ in range(3):
        called(x).sum().backward()
    assert (sent, layer.settings[gradients_module.BUFFERS]) == ([], False)
    net.eval()
    called(x)
    once = [0] * (3 if own else 0)  # mean, variance, count
    assert sent == once
    called(x)
    assert sent == once
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
    called(x)
    assert sent == once * 2
    net.train()
    called(x).sum().backward()
    with torch.no_grad():
        called(x)
    assert sent == once * 3


def test_a_model_of_fewer_modules_than_ranks_has_no_stages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Refused):
        stages.cuts([], 3)
    assert "no stage for each rank" in capsys.readouterr().err


def test_a_call_with_more_than_one_tensor_has_no_stages(capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    layer = stages.Staged(net, [], own_norms=False)
    with pytest.raises(Refused):
        layer(net.forward, net)(torch.ones(2, 3), torch.ones(2, 3))
    assert "one tensor" in capsys.readouterr().err
