"""A small CPU training loop under advisor's real hooks, and changes to try in it: right ones and planted faults.

What a step takes is planted: the net says how long it waits, and nobody does. A trial's limits run on a clock that these steps set. So
nothing that this machine does in between decides a verdict.
"""

import dataclasses
import itertools
import json
import os
import random
import signal
from pathlib import Path
from typing import ClassVar

import torch
import torch._dynamo  # what the first optimizer imports: here once, not in every fork
import torch.nn.functional as F
from clocks import Clock
from torch import nn
from torch.utils.data import DataLoader

from advisor.core.errors import AdvisorError
from advisor.core.findings import Recommendation, Semantics
from advisor.core.verdict import Check
from advisor.loop import attach, graphs, interval, stop, timing
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.patch import replace_attribute
from advisor.trials import measure
from advisor.trials.live import blocks, driver, limit, loop, trial

torch.set_num_threads(1)


class Net(nn.Module):
    """A net with a (planted) wait in it that a change can take away, and (planted) noise of that share of a step."""

    noise = 0.005

    def __init__(self, wait_s):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 36, 10)
        self.wait_s = wait_s

    @property
    def step_s(self):
        """The wait, and 2 ms of work."""
        return 0.002 + self.wait_s

    def forward(self, x):
        return self.fc(F.relu(self.bn(self.conv(x))).flatten(1))


def train(*args, **options):
    """Run the loop in a process of its own, as in life; returns (steps run, why it ended)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told = _train(*args, **options)
        except BaseException as error:
            told = 0, f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps(told).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        told = stream.read()
    os.waitpid(pid, 0)
    done, reason = json.loads(told) if told else (0, "killed")
    assert "AssertionError" not in reason, reason
    return done, reason


def planted(training):
    """`step_times` with the net's step for each clean one, and its noise."""
    noise = random.Random(0)

    def times(boundaries):
        found, net = timing.step_times(boundaries), training.roots[0].module
        step_us = net.step_s * 1e6
        return dataclasses.replace(
            found, wall_us=tuple(step_us * (1 + noise.gauss(0, net.noise)) for _ in found.wall_us)
        )

    return times


def planted_clock(net):
    """A listener that sets each boundary one of the net's steps after the last. Not for a search, which lays these times over a trace."""
    now = 0

    def tell(step):
        nonlocal now
        now += round(net().step_s * 1e9)
        step.host_ns = now

    return tell


class Undisturbed:
    """In place of the watch over this machine: what else runs on it here says nothing about planted times."""

    def __init__(self, device):
        pass

    def renew(self):
        pass

    def begin(self):
        pass

    def end(self, on):
        return ""


def plant_clocks(training):
    """What decides in a search: steps take what the net says, and however long advisor takes at a boundary the next step is a clean one.

    Returns:
        The clock that the search reads.
    """
    clock = Clock()
    blocks.step_times = driver.step_times = measure.step_times = planted(training)
    driver.time = limit.time = trial.time = clock
    interval.LISTENER_NS = 10**12
    loop.MachineWatch = Undisturbed
    return clock


def _train(session, driver_class, find, *, steps=2000, wait_s=0.05, noise=Net.noise, fold=0, mixed=None):
    """mixed: batches come from a loader, and in this share of the steps the script mixes its images, which are then no loader's."""
    training, watcher = attach.attach_training(session)
    clock = plant_clocks(training)
    done = 0
    try:
        driver_class(training, session, watcher, find)
        torch.manual_seed(0)

        def begin():
            net = Net(wait_s)
            net.noise = noise
            return net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

        net, optimizer = begin()
        if session.mode == "measure":
            training.on_step.insert(0, planted_clock(lambda: net))
        data = [(torch.randn(8, 3, 8, 8), torch.randint(0, 10, (8,))) for _ in range(4)]
        chance, loader = random.Random(1), DataLoader(data, batch_size=None)
        batches = iter(itertools.chain.from_iterable(itertools.repeat(loader))) if mixed is not None else None
        for done in range(1, steps + 1):
            if fold and done % fold == 0:
                net, optimizer = begin()  # another model from here on
            x, y = data[done % 4] if batches is None else next(batches)
            x = x.to("cpu")
            clock.sleep(net.step_s)
            if mixed is not None and chance.random() < mixed:
                x = 0.7 * x + 0.3 * x.roll(1, 0)
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        assert watcher.patches.fault is None, watcher.patches.fault
    except stop.StopTraining as stopped:
        return done, stopped.reason
    return done, "script ended"


class Wrapped(Transform):
    """Puts a function around the root's forward."""

    title = "a change of the tests"
    semantics = Semantics.EXACT

    def match(self, training, parameters):
        return Match(applies=bool(training.roots), reason="no model", sites=tuple(r.name for r in training.roots))

    def wrap(self, forward, net):
        return forward

    def apply(self, training, parameters):
        undo = Undo()
        net = training.roots[0].module
        net.__dict__["forward"] = self.wrap(type(net).forward.__get__(net), net)
        undo.push(lambda: net.__dict__.pop("forward", None))
        return undo

    def effect(self, training, before, after):
        return Check(passed="forward" in training.roots[0].module.__dict__, detail="the forward is wrapped")


class Nothing(Wrapped):
    id = "nothing"


class Waits(Wrapped):
    """Changes the wait by a factor through an attribute, so that a replay finds the same numbers."""

    factor = 1.0

    def apply(self, training, parameters):
        net, undo = training.roots[0].module, Undo()
        plain = net.wait_s
        net.wait_s = plain * self.factor
        undo.push(lambda: setattr(net, "wait_s", plain))
        return undo

    def effect(self, training, before, after):
        return Check(passed=None, detail="")


class Faster(Waits):
    id, factor = "faster", 0.5


class Quicker(Waits):
    id, factor, title = "quicker", 0.8, "another change of the tests"


class CountsSteps(Waits):
    """Its effect is what has been counted since it was switched on."""

    id, factor, title = "counts_steps", 0.8, "a change that counts"
    seen: ClassVar[list[object]] = []

    def apply(self, training, parameters):
        undo = super().apply(training, parameters)
        self.seen.clear()
        training.on_step.append(self.seen.append)
        undo.push(lambda: training.on_step.remove(self.seen.append))
        return undo

    def effect(self, training, before, after):
        return Check(passed=bool(self.seen), detail=f"{len(self.seen)} steps")


class Warms(CountsSteps):
    """Has its effect after six steps, as what is captured at a later call; until then steps agree, and it says that it is not there yet."""

    id, factor, warm_steps = "cuda_graphs", 0.5, 6

    def warming(self, training):
        return len(self.seen) < self.warm_steps

    def effect(self, training, before, after):
        return Check(passed=not self.warming(training), detail=f"{len(self.seen)} steps")


class Half(Waits):
    id, factor = "amp_bf16", 0.9


class Graphs(Waits):
    """Takes away the noise too."""

    id, factor = "cuda_graphs", 0.3

    def apply(self, training, parameters):
        undo, net = super().apply(training, parameters), training.roots[0].module
        noise, net.noise = net.noise, 0.001
        undo.push(lambda: setattr(net, "noise", noise))
        return undo


class Balanced(Wrapped):
    """Takes away one of two waits that run side by side: little is gained before the other one goes as well."""

    of_the_wait = (1.0, 0.96, 0.6)  # what is left of it, by how many of the two are on
    on: ClassVar[set[str]] = set()

    def apply(self, training, parameters):
        net, undo = training.roots[0].module, Undo()
        whole_s = net.wait_s / self.of_the_wait[len(self.on)]

        def turn(change):
            change(self.id)
            net.wait_s = whole_s * self.of_the_wait[len(self.on)]

        turn(self.on.add)
        undo.push(lambda: turn(self.on.discard))
        return undo

    def effect(self, training, before, after):
        return Check(passed=self.id in self.on, detail="one of two waits is gone")


class Host(Balanced):
    id = "host"


class Device(Balanced):
    id, title = "device", "another change of the tests"


class Layout(Balanced):
    """Costs a little alone, as does half precision, and both together save much."""

    id, of_the_wait = "channels_last", (1.0, 1.1, 0.4)


class HalfInLayout(Layout):
    id, title = "amp_bf16", "another change of the tests"


class FasterStill(Waits):
    id, factor, conflicts = "faster_still", 0.1, ("faster",)


class Wrong(Wrapped):
    """Fast, and wrong: it leaves the wait out and the bias too."""

    id, semantics = "wrong", Semantics.REASSOCIATED

    def wrap(self, forward, net):
        return lambda x: F.linear(F.relu(net.bn(net.conv(x))).flatten(1), net.fc.weight)


class Slower(Waits):
    id, factor = "slower", 1.6


class Released(Slower):
    """Says where it is released."""

    id = "released"
    note: ClassVar[Path | None] = None

    def release(self, training):
        with open(self.note, "a") as stream:
            stream.write("released\n")


class Torn(Waits):
    """Fast, and the batch that the model gets is not whole: outside of what a replay of the model sees."""

    id, factor = "torn", 0.5

    def apply(self, training, parameters):
        undo, plain = super().apply(training, parameters), torch.Tensor.to

        def to(x, *args):
            moved = plain(x, *args)
            return torch.cat([moved[:-1], torch.zeros_like(moved[-1:])]) if moved.shape == (8, 3, 8, 8) else moved

        replace_attribute(undo, torch.Tensor, "to", to)
        return undo


class Raises(Wrapped):
    id = "raises"

    def apply(self, training, parameters):
        raise RuntimeError("no such kernel\nwith details")


class LosesDevice(Wrapped):
    """Raises, and from then on the (planted) device repeats the error to whoever asks."""

    id = "loses_device"

    def apply(self, training, parameters):
        trial.unusable = lambda device: True
        return super().apply(training, parameters)

    def wrap(self, forward, net):
        def changed(x):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nand advice")

        return changed


class RaisesLater(Wrapped):
    """Runs in the gate, and fails in the user's own step."""

    id = "raises_later"

    def wrap(self, forward, net):
        calls = []

        def changed(x):
            calls.append(1)
            if len(calls) > 12:
                raise RuntimeError("boom in the step")
            return forward(x)

        return changed


class DoesNotApply(Wrapped):
    id = "does_not_apply"

    def match(self, training, parameters):
        return Match(applies=False, reason="no such layer")


class NoEffect(Wrapped):
    id = "no_effect"

    def effect(self, training, before, after):
        return Check(passed=False, detail="no kernel of ours was seen")


class Dies(Wrapped):
    """Ends the process as a fault in native code does."""

    id = "dies"

    def wrap(self, forward, net):
        def changed(x):
            os.kill(os.getpid(), signal.SIGSEGV)

        return changed


class Traced(Wrapped):
    """Its effect tells whether there were traces."""

    id = "traced"

    def effect(self, training, before, after):
        return Check(passed=True, detail=f"before {before is not None}, after {after is not None}")


class Counted(Traced):
    id, traced = "counted", False


class Captures(Traced):
    """Has a (planted) captured graph alive in the process from its first step on."""

    id = "captures"

    def apply(self, training, parameters):
        graphs.alive = lambda: True
        return super().apply(training, parameters)


class CannotGoBack(Wrapped):
    id, semantics = "cannot_go_back", Semantics.REASSOCIATED

    def apply(self, training, parameters):
        undo = Undo()

        def fail():
            raise ValueError("stuck")

        undo.push(fail)
        return undo

    def effect(self, training, before, after):
        return Check(passed=None, detail="")


class FreshOnly(Waits):
    id, factor, live = "fresh_only", 0.5, False

    def match(self, training, parameters):
        return Match(applies=True)

    def apply(self, training, parameters):
        undo, plain = Undo(), Net.__init__

        def start(net, wait_s):
            plain(net, wait_s * self.factor)

        Net.__init__ = start
        undo.push(lambda: setattr(Net, "__init__", plain))
        return undo


CHANGES = {
    c.id: c
    for c in (
        Nothing, Faster, Quicker, CountsSteps, FasterStill, Slower, Torn, Released, Wrong, Raises, LosesDevice, RaisesLater, DoesNotApply, NoEffect, CannotGoBack,
        FreshOnly, Dies, Traced, Counted, Captures, Half, Graphs, Host, Device,
    )
}  # fmt: skip


def find(identifier):
    try:
        return CHANGES[identifier]()
    except KeyError:
        raise AdvisorError(f"no transform {identifier!r}") from None


def candidates(*names):
    return tuple(Recommendation(transform=name, title=f"title of {name}") for name in names)
