"""Gradients past autograd's accumulation, with a stand-in for the CUDA graphs that computes on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from advisor.loop.training import RootModule, Training
from advisor.transforms import direct_gradients
from advisor.transforms.base import Undo
from advisor.transforms.cuda_graphs import CudaGraphs
from advisor.transforms.direct_gradients import ParameterGradients
from advisor.transforms.forward import GRAPH, SUBMODULE, ForwardStack
from advisor.transforms.graphs import arguments, calls
from advisor.transforms.graphs import captured as capturing
from advisor.transforms.graphs.layer import GraphLayer
from advisor.transforms.graphs.layout import Layout
from advisor.transforms.graphs.replaying import Replay, serve


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.phase, self.mask, self.skipped, self.kept, self.sizes = (
            "warm-up",
            torch.ones(8),
            None,
            [True, True],
            (8, 8),
        )
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.body(x))))


class Replayed(capturing.Captured):
    """As captured, with replays that run the module's forward and write into the static tensors."""

    def __init__(self, module: nn.Module, x: torch.Tensor) -> None:
        self.parameters = list(module.parameters())
        self.by_id = {id(p): p for p in self.parameters}
        self.inputs = (x.detach().clone().requires_grad_(x.requires_grad),)
        self.in_flight, self.replays, self.differentiable, self.structure = None, 0, [True], None
        self.computed, self.constants, self.twice, self._zeros = [], {}, False, [False]
        self.leaves, self.places = self.parameters, [*range(len(self.parameters))]
        self.module = module
        # Like a captured one, it computes on other leaves over the same memory.
        self.others = {name: p.detach().requires_grad_() for name, p in module.named_parameters()}
        out = self._run()
        self.outputs, self.output_grads = [out.detach().clone()], [torch.empty_like(out)]
        self.input_grads = [torch.empty_like(x) if x.requires_grad else None]
        self.memory = [torch.full_like(p, torch.nan).detach() for p in self.parameters]  # the graph's
        self.gradients = ParameterGradients(self.parameters, [g.detach() for g in self.memory])
        self.forward = SimpleNamespace(replay=self._forward)
        self.backward = SimpleNamespace(replay=self._backward)

    def _run(self) -> torch.Tensor:
        with torch.enable_grad():
            self.graph = torch.func.functional_call(self.module, self.others, self.inputs)
        return self.graph

    def _forward(self) -> None:
        self.outputs[0].copy_(self._run().detach())

    def _backward(self) -> None:
        sources = [*(x for x in self.inputs if x.requires_grad), *self.others.values()]
        found = torch.autograd.grad(self.graph, sources, self.output_grads[0], retain_graph=True)
        for static, gradient in zip(
            [*(g for g in self.input_grads if g is not None), *self.memory], found, strict=True
        ):
            static.copy_(gradient)


class Loop:
    """A module behind `Replayed`, called as GraphedForward calls it, beside a plain twin."""

    def __init__(self, x: torch.Tensor | None = None) -> None:
        self.net, self.plain = Net(), Net()
        self.x = torch.randn(5, 6) if x is None else x
        self.captured = Replayed(self.net, self.x)
        self.directly: list[bool] = []

    def __call__(self, x: torch.Tensor | None = None) -> torch.Tensor:
        x = self.x if x is None else x
        direct = self.captured.gradients.direct()
        self.directly.append(direct)
        given = [self.captured.gradients.anchor] if direct else self.captured.parameters
        (out,) = Replay.apply(self.captured, direct, x, *given)
        return out

    def settle(self) -> None:
        """Past the first steps, after which it is known that nobody watches."""
        for _ in range(2):
            self().sum().backward()
        for net in (self.net, self.plain):
            net.zero_grad()
        self.plain.load_state_dict(self.net.state_dict())

    def hold(self) -> None:
        """Both nets have the same gradients."""
        for ours, theirs in zip(self.net.parameters(), self.plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.fixture
def loop() -> Iterator[Loop]:
    undo = Undo()
    serve(undo)
    yield Loop()
    undo.run()
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward


def test_gradients_are_put_down_without_copies_and_without_edges(loop: Loop) -> None:
    loop.settle()
    out = loop()
    assert len(out.grad_fn.next_functions) == 2  # the input, and one for all parameters
    out.square().sum().backward()
    loop.plain(loop.x).square().sum().backward()
    loop.hold()
    places = [p.grad.data_ptr() for p in loop.net.parameters() if p.grad is not None]
    assert places == [g.data_ptr() for g in loop.captured.memory]
    assert loop.captured.gradients.watched is False


def test_gradients_are_added_to_those_that_are_there(loop: Loop) -> None:
    loop.settle()
    for scale in (1.0, 2.0, 3.0):
        (loop() * scale).sum().backward()
        (loop.plain(loop.x) * scale).sum().backward()
        loop.hold()
    loop.net.zero_grad(set_to_none=False)
    loop.plain.zero_grad(set_to_none=False)
    loop().sum().backward()
    loop.plain(loop.x).sum().backward()
    loop.hold()


def test_a_backward_through_the_same_graph_twice_adds_twice(loop: Loop) -> None:
    loop.settle()
    ours, theirs = loop().square().sum(), loop.plain(loop.x).square().sum()
    for loss in (ours, theirs):
        loss.backward(retain_graph=True)
        loss.backward()
    loop.hold()


def test_what_a_graph_that_is_kept_needs_is_not_overwritten(loop: Loop) -> None:
    loop.settle()
    ours, theirs = loop(), loop.plain(loop.x)
    for out in (ours, theirs):
        out.square().sum().backward(retain_graph=True)
    assert loop.captured.busy()  # so that a forward between runs eagerly
    for out in (ours, theirs):
        out.sum().backward()
    loop.hold()
    assert not loop.captured.busy()
    found = torch.autograd.grad(loop().sum(), [loop.net.body.weight], retain_graph=True)
    assert not loop.captured.busy()  # its graph is gone
    out = loop().sum()
    found = torch.autograd.grad(out, [loop.net.body.weight], retain_graph=True)
    assert loop.captured.busy()
    torch.testing.assert_close(torch.autograd.grad(out, [loop.net.body.weight]), found)
    assert not loop.captured.busy()


@pytest.mark.parametrize("accumulated", [False, True])
def test_gradients_that_the_script_keeps_stay_as_they_are(loop: Loop, accumulated: bool) -> None:
    loop.settle()
    kept: list[list[torch.Tensor]] = []
    for step in range(3):
        for net, out in ((loop.net, loop()), (loop.plain, loop.plain(loop.x))):
            if not accumulated:
                net.zero_grad()
            (out * (step + 1)).square().sum().backward()
            kept.append([p.grad for p in net.parameters() if p.grad is not None])
        loop.hold()
    for ours, theirs in zip(kept[::2], kept[1::2], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
    assert all((a is b) == accumulated for a, b in zip(kept[0], kept[2], strict=True))
    kept.clear()
    del ours, theirs, a, b, out
    loop.net.zero_grad()
    loop().sum().backward()
    loop.net.zero_grad()
    loop().sum().backward()
    places = [p.grad.data_ptr() for p in loop.net.parameters() if p.grad is not None]
    assert places == [g.data_ptr() for g in loop.captured.memory]  # nothing is copied where nothing is kept


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("alias", [torch.Tensor.detach, torch.Tensor.flatten, lambda g: g.data])
def test_what_the_script_sees_of_a_gradient_through_another_tensor_stays(
    loop: Loop, alias: Callable[[torch.Tensor], torch.Tensor], hooked: bool, accumulated: bool
) -> None:
    loop.settle()
    if hooked:  # gradients come through autograd then, in tensors of its own over the static memory
        for net in (loop.net, loop.plain):
            net.body.weight.register_hook(lambda g: g * 2)
    kept: list[list[torch.Tensor]] = []
    for step in range(4):
        for net, out in ((loop.net, loop()), (loop.plain, loop.plain(loop.x))):
            if not accumulated:
                net.zero_grad()
            (out * (step + 1)).square().sum().backward()
            kept.append([alias(p.grad) for p in net.parameters() if p.grad is not None])
        loop.hold()
        del out
    for ours, theirs in zip(kept[::2], kept[1::2], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # a bias's before a norm is rounding alone
    kept.clear()
    del ours, theirs, a, b, net
    for _ in range(2):
        loop.net.zero_grad()
        loop().sum().backward()
    places = [p.grad.data_ptr() for p in loop.net.parameters() if p.grad is not None]
    assert places[1:] == [g.data_ptr() for g in loop.captured.memory][1:]  # nothing is copied any more


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("seen", [False, True])
def test_a_gradient_that_the_script_gives_other_memory_is_new_in_the_next_step(
    loop: Loop, accumulated: bool, seen: bool
) -> None:
    loop.settle()
    kept = []
    for step in range(4):
        for net, out in ((loop.net, loop()), (loop.plain, loop.plain(loop.x))):
            if not accumulated:
                net.zero_grad()
            (out * (step + 1)).square().sum().backward()
        loop.hold()
        for net in (loop.net, loop.plain):
            for p in net.parameters():  # as scripts mask the gradients of weights that they have pruned
                kept += [p.grad.data] if seen else []
                p.grad.data = p.grad.data * (p.data > 0)
        loop.hold()
        del out


def test_a_gradient_that_was_kept_in_two_ways_stays_when_one_is_gone(loop: Loop) -> None:
    loop.settle()
    loop().sum().backward()
    kept, seen, others = loop.net.body.weight.grad, loop.net.body.weight.grad.detach(), loop.net.head.weight.grad
    before = kept.clone(), others.clone()
    for step in range(3):
        loop.net.zero_grad()
        (loop() * (step + 2)).sum().backward()
        torch.testing.assert_close((kept, others), before)
        if step == 0:
            torch.testing.assert_close(seen, before[0])
            del seen


def test_a_parameter_that_a_penalty_reads_too_has_both_gradients(loop: Loop) -> None:
    loop.settle()
    for net, out in ((loop.net, loop()), (loop.plain, loop.plain(loop.x))):
        (out.sum() + sum(p.square().sum() for p in net.parameters())).backward()
    loop.hold()


def test_what_is_frozen_gets_no_gradient(loop: Loop) -> None:
    loop.settle()
    for net in (loop.net, loop.plain):
        net.body.weight.requires_grad_(False)
        net.head.bias.requires_grad_(False)
    loop().sum().backward()
    loop.plain(loop.x).sum().backward()
    loop.hold()
    assert loop.net.body.weight.grad is None


def _tensor_hook(p: torch.Tensor) -> object:
    return p.register_hook(lambda g: g * 2)


def _accumulated_hook(p: torch.Tensor) -> object:
    def threefold(q: torch.Tensor) -> None:
        q.grad.mul_(3)

    return p.register_post_accumulate_grad_hook(threefold)


@pytest.mark.parametrize("register", [_tensor_hook, _accumulated_hook])
@pytest.mark.parametrize("late", [False, True])
def test_hooks_of_a_parameter_run(loop: Loop, register: Callable[[torch.Tensor], object], late: bool) -> None:
    loop.settle()
    if not late:
        handles = [register(net.norm.weight) for net in (loop.net, loop.plain)]
    ours, theirs = loop(), loop.plain(loop.x)
    if late:  # between forward and backward
        handles = [register(net.norm.weight) for net in (loop.net, loop.plain)]
    ours.sum().backward()
    theirs.sum().backward()
    loop.hold()
    assert loop.directly[-1] is late
    assert len(handles) == 2


@pytest.mark.parametrize("patience", [0, 4])
def test_hooks_of_an_accumulator_run_as_horovod_has_them(monkeypatch: pytest.MonkeyPatch, patience: int) -> None:
    """With an edge each, as soon as it is known that somebody holds them for good."""
    monkeypatch.setattr(direct_gradients, "PATIENCE", patience)
    monkeypatch.setattr(direct_gradients, "ASKED_EVERY", 1)
    loop, ran = Loop(), []
    nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in loop.net.parameters()]
    for node in nodes:
        node.register_hook(lambda *given: ran.append(1))
    for _ in range(patience + 3):
        loop().sum().backward()
    assert len(ran) == (patience + 3) * len(nodes)
    assert loop.directly == [*[True] * (patience + 1), False, False]


def test_nobody_watches_where_only_the_last_loss_is_kept() -> None:
    loop = Loop()
    for _ in range(3):
        loss = loop().sum()
        loss.backward()
    assert loop.directly == [True, True, True]
    assert loop.captured.gradients.watched is False
    assert loss.grad_fn is not None


@pytest.mark.parametrize("lets_go", [False, True])
def test_losses_that_are_kept_keep_the_edges(monkeypatch: pytest.MonkeyPatch, lets_go: bool) -> None:
    """For good only where the script keeps them for long: a sum of losses ends with the script's next report."""
    monkeypatch.setattr(direct_gradients, "PATIENCE", 16)
    loop = Loop()
    kept = [loop.net(loop.x).sum()]  # of an eager step before the capture
    for step in range(30):
        if step == 10 and lets_go:
            kept.clear()
        loop().sum().backward()
    assert loop.directly == [True] * 30 if lets_go else [*[True] * 17, *[False] * 13]
    assert loop.captured.gradients.watched is not lets_go
    assert bool(kept) is not lets_go


@pytest.mark.parametrize("which", [[0], [1, 4], [0, 1, 2, 3, 4, 5]])
def test_gradients_that_are_asked_for_are_found(loop: Loop, which: list[int]) -> None:
    loop.settle()
    weight = torch.randn(3, requires_grad=True)
    found = []
    for net, out in ((loop.net, loop()), (loop.plain, loop.plain(loop.x))):
        parameters = [p for i, p in enumerate(net.parameters()) if i in which]
        loss = (out * weight).sum() + next(net.parameters()).square().sum()
        found.append(torch.autograd.grad(loss, [weight, *parameters]))
        assert all(p.grad is None for p in net.parameters())
    torch.testing.assert_close(*found)


def test_a_backward_for_some_inputs_writes_theirs_alone(loop: Loop) -> None:
    loop.settle()
    for net, out in ((loop.net, loop()), (loop.plain, loop.plain(loop.x))):
        net.head.weight.grad = torch.ones_like(net.head.weight)
        out.square().sum().backward(inputs=[net.head.weight, net.body.weight])
    loop.hold()
    assert loop.net.norm.weight.grad is None


def test_gradients_of_the_input_alone_touch_no_parameter() -> None:
    undo = Undo()
    serve(undo)
    loop = Loop(torch.randn(5, 6, requires_grad=True))
    loop.settle()
    ours = torch.autograd.grad(loop().square().sum(), loop.x)
    theirs = torch.autograd.grad(loop.plain(loop.x).square().sum(), loop.x)
    torch.testing.assert_close(ours, theirs)
    assert all(p.grad is None for p in loop.net.parameters())
    undo.run()


def test_what_is_not_used_is_said_as_before(loop: Loop) -> None:
    loop.settle()
    stranger = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(loop().sum(), [loop.net.head.bias, stranger])
    found = torch.autograd.grad(loop().sum(), [loop.net.head.bias, stranger], allow_unused=True)
    assert found[0] is not None
    assert found[1] is None


def test_second_derivatives_are_refused_in_words(loop: Loop) -> None:
    loop.settle()
    with pytest.raises(RuntimeError, match="leave out cuda_graphs"):
        torch.autograd.grad(loop().sum(), list(loop.net.parameters()), create_graph=True)


def test_two_applications_are_served_until_both_are_undone() -> None:
    plain = torch.autograd._engine_run_backward
    first, second = Undo(), Undo()
    serve(first)
    serve(second)
    first.run()
    assert torch.autograd._engine_run_backward is not plain
    second.run()
    assert torch.autograd._engine_run_backward is plain


def test_nothing_is_left_of_a_step(loop: Loop) -> None:
    loop.settle()
    gc.collect()
    gc.disable()
    try:
        out = loop()
        token = out.grad_fn.token
        out.sum().backward()
        del out
        assert len(gc.get_referrers(token)) <= 1  # no cycle holds it
    finally:
        gc.enable()


def test_gradients_have_memory_of_their_own() -> None:
    weight, bias, other = torch.randn(4, 3), torch.randn(3), torch.randn(3)
    above = torch.randn(3)
    gradients = [torch.randn(3, 4).t(), above, above, None, torch.zeros(()).expand(3)]
    parameters = [weight, bias, other, other, other]
    found = direct_gradients.own_memory(gradients, parameters, [above])
    for own, gradient, parameter in zip(found, gradients, parameters, strict=True):
        if gradient is None:
            assert own is None
            continue
        assert torch.equal(own, gradient)
        assert own.stride() == parameter.stride()
    places = [t.untyped_storage().data_ptr() for t in [above, *found] if t is not None]
    assert len(set(places)) == len(places)


def test_gradients_beside_each_other_stay_and_those_over_each_other_do_not() -> None:
    """A norm's two lie in one allocation: 24 copies a step of a ResNet-18 otherwise."""
    both, parameters = torch.randn(2, 3), [torch.randn(3) for _ in range(3)]
    found = direct_gradients.own_memory([both[0], both[1], both.view(-1)[2:5]], parameters, [])
    assert [t.data_ptr() for t in found[:2]] == [both[0].data_ptr(), both[1].data_ptr()]
    assert found[2].untyped_storage().data_ptr() != both.untyped_storage().data_ptr()
    assert torch.equal(found[2], both.view(-1)[2:5])
    above = both[1][:1]  # of an input: its last byte is the next one's first
    kept, moved = direct_gradients.own_memory([both[0], both[1]], parameters[:2], [above])
    assert kept.data_ptr() == both[0].data_ptr()
    assert moved.data_ptr() != both[1].data_ptr()


def _replaced(net: Net) -> None:
    net.head = nn.Linear(8, 3)


def _data(net: Net) -> None:
    net.body.weight.data = net.body.weight.data.clone()


def _buffer(net: Net) -> None:
    net.norm.running_mean = net.norm.running_mean.clone()


def _parameter(net: Net) -> None:
    net.body.weight = nn.Parameter(net.body.weight.detach())  # over the same memory


def _added(net: Net) -> None:
    net.extra = nn.Linear(2, 2)


def _frozen_norm(net: Net) -> None:
    net.norm.eval()


def _scheduled_momentum(net: Net) -> None:
    net.norm.momentum *= 0.5


def _no_number_any_more(net: Net) -> None:
    net.norm.eps = torch.ones(2)


def _phase(net: Net) -> None:
    net.phase = "full"


def _mask(net: Net) -> None:
    net.mask = torch.ones(8)


def _mask_elsewhere(net: Net) -> None:
    net.mask.data = torch.zeros(8)


def _a_number_now(net: Net) -> None:
    net.skipped = 0.5


def _in_a_list(net: Net) -> None:
    net.kept[0] = False


def _tuple(net: Net) -> None:
    net.sizes = (4, 4)


def _attribute(net: Net) -> None:
    net.late = True


def _hook(net: Net) -> None:
    net.head.register_forward_hook(lambda *_: None)


def _forward(net: Net) -> None:
    net.body.forward = lambda x: x


@pytest.mark.parametrize(
    "change",
    [
        *(
            _replaced,
            _data,
            _buffer,
            _parameter,
            _added,
            _frozen_norm,
            _scheduled_momentum,
            _no_number_any_more,
            _phase,
        ),
        *(_mask, _mask_elsewhere, _a_number_now, _in_a_list, _tuple, _attribute, _hook, _forward),
    ],
)
def test_a_module_that_changed_is_seen(change: Callable[[Net], None]) -> None:
    net = Net()
    layout = Layout(net)
    net(torch.randn(4, 6)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert not layout.changed()
    change(net)
    assert layout.changed()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    """What stands for captured graphs, without a GPU."""
    made: list[Replayed] = []

    class Captured(Replayed):
        def __init__(self, inner: object, module: nn.Module, given: arguments.Arguments, **options: object) -> None:
            super().__init__(module, *given.tensors)
            self.parameters = [p for p in module.parameters() if p.requires_grad]
            self.layout = Layout(module)
            self.structure = torch.utils._pytree.tree_structure(torch.zeros(1))
            made.append(self)

    monkeypatch.setattr(calls, "Captured", Captured)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


@pytest.mark.parametrize(("every", "made"), [(1, 3), (calls.WORTH_REPLAYS * 2, 5)])
def test_numbers_that_change_every_few_steps_end_the_captures(captures: list[Replayed], every: int, made: int) -> None:
    net = Net()
    forward = calls.GraphedForward(net.forward, net, GraphLayer(False))
    for step in range(calls.WORTH_REPLAYS * 2 * 5):
        net.done = step // every
        forward(torch.randn(5, 6))
    assert len(captures) == made
    assert bool(forward.failed) == (every == 1)


def test_what_has_hooks_by_now_is_not_captured(captures: list[Replayed]) -> None:
    net = Net()
    forward = calls.GraphedForward(net.forward, net, GraphLayer(False))
    for _ in range(calls.WARM_CALLS + 1):
        forward(torch.randn(5, 6))
    seen: list[torch.Tensor] = []
    net.head.register_forward_hook(lambda _module, _args, out: seen.append(out))
    for _ in range(calls.WARM_CALLS + 2):
        forward(torch.randn(5, 6))
    assert len(captures) == 1
    assert len(seen) == calls.WARM_CALLS + 2
    (why,) = forward.failed.values()
    assert why.startswith("head has a hook (test_what_has_hooks_by_now_is_not_captured.<locals>.<lambda>, ")


class Around:
    """A layer of advisor's."""

    def __call__(self, inner: Callable[..., torch.Tensor], module: nn.Module) -> Callable[..., torch.Tensor]:
        return lambda *args: inner(*args)


def test_graphs_that_are_switched_off_and_on_again_replay_what_they_captured(captures: list[Replayed]) -> None:
    """A trial's blocks do this: each switch had cost a warm-up and a capture, and after three the graphs were given up."""
    net, layer = Net(), Around()
    forward = calls.GraphedForward(net.forward, net, GraphLayer(False))
    stack = ForwardStack.of(net)
    ForwardStack.of(net.body).set(SUBMODULE, Around())  # another change, that is kept
    stack.set(GRAPH, layer)
    for _ in range(calls.WARM_CALLS + 1):
        forward(torch.randn(5, 6))
    for _ in range(6):
        stack.clear(GRAPH)
        stack.set(GRAPH, layer)
        forward(torch.randn(5, 6))
    assert [captured.replays for captured in captures] == [7]
    assert forward.reasons() == []


@pytest.mark.parametrize("in_its_place", [False, True])
def test_a_graph_whose_parts_have_other_layers_by_now_is_captured_anew(
    captures: list[Replayed], in_its_place: bool
) -> None:
    net = Net()
    forward = calls.GraphedForward(net.forward, net, GraphLayer(False))
    below = ForwardStack.of(net.body)
    below.set(SUBMODULE, Around())
    for _ in range(calls.WARM_CALLS + 1):
        forward(torch.randn(5, 6))
    if in_its_place:
        below.clear(SUBMODULE)
    below.set(SUBMODULE if in_its_place else SUBMODULE + 1, Around())
    for _ in range(calls.WARM_CALLS + 1):
        forward(torch.randn(5, 6))
    assert [captured.replays for captured in captures] == [1, 1]
    assert not forward.failed


@pytest.mark.parametrize("change", ["thaw", "evaluate"])
def test_what_is_thawed_or_frozen_later_is_captured_anew(change: str, captures: list[Replayed]) -> None:
    net = Net()
    net.body.requires_grad_(change != "thaw")
    forward = calls.GraphedForward(net.forward, net, GraphLayer(False))
    for _ in range(calls.WARM_CALLS + 2):
        forward(torch.randn(5, 6))
    assert [captured.replays for captured in captures] == [2]
    net.body.requires_grad_(True)
    net.norm.train(change != "evaluate")
    statistics = net.norm.running_mean.clone()
    for _ in range(calls.WARM_CALLS):
        forward(torch.randn(5, 6)).sum().backward()
    assert net.body.weight.grad is not None
    assert torch.equal(net.norm.running_mean, statistics) == (change == "evaluate")
    forward(torch.randn(5, 6))
    assert [captured.replays for captured in captures] == [2, 1]


def captured_in_place_of(net: Net, forward: Callable[[], object]) -> None:
    with capturing.tensors_stay(net):
        forward()


def test_tensors_that_a_captured_forward_replaces_are_put_back_and_refused() -> None:
    """Nothing is computed in a capture: what it puts there holds no values."""
    net = Net()
    before = dict(net.norm._buffers)

    net.calls, net.state = 0, before["running_var"]

    def replaces() -> None:
        net.calls += 1
        net.state = net.state * 0.9
        net.seen = net.state
        net.norm.running_mean = net.norm.running_mean * 0.9
        net.register_buffer("other", torch.zeros(1))

    with pytest.raises(RuntimeError, match="keep: other, running_mean, seen, state"):
        captured_in_place_of(net, replaces)
    assert dict(net.norm._buffers) == before
    assert "other" not in net._buffers
    assert net.state is before["running_var"]
    assert not hasattr(net, "seen")
    assert net.calls == 1
    captured_in_place_of(net, lambda: net.norm.running_mean.mul_(0.9))

    def fails() -> None:
        replaces()
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        captured_in_place_of(net, fails)
    assert dict(net.norm._buffers) == before


def test_memory_that_replays_use_and_the_allocator_counts_as_free() -> None:
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 100, "allocated_size": 10},  # everybody's
        {"segment_pool_id": (0, 1), "total_size": 100, "allocated_size": 30},
        {"segment_pool_id": (0, 2), "total_size": 50, "allocated_size": 50},
        {"segment_pool_id": (0, 3), "total_size": 70, "allocated_size": 0},  # another graph's
    ]
    assert capturing.free_bytes(segments, {(0, 1), (0, 2)}) == 70


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", [nn.Sequential, lambda held: torch.compile(held, backend="eager")])
def test_what_data_parallel_is_to_hear_of_is_not_graphed(wrap: Callable[..., nn.Module]) -> None:
    """Its forward would be in the graph, with all that it does for the other ranks."""
    root = RootModule(module=wrap(nn.parallel.DistributedDataParallel(nn.Linear(2, 2))), name="Linear")
    match = CudaGraphs().match(Training(device=torch.device("cuda"), roots=[root]), {})
    assert not match.applies
    assert "DistributedDataParallel does work of its own" in match.reason
