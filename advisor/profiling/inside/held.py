"""What one step holds, in the child: the memory mode stops the script behind it, the profile mode watches it behind its trace.

An activation is what autograd keeps for the backward: `saved_tensors_hooks` sees each tensor as it is kept, and what module's forward and
which line of the script or its libraries kept it first. Storages are counted once, parameters and buffers not among them. The step before
is watched for what each module's forward takes. What lives on between steps (parameters, gradients, the optimizer's state) is counted
from the objects; peak and reserved bytes are the allocator's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from advisor.core import storage
from advisor.core.held import ACTIVATION, HELD_FILE, HeldRow, MemoryCourse, MemoryLook, ModuleCost
from advisor.loop import ranks
from advisor.loop.session import Session
from advisor.loop.sources import user_line
from advisor.loop.stop import stop
from advisor.loop.training import StepEvent, Training
from advisor.profiling.inside.course import GRADIENT, Course, Kept

# Whose outputs transforms/norm_outputs.py makes again.
_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.GroupNorm)
_ACTIVATIONS = (torch.nn.ReLU, torch.nn.SiLU, torch.nn.GELU)


class Look:
    """Watches a step's forwards; `begin` and `end` at its boundaries."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self._names = {
            id(module): f"{root.name}.{path}" if path else root.name
            for root in training.roots
            for path, module in root.module.named_modules()
        }
        self._state = {
            tensor.untyped_storage().data_ptr()
            for root in training.roots
            for tensor in map(_own, (*root.module.parameters(), *root.module.buffers()))
            if tensor.layout is torch.strided
        }
        self._inside: list[torch.nn.Module] = []
        self._held: list[tuple[int, tuple[str, ...], str]] = []  # of each storage: bytes, modules around it, line
        self._course: Course | None = None
        self._found: MemoryCourse | None = None
        self._inputs: dict[str, int] = {}
        self._made: dict[int, str] = {}  # by its storage, what a norm, or an activation behind it, has made
        self._renewed: dict[str, int] = {}
        self._early: dict[int, int] = {}
        self._calls: dict[str, int] = {}
        self._spans: list[tuple[str, Any, Any]] = []
        self._open: list[Any] = []
        self._times: dict[str, float] = {}
        self._handles: list[Any] = []
        self._hooks: Any = None
        self._disable: Any = None
        self._dropped: Any = None  # looks for gradients that the script has dropped
        self._forwards = True  # something was kept since that was looked for

    def begin_times(self) -> None:
        """Time each module's forward in the step that begins."""
        self._handles = [
            register_module_forward_pre_hook(self._enters_timed),
            register_module_forward_hook(self._leaves_timed, always_call=True),
        ]

    def end_times(self) -> None:
        """Of the step that ends."""
        self._remove()
        if self.training.device.type == "cuda":
            torch.cuda.synchronize()
        for name, began, ended in self._spans:
            took = began.elapsed_time(ended) * 1e3 if not isinstance(began, float) else (ended - began) * 1e6
            self._times[name] = self._times.get(name, 0.0) + took
        self._spans.clear()

    def begin(self) -> None:
        """See what is kept in the step that begins."""
        self._handles = [
            register_module_forward_pre_hook(self._enters),
            register_module_forward_hook(self._leaves, always_call=True),
        ]
        if self.training.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._course = Course(self.training.device)
        self._watch_gradients(self._course)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._kept, self._given)
        self._hooks.__enter__()
        self._disable = _disable = torch._C._autograd._saved_tensors_hooks_disable

        def disable(*args: Any, **kwargs: Any) -> Any:
            self._leave()  # torch.func refuses any hook: it goes on without ours
            return _disable(*args, **kwargs)

        torch._C._autograd._saved_tensors_hooks_disable = disable

    def end(self) -> None:
        """The step has ended."""
        self._leave()
        self._remove()
        if self._course is not None:
            self._found, self._course = self._course.result(list(self._lasting())), None

    def _leave(self) -> None:
        """Take the hooks on saved tensors off. What they have given stays autograd's until it is used."""
        if self._hooks is not None and self._disable is not None:
            torch._C._autograd._saved_tensors_hooks_disable = self._disable
            self._disable = None
            self._hooks.__exit__(None, None, None)

    def result(self, *, step_us: float, steps: int, applied: tuple[str, ...]) -> MemoryLook:
        """What was seen."""
        device = self.training.device
        cuda = device.type == "cuda"
        return MemoryLook(
            rows=tuple(sorted((*self._activations(), *self._lasting()), key=lambda row: -row.nbytes)),
            modules=tuple(self._costs()),
            device=device.type,
            peak_bytes=torch.cuda.max_memory_allocated() if cuda else 0,
            reserved_bytes=torch.cuda.max_memory_reserved() if cuda else 0,
            total_bytes=torch.cuda.get_device_properties(device).total_memory if cuda else 0,
            step_us=step_us,
            batch_size=self.training.batch_size,
            steps=steps,
            applied=applied,
            course=self._found,
        )

    # -- hooks ------------------------------------------------------------------------------------------------------

    def _enters(self, module: torch.nn.Module, args: Any) -> None:
        self._inside.append(module)
        name = self._names.get(id(module))
        if name is not None and torch.is_grad_enabled():
            self._calls[name] = self._calls.get(name, 0) + 1
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            self._inputs[name] = self._inputs.get(name, 0) + sum(t.numel() * t.element_size() for t in tensors)

    def _leaves(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._inside and self._inside[-1] is module:
            self._inside.pop()
        name = self._names.get(id(module))
        if name is None or not isinstance(output, torch.Tensor) or output.layout is not torch.strided:
            return
        made = output.untyped_storage().data_ptr()
        if isinstance(module, _NORMS):
            self._made[made] = name
        elif isinstance(module, _ACTIVATIONS) and args and isinstance(args[0], torch.Tensor):
            norm = self._made.get(args[0].untyped_storage().data_ptr(), "")
            if norm and made not in self._made:
                self._made[made] = norm
                # It has kept its output before anybody knew whose that is.
                self._renewed[norm] = self._renewed.get(norm, 0) + self._early.pop(made, 0)
        else:
            self._made.pop(made, None)

    def _kept(self, tensor: torch.Tensor) -> Kept:
        course, address = self._course, 0
        if course is not None and tensor.layout is torch.strided and tensor.device.type == self.training.device.type:
            whole = tensor.untyped_storage()
            if whole.data_ptr() not in self._state:
                address, self._forwards = whole.data_ptr(), True
                around = tuple(name for module in self._inside if (name := self._names.get(id(module))))
                if course.keeps(address, whole.nbytes(), around[-1] if around else ""):
                    self._held.append((whole.nbytes(), around, user_line()))
                    if (norm := self._made.get(address)) is not None:
                        self._renewed[norm] = self._renewed.get(norm, 0) + whole.nbytes()
                    else:
                        self._early[address] = whole.nbytes()
        return Kept(tensor.detach(), address, course.drops if course is not None else _nothing)

    def _given(self, kept: Kept) -> torch.Tensor:
        if self._course is not None and self._forwards:
            self._forwards = False
            self._course.backward()
            self._dropped()
        return kept.tensor

    def _watch_gradients(self, course: Course) -> None:
        """Gradients of the step before are there at first; later ones as autograd adds them."""
        parameters = [p for root in self.training.roots for p in root.module.parameters() if p.requires_grad]
        there = {id(p): _nbytes(p.grad) for p in parameters}
        course.enter(GRADIENT, sum(there.values()))

        def added(parameter: torch.Tensor) -> None:
            held, now = there.get(id(parameter), 0), _nbytes(parameter.grad)
            if now != held:
                there[id(parameter)] = now
                course.enter(GRADIENT, now - held)

        def dropped(*_: Any) -> None:
            for parameter in parameters:
                added(parameter)

        for parameter in parameters:
            self._handles.append(parameter.register_post_accumulate_grad_hook(added))
        # A script drops them before the forward or behind it: looked at as its models are called, and as a backward begins.
        self._dropped = dropped
        for root in self.training.roots:
            self._handles.append(root.module.register_forward_pre_hook(dropped))

    def _enters_timed(self, module: torch.nn.Module, args: Any) -> None:
        self._open.append((module, self._now()))

    def _leaves_timed(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._open and self._open[-1][0] is module:
            _, began = self._open.pop()
            name = self._names.get(id(module))
            if name is not None and torch.is_grad_enabled():
                self._spans.append((name, began, self._now()))

    def _now(self) -> Any:
        if self.training.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- what it comes to -------------------------------------------------------------------------------------------

    def _activations(self) -> Iterator[HeldRow]:
        found: dict[tuple[str, str], list[int]] = {}
        for nbytes, around, line in self._held:
            found.setdefault((around[-1] if around else "", line), []).append(nbytes)
        for (module, line), sizes in found.items():
            yield HeldRow(kind=ACTIVATION, module=module, source=line, nbytes=sum(sizes), count=len(sizes))

    def _costs(self) -> Iterator[ModuleCost]:
        held: dict[str, int] = {}
        for nbytes, around, _ in self._held:
            for name in set(around):
                held[name] = held.get(name, 0) + nbytes
        children = {
            self._names[id(module)]: sum(1 for _ in module.modules()) - 1
            for root in self.training.roots
            for module in root.module.modules()
        }
        weights = {
            self._names[id(module)]: sum(p.numel() * p.element_size() for p in map(_own, module.parameters()))
            for root in self.training.roots
            for module in root.module.modules()
        }
        for name, calls in self._calls.items():
            yield ModuleCost(
                module=name,
                forward_us=self._times.get(name, 0.0),
                held_bytes=held.get(name, 0),
                input_bytes=self._inputs.get(name, 0),
                submodules=children.get(name, 0),
                calls=calls,
                weight_bytes=weights.get(name, 0),
                renewed_bytes=self._renewed.get(name, 0),
            )

    def _lasting(self) -> Iterator[HeldRow]:
        training, seen = self.training, set[int]()

        def size(tensors: Any) -> tuple[int, int]:
            nbytes = count = 0
            for tensor in map(_own, tensors):
                if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                    whole = tensor.untyped_storage()
                    if whole.data_ptr() not in seen and tensor.device.type == training.device.type:
                        seen.add(whole.data_ptr())
                        nbytes, count = nbytes + whole.nbytes(), count + 1
            return nbytes, count

        modules = [root.module for root in training.roots]
        kinds = {
            "parameter": (p for m in modules for p in m.parameters()),
            "buffer": (b for m in modules for b in m.buffers()),
            "gradient": (p.grad for m in modules for p in m.parameters() if p.grad is not None),
            "optimizer": (v for o in training.optimizers for s in o.state.values() for v in s.values()),
            "batch": (value for root in training.roots for value in root.args),
        }
        for kind, tensors in kinds.items():
            nbytes, count = size(tensors)
            if nbytes:
                yield HeldRow(kind=kind, nbytes=nbytes, count=count)


def _nothing(address: int) -> None:
    """Of what is kept when no step is watched any more."""


def _nbytes(gradient: torch.Tensor | None) -> int:
    if gradient is None or gradient.layout is not torch.strided:
        return 0
    return int(_own(gradient).untyped_storage().nbytes())


def _own(value: Any) -> Any:
    """Of a tensor that several ranks share (FSDP2's) this rank's part."""
    return value.to_local() if hasattr(value, "to_local") else value


class LookDriver:
    """A `Training.on_step` listener; `settle` puts kept changes on, and says when all are."""

    def __init__(self, training: Training, session: Session, settle: Any, applied: Any) -> None:
        self.training, self.session = training, session
        self._settle, self._applied = settle, applied
        self._settled = settle()
        self._seen = 0
        self._look: Look | None = None
        self._at: list[float] = []
        training.on_step.append(self.on_step)

    def on_step(self, event: StepEvent) -> None:
        """One boundary.

        Raises:
            StopTraining: when the step is watched.
        """
        self._seen += 1
        if not self._settled:
            self._settled = self._settle()
            return
        self._at.append(event.host_ns / 1e3)
        if self._seen < self.session.warmup:
            return
        if self._look is None:
            self._look = Look(self.training)
            self._look.begin_times()
        elif self._look._hooks is None:
            self._look.end_times()
            self._look.begin()
        else:
            self._look.end()
            steps = [b - a for a, b in zip(self._at, self._at[1:], strict=False)][:-2]
            found = self._look.result(
                step_us=sorted(steps)[len(steps) // 2] if steps else 0.0, steps=self._seen, applied=self._applied()
            )
            if ranks.group()[0] == 0:
                storage.save(self.session.folder / HELD_FILE, found)
            stop(self.session, "watched")
