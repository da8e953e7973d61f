"""Where a loader's time goes: named by line and kind, in forked and spawned workers and in the training's thread, for a bounded time."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import clocks
import numpy as np
import pytest
import torch
from PIL import Image
from pipelines import Compose, Images, Normalize, RandomHorizontalFlip, ToTensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from advisor.core import storage
from advisor.core.loading import COLLATE, DECODE, FLIP, HAND_OVER, OTHER, READ, RESIZE, TO_FP32, LoaderWork
from advisor.loop.patches import Patches
from advisor.profiling.inside.loading import sampling
from advisor.profiling.inside.loading.naming import NamedWork, Naming
from advisor.profiling.inside.loading.own import StepSampler
from advisor.profiling.inside.loading.sampling import MOST_SAMPLES, LoaderSampler
from advisor.profiling.inside.loading.watch import FILE, LoaderWatch

HERE = Path(__file__).name
seen: list[NamedWork | None] = []


def look() -> None:
    """What the stack above is told as."""
    seen.append(Naming().of(sys._getframe(1)))


class Looked(Dataset):
    """A data set whose item is made by `make`, in which a sample is taken."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.make()


def told(make: Callable[[], Any], collate_fn: Any = None) -> NamedWork:
    """What is told of a sample taken while one batch is made."""
    seen.clear()
    next(iter(DataLoader(Looked(make), batch_size=1, collate_fn=collate_fn or default_collate)))
    assert seen[0] is not None
    return seen[0]


def flipped() -> Any:
    class Step(RandomHorizontalFlip):
        def __call__(self, array: Any) -> Any:
            look()
            return array

    Step.__name__ = "RandomHorizontalFlip"
    return Compose([Step()])(np.zeros((2, 2, 3), np.uint8))


def imread(path: str) -> torch.Tensor:
    look()
    return torch.zeros(1)


def unknown() -> torch.Tensor:
    look()
    return torch.zeros(1)


def collating(batch: list[Any]) -> Any:
    look()
    return default_collate(batch)


def test_classes_of_transforms_are_told_by_their_names() -> None:
    work = told(flipped)
    assert (work.kind, work.what) == (FLIP, "RandomHorizontalFlip")
    assert work.source.partition(":")[0].endswith(HERE)


def test_functions_of_the_scripts_own_are_told_by_theirs_or_as_other_with_their_line() -> None:
    assert told(lambda: imread("a.jpg")).kind == DECODE
    work = told(unknown)
    assert (work.kind, work.what) == (OTHER, "look")
    assert work.source.rpartition(":")[2] == str(unknown.__code__.co_firstlineno + 1)


def test_what_collates_is_told_as_that_whatever_it_calls() -> None:
    work = told(lambda: torch.zeros(1), collating)
    assert (work.kind, work.what) == (COLLATE, "collating")


def test_outside_of_a_fetch_nothing_is_told() -> None:
    assert Naming().of(sys._getframe()) is None


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("cv2.imread(path)", DECODE),
        ("np.load(path)", READ),
        ("image.resize((4, 4))", RESIZE),
        ("cv2.flip(image, 1)", FLIP),
        ("image.astype(np.float32)", TO_FP32),
        ("(image / 255.0)", TO_FP32),
        ("image + other", OTHER),
        ("torch.stack(frames)", COLLATE),
    ],
)
def test_a_call_into_c_is_told_by_the_source_of_its_line(line: str, kind: str, tmp_path: Path) -> None:
    """The frame stands in the line, as it does while a function of an extension runs."""
    file = tmp_path / "data.py"
    file.write_text(f"def item(cv2, np, torch, image, other, path, frames):\n    return {line}\n")
    space: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), space)

    class Stops:
        """Whatever is done with it, a sample is taken."""

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **more: self._sample()

        def _sample(self, *args: Any) -> torch.Tensor:
            frame: FrameType | None = sys._getframe()
            while frame is not None and frame.f_code.co_name != "item":
                frame = frame.f_back
            seen.append(Naming().of(frame))
            return torch.zeros(1)

        __truediv__ = __add__ = _sample
        float32 = None

    stops = Stops()
    assert told(lambda: space["item"](stops, stops, stops, stops, stops, "a", [])).kind == kind


def pixels() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.zeros((96, 96, 3), np.uint8)).save(stream, "JPEG")
    return stream.getvalue()


class Jpegs(Dataset):
    """Decodes a JPEG an item."""

    def __init__(self) -> None:
        self.file = pixels()

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        image = Image.open(io.BytesIO(self.file)).convert("RGB")
        return torch.from_numpy(np.array(image))


class Stream(IterableDataset):
    """The same, without an index."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        data = Jpegs()
        while True:
            yield data[0]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[LoaderWatch]:
    patches, watch = Patches(), LoaderWatch(tmp_path)
    watch.attach(patches)
    yield watch
    watch.rest()
    patches.restore_all()


def drawn_until_told(watch: LoaderWatch, loader: DataLoader[Any]) -> LoaderWork:
    """Draw batches until the samples say where the time goes."""
    batches = iter(loader)

    def work() -> LoaderWork | None:
        next(batches)
        found = watch.work(loader.dataset)
        return found if found is not None and found.told else None

    clocks.until(lambda: work() is not None)
    found = watch.work(loader.dataset)
    assert found is not None
    return found


@pytest.mark.parametrize("data", [Jpegs, Stream])
@pytest.mark.parametrize(
    "workers", [0, pytest.param(1, id="fork"), pytest.param(2, id="spawn", marks=pytest.mark.long)]
)
def test_where_a_batchs_time_goes_is_seen_where_it_is_made(watch: LoaderWatch, data: type, workers: int) -> None:
    context = {0: None, 1: "fork", 2: "spawn"}[workers]
    own: list[int] = []
    loader = DataLoader(
        data(), batch_size=16, num_workers=workers, multiprocessing_context=context, worker_init_fn=own.append if workers < 2 else None
    )  # fmt: skip
    plain = loader.worker_init_fn
    work = drawn_until_told(watch, loader)
    assert work.worker == bool(workers)
    assert work.kinds is not None
    assert DECODE in work.kinds
    assert any(line.source.partition(":")[0].endswith(HERE) for line in work.lines)
    assert sum(time for kind, time in work.kinds.items() if kind != HAND_OVER) == pytest.approx(work.batch_us)
    # The script's loader is as it was.
    assert loader.worker_init_fn is plain


def test_loaders_of_evaluations_and_a_second_iterator_are_left_alone(watch: LoaderWatch) -> None:
    data = Jpegs()
    with torch.no_grad():
        next(iter(DataLoader(data, batch_size=1)))
    assert watch.work(data) is None
    loader = DataLoader(data, batch_size=1)
    next(iter(loader))
    assert len(watch._here) == 1
    watch.rest()
    again = iter(loader)
    assert "fetch" not in vars(again._dataset_fetcher)


def test_a_worker_goes_on_where_sampling_it_fails(watch: LoaderWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **more: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(sampling, "LoaderSampler", broken)
    data = Jpegs()
    batch = next(iter(DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork")))
    assert batch.shape == (2, 96, 96, 3)
    assert watch.work(data) is None


def test_samples_are_shares_of_the_batches_time_and_end_by_themselves() -> None:
    clock = clocks.Clock()
    sampler = LoaderSampler(worker=True, clock=clock)

    def batch(seconds: float) -> None:
        sampler.begin()
        seen.clear()
        next(iter(DataLoader(Looked(flipped), batch_size=1)))
        clock.sleep(seconds)
        sampler.end()

    batch(5.0)  # the first batch is passed over: imports are in it
    for _ in range(3):
        batch(0.2)
        clock.sleep(0.1)
    work = sampler.work()
    assert (work.batches, work.samples, work.kinds) == (3, 0, None)
    naming = {"a": NamedWork(DECODE, "d.py:1", "open"), "b": NamedWork(RESIZE, "d.py:2", "resize")}
    sampler._naming.of = naming.get
    sampler.begin()
    for key, elapsed in (("a", 0.01), ("b", 0.03)):
        clock.sleep(elapsed)
        sampler.take({threading.get_ident(): key}, elapsed, clock.perf_counter())
    clock.sleep(0.16)
    sampler.end()
    work = sampler.work()
    assert work.kinds == pytest.approx({RESIZE: 150_000.0, DECODE: 50_000.0})
    assert not work.told  # two samples are none
    assert work.waits_frac == pytest.approx(0.3 / 1.1)
    # Waiting for an order is no work: nothing is taken.
    sampler.take({threading.get_ident(): "a"}, 9.0, clock.perf_counter())
    assert sampler.samples == 2


def test_a_sampler_has_its_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "EVERY_S", 0.0)
    kept: list[LoaderWork] = []
    sampler = LoaderSampler(worker=True, saved=kept.append)
    sampler._naming.of = lambda frame: NamedWork(OTHER, "", "")
    sampler.begin()
    sampler.end()
    sampler.begin()
    sampler.start()
    clocks.until(lambda: sampler.over)
    assert sampler.samples == MOST_SAMPLES


def test_the_record_is_read_back(tmp_path: Path) -> None:
    work = LoaderWork(batches=2, each_us=(1.0, 3.0), samples=30, kinds={DECODE: 2.0})
    storage.save(tmp_path / FILE.format(0), work)
    watch = LoaderWatch(tmp_path)
    data = Images(Compose([ToTensor(), Normalize()]))
    watch._datasets.append(data)
    assert watch.work(data) == work
    assert work.shares_text() == "decode 100 %"


def own_batches(sampled: Callable[[], None]) -> Iterator[torch.Tensor]:
    """A generator of a script's, in which no module is called."""
    while True:
        sampled()
        yield torch.zeros(2, 4)


def steps_in_a_generator(net: torch.nn.Module, sampled: Callable[[], None]) -> Iterator[float]:
    """A training loop that is itself a generator."""
    while True:
        sampled()
        yield float(net(torch.zeros(2, 4)).sum())


class Samples(torch.nn.Module):
    """A module in whose forward a sample is taken."""

    def __init__(self, sampled: Callable[[], None]) -> None:
        super().__init__()
        self.sampled = sampled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sampled()
        return x


def test_a_generators_own_work_is_the_input_and_a_training_loop_in_one_is_not() -> None:
    sampler = StepSampler()

    def sampled() -> None:
        sampler.take({threading.get_ident(): sys._getframe(1)}, 0.01, 0.0)

    batches = own_batches(sampled)
    for _ in range(20):
        next(batches)
    net = Samples(sampled)
    loop = steps_in_a_generator(net, sampled)
    for _ in range(20):
        next(loop)
    net(torch.zeros(1))
    sampled()  # the script's loop: no work of the input's
    sampler.stop_after(10)
    work = sampler.work()
    assert work.samples == 20
    assert work.told
    assert work.batch_us == pytest.approx(20_000.0)  # 20 samples of 10 ms in 10 steps
    assert work.lines[0].source.rpartition(":")[2] == str(own_batches.__code__.co_firstlineno + 3)


def test_a_loop_without_a_dataloader_is_sampled_and_one_with_a_loader_is_not(watch: LoaderWatch) -> None:
    next(iter(DataLoader(Jpegs(), batch_size=1)))
    watch.look_for_own()
    assert watch._own is None
    other = LoaderWatch(Path())
    other.look_for_own()
    assert other._own is not None
    other.rest(3)
    assert other.work(None) is None  # nothing that makes a batch was seen
