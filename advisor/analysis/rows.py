"""What one row of the profile is: a cast, a norm, padding, an index."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from advisor.core.profile import KernelRow
from advisor.resources import kernel_entries

# CopyFunctor: torch._foreach_copy_ between two dtypes.
_CAST = re.compile(r"(CopyFunctor<|LoadWithCast|StoreWithCast|b?float\d+to\w*\d+_copy|_to_copy)", re.IGNORECASE)


_BATCH_NORM = re.compile(r"batch_?norm|(^|[:_])bn_(fw|bw|inf|train)", re.IGNORECASE)


_STANDARDISED = re.compile(r"Std\w*Conv|WSConv")


_INSTANCE_OR_GROUP = re.compile(r"(group|instance)_?norm", re.IGNORECASE)


_LAYER_NORM = re.compile(r"layer_?norm", re.IGNORECASE)


_SQUEEZE_EXCITE_FORWARD = re.compile(r"aten::(mul|mean|adaptive_avg_pool2d)_?$")


_SQUEEZE_EXCITE_BACKWARD = re.compile(r"aten::(mul|div|sum|add|_adaptive_avg_pool2d_backward)_?$")


_SQUEEZE_EXCITE = re.compile(
    r"^(Squeeze_?(And|&)?_?Excit\w*|Effective_?SE\w*|E?SE(Layer|Block|Module|Unit|Net)?)$", re.IGNORECASE
)


HALF = ("fp16", "bf16")


SINGLE = ("fp32", "tf32")  # stored as fp32; a kernel that rounds its inputs to TF32 is still an fp32 operator


MATRIX = ("conv", "gemm")


def parent(module: str) -> str:
    """The path of the module that holds this one; "" for a root."""
    return module.rpartition(".")[0]


def inner_path(module: str) -> str:
    """The path without the attributes under which wrappers (DataParallel, DDP, torch.compile) keep the user's module."""
    return ".".join(part for part in module.split(".") if part not in ("module", "_orig_mod"))


def shapes_of(row: KernelRow) -> list[list[int]]:
    """Shapes of the operator's tensor inputs, in order; [] where an input is no tensor or nothing was recorded."""
    try:
        raw = json.loads(row.shapes) if row.shapes else []
    except ValueError:
        return []
    if not isinstance(raw, list):
        return []
    return [s if isinstance(s, list) and all(isinstance(n, int) for n in s) else [] for s in raw]


def is_cast(row: KernelRow) -> bool:
    """A copy whose purpose is another dtype: by kind, by operator, or by the kernel's conversion functor."""
    if row.kind == "cast":
        return True
    return row.kind in ("copy", "elementwise") and bool(
        "_to_copy" in row.op or (("copy" in row.op or "aten::to" in row.op) and _CAST.search(row.name))
    )


def _norm_text(row: KernelRow) -> str:
    # The module's type comes first: aten::instance_norm runs batch-norm kernels.
    return row.module_type if "Norm" in row.module_type else f"{row.op} {row.name}"


def is_own(row: KernelRow) -> bool:
    """One of advisor's own kernels: what it takes is no longer there to be saved."""
    return row.name in kernel_entries()


def is_batchnorm(row: KernelRow) -> bool:
    """Batch normalisation, SyncBatchNorm's own kernels included, advisor's not, and none of weights (NFNets standardise theirs with it)."""
    of_weights = _STANDARDISED.search(row.module_type)
    return row.kind == "norm" and not is_own(row) and not of_weights and bool(_BATCH_NORM.search(_norm_text(row)))


def is_groupnorm(row: KernelRow) -> bool:
    """Group or instance normalisation, advisor's own kernels left out."""
    return row.kind == "norm" and not is_own(row) and bool(_INSTANCE_OR_GROUP.search(_norm_text(row)))


_PADS = ("aten::reflection_pad2d", "aten::replication_pad2d", "aten::_pad_circular")


def is_padding(row: KernelRow) -> bool:
    """Padding of images with their own values, and its gradient."""
    return row.op.startswith(_PADS)


def is_prelu(row: KernelRow) -> bool:
    """LeakyReLU with a learnt slope, and its gradients."""
    return row.op.startswith(("aten::prelu", "aten::_prelu_kernel"))


def is_volume_pooling(row: KernelRow) -> bool:
    """Pooling of volumes by a window."""
    return row.kind == "pool" and "pool3d" in row.op and "adaptive" not in row.op


def is_layernorm(row: KernelRow) -> bool:
    """Layer normalisation, also over channels, advisor's own kernels left out."""
    return row.kind == "norm" and not is_own(row) and bool(_LAYER_NORM.search(_norm_text(row)))


def is_squeeze_excite(class_name: str) -> bool:
    """Whether a module class is named like the squeeze-and-excite blocks of common model libraries."""
    return bool(_SQUEEZE_EXCITE.match(class_name))


def is_strict_fp32(row: KernelRow) -> bool:
    """Computed with fp32 multiplications, not on tensor cores."""
    return row.dtype == "fp32" and not row.tensor_core


def is_strict_linear(row: KernelRow) -> bool:
    """A product of a linear layer with fp32 multiplications, off the tensor cores."""
    return row.kind == "gemm" and row.module_type == "Linear" and is_strict_fp32(row)


def gates(row: KernelRow) -> bool:
    """Channels scaled by one value each: [N, C, H, W] times [N, C, 1, 1]."""
    shapes = [shape for shape in shapes_of(row) if len(shape) == 4]
    if row.kind != "elementwise" or "mul" not in row.op or len(shapes) != 2 or shapes[0][:2] != shapes[1][:2]:
        return False
    return (shapes[0][2:] == [1, 1]) != (shapes[1][2:] == [1, 1])


def like_squeeze_excite(row: KernelRow) -> bool:
    if row.phase not in ("forward", "backward") or is_own(row):
        return False
    shape = next(iter(shapes_of(row)), [])
    if len(shape) != 4 or row.kind not in ("elementwise", "activation", "reduce"):
        return False
    if shape[2:] == [1, 1]:
        return True
    # The pooled activation is the gated one too: backward sums the gradients of both uses.
    return bool((_SQUEEZE_EXCITE_BACKWARD if row.phase == "backward" else _SQUEEZE_EXCITE_FORWARD).match(row.op))


def launches(rows: Iterable[KernelRow]) -> float:
    """Kernels per step."""
    return sum(row.calls for row in rows)
