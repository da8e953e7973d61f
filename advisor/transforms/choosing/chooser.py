"""Every convolution's products, made the way that was chosen for them: PyTorch's own operators with a choice in front.

`aten::convolution` and `aten::convolution_backward` get a kernel below autograd and autocast, for one device type, as
`torch.library` allows. So whoever calls them gets the choice: modules, functions, graphs that were captured or compiled, DDP's replicas.
While a CUDA graph is captured nothing is timed: what the calls before have chosen goes into it.
"""

from __future__ import annotations

import math
import platform
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.core.findings import Semantics
from advisor.core.roofline import limit_us
from advisor.profiling.inside.dtypes import dtype_name
from advisor.transforms.choosing import families, ways
from advisor.transforms.choosing.clock import Clock, by_turns
from advisor.transforms.choosing.decide import Choice, Timed, decide
from advisor.transforms.choosing.numbers import DATA, FORWARD, WEIGHT, Numbers
from advisor.transforms.choosing.store import Store
from advisor.transforms.choosing.ways import AS_USUAL, USUAL, Originals, Way

BUDGET_S = 20.0  # of a process, for all its products
PRODUCT_S = 2.0  # of one product, beside the call that is under way


class Chooser:
    """The choices of one process.

    Attributes:
        chosen: key → choice, of the products seen here. failed: key → why none was made, and the usual way runs.
        ran: (direction, way) → calls.
        allowed: what may become of a product's numbers: ways that change more are none.
    """

    def __init__(
        self,
        device: torch.device,
        machine: Environment,
        store: Store,
        clock: Clock | None = None,
        *,
        allowed: Semantics = Semantics.REASSOCIATED,
    ) -> None:
        self.device = device
        self.allowed = allowed
        self.clock = clock or Clock(device)
        self.chosen: dict[str, Choice] = {}
        self.failed: dict[str, str] = {}
        self.ran: Counter[tuple[str, str]] = Counter()
        self.spent_s = 0.0
        self._machine, self._store = machine, store
        self._ways: dict[str, Way] = {}
        self._library: torch.library.Library | None = None
        self._kernels: Originals | None = None

    # ---- on and off

    def start(self) -> None:
        """Put the choice in front of PyTorch's own kernels."""
        kind = self.device.type.upper()
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, kind))
        self._kernels = Originals(
            _boxed(torch.library.get_kernel("aten::convolution", kind), keys),
            _boxed(torch.library.get_kernel("aten::convolution_backward", kind), keys),
        )
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced, which is meant
            self._library.impl("convolution", self.convolution, kind)
            self._library.impl("convolution_backward", self.gradients, kind)

    def stop(self) -> None:
        """Take it away. Nothing that was made holds it."""
        self._library = None  # torch takes the kernels back with the object
        self.clock.close()

    # ---- the two operators

    def convolution(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *arguments: Any
    ) -> torch.Tensor:
        """As aten::convolution; `arguments`: stride, padding, dilation, transposed, output padding, groups."""
        kernels = self._originals()
        numbers = _numbers(x, arguments)
        if numbers is None:
            y: torch.Tensor = kernels.forward(x, weight, bias, *arguments)
            return y

        def make(way: Way) -> Callable[[], torch.Tensor]:
            return lambda: ways.made_forward(kernels, way, x, weight, bias, numbers)

        way = self.way(FORWARD, (x, weight), numbers, make, lambda y: y if bias is None else y - _column(bias))
        self.ran[FORWARD, way.name] += 1
        return make(way)()

    def gradients(
        self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: list[int] | None, *arguments: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """As aten::convolution_backward; `arguments`: as of the forward, and which of the three gradients are wanted."""
        kernels, mask = self._originals(), arguments[-1]
        numbers = _numbers(x, arguments[:-1])
        if numbers is None or not (mask[0] or mask[1]):
            found: tuple[torch.Tensor | None, ...] = kernels.backward(dy, x, weight, bias_sizes, *arguments)
            return found
        taken = {}
        for place, direction in enumerate((DATA, WEIGHT)):
            if mask[place]:
                only = [place == 0, place == 1, False]

                def make(way: Way, only: Sequence[bool] = only, place: int = place) -> Callable[[], torch.Tensor]:
                    return lambda: _of(ways.made_gradient(kernels, way, dy, x, weight, None, numbers, only)[place])

                taken[direction] = self.way(direction, (dy, x, weight), numbers, make, lambda product: product)
                self.ran[direction, taken[direction].name] += 1
        one = next(iter(taken.values()))
        if set(taken.values()) == {one} and (not one.family or len(taken) == 1):  # one call makes both
            return ways.made_gradient(kernels, one, dy, x, weight, bias_sizes, numbers, mask)
        first = ways.made_gradient(kernels, taken[DATA], dy, x, weight, None, numbers, [True, False, False])
        rest = ways.made_gradient(kernels, taken[WEIGHT], dy, x, weight, bias_sizes, numbers, [False, True, mask[2]])
        return first[0], rest[1], rest[2]

    def _originals(self) -> Originals:
        assert self._kernels is not None, "started"
        return self._kernels

    # ---- the choice

    def way(
        self,
        direction: str,
        operands: tuple[torch.Tensor, ...],
        numbers: Numbers,
        make: Callable[[Way], Callable[[], torch.Tensor]],
        plain: Callable[[torch.Tensor], torch.Tensor],
    ) -> Way:
        """The way that this product is made: chosen before, or chosen now.

        Args:
            operands: x and weight for the forward; dy, x and weight for a gradient.
            make: way → what makes the product that way.
            plain: the product without what is no part of it, as a bias.
        """
        key = self._key(direction, operands, numbers)
        way = self._ways.get(key)
        if way is not None:
            return way
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return AS_USUAL  # and asked again when nothing is captured
        others = ways.candidates(direction, operands, numbers, cudnn=self.device.type == "cuda", allowed=self.allowed)
        known = {w.name: w for w in (AS_USUAL, *others)}
        choice = self._store.get(key)
        if choice is None or choice.way not in known:
            choice = self._time(key, direction, operands, numbers, make, plain, known)
        way = AS_USUAL if choice is None else known[choice.way]
        if choice is not None:
            self.chosen[key] = choice
        self._ways[key] = way
        return way

    def _time(
        self,
        key: str,
        direction: str,
        operands: tuple[torch.Tensor, ...],
        numbers: Numbers,
        make: Callable[[Way], Callable[[], torch.Tensor]],
        plain: Callable[[torch.Tensor], torch.Tensor],
        known: dict[str, Way],
    ) -> Choice | None:
        if self.spent_s >= BUDGET_S:
            self.failed[key] = f"the {BUDGET_S:.0f} s for choices were over"
            return None
        begin = self.clock.now()
        until = begin + min(PRODUCT_S, BUDGET_S - self.spent_s)
        try:
            error_of = ways.exact_part(self._originals(), direction, operands, numbers)
            tried = {
                name: self._first(way, make(way), lambda y: error_of(plain(y)), until) for name, way in known.items()
            }
            work = {n: (known[n].search, make(known[n])) for n, first in tried.items() if not first.failed}
            times = by_turns(self.clock, work, until)
            timed = [
                Timed(way=n, times_us=times.get(n, ()), error=first.error, failed=first.failed)
                for n, first in tried.items()
            ]
            usual = next(t for t in timed if t.way == USUAL)
            least = self._least_us(direction, operands, numbers)
            choice = decide(usual, [t for t in timed if t is not usual], least_us=least)
        except (RuntimeError, ValueError) as error:  # no memory for a second result, or cuDNN has no algorithm
            self.failed[key] = str(error).partition("\n")[0]
            return None
        finally:
            self.spent_s += self.clock.now() - begin
        self._store.put(key, choice)
        return choice

    def _first(
        self, way: Way, call: Callable[[], torch.Tensor], error_of: Callable[[torch.Tensor], float], until: float
    ) -> Timed:
        """A way's first call, which makes its plan and shows its error."""
        if way is not AS_USUAL and self.clock.now() >= until:
            return Timed(way=way.name, failed="not timed: the time for it was over")
        try:
            return Timed(way=way.name, error=error_of(self.clock.run(way.search, call)))
        except (RuntimeError, AdvisorError) as error:  # no memory for it, no algorithm, a kernel that is not compiled
            if way is AS_USUAL:
                raise
            return Timed(way=way.name, failed=str(error).partition("\n")[0])

    def _least_us(self, direction: str, operands: tuple[torch.Tensor, ...], numbers: Numbers) -> float:
        """What this machine needs for the bytes, beyond what its L2 holds. Operations bound nothing here: Winograd takes fewer."""
        *others, x, weight = (t.numel() * t.element_size() for t in operands)
        nbytes = sum(others) + x * _read(operands[-1], numbers) + weight
        if nbytes <= self._machine.l2_bytes or self._machine.rates_doubt:
            return 0.0
        return limit_us(self._machine, nbytes=float(nbytes), flops=0.0, dtype=dtype_name(operands[0].dtype))

    def _key(self, direction: str, operands: Sequence[torch.Tensor], numbers: Numbers) -> str:
        x, weight = operands[-2:]
        cuda = self.device.type == "cuda"
        parts = (
            direction,
            tuple(x.shape),
            tuple(weight.shape),
            dtype_name(x.dtype),
            [ways.layout_of(t) for t in operands],
            numbers.arguments,
            (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark) if cuda else (),
            torch.cuda.get_device_name(self.device) if cuda else platform.machine(),
            torch.__version__,
            torch.backends.cudnn.version() if cuda else None,
            families.digest(),
            self.allowed.value,
        )
        return " ".join(str(part).replace(" ", "") for part in parts)


def _read(weight: torch.Tensor, numbers: Numbers) -> float:
    """The share of an input that taps reach: a stride beyond them steps over the rest."""
    return math.prod(min(1.0, k / s) for k, s in zip(weight.shape[2:], numbers.stride, strict=True))


def _numbers(x: torch.Tensor, arguments: Sequence[Any]) -> Numbers | None:
    """Those of a convolution of images; None for another, which is left as it is."""
    stride, padding, dilation, transposed, _, groups = arguments
    if transposed or x.dim() != 4 or not x.numel():
        return None
    return Numbers(tuple(stride), tuple(padding), tuple(dilation), groups)


def _boxed(kernel: Any, keys: Any) -> Callable[..., Any]:
    return lambda *arguments: kernel.call_boxed(keys, *arguments)


def _column(bias: torch.Tensor) -> torch.Tensor:
    return bias.view(1, -1, 1, 1)


def _of(product: torch.Tensor | None) -> torch.Tensor:
    assert product is not None
    return product
