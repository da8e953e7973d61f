"""All bundled kernels: listed without a GPU, verified on one."""

from __future__ import annotations

from collections.abc import Callable

from advisor.core.errors import AdvisorError, ExitCode
from advisor.ops import sources
from advisor.ops.batchnorm_act import spec as batchnorm_act

_REPLACES = "native_batch_norm + add + activation, training, channels_last"

# kernel source → (its entries, what it replaces)
KERNELS: dict[str, tuple[tuple[str, ...], str]] = {
    name: (entries, _REPLACES) for name, entries in batchnorm_act.KERNELS.items()
}


def listing() -> list[dict[str, object]]:
    """One row a kernel source: name, entries, what it replaces, sha256 of source and includes."""
    return [
        {"kernel": name, "entries": ", ".join(entries), "replaces": replaces, "sha256": sources.sha256(name)[:16]}
        for name, (entries, replaces) in sorted(KERNELS.items())
    ]


def verify(say: Callable[[str], None]) -> list[dict[str, object]]:
    """Compile each kernel for the GPU present and compare it with its fp64 reference on fresh random inputs.

    Returns:
        One row a kernel family, variant and dtype with `passed` and the largest relative error.

    Raises:
        AdvisorError: without a CUDA GPU of sm_80 or newer and a fitting CuPy, with exit code 5.
    """
    from advisor.ops import nvrtc

    reason = nvrtc.unavailable()
    if reason:
        raise AdvisorError(
            f"kernels cannot be verified here: {reason}",
            expected="an NVIDIA GPU of sm_80 or newer and CuPy",
            exit_code=ExitCode.GPU_REQUIRED,
        )
    from advisor.ops.batchnorm_act import verify as batchnorm_act_verify

    return batchnorm_act_verify.verify(say)
