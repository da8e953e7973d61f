"""CUDA graphs for the segments of a step: the calls are made once on a stream that captures, with memory that nobody else is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from advisor.core.errors import first_line
from advisor.core.units import bytes_text
from advisor.cupy_loops.changes.base import Unfit
from advisor.cupy_loops.replay.arena import Arena
from advisor.cupy_loops.replay.calls import PRODUCTS, CannotFuse, NotAStep, Program
from advisor.cupy_loops.replay.cublas import CublasUnavailable, Products
from advisor.cupy_loops.replay.fused import Kernels
from advisor.cupy_loops.replay.instead import naive_operations
from advisor.cupy_loops.replay.joined import Joined
from advisor.cupy_loops.replay.memory import samples
from advisor.cupy_loops.replay.naive import Meaning
from advisor.cupy_loops.replay.sums import Sums

RELAXED = 2  # cudaStreamCaptureModeRelaxed: memory may be taken from the driver meanwhile
TIMED, TIMED_TOGETHER = 5, 6  # launches of a graph that times a call, and calls in it
MOST_MEMORY = 0.2  # of what is free, for the arrays of one arena: there are two, and copies while a graph is judged


class Graphs:
    """The backend on a GPU."""

    timed = True

    def __init__(self, module: Any) -> None:
        if not hasattr(module, "cuda") or not module.cuda.is_available():
            raise Unfit("CUDA graphs need a CUDA GPU")
        try:
            self.products = Products(module)
        except CublasUnavailable as error:
            raise Unfit(str(error)) from None
        self.module = module
        self.stream = module.cuda.Stream(non_blocking=True)
        sums, joined = Sums(module), Joined(module)
        self._instead: dict[str, Callable[..., Any]] = {
            "dot": self.products.dot,
            "matmul": self.products.matmul,
            "__matmul__": self.products.matmul,
            "__rmatmul__": self.products.rmatmul,
            "tensordot": self.products.tensordot,
            "inner": self.products.inner,
            "einsum": self.products.einsum,
            "sum": sums.sum,
            "mean": sums.mean,
            "var": sums.var,
            "concatenate": joined.concatenate,
            "stack": joined.stack,
        }
        self.kernels = Kernels(module)
        self._masked: dict[str, Callable[..., Any]] = {}

    def build(self, program: Program, module: Any, segments: list[tuple[int, int]]) -> Arena:
        """An arena with a graph for each segment. Nothing is executed.

        Raises:
            CannotCapture: a call is refused.
            CannotFuse: kernels that stand for several calls cannot be made or launched.
            NotAStep: the arrays of a step do not fit beside the loop.
        """
        outside = (*program.kept.values(), *program.given.values())
        if len({int(value.device.id) for value in outside}) > 1:
            raise NotAStep("its arrays are on several GPUs")
        needed = sum(value.nbytes for entry in program.entries for value in entry.samples)
        free = module.cuda.runtime.memGetInfo()[0] + module.get_default_memory_pool().free_bytes()
        if needed > MOST_MEMORY * free:
            raise NotAStep(f"the arrays of a step take {bytes_text(needed)}, and {bytes_text(free)} are free")
        for entry in program.entries:
            if entry.how == "run" and entry.run is None:
                entry.run = self._instead.get(entry.name)
        arena = Arena(program, module)
        arena.pool = module.cuda.MemoryPool()
        self._compile(program, arena)
        module.cuda.runtime.deviceSynchronize()
        for segment in segments:
            arena.graphs[segment] = self._captured(arena, segment)
        return arena

    def launch(self, arena: Arena, segment: tuple[int, int]) -> None:
        """Fill what the calls of this segment give, in the order of the current stream."""
        arena.graphs[segment].launch()

    def masked(self, name: str) -> Callable[..., Any]:
        """What does `target[mask] op= number` in place, of target, mask and number; "" is an assignment."""
        sign = {"": "", "__iadd__": "y +", "__isub__": "y -", "__imul__": "y *", "__itruediv__": "y /"}[name]
        if name not in self._masked:
            kernel = self.module.ElementwiseKernel("bool m, T s", "T y", f"if (m) y = {sign} s", "advisor_masked")
            self._masked[name] = lambda target, mask, number: _nothing(kernel(mask, number, target))
        return self._masked[name]

    def operation(self, found: Meaning, inputs: list[Any]) -> Callable[..., None] | None:
        """What computes this in a graph of inputs that lie as these do, into an output."""
        return naive_operations(self.module, self.products, found, inputs, self.ms)

    def faster(self, first: Callable[[], Any], second: Callable[[], Any]) -> bool:
        """Whether the device does the first in less time."""
        return self.ms(first) < self.ms(second)

    def ms(self, call: Callable[[], Any]) -> float:
        """Milliseconds that the device takes for a call: several behind each other in a graph, so that what launching costs the host is not
        timed; the best of a few. Where it cannot be captured, one by one.
        """
        call()
        self.module.cuda.runtime.deviceSynchronize()
        try:
            graph = self._several(call)
            return self._best(graph.launch) / TIMED_TOGETHER
        except Exception:
            return self._best(call)

    def _several(self, call: Callable[[], Any]) -> Any:
        with self.stream:
            self.stream.begin_capture(RELAXED)
            try:
                for _ in range(TIMED_TOGETHER):
                    call()
            finally:
                graph = self.stream.end_capture()
        return graph

    def _best(self, call: Callable[[], Any]) -> float:
        events, best = self.module.cuda.Event, float("inf")
        for _ in range(TIMED):
            begins, ends = events(), events()
            begins.record()
            call()
            ends.record()
            ends.synchronize()
            best = min(best, self.module.cuda.get_elapsed_time(begins, ends))
        return best

    def _compile(self, program: Program, arena: Arena) -> None:
        there = samples(program)
        entries = [entry for entry in program.entries if entry.how == "run" and entry.name in PRODUCTS and entry.run]
        calls = [lambda entry=entry: arena.run(entry, at=there) for entry in entries]
        self.products.prepare(calls, self.ms)
        steps = [step for plan in program.plans.values() for step in plan]
        try:
            self.kernels.compile(steps, there, [str(dtype) for dtype in program.scalar_dtypes])
        except Exception as error:
            raise CannotFuse(first_line(error)) from None

    def _captured(self, arena: Arena, segment: tuple[int, int]) -> Any:
        failed = None
        with self.module.cuda.using_allocator(arena.pool.malloc), self.stream:
            self.stream.begin_capture(RELAXED)
            try:
                self.products.copies.remember(True)
                arena.build(
                    segment,
                    lambda step: self.kernels.launch(step, arena.at, arena.scalars),
                    self.products.copies.wrote,
                )
            except Exception as error:
                failed = error
            self.products.copies.remember(False)
            try:
                graph = self.stream.end_capture()
            except Exception as error:  # what has failed has ended it
                failed = failed or error
        if failed is not None:
            raise failed
        return graph


def _nothing(result: Any) -> None:
    return None
