"""Kernels that CuPy's functions make are told by their calls, whichever way they are made."""

from __future__ import annotations

from typing import Any

import stub_cupy

from advisor.loop.patches import Patches
from advisor.profiling.inside.cupy_surface import Surface


class RawModule:
    def get_function(self, name: str) -> Any:
        def kernel(*args: Any) -> str:
            return f"{name}{args}"

        return kernel


def fuse(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else lambda function: function


def test_fused_functions_and_functions_of_modules_are_told() -> None:
    cp, seen, patches = stub_cupy.module(), [], Patches()
    cp.fuse, cp.RawModule = fuse, RawModule

    def handler(name: str, plain: Any, args: Any, kwargs: Any) -> Any:
        seen.append((name, len(args)))
        return plain(*args, **kwargs)

    Surface(cp, handler, patches).patch()

    @cp.fuse
    def doubled(x: Any) -> Any:
        return 2 * x

    @cp.fuse(kernel_name="t")
    def tripled(x: Any) -> Any:
        return 3 * x

    kernel = cp.RawModule().get_function("conv")
    kernel.shared = 4
    assert (doubled(3), tripled(3), kernel((1,), (2,))) == (6, 9, "conv((1,), (2,))")
    assert seen == [("fuse:doubled", 2), ("fuse:tripled", 2), ("RawKernel:conv", 3)]
    assert kernel._plain.shared == 4
    patches.restore_all()
    assert (cp.fuse, cp.RawModule) == (fuse, RawModule)
    assert doubled(1) == 2
    assert len(seen) == 3
