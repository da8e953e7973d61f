"""Names of torch's dtypes, as facts and reports have them."""

from __future__ import annotations

import torch

DTYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}


def dtype_name(dtype: torch.dtype | None) -> str:
    """ "fp32", "bf16", …; torch's own name for others, "" for None."""
    return "" if dtype is None else DTYPES.get(dtype, str(dtype).removeprefix("torch."))
