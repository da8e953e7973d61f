"""What a family of convolutions says of a call that is told by names."""

from __future__ import annotations

from typing import Any

from advisor.ops.convolution_support import Sizes


def unsupported(spec: Any, **call: Any) -> str:
    """Why the family's kernels cannot take the call; empty when they can."""
    sizes = Sizes(**{name: call.pop(name) for name in Sizes.__annotations__})
    reason: str = spec.SUPPORTS.unsupported(sizes, **call)
    return reason
