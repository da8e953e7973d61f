"""TF32: fp32 convolutions and matrix products on tensor cores, with 10 mantissa bits in the products instead of 23.

Loses nothing in speed on Ampere or newer, and does nothing where autocast already takes the products to half precision.
cuDNN may use TF32 by default, matrix products may not.

From torch 2.9 there are two interfaces to the same setting, and a state in which they disagree makes later reads raise. So
this sets through the legacy flags, which set both, and then puts back both.
Sources: https://pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from advisor.core import architectures
from advisor.core.profile import KernelRow, StepProfile
from advisor.core.units import percent_text
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.patch import all_or_nothing, parameters_of

_TF32_CAPABILITY = divmod(architectures.TF32, 10)
_T = TypeVar("_T")
# Operations by the newer interface, and how the older one reads and sets them together.
_Flag = tuple[tuple[str, ...], Callable[[], "bool | None"], Callable[[bool], None]]


class Tf32(Transform):
    """Allow TF32 in cuBLAS and cuDNN."""

    id = "tf32"

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if training.device.type != "cuda":
            return Match(applies=False, reason="TF32 needs a CUDA GPU")
        if torch.cuda.get_device_capability(training.device) < _TF32_CAPABILITY:
            return Match(applies=False, reason="this GPU has no TF32 tensor cores (compute capability below 8.0)")
        if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
            return Match(applies=False, reason="NVIDIA_TF32_OVERRIDE=0 in the environment rules it out")
        if not any(parameter.dtype == torch.float32 for parameter in parameters_of(training)):
            return Match(applies=False, reason="no parameter is fp32")
        off = switched_off()
        if not off:
            return Match(applies=False, reason="TF32 is already allowed for convolutions and matrix products")
        return Match(applies=True, sites=tuple(off))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        with all_or_nothing() as undo:
            off = switched_off()
            if "matrix products" in off:
                _set(undo, _MATMUL, on=True)
            if "convolutions" in off:
                _set(undo, _CUDNN, on=True)
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        off = switched_off()
        if off:
            return Check(passed=False, detail=f"TF32 is still off for {' and '.join(off)}")
        if before is None or after is None:
            return Check(passed=True, detail="both TF32 flags are on")
        shares = [_tensor_core_share(profile) for profile in (before, after)]
        numbers = {"tensor_core_frac_before": shares[0], "tensor_core_frac_after": shares[1]}
        if {row.name for row in _products(before)} == {row.name for row in _products(after)}:
            return Check(
                passed=False, detail="the same convolution and matrix-product kernels run as before", numbers=numbers
            )
        return Check(
            passed=True,
            detail=f"tensor-core share of convolutions and products {percent_text(shares[0])} → {percent_text(shares[1])}",
            numbers=numbers,
        )


def new_interface() -> bool:
    return hasattr(torch._C, "_get_fp32_precision_getter")


def _precision(operation: str) -> str:
    return str(torch._C._get_fp32_precision_getter("cuda", operation))


def settings() -> tuple[object, ...]:
    """The TF32 flags in force, whichever interface they were set by: equal tuples mean equal flags."""
    if new_interface():
        return _precision("conv"), _precision("matmul")
    return _legacy_cudnn(), _legacy_matmul()


def _readable(read: Callable[[], _T]) -> _T | None:
    try:
        return read()
    except RuntimeError:  # the script has set the two interfaces apart; then only the newer one can be used
        return None


def _legacy_matmul() -> bool | None:
    return _readable(torch._C._get_cublas_allow_tf32)


def _legacy_cudnn() -> bool | None:
    return _readable(torch._C._get_cudnn_allow_tf32)


def switched_off() -> list[str]:
    if new_interface():
        state = {"convolutions": _precision("conv") == "tf32", "matrix products": _precision("matmul") == "tf32"}
    else:
        state = {"convolutions": bool(_legacy_cudnn()), "matrix products": bool(_legacy_matmul())}
    return [what for what, on in state.items() if not on]


_MATMUL: _Flag = (("matmul",), _legacy_matmul, torch._C._set_cublas_allow_tf32)
_CUDNN: _Flag = (("conv", "rnn"), _legacy_cudnn, torch._C._set_cudnn_allow_tf32)


def forbid() -> Undo:
    """fp32 products have all their bits, until this is undone."""
    with all_or_nothing() as undo:
        _set(undo, _MATMUL, on=False)
        _set(undo, _CUDNN, on=False)
    return undo


def _set(undo: Undo, flag: _Flag, *, on: bool) -> None:
    operations, legacy, set_legacy = flag
    newer = {operation: _precision(operation) for operation in operations} if new_interface() else {}
    old = legacy()

    def put_back() -> None:
        if old is not None:
            set_legacy(old)
        for operation, value in newer.items():
            # "none" inherits from the setting above; it is put back where that gives the value found.
            for candidate in ("none", value):
                if _precision(operation) != value:
                    torch._C._set_fp32_precision_setter("cuda", operation, candidate)

    undo.push(put_back)
    if old is not None:
        set_legacy(on)
    else:
        torch._C._set_fp32_precision_setter("cuda", operations[0], "tf32" if on else "ieee")


def _products(profile: StepProfile) -> list[KernelRow]:
    return [row for row in profile.kernels if row.kind in ("conv", "gemm")]


def _tensor_core_share(profile: StepProfile) -> float:
    rows = _products(profile)
    total = sum(row.time_us for row in rows)
    return sum(row.time_us for row in rows if row.tensor_core) / total if total else 0.0
