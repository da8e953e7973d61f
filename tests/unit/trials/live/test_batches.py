import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from advisor.loop.training import RootModule, Training
from advisor.transforms.images import NormalisedImages, Table
from advisor.trials.live.batches import BatchWatch


@pytest.fixture
def loop():
    data = TensorDataset(torch.arange(64.0).view(16, 4), torch.arange(16))
    loader = DataLoader(data, batch_size=4)
    root = RootModule(module=nn.Linear(4, 1), name="Linear")
    training = Training(device=torch.device("cpu"), roots=[root], loaders=[loader])
    watch = BatchWatch(training)
    yield loader, root, watch
    watch.stop()


def feed(root, x):
    root.args = (x,)


def test_the_loaders_own_batch_is_recognised_wherever_it_lies(loop):
    loader, root, watch = loop
    watch.start()
    for x, _y in loader:
        feed(root, x.clone().t().contiguous().t())
        assert watch.fed() is True


def test_a_script_that_draws_ahead_is_understood(loop):
    loader, root, watch = loop
    watch.start()
    batches = iter(loader)
    ahead = next(batches)
    for following in batches:
        feed(root, ahead[0])
        assert watch.fed() is True
        ahead = following


def test_images_kept_as_bytes_are_compared_by_value_and_stay_bytes():
    table = Table(torch.arange(256.0).expand(3, 256).contiguous())
    kept = NormalisedImages(torch.arange(48, dtype=torch.uint8).view(1, 3, 4, 4), table)
    loader = DataLoader([kept], batch_size=None)
    root = RootModule(module=nn.Linear(4, 1), name="Linear")
    watch = BatchWatch(Training(device=torch.device("cpu"), roots=[root], loaders=[loader]))
    watch.start()
    try:
        (x,) = loader
        assert x.untouched
        for given, same in ((x.plain(), True), (x.plain() + 1, False)):
            feed(root, given)
            assert watch.fed() is same
    finally:
        watch.stop()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: torch.cat([x[:3], torch.zeros(1, 4)]),  # a copy that had not arrived
        lambda x: x.roll(1, 0),
        lambda x: x + 1e-6 * x.abs().max(),
        lambda x: torch.full_like(x, float("nan")),
    ],
)
def test_spoilt_batches_are_seen(loop, spoil):
    loader, root, watch = loop
    watch.start()
    x, _y = next(iter(loader))
    feed(root, spoil(x))
    assert watch.fed() is False


def test_the_batch_may_change_in_place_afterwards(loop):
    loader, root, watch = loop
    watch.start()
    x, _y = next(iter(loader))
    feed(root, x.clone())
    x.zero_()  # the loader's buffer is refilled
    assert watch.fed() is True


def test_inputs_that_the_script_makes_itself_say_nothing(loop):
    loader, root, watch = loop
    watch.start()
    next(iter(loader))
    feed(root, torch.randn(4, 9))
    assert watch.fed() is None


def test_nothing_stays_behind(loop):
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    plain = _BaseDataLoaderIter.__next__
    _, _, watch = loop
    watch.start()
    assert watch.active
    watch.stop()
    watch.stop()
    assert _BaseDataLoaderIter.__next__ is plain
    assert not watch.active
