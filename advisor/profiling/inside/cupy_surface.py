"""CuPy's public surface, with a handler around each call: functions, ufuncs, methods of arrays, and kernels of the user's own.

`cupy.ndarray` is a class that Python made, so its methods can be replaced; what is below it, in Cython, cannot and need not be:
everything that a script can write goes through a name that is replaced here. Outermost calls alone reach the handler, in the thread
that patched.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy

from advisor.loop.patches import Patches
from advisor.profiling.inside.late_modules import LateModules
from advisor.profiling.trace.cupy_names import MADE

Handler = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Of the array type: what computes, moves, changes or looks at values. Attributes that only tell of an array are left alone.
METHODS = _names(
    """__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__
    __itruediv__ __floordiv__ __rfloordiv__ __ifloordiv__ __mod__ __rmod__ __imod__ __pow__ __rpow__ __ipow__
    __matmul__ __rmatmul__ __neg__ __pos__ __abs__ __invert__ __and__ __rand__ __iand__ __or__ __ror__ __ior__
    __xor__ __rxor__ __ixor__ __lshift__ __rshift__ __lt__ __le__ __gt__ __ge__ __eq__ __ne__ __getitem__
    __setitem__ __iter__ __bool__ __float__ __int__ __complex__ __index__ __copy__ __deepcopy__ __str__ __repr__
    __format__ __divmod__ __reduce__ __dlpack__ toDlpack all any argmax argmin argsort astype choose clip
    compress conj copy cumprod cumsum diagonal dot fill flatten get item max mean min nonzero prod ptp put ravel
    repeat reshape round scatter_add scatter_max scatter_min searchsorted set sort squeeze std sum swapaxes take
    tobytes tolist trace transpose var view reduced_view argpartition partition byteswap conjugate tofile dump dumps
    __array_ufunc__ __array_function__"""
)
# Calls that bring values to the host, which waits for the device.
LOOKS = _names(
    """__bool__ __float__ __int__ __complex__ __index__ __str__ __repr__ __format__ __iter__ __reduce__ get item
    tolist tobytes asnumpy array_equal allclose savez save"""
)
# Functions that touch no array.
_IDLE = _names(
    """get_array_module is_available show_config get_default_memory_pool get_default_pinned_memory_pool get_include
    result_type can_cast promote_types common_type min_scalar_type issubdtype isscalar geterr seterr finfo iinfo
    shape ndim size typename broadcast_shapes dtype get_printoptions set_printoptions printoptions memoize
    clear_memo fuse show_runtime disable_experimental_feature_warning einsum_path mintypecode obj2sctype
    sctype2char finfo may_share_memory shares_memory isfortran"""
)
_OF_NUMPY = ("__array_ufunc__", "__array_function__")
# Attributes that make another array of the same memory.
PROPERTIES = ("T", "mT", "real", "imag")
SEES = "_advisor_sees"  # an attribute of the classes that stand around CuPy's kernel classes
_KERNELS = ("ElementwiseKernel", "ReductionKernel", "RawKernel")
# Of what is no function by its type, and of what is used in other ways, the method.
_CALLABLES = ("cython_function_or_method", "_GUFunc")
_BY_METHOD = {"r_": "__getitem__", "c_": "__getitem__", "vectorize": "__call__"}
_OF_UFUNCS = ("at", "reduce", "accumulate", "outer", "reduceat")
_MODULES = ("linalg", "fft", "random", "lib.stride_tricks")
EXTRA = (
    "cupyx",
    "cupyx.scipy.ndimage",
    "cupyx.scipy.signal",
    "cupyx.scipy.special",
    "cupyx.scipy.fft",
    "cupyx.scipy.linalg",
)


def attribute(read: Callable[..., Any], plain: Any) -> property:
    """A property that reads by `read`, and is set as `plain` is."""
    return property(read, plain.__set__ if hasattr(plain, "__set__") else None)


class Called:
    """A function or ufunc in whose place this stands: all but the call is the original's."""

    def __init__(self, plain: Any, name: str, wrap: Callable[[str, Any], Callable[..., Any]]) -> None:
        self._plain, self._name, self._wrap = plain, name, wrap
        self._call = wrap(name, plain)
        functools.update_wrapper(self, plain, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._plain, name)
        return self._wrap(f"{self._name}.{name}", found) if name in _OF_UFUNCS else found

    def __repr__(self) -> str:
        return repr(self._plain)


class SurfaceKernel(Called):
    """A kernel that a function of CuPy's has made: its calls are told with itself as the first argument."""

    def __init__(self, plain: Any, name: str, wrap: Callable[[str, Any], Callable[..., Any]]) -> None:
        super().__init__(plain, name, lambda told, made: wrap(told, lambda kernel, *args, **kw: kernel(*args, **kw)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._plain, *args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._plain, name, value)


class Surface:
    """Wraps `module`'s public surface; `patch` puts the wrappers on, `patches.restore_all` takes them off.

    Args:
        wrap: makes what stands in the place of a function of this name; None: the handler around its outermost calls.

    Attributes:
        on_late: called with the name of a part of cupyx that the script has imported since, its functions wrapped by then.
    """

    def __init__(
        self,
        module: Any,
        handler: Handler,
        patches: Patches,
        wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        self.module, self.handler, self.patches = module, handler, patches
        self.inside = False
        self.thread = threading.get_ident()
        self.wrap = wrap or self._wrapped
        self.on_late: list[Callable[[str], None]] = []

    def patch(self, names: Iterable[str] | None = None) -> None:
        """Wrap all of it, or only what the handler would be told under one of these names."""
        wanted = None if names is None else frozenset(names)
        array = self.module.ndarray
        for name in METHODS:
            plain = getattr(array, name, None)
            if name in _OF_NUMPY and plain is getattr(numpy.ndarray, name):
                continue  # arrays that are NumPy's
            if plain is not None and plain is not getattr(object, name, None) and (wanted is None or name in wanted):
                self.patches.replace(array, name, self.wrap(name, plain))
        for name in PROPERTIES:
            plain = getattr(array, name, None)
            if plain is not None and (wanted is None or name in wanted):
                self.patches.replace(array, name, attribute(self.wrap(name, plain.__get__), plain))
        if wanted is None:
            self._patch_makers()
        self._patch_functions(self.module, "", wanted)
        for name in _MODULES:
            part: Any = self.module
            for step in name.split("."):
                part = getattr(part, step, None)
            if part is not None:
                self._patch_functions(part, f"{name}.", wanted)
        if self.module.__name__ == "cupy":
            for name in EXTRA:
                if name in sys.modules:
                    self._patch_functions(importlib.import_module(name), f"{name}.", wanted)
            if wanted is None:
                self._await([name for name in EXTRA if name not in sys.modules])
        for name in _KERNELS:
            kind = getattr(self.module, name, None)
            if isinstance(kind, type) and (wanted is None or name in wanted):
                self.patches.replace(self.module, name, self._kernel(name, kind))

    def _await(self, names: list[str]) -> None:
        """Scripts import these behind `import cupy`, which is when this is."""

        def imported(name: str) -> None:
            self._patch_functions(sys.modules[name], f"{name}.", None)
            for listener in self.on_late:
                listener(name)

        late = LateModules(names, imported)
        late.start()
        self.patches.undo(late.stop)

    def _patch_makers(self) -> None:
        """What makes kernels or takes arrays by other ways than a call of a function."""
        for name, method in _BY_METHOD.items():
            found = getattr(self.module, name, None)
            owner = found if isinstance(found, type) else type(found)
            plain = getattr(owner, method, None)
            if found is not None and plain is not None:
                self.patches.replace(owner, method, self.wrap(name, plain))
        fuse = getattr(self.module, "fuse", None)
        if fuse is not None:
            self.patches.replace(self.module, "fuse", self._fusing(fuse))
        raw: Any = getattr(self.module, "RawModule", None)
        if raw is not None:
            wrap = self.wrap

            def get_function(module: Any, name: str) -> SurfaceKernel:
                return SurfaceKernel(raw.get_function(module, name), f"RawKernel:{name}", wrap)

            told = {"get_function": get_function, "__module__": raw.__module__, "__doc__": raw.__doc__}
            self.patches.replace(self.module, "RawModule", type("RawModule", (raw,), told))

    def _fusing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """`cupy.fuse`, as a decorator with arguments or without, gives kernels whose calls are told."""
        wrap = self.wrap

        @functools.wraps(plain)
        def fuse(*args: Any, **kwargs: Any) -> Any:
            found = plain(*args, **kwargs)
            if not (args and callable(args[0])):  # a decorator still to be given its function
                return lambda function: SurfaceKernel(
                    found(function), f"fuse:{getattr(function, '__name__', '')}", wrap
                )
            return SurfaceKernel(found, f"fuse:{getattr(args[0], '__name__', '')}", wrap)

        return fuse

    def _patch_functions(self, owner: Any, prefix: str, wanted: frozenset[str] | None) -> None:
        ufunc = getattr(self.module, "ufunc", ())
        for name, plain in list(vars(owner).items()):
            if name.startswith("_") or name in _IDLE or isinstance(plain, (type, types.ModuleType)):
                continue
            is_function = isinstance(plain, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, Called))
            if not (is_function or isinstance(plain, ufunc) or type(plain).__name__ in _CALLABLES):
                continue
            if wanted is None or prefix + name in wanted:
                self.patches.replace(owner, name, Called(plain, prefix + name, self.wrap))

    def _kernel(self, name: str, kind: Any) -> type:
        """A subclass whose call is told: `isinstance` and everything else stay as they are."""
        surface = self

        def call(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            return surface.wrap(f"{name}:{getattr(kernel, 'name', '')}", kind.__call__)(kernel, *args, **kwargs)

        def made(kernel: Any, *args: Any, **kwargs: Any) -> None:
            surface.wrap(name + MADE, kind.__init__)(kernel, *args, **kwargs)

        told = {"__call__": call, "__init__": made, "__module__": kind.__module__, "__doc__": kind.__doc__, SEES: True}
        made_of: type = type(kind)(name, (kind,), told)
        return made_of

    def _wrapped(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        get_ident, patches = threading.get_ident, self.patches

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.inside or not patches.active or get_ident() != self.thread:
                return plain(*args, **kwargs)
            self.inside = True
            try:
                return self.handler(name, plain, args, kwargs)
            finally:
                self.inside = False

        return call
