"""Norms, readings and gradients of a rank, in a group of one process; of several: tests/integration/test_several_ranks.py."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from advisor.distributed import gradients as gradients_module
from advisor.distributed import joining, norms, place
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
    monkeypatch.setattr(gradients_module, "_differing", lambda values, tolerance: 0 if tolerance else None)
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
