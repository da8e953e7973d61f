"""What CUDA runtime and driver calls, and the device records of copies, mean. Names are those that CUPTI reports."""

from __future__ import annotations

# Calls that return only when the device has done something (CUDA Runtime API, "API synchronization behavior").
_WAITS = frozenset(
    [
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
        "cudaMemcpy2D",
        "cudaMemcpy3D",
        "cudaMemcpyToSymbol",
        "cudaMemcpyFromSymbol",
        "cudaFree",
        "cudaFreeHost",
        "cudaHostAlloc",
        "cudaMallocHost",
        "cudaHostUnregister",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
        "cuEventSynchronize",
        "cuMemFree",
        "cuMemFree_v2",
        "cuMemcpyDtoH",
        "cuMemcpyDtoH_v2",
        "cuMemcpyHtoD",
        "cuMemcpyHtoD_v2",
        "hipStreamSynchronize",
        "hipDeviceSynchronize",
    ]
)
_ALLOCATIONS = frozenset(
    [
        *("cudaMalloc", "cudaFree", "cudaMallocAsync", "cudaFreeAsync", "cuMemAlloc", "cuMemFree"),
        *("cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "hipMalloc", "hipFree"),
    ]
)
# The operators that people know a wait by, told before the outermost operator around it.
_KNOWN_BY = (
    "aten::item",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::equal",
    "aten::_local_scalar_dense",
)


def is_launch(name: str) -> bool:
    """True for calls that start kernels."""
    return "LaunchKernel" in name or "LaunchCooperative" in name or "GraphLaunch" in name


def is_allocation(name: str) -> bool:
    """True for calls that take device memory from the driver, or give it back."""
    return name.removesuffix("_ptsz").removesuffix("_v2") in _ALLOCATIONS


def is_load(name: str) -> bool:
    """True for calls that load compiled kernels into the process."""
    return name.startswith(("cuModuleLoad", "cuLibraryLoad", "cudaLibraryLoad"))


def is_wait(name: str) -> bool:
    """True for calls that wait for the device whatever their arguments."""
    return name.removesuffix("_ptsz") in _WAITS


def wait_text(call: str, operators: list[str], *, pageable: bool = False) -> str:
    """The call and the operator behind it: `cudaStreamSynchronize from aten::item`.

    Args:
        call: the runtime call.
        operators: names of the operators around it, innermost first.
        pageable: the call copies to or from pageable host memory, and waits because of that.
    """
    text = f"{call} (pageable)" if pageable else call
    if not operators:
        return text
    known = next((name for name in _KNOWN_BY if name in operators), operators[-1])
    return f"{text} from {known}"


def copy_kind(name: str) -> str:
    """h2d, d2h, d2d for a copy's device record ("Memcpy HtoD (Pageable -> Device)"); "" for anything else."""
    if not name.startswith("Memcpy"):
        return ""
    for text, kind in (("HtoD", "h2d"), ("DtoH", "d2h"), ("DtoD", "d2d"), ("PtoP", "d2d")):
        if text in name:
            return kind
    return "d2d"
