"""Names in the trace for what the profiler cannot know: which module and which of the user's lines an operator is for.

Only inside the traced window: `torch.nn.Module.__call__` opens a range `advisor:module:<path>|<type>` around each forward,
and a `TorchFunctionMode` opens `advisor:line:<file>:<line>` around each call from Python into torch. Both are undone
exactly by `stop`. The step watcher's optimizer hooks open and close `advisor:optimizer:<type>` (updates.py): the window ends inside torch's own
range around the step, and where no function mode is there to see that, torch before 2.13 does not tell of it. A fault in here ends the
annotation, never the training.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast as RecordFunctionFast
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from advisor.loop import updates
from advisor.loop.compiles import compiled_code_in_use
from advisor.loop.sources import Lines
from advisor.loop.training import RootModule, Training
from advisor.profiling.inside.cupy_lines import CupyLines
from advisor.profiling.inside.weights import WeightLines

MODULE, LINE, STEP, OPTIMIZER = "advisor:module:", "advisor:line:", "advisor:step:", "advisor:optimizer:"

# Calls that start no operator: attributes (`x.shape` is `__get__`) and questions about a tensor. Nor may a range of ours
# stand around the opening of a `record_function`: that would end after ours, and the profiler cuts ranges that cross.
_NO_WORK = frozenset(
    [
        "__get__",
        "__set__",
        "dim",
        "size",
        "numel",
        "stride",
        "__len__",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "element_size",
        "data_ptr",
        "storage_offset",
        "get_device",
        "type",
        "has_names",
        "is_pinned",
        "ndimension",
        "nelement",
        "__hash__",
        "untyped_storage",
    ]
)
_WRAPPERS = re.compile(r"^((module|_orig_mod|_fsdp_wrapped_module)(\.|$))+")


def step_marker(index: int) -> None:
    """Leave the mark `advisor:step:<index>` in the trace, so that a step's bounds are on the trace's own clock."""
    with RecordFunctionFast(f"{STEP}{index}"):
        pass


def module_names(roots: Sequence[RootModule]) -> dict[int, str]:
    """`id(module)` → "<path>|<type>" for every module under the roots, the path beginning with the root's name.

    A module that is reachable by two paths gets the first. Wrappers (DataParallel, a compiled module) are left out of the
    path, so that a module has the same one with and without them.
    """
    names: dict[int, str] = {}
    for root in roots:
        for path, module in root.module.named_modules():
            path = _WRAPPERS.sub("", path)
            full = f"{root.name}.{path}" if path else root.name
            names.setdefault(id(module), f"{full}|{type(module).__name__}")
    return names


class Annotator:
    """Annotations around modules and source lines between `start` and `stop`; `failure` says why they ended early.

    `opened` counts the ranges so far: the window's size can be told from it while it is still open.
    """

    def __init__(self, roots: Sequence[RootModule] = (), training: Training | None = None) -> None:
        self.failure = ""
        self.roles: dict[
            str, str
        ] = {}  # source line → the phase that it is, where weights are written outside an optimizer's step
        self.opened = 0
        self.lines = False  # source lines are annotated
        self._names = module_names(roots)
        self._active = False
        self._process = os.getpid()
        self._lines = Lines()
        self._original: Callable[..., Any] | None = None
        self._patched: Callable[..., Any] | None = None
        self._mode: _LineMode | None = None
        self._optimizer: RecordFunctionFast | None = None
        self._waits: list[tuple[Any, str, Any, Any]] = []  # owner, attribute, original, ours
        self._ranges: list[Any] = []  # torch's and the script's own, opened since `start`
        self._training = training
        self._weights: WeightLines | None = None  # while lines that write weights are looked for
        self._cupy = CupyLines(lambda line: open_range(LINE + line))
        self._running = threading.local()  # `.modules`: how many are running

    def start(self, *, compiled: bool | None = None) -> None:
        """Modules are annotated from now on, and source lines unless compiled code is in use.

        Args:
            compiled: whether the step runs compiled code, where the caller knows; by default, whether any was made.
        """
        self._active = True
        updates.watch(self)
        self._patch_modules()
        # Dynamo guards on the function modes: ours would make it compile anew.
        if not (compiled_code_in_use() if compiled is None else compiled):
            self._weights = WeightLines(self._training)
            self._mode = _LineMode(self)
            _insert_below(self._mode)
            self.lines = True
            self._patch_waits()
            self._cupy.start()

    def settle(self) -> None:
        """A step has ended. Lines that write weights are looked for until some are found: that takes time of the steps to come."""
        if self._weights is not None:
            self.roles = self._weights.finish()
            if self.roles:
                self._weights = None

    def stop(self) -> None:
        """Everything is as before `start`. May be called twice."""
        self._active = False
        self.settle()
        self._weights = None
        self.close_optimizer()
        self._close_ranges()
        updates.let_go(self)
        if self._mode is not None:
            _remove(self._mode)
            self._mode = None
        # When someone else wrapped the call after us it cannot be put back; our wrapper then only passes calls on.
        if self._patched is not None and torch.nn.Module.__call__ is self._patched:
            torch.nn.Module.__call__ = self._original  # type: ignore[method-assign, assignment]  # put back
        self._patched = None
        for owner, name, original, ours in self._waits:
            if owner.__dict__.get(name) is ours:
                setattr(owner, name, original)
        self._waits.clear()
        self._cupy.stop()

    def open_module(self, module: torch.nn.Module) -> RecordFunctionFast | None:
        """An open range named after the module, or None. Never raises."""
        if not self._active:
            return None
        try:
            if os.getpid() != self._process:  # a DataLoader worker forked inside the window
                return None
            name = self._names.get(id(module))
            if name is None:
                kind = type(module).__name__
                name = f"{kind}|{kind}"
            self.opened += 1
            scope = open_range(MODULE + name)
        except Exception as error:
            self._fail(error)
            return None
        self._running.modules = self._modules() + 1
        if self._weights is not None:
            self._weights.forget()
        return scope

    def _modules(self) -> int:
        found: int = getattr(self._running, "modules", 0)
        return found

    def close_module(self, scope: RecordFunctionFast) -> None:
        """The module whose range this is has returned."""
        self._running.modules -= 1
        scope.__exit__(None, None, None)

    def open_optimizer(self, optimizer: Any) -> None:
        """A range around what this optimizer does until `close_optimizer`. Never raises."""
        self.close_optimizer()
        if not self._active:
            return
        try:
            self.opened += 1
            self._optimizer = open_range(OPTIMIZER + type(optimizer).__name__)
            if self._weights is not None:
                self._weights.forget()
        except Exception as error:
            self._fail(error)

    def close_optimizer(self) -> None:
        """No optimizer's range is open."""
        scope, self._optimizer = self._optimizer, None
        if scope is not None:
            scope.__exit__(None, None, None)

    def note_range(self, record: Any) -> None:
        """A `record_function` was entered in this thread."""
        if self._active:
            self._ranges.append(record)

    def _close_ranges(self) -> None:
        """End the ranges that are open still: that of an optimizer's step, in whose hook the window ends, or the script's around an epoch.

        The profiler writes their ends into its events, which are freed with it: where another one is on by then, into memory that is
        somebody else's (seen up to torch 2.13; processes died of it). Ended once more, by whoever opened it, a range does nothing.
        """
        ranges, self._ranges = self._ranges, []
        with contextlib.suppress(Exception), torch._C.DisableTorchFunctionSubclass():
            for record in reversed(ranges):
                torch.ops.profiler._record_function_exit._RecordFunction(record)

    def open_line(self) -> RecordFunctionFast | None:
        """An open range named after the line outside torch, or None. Never raises."""
        if not self._active:
            return None
        try:
            if os.getpid() != self._process:
                return None
            line = self._lines.of(sys._getframe(2))
            if line:
                self.opened += 1
                return open_range(LINE + line)
        except Exception as error:
            self._fail(error)
        return None

    def note_weights(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A call into torch has returned, in which weights may have been written. Never raises."""
        weights = self._weights
        if weights is None or self._optimizer is not None or self._modules():
            return
        try:
            if os.getpid() == self._process and torch._C._current_graph_task_id() == -1:
                weights.saw(func, args, kwargs, result, self._lines.of(sys._getframe(2)))
        except Exception:  # a tensor of another kind, without an address: nothing is said of lines then
            self._weights = None

    def _fail(self, error: Exception) -> None:
        self._active = False
        self.failure = f"annotation stopped: {type(error).__name__}: {error}"

    def _patch_modules(self) -> None:
        original = self._original = torch.nn.Module.__call__
        opening, closing = self.open_module, self.close_module

        def annotated_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            scope = opening(module)
            try:
                return original(module, *args, **kwargs)
            finally:
                if scope is not None:
                    closing(scope)

        self._patched = annotated_call
        torch.nn.Module.__call__ = annotated_call  # type: ignore[method-assign]  # replaced until `stop`

    def _patch_waits(self) -> None:
        """Waits that a script asks for itself are no operators, so that a function mode does not see them."""
        for owner, name in (
            (torch.cuda, "synchronize"),
            (torch.cuda, "empty_cache"),
            (torch.cuda.Stream, "synchronize"),
            (torch.cuda.Event, "synchronize"),
        ):
            original = owner.__dict__.get(name)
            if original is not None:
                ours = self._with_line(original)
                setattr(owner, name, ours)
                self._waits.append((owner, name, original, ours))

    def _with_line(self, original: Callable[..., Any]) -> Callable[..., Any]:
        opening = self.open_line

        @functools.wraps(original)
        def annotated(*args: Any, **kwargs: Any) -> Any:
            scope = opening()
            try:
                return original(*args, **kwargs)
            finally:
                if scope is not None:
                    scope.__exit__(None, None, None)

        return annotated


class _LineMode(TorchFunctionMode):
    """Opens a source-line range around every call from Python into torch; calls that torch makes itself are not seen."""

    def __init__(self, annotator: Annotator) -> None:
        super().__init__()
        self._annotator = annotator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        passed_over = name in _NO_WORK or name.startswith("_record_function")
        scope = None if passed_over else self._annotator.open_line()
        try:
            result = func(*args, **(kwargs or {}))
            if name.startswith("_record_function_enter"):
                self._annotator.note_range(result)
            self._annotator.note_weights(func, args, kwargs, result)
            return result
        finally:
            if scope is not None:
                scope.__exit__(None, None, None)


def open_range(name: str) -> RecordFunctionFast:
    scope = RecordFunctionFast(name)
    scope.__enter__()
    return scope


def _insert_below(mode: TorchFunctionMode) -> None:
    # Below the modes of the user's own `with` blocks, since each takes the topmost mode off when it ends; but above the
    # DeviceContext of `torch.set_default_device`, which insists on being at the bottom when it ends. That one has been
    # entered as a context manager, the one of `with torch.device(…):` is pushed without.
    modes = _take_all()
    fixed = [other for other in modes if isinstance(other, DeviceContext) and hasattr(other, "old_device")]
    for other in (*fixed, mode, *(other for other in modes if other not in fixed)):
        torch._C._push_on_torch_function_stack(other)


def _remove(mode: TorchFunctionMode) -> None:
    if mode not in _get_current_function_mode_stack():
        return
    for other in _take_all():
        if other is not mode:
            torch._C._push_on_torch_function_stack(other)


def _take_all() -> list[Any]:
    """Pop every function mode of this thread; returns them bottom first."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    return modes[::-1]
