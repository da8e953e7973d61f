"""What is found in live loops, and that looking changes nothing."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from clocks import until
from pipelines import Compose, Images, Normalize, RandomHorizontalFlip, ToTensor
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from advisor.loop import discover, stop, values
from advisor.loop.attach import Attached, attach_training
from advisor.loop.discover import Discovery
from advisor.loop.recorded import capture_next_step
from advisor.loop.session import Session
from advisor.loop.steps import StepWatcher
from advisor.loop.training import StepEvent, Training
from advisor.loop.values import inner
from advisor.profiling.inside import facts, inputfacts
from advisor.transforms.images import NormalisedImages, Table

Found = tuple[Training, StepWatcher, Discovery]


@pytest.fixture
def found(tmp_path: Path) -> Iterator[Found]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.collect()
    training, watcher = attach_training(Session(mode="search", run_dir=str(tmp_path), script="x"))
    assert Attached.discovery is not None
    yield training, watcher, Attached.discovery
    watcher.detach()
    training.optimizers.clear()
    training.roots.clear()
    Attached.training = Attached.watcher = Attached.discovery = None
    stop.forget()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding="same", bias=False)
        self.conv2 = nn.Conv2d(8, 8, 3, groups=2)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv1(x)))  # the norm follows conv1, though it is registered after conv2
        return self.head(self.drop(self.conv2(x)).mean((2, 3)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, **options: object) -> None:
    loss = nn.CrossEntropyLoss()
    for _ in range(steps):
        optimizer.zero_grad(**options)
        loss(model(torch.randn(4, 3, 8, 8)), torch.randint(0, 4, (4,))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def test_facts_of_a_model_in_training(found: Found) -> None:
    training, watcher, discovery = found
    model = Net()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=True), 6)
    assert discovery.finished
    assert [root.name for root in training.roots] == ["Net"]  # the loss owns no parameters
    assert training.roots[0].module is model
    told = facts.model_facts(training, discovery, watcher)
    assert told.roots == ("Net",)
    assert told.parameters == sum(p.numel() for p in model.parameters())
    assert told.module_counts["Conv2d"] == 2
    assert told.optimizers == ("SGD",)
    assert told.optimizer_foreach is True
    assert not told.optimizer_fused
    assert told.zero_grad_to_none
    assert told.grad_clipping
    assert told.dropout
    assert told.fixed_shapes
    assert (told.batch_size, told.accumulation, told.backwards) == (4, 1, 1)
    assert (told.autocast, told.parameter_dtype, told.distributed) == ("", "fp32", "")
    first, second = told.convs
    assert (first.module, first.kernel, first.padding, first.bias) == ("Net.conv1", (3, 3), (1, 1), False)
    assert (first.input_shape, first.dtype, first.layout) == ((4, 3, 8, 8), "fp32", "nchw")
    assert first.followed_by_bn
    assert not second.followed_by_bn
    assert second.groups == 2


class Detector(nn.Module):
    """Takes a list of images and a dict a image, as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        return sum(
            (
                self.conv(image[None]).mean() - target["box"].mean()
                for image, target in zip(images, targets, strict=True)
            ),
            torch.zeros(()),
        )


def test_a_steps_elements_are_those_of_all_that_its_models_are_given(found: Found) -> None:
    """Over the close look at the first steps and behind it, lists and micro-batches too, evaluation apart."""
    training, _, discovery = found
    model, seen = Detector(), []
    training.on_step.append(lambda event: seen.append(event.elements))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = []
    for step in range(8):
        optimizer.zero_grad()
        given.append(0)
        for micro in range(2):
            images = [torch.randn(3, 8 + step, 8), torch.randn(3, 8, 8 + micro)]
            targets = [{"box": torch.rand(4)}, {"box": torch.rand(2 + step, 4)}]
            model(images, targets).backward()
            given[-1] += sum(t.numel() for t in (*images, *(target["box"] for target in targets)))
        optimizer.step()
    assert discovery.finished
    assert seen[-1] == given[-1]
    # The first calls come before gradients have told what trains.
    assert seen[2:] == given[2:]


def test_what_runs_without_gradients_in_every_step_is_a_guide(found: Found) -> None:
    """A teacher; not the model itself in evaluation, a part of it, what runs once, or a metric without parameters."""
    training, watcher, discovery = found
    model, teacher, once = Net(), Net().eval(), nn.Linear(2, 2)
    around = nn.Sequential(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        x = torch.randn(4, 3, 8, 8)
        with torch.no_grad():
            guide = teacher(x)
            model.conv1(x)
            around(x)
            nn.Softmax(1)(guide)
            if step in (0, 2):
                once(torch.randn(2, 2))
                model.eval()(x)
                model.train()
        optimizer.zero_grad()
        (model(x) - guide).square().mean().backward()
        optimizer.step()
    assert [root.module for root in training.roots] == [model]
    assert [(guide.module, guide.name) for guide in training.guides] == [(teacher, "Net#2")]
    told = facts.model_facts(training, discovery, watcher)
    assert (told.roots, told.guides) == (("Net",), ("Net#2",))
    assert told.parameters == sum(p.numel() for p in model.parameters())


def test_a_script_without_such_a_model_has_no_guides(found: Found) -> None:
    training, watcher, discovery = found
    model = Net()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 6)
    assert training.guides == []
    assert facts.model_facts(training, discovery, watcher).guides == ()


def test_gradients_that_are_zeroed_in_place_are_told(found: Found) -> None:
    training, watcher, discovery = found
    model = Net()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 4, set_to_none=False)
    assert not facts.model_facts(training, discovery, watcher).zero_grad_to_none


def test_the_scripts_own_autocast_and_layout_are_told(found: Found) -> None:
    training, watcher, discovery = found
    model = Net().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)).sum()
        loss.backward()
        optimizer.step()
    told = facts.model_facts(training, discovery, watcher)
    assert told.autocast == "bf16"
    assert told.channels_last
    assert {conv.dtype for conv in told.convs} == {"bf16"}
    assert {conv.layout for conv in told.convs} == {"nhwc"}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("leaves_out", [False, True])
def test_micro_batches_without_an_all_reduce_are_told(found: Found, leaves_out: bool) -> None:
    training, watcher, discovery = found
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(8):
        last = number % 2 == 1
        with contextlib.nullcontext() if last or not leaves_out else model.no_sync():
            model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    assert facts.model_facts(training, discovery, watcher).flags["no_sync"] is leaves_out


def test_clipping_by_a_function_imported_by_its_name_is_told(found: Found) -> None:
    training, watcher, discovery = found
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert facts.model_facts(training, discovery, watcher).grad_clipping


def test_a_model_called_on_the_meta_device_is_no_fault(found: Found) -> None:
    training, watcher, discovery = found
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    copy.deepcopy(model).to("meta")(torch.empty(1, 3, 8, 8, device="meta"))  # as counters of operations do
    train(model, optimizer, 4)
    assert watcher.patches.fault is None
    assert facts.model_facts(training, discovery, watcher).autocast == ""


def test_convolutions_that_were_not_seen_go_by_registration(found: Found) -> None:
    training, watcher, _ = found
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.randn(2, 3, 8, 8)).sum().backward()
        optimizer.step()
    convs = facts.model_facts(training).convs  # without what the look has seen
    assert [conv.followed_by_bn for conv in convs] == [True, False]
    assert convs[0].layout == ""
    assert watcher.seen == 4


def test_the_input_pipeline_is_told(found: Found) -> None:
    training, _, discovery = found
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(24, 3), torch.zeros(24)), batch_size=6)
    for x, _ in loader:
        model(x).sum().backward()
        optimizer.step()
    told = inputfacts.input_stats(training, discovery, [12.0])
    assert (told.loader, told.batch_size, told.workers, told.next_us) == ("DataLoader", 6, 0, 12.0)
    assert (told.batch_bytes, told.batch_dtype) == (6 * 3 * 4 + 6 * 4, "fp32")
    assert "test_discover.py:" in told.source
    assert training.loaders == [loader]


class LibrarysLoader:
    """As fastai's: no torch DataLoader, but torch's iterators behind it."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self._made = DataLoader(batches, batch_size=None)

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from _SingleProcessDataLoaderIter(self._made)


class Slow(Dataset):
    """Items of which each takes a worker `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(3)


def test_batches_that_are_there_are_told_from_those_to_wait_for() -> None:
    assert values.still_to_come(iter(DataLoader(Slow(0.0), 1)))  # the training thread makes it itself
    waiting = iter(DataLoader(Slow(10.0**6), 1, num_workers=1))
    assert values.still_to_come(waiting)
    ready = iter(DataLoader(Slow(0.0), 1, num_workers=1))
    until(lambda: not values.still_to_come(ready))
    next(ready)
    for worker in waiting._workers:
        worker.kill()


@pytest.mark.parametrize(
    ("waits", "mean", "above_the_median"),
    [
        ([], 0.0, 0.0),
        ([4.0], 4.0, 0.0),
        ([1.0] * 20, 1.0, 0.0),
        ([1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 9.0], 3.0, 2.0),
        ([9.0, 1.0, 9.0, 9.0], 7.0, -2.0),
        ([1.0, 1.0, 1.0, 500.0, 1.0], 1.0, 0.0),  # one stall is no pattern
    ],
)
def test_waits_for_batches_are_told_by_their_mean_and_bursts(
    waits: list[float], mean: float, above_the_median: float
) -> None:
    assert inputfacts.waits(waits) == (mean, above_the_median)


def test_a_librarys_own_loader_is_told_by_torchs_iterator(found: Found) -> None:
    training, _, discovery = found
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in LibrarysLoader([torch.randn(6, 3)] * 5):
        model(x).sum().backward()
        optimizer.step()
    told = inputfacts.input_stats(training, discovery, [12.0])
    assert training.loaders == []
    assert (told.loader, told.next_us, told.workers, told.batch_size) == ("of another class", 12.0, 0, 6)
    assert (told.batch_bytes, told.batch_dtype) == (6 * 3 * 4, "fp32")
    assert "test_discover.py:" in told.source


def test_the_loader_drawn_from_last_is_the_trainings(found: Found) -> None:
    """Before steps are known an interval may hold a whole epoch and its evaluation, whose batches are drawn with gradients on."""
    training, watcher, _ = found
    model = nn.Linear(3, 1)
    train = DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=4)
    other = DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=4)
    for loader in (train, other, train):
        for _ in loader:
            pass
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    assert watcher.seen == 1
    assert training.loaders == [train]


def test_the_next_models_batches_are_looked_at_too(found: Found) -> None:
    """After a search for the learning rate, or in the next fold."""
    training, _, discovery = found
    told = []
    for rows in (6, 3):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in DataLoader(TensorDataset(torch.randn(48, 3)), batch_size=rows):
            model(x).sum().backward()
            optimizer.step()
        told.append(inputfacts.input_stats(training, discovery).batch_bytes)
    assert told == [6 * 3 * 4, 3 * 3 * 4]


@pytest.mark.parametrize(
    ("steps", "followed"), [pytest.param(discover.CALM_STEPS + 8, 12, marks=pytest.mark.long), (5, discover.MAX_LOOKS)]
)
def test_models_are_followed_unless_they_change_all_the_time(found: Found, steps: int, followed: int) -> None:
    """Twelve folds, or a script that makes a model for every few steps."""
    training, _, _ = found
    known = []
    for _ in range(12):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
        known.append([root.module for root in training.roots] == [model])
    assert sum(known) == followed


def test_images_that_workers_normalise_are_told_with_their_time(found: Found) -> None:
    training, _, discovery = found
    model = nn.Sequential(nn.Flatten(), nn.Linear(6 * 8 * 3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = Images(Compose([RandomHorizontalFlip(), ToTensor(), Normalize()]))
    for x, _ in DataLoader(dataset, batch_size=6):
        model(x).sum().backward()
        optimizer.step()
    told = inputfacts.input_stats(training, discovery)
    assert told.normalise == "ToTensor + Normalize"
    assert told.normalise_us > 0
    dataset.transform.transforms.pop(1)  # what remains cannot run: no fault of ours
    assert inputfacts.input_stats(training, discovery).normalise == ""


def test_images_kept_as_bytes_are_told_as_bytes_and_stay_so(found: Found) -> None:
    _, _, discovery = found
    pixels = torch.zeros(4, 3, 6, 8, dtype=torch.uint8)
    images = NormalisedImages(pixels, Table(torch.zeros(3, 256)))
    discovery.look_at_batch([images, torch.zeros(4)], None)
    seen = discovery.seen.batch
    assert (seen.nbytes, seen.dtype, seen.shape) == (4 * 3 * 6 * 8 + 16, torch.uint8, (4, 3, 6, 8))
    assert seen.pointers == {pixels.data_ptr()}
    assert images.untouched


def test_the_next_step_is_captured_whole(found: Found) -> None:
    training, _, _ = found
    model = Net()
    seen: list[tuple[torch.Tensor, ...]] = []
    inputs: list[torch.Tensor] = []

    def listener(event: StepEvent) -> None:
        if event.index == 4:
            assert training.roots[0].output is None
            capture_next_step(training)
        if event.index == 5:
            assert not training.keep_gradients
            root = training.roots[0]
            assert root.output_grads[0] is not None
            seen.append((root.args[0], root.output, root.output_grads[0]))

    training.on_step.append(listener)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(7):
        x = torch.randn(4, 3, 8, 8)
        inputs.append(x)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    ((argument, output, grad),) = seen
    assert argument is inputs[5]
    assert torch.equal(grad, 2 * output)  # d(sum of squares)/d(output)


def test_a_captured_output_used_twice_has_the_whole_gradient(found: Found) -> None:
    training, _, _ = found
    model = nn.Linear(3, 2)
    grads: list[torch.Tensor] = []

    def listener(event: StepEvent) -> None:
        if event.index == 4:
            capture_next_step(training)
        if event.index == 5 and training.roots[0].output_grads[0] is not None:
            grads.append(training.roots[0].output_grads[0])

    training.on_step.append(listener)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        out = model(torch.randn(4, 3))
        (out.sum() + 2 * out.sum()).backward()
        optimizer.step()
    assert torch.equal(grads[0], torch.full((4, 2), 3.0))


@dataclass(frozen=True)
class Prediction:
    boxes: torch.Tensor
    scores: list[torch.Tensor]
    name: str = "head"


class Predicting(nn.Linear):
    def forward(self, x: torch.Tensor) -> Prediction:
        y = super().forward(x)
        return Prediction(2 * y, [3 * y])


def test_a_dataclass_that_a_model_returns_is_captured(found: Found) -> None:
    training, _, _ = found
    model = Predicting(3, 2)
    grads: list[tuple[torch.Tensor | None, ...]] = []

    def listener(event: StepEvent) -> None:
        if event.index == 4:
            capture_next_step(training)
        if event.index == 5:
            grads.append(training.roots[0].output_grads)

    training.on_step.append(listener)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        found_here = model(torch.randn(4, 3))
        (found_here.boxes.sum() + 5 * found_here.scores[0].sum()).backward()
        optimizer.step()
    assert [None if g is None else float(g.mean()) for g in grads[0]] == [1.0, 5.0]


def test_looking_changes_no_number_and_no_state(found: Found) -> None:
    _, watcher, _ = found
    observed = Net()
    plain = copy.deepcopy(observed)
    torch.manual_seed(5)
    train(observed, torch.optim.SGD(observed.parameters(), lr=0.1), 6)
    draw = torch.rand(3)
    assert watcher.seen == 6
    watcher.detach()
    torch.manual_seed(5)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 6)
    assert torch.equal(draw, torch.rand(3))
    assert all(
        torch.equal(a, b) for a, b in zip(observed.state_dict().values(), plain.state_dict().values(), strict=True)
    )
    assert not vars(observed).keys() ^ vars(plain).keys()
    assert not observed._forward_hooks
    assert not observed._forward_pre_hooks


def test_roots_that_change_are_found_again(found: Found) -> None:
    training, _, _ = found
    first, second = nn.Linear(3, 2), nn.Conv2d(3, 2, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for number in range(12):
        out = first(torch.randn(4, 3)) if number < 6 else second(torch.randn(4, 3, 2, 2))
        optimizer.zero_grad()
        out.sum().backward()
        optimizer.step()
    assert [root.module for root in training.roots] == [second]


def test_checkpointed_forwards_are_no_roots(found: Found) -> None:
    from torch.utils.checkpoint import checkpoint

    training, _, _ = found

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(self.body, x, use_reentrant=False)
            return out

    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    assert [root.name for root in training.roots] == ["Checkpointed"]
    assert training.roots[0].calls == 1


def test_a_compiled_model_is_traced_without_our_hooks(found: Found) -> None:
    training, watcher, discovery = found
    model = torch.compile(Net(), backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 7)
    assert watcher.patches.fault is None
    assert watcher.seen == 7
    assert inner(training.roots[0].module).__class__ is Net
    assert training.roots[0].name == "Net"
    told = facts.model_facts(training, discovery, watcher)
    assert told.compiled
    from torch._dynamo.utils import counters

    assert counters["stats"]["unique_graphs"] <= 2  # one, and one more when sizes become symbolic: none for our wrapper


def test_a_function_that_was_compiled_with_the_model_in_it_is_told_as_compiled(found: Found) -> None:
    training, watcher, discovery = found
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    for _ in range(6):
        optimizer.zero_grad()
        forward(torch.randn(2, 3, 8, 8)).backward()
        optimizer.step()
    told = facts.model_facts(training, discovery, watcher)
    assert told.roots == ()
    assert told.compiled


def test_inner_sees_through_wrappers() -> None:
    model = nn.Linear(1, 1)
    assert inner(nn.DataParallel(model)) is model
    assert inner(model) is model


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        (torch.zeros(3, 2), (3, 2)),
        ([torch.zeros(3, 2), torch.zeros(3)], (3, 2)),
        ({"id": "x", "image": torch.zeros(5, 1)}, (5, 1)),
        ((("a", "b"), [torch.zeros(4)]), (4,)),
        (((torch.zeros(3, 8, 9), torch.zeros(3, 9, 8)), ({"boxes": torch.zeros(5, 4)}, {})), (2, 3, 8, 9)),
        ([[torch.zeros(6, 3, 8, 8), torch.zeros(6, 3, 8, 8)], torch.zeros(6)], (6, 3, 8, 8)),
        ([torch.zeros(4, 1, 8), torch.zeros(4, 1, 8)], (4, 1, 8)),
        ({"cls": torch.zeros(12, 1), "bboxes": torch.zeros(12, 4), "img": torch.zeros(4, 3, 8, 8)}, (4, 3, 8, 8)),
        ("text", ()),
        (torch.tensor(1.0), ()),
    ],
)
def test_first_shape(batch: object, shape: tuple[int, ...]) -> None:
    assert values.first_shape(batch) == shape


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    "clip",
    [
        lambda model: clip_grad_norm_(model.parameters(), 1.0),
        lambda model: torch.nn.utils.clip_grad_value_(list(model.parameters()), 0.5),
        lambda model: torch.nn.utils.clip_grad_norm_(next(model.parameters()), max_norm=1.0),
    ],
    ids=["by a generator", "by value", "of one tensor"],
)
def test_clipping_before_gradients_are_unscaled_is_told(
    found: Found, clip: Callable[[nn.Module], object], by_hand: bool
) -> None:
    training, watcher, discovery = found
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 3, 8, 8)).square().mean()).backward()
        if by_hand:
            scaler.unscale_(optimizer)
        clip(model)
        scaler.step(optimizer)
        scaler.update()
    told = facts.model_facts(training, discovery, watcher)
    assert watcher.patches.fault is None
    assert told.grad_clipping
    assert told.clips_scaled is not by_hand
    assert ("test_discover.py:" in told.set_at.get("clips_scaled", "")) is not by_hand


def test_clipping_beside_a_scaler_that_is_off_is_sound(found: Found) -> None:
    training, watcher, discovery = found
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 3, 8, 8)).square().mean()).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
    assert not facts.model_facts(training, discovery, watcher).clips_scaled


@pytest.mark.parametrize("method", [True, False], ids=["loss.backward", "autograd.backward"])
def test_a_backward_that_keeps_its_graph_is_told_with_its_line_and_is_no_micro_batch(
    found: Found, method: bool
) -> None:
    training, watcher, discovery = found
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        x = torch.randn(4, 3, 8, 8, requires_grad=True)
        loss = model(x).square().mean()
        if method:
            loss.backward(create_graph=True)
        else:
            torch.autograd.backward(loss, create_graph=True)
        assert x.grad is not None
        x.grad.square().sum().backward()
        optimizer.step()
        x.grad = None
    told = facts.model_facts(training, discovery, watcher)
    assert told.create_graph
    assert "test_discover.py:" in told.set_at["create_graph"]
    assert told.accumulation == 1


def test_gradients_by_autograd_grad_keep_nothing(found: Found) -> None:
    training, watcher, discovery = found
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        x = torch.randn(4, 3, 8, 8, requires_grad=True)
        loss = model(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()
    assert not facts.model_facts(training, discovery, watcher).create_graph


def test_gradients_that_the_script_zeroes_by_itself_are_told_to_stay(found: Found) -> None:
    training, watcher, discovery = found
    model, other = Net(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(facts.WRITTEN_BEFORE // 2 + 1):
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.zero_()
        model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    assert facts.model_facts(training, discovery, watcher).gradients_stay
    for weight in model.parameters():
        weight.grad = None
    other(torch.randn(4, 3, 8, 8)).square().mean().backward()
    assert not facts.model_facts(training, discovery, watcher).gradients_stay


def test_flags_that_hold_around_a_part_of_the_step_are_told(found: Found) -> None:
    training, watcher, discovery = found
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        with torch.backends.cudnn.flags(enabled=False, deterministic=True):
            model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    flags = facts.model_facts(training, discovery, watcher).flags
    assert torch.backends.cudnn.enabled
    assert (flags["cudnn_enabled"], flags["cudnn_deterministic"]) == (False, True)


def test_one_of_two_networks_that_zeroes_its_gradients_is_told(found: Found) -> None:
    training, watcher, discovery = found
    first, second = Net(), Net()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second)]
    for _ in range(5):
        for net, optimizer, to_none in zip((first, second), optimizers, (False, True), strict=True):
            optimizer.zero_grad(set_to_none=to_none)
            net(torch.randn(4, 3, 8, 8)).square().mean().backward()
            optimizer.step()
    assert not facts.model_facts(training, discovery, watcher).zero_grad_to_none
    assert training.zeroes_gradients


def test_under_anomaly_detection_noting_a_stack_is_timed(found: Found) -> None:
    training, watcher, discovery = found
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autograd.set_detect_anomaly(True):
        train(model, optimizer, 4)
    read = facts.model_facts(training, discovery, watcher)
    assert read.stack_us > 0
    assert not torch.is_anomaly_enabled()
    assert read.flags["anomaly"], "the steps ran under it, as those of a `with` inside the loop do"
