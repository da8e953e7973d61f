"""A number that is still on its way from the GPU.

Stands in for the float, int or bool that `.item()` would have waited for. Arithmetic on lines declared lazy is written down and done
later, by the same Python operators on the same Python numbers in the same order, so the result is bit-equal; every other use waits
and makes a plain number. It is no subclass of float: C code would read a float's own, unset value without asking.
"""

from __future__ import annotations

import math
import operator
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any, ClassVar
from weakref import ref

import torch

# Arithmetic written down before it is done, at most: then the oldest is waited for, which bounds memory and recursion.
DEEPEST = 64

_MOST_ASKED = 8  # steps without an update (accumulated gradients) before a number that passes for finite is waited for

_DIVISIONS = (operator.truediv, operator.floordiv, operator.mod)
_NUMBERS = (int, float, bool)
_KINDS: dict[torch.dtype, type] = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), float),
    **dict.fromkeys((torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8), int),
    torch.bool: bool,
}


class _Place:
    """Pinned memory for one number from the current stream. `here` and `there` are the same bytes, as host and device see them.

    Attributes:
        arrived: recorded on the stream behind each write.
        __cuda_array_interface__: how torch takes memory that it did not allocate for a device's.

    Raises:
        RuntimeError: where the device cannot write to the host's memory.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.here = torch.empty((), dtype=dtype, pin_memory=True)
        # As bytes: the interface has no name for bfloat16.
        self.__cuda_array_interface__ = {
            "shape": (dtype.itemsize,),
            "typestr": "|u1",
            "data": (self.here.data_ptr(), False),
            "version": 2,
        }
        self.there = torch.as_tensor(self, device=device).view(dtype).reshape(())
        if self.there.data_ptr() != self.here.data_ptr():
            raise RuntimeError("this device has no view of the host's memory")
        self.stream = torch.cuda.current_stream(device)
        self.arrived: Any = torch.cuda.Event()


# Places that hold no number now, by dtype, device and stream: what one stream writes comes in the order in which it was asked for.
_free: defaultdict[tuple[torch.dtype, torch.device, int], list[_Place]] = defaultdict(list)


class HostWrite:
    """A one-element tensor on its way to the host, behind the work that is queued on the current stream.

    A kernel writes it into the host's memory. A copy would hold up the kernels before and behind it for 12 to 14 us on an H200, and
    a copy on a stream of its own costs the host four calls more (docs/notes/host-cost-of-a-call.md#what-the-host-does-in-a-small-nets-step).
    """

    __slots__ = ("_place", "_places")

    def __init__(self, tensor: torch.Tensor) -> None:
        # The stream's handle alone: `torch.cuda.current_stream` makes objects, for 10 us and more.
        stream = torch._C._cuda_getCurrentRawStream(tensor.device.index)
        self._places = _free[tensor.dtype, tensor.device, stream]
        self._place = self._places.pop() if self._places else _Place(tensor.dtype, tensor.device)
        value = tensor.detach()
        if value.dim():
            value = value.reshape(())
        torch.maximum(value, value, out=self._place.there)  # itself, NaN and -0.0 too
        self._place.arrived.record(self._place.stream)

    def __del__(self) -> None:
        if hasattr(self, "_place"):
            self._places.append(self._place)

    def done(self) -> bool:
        """Whether it has arrived. Does not wait."""
        return bool(self._place.arrived.query())

    def value(self) -> Any:
        """The Python number. Waits, if it has not arrived."""
        if not self.done():  # a call that need not wait is one more of the host's, and looks like a wait to a trace
            self._place.arrived.synchronize()
        return torch.Tensor.tolist(self._place.here)


class Deferred:
    """A Python number to come. Made by `defer`, and by arithmetic on a lazy line."""

    __slots__ = ("__weakref__", "_depth", "_kind", "_left", "_operator", "_right", "_value", "_write")

    lazy: ClassVar[set[tuple[CodeType, int]]] = set()
    """Lines, by code object and number, whose arithmetic stays deferred."""

    guards: ClassVar[dict[tuple[CodeType, int], CodeType]] = {}
    """Lines that ask a number only whether it is finite, to end the program where it is not, with the code of that `if`. Asked there, it
    passes for finite until `decide`."""

    def __init__(
        self, kind: type, write: Any = None, function: Any = None, left: Any = None, right: Any = None
    ) -> None:
        self._kind = kind
        self._write, self._operator, self._left, self._right = write, function, left, right
        self._value: Any = None
        self._depth: int = 1 + max((side._depth for side in (left, right) if type(side) is Deferred), default=0)

    @property
    def __class__(self) -> type:
        """What the number will be, so that `isinstance(x, float)` answers as for the plain number."""
        return self._kind

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("the type of a number cannot be changed")

    def _settled(self) -> bool:
        return self._write is None and self._operator is None

    def _settle(self, wait: bool) -> bool:
        """Work out the value if that needs no waiting, or with `wait` in any case. Says whether it is known now."""
        if self._settled():
            return True
        if self._write is not None:
            if not wait and not self._write.done():
                return False
            self._value, self._write = self._write.value(), None
            return True
        sides = [side for side in (self._left, self._right) if type(side) is Deferred]
        if not all(side._settle(wait) for side in sides):
            self._depth = 1 + max(side._depth for side in sides)
            return False
        self._value = self._operator(plain(self._left), plain(self._right))
        self._operator = self._left = self._right = None
        self._depth = 1
        return True

    def _compute(self) -> Any:
        if _asked:
            decide()
        if not self._settle(wait=False):
            _waits[0] += 1
            self._settle(wait=True)
        return self._value

    def _passes(self, frame: FrameType) -> bool:
        """Whether it passes for finite in what this frame asks, until it is known."""
        code = Deferred.guards.get((frame.f_code, frame.f_lineno))
        if code is None or self._settle(wait=False):
            return False
        if len(_asked) >= _MOST_ASKED:
            decide()
        _asked.append((self, code, frame.f_globals, dict(frame.f_locals)))
        return True

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        value = self._compute()
        return type(value), (value,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compute(), name)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        import numpy

        return numpy.asarray(self._compute(), dtype=dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """What NumPy does with us, also in an array's own place (`array += number`)."""
        if Deferred.guards and self._passes(sys._getframe(1)):
            return getattr(ufunc, method)(0.0)
        return getattr(ufunc, method)(*map(plain, inputs), **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = {key: plain(value) for key, value in (kwargs or {}).items()}
        return func(*(plain(argument) for argument in args), **keywords)

    def __hash__(self) -> int:
        return hash(self._compute())

    def __bool__(self) -> bool:
        return bool(self._compute())

    def __float__(self) -> float:
        if Deferred.guards and self._passes(sys._getframe(1)):
            return 0.0
        return float(self._compute())

    def __int__(self) -> int:
        return int(self._compute())

    def __index__(self) -> int:
        return operator.index(self._compute())

    def __complex__(self) -> complex:
        return complex(self._compute())

    def __str__(self) -> str:
        return str(self._compute())

    def __repr__(self) -> str:
        return repr(self._compute())

    def __format__(self, spec: str) -> str:
        return format(self._compute(), spec)

    def __round__(self, digits: int | None = None) -> Any:
        return round(self._compute(), digits) if digits is not None else round(self._compute())

    def __trunc__(self) -> int:
        return self._compute().__trunc__()  # type: ignore[no-any-return]  # any kind of number

    def __floor__(self) -> int:
        return math.floor(self._compute())  # type: ignore[no-any-return]  # any kind of number

    def __ceil__(self) -> int:
        return math.ceil(self._compute())  # type: ignore[no-any-return]  # any kind of number

    def __divmod__(self, other: Any) -> Any:
        return divmod(self._compute(), plain(other))

    def __rdivmod__(self, other: Any) -> Any:
        return divmod(plain(other), self._compute())

    def __abs__(self) -> Any:
        return abs(self._compute())

    def __neg__(self) -> Any:
        return -self._compute()

    def __pos__(self) -> Any:
        return +self._compute()

    def __invert__(self) -> Any:
        return ~self._compute()


class Across:
    """Where one script runs as several ranks, `ranks` makes a rank's number the whole batch's (distributed/readings.py)."""

    ranks: Callable[[torch.Tensor], torch.Tensor] | None = None


def defer(tensor: torch.Tensor) -> Deferred | None:
    """The number in a one-element tensor, to come; None when its dtype has no deferred form."""
    kind = _KINDS.get(tensor.dtype)
    if kind is None or tensor.numel() != 1:
        return None
    if Across.ranks is not None:
        tensor = Across.ranks(tensor)
    # What has come by now need not hold its place in pinned memory: a list may keep the numbers of an epoch.
    while coming and ((oldest := coming[0]()) is None or oldest._settle(wait=False)):
        coming.popleft()
    number = Deferred(kind, write=HostWrite(tensor))
    coming.append(ref(number))
    return number


coming: deque[ref[Deferred]] = deque()
_waits = [0]


def waits() -> int:
    """How often somebody has waited for a number, since the process began."""
    return _waits[0]


_asked: list[tuple[Deferred, CodeType, dict[str, Any], dict[str, Any]]] = []  # what passes for finite


def decide() -> None:
    """Ask those that passed for finite once more, now that they can be waited for: where one is not, the script's own `if` runs.

    Raises:
        BaseException: what that branch raises: SystemExit, most often.
    """
    while _asked:
        number, code, names, own = _asked.pop(0)
        if not math.isfinite(number._compute()):
            _asked.clear()
            FunctionType(code, {**names, **own})()  # the script's own lines, compiled from its file


def plain(value: Any) -> Any:
    """`value`, waited for if it is deferred."""
    return value._compute() if type(value) is Deferred else value


def _combine(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Called from an operator method: deferred on a lazy line and between numbers, else done now.

    A division by what may be zero is done now, so that its error comes where the plain script has it.
    """
    numbers = all(type(side) is Deferred or type(side) in _NUMBERS for side in (left, right))
    if numbers and (function not in _DIVISIONS or (type(right) is not Deferred and right != 0)):
        frame = sys._getframe(2)
        if (frame.f_code, frame.f_lineno) in Deferred.lazy:
            for side in (left, right):
                if type(side) is Deferred:
                    side._settle(wait=side._depth >= DEEPEST)
            return Deferred(_kind(function, left, right), function=function, left=left, right=right)
    return function(plain(left), plain(right))


def _kind(function: Callable[[Any, Any], Any], left: Any, right: Any) -> type:
    kinds = [side._kind if type(side) is Deferred else type(side) for side in (left, right)]
    return float if float in kinds or function is operator.truediv else int


def _operators() -> None:
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
        function = getattr(operator, name)

        def forward(self: Deferred, other: Any, function: Any = function) -> Any:
            return _combine(function, self, other)

        def reflected(self: Deferred, other: Any, function: Any = function) -> Any:
            return _combine(function, other, self)

        setattr(Deferred, f"__{name}__", forward)
        setattr(Deferred, f"__r{name}__", reflected)
    for name in ("pow", "and", "or", "xor", "lshift", "rshift"):  # done now: seldom in what is added up over steps
        function = getattr(operator, f"__{name}__")

        def now(self: Deferred, other: Any, function: Any = function) -> Any:
            return function(self._compute(), plain(other))

        def now_reflected(self: Deferred, other: Any, function: Any = function) -> Any:
            return function(plain(other), self._compute())

        setattr(Deferred, f"__{name}__", now)
        setattr(Deferred, f"__r{name}__", now_reflected)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        function = getattr(operator, name)

        def compare(self: Deferred, other: Any, function: Any = function) -> Any:
            return function(self._compute(), plain(other))

        setattr(Deferred, f"__{name}__", compare)


_operators()
