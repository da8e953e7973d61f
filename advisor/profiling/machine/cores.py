"""Which cores lie beside a GPU, read from /sys: those of its NUMA node, and its share of them among all GPUs there.

Memory that a process fills first lies on the node of the core that it runs on; copies from there to a GPU of another node cross between
the processors' sockets. Source: the kernel's ABI/testing/sysfs-bus-pci (local_cpulist), cputopology (thread_siblings_list).
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from pathlib import Path

from advisor.profiling.machine import hostload

SYS = Path("/sys")
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # PCI's vendor, and the class that GPUs are of


def pci_address(domain: int, bus: int, device: int) -> str:
    """As /sys has it."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def of_node(address: str, allowed: Set[int], sys: Path = SYS) -> set[int]:
    """Of the `allowed` cores those of the GPU's node; none where the machine does not tell.

    Args:
        address: the GPU's, as `pci_address` writes it.
    """
    return _numbers(_read(sys / "bus/pci/devices" / address / "local_cpulist")) & set(allowed)


def of_share(address: str, allowed: Set[int], sys: Path = SYS) -> set[int]:
    """The GPU's share of `of_node`: its whole cores, with both of their threads, divided among the GPUs of that node in their order.

    None where there are fewer cores than GPUs.
    """
    near = of_node(address, allowed, sys)
    folder = sys / "bus/pci/devices"
    beside = _read(folder / address / "local_cpulist")
    gpus = (
        sorted(p.name for p in folder.iterdir() if _is_gpu(p) and _read(p / "local_cpulist") == beside) if near else []
    )
    whole: dict[str, list[int]] = {}
    for cpu in sorted(near):
        whole.setdefault(hostload.siblings(cpu, sys / "devices/system/cpu"), []).append(cpu)
    if address not in gpus or len(whole) < len(gpus):
        return set()
    number, count = gpus.index(address), len(gpus)
    mine = list(whole.values())[number * len(whole) // count : (number + 1) * len(whole) // count]
    return {cpu for threads in mine for cpu in threads}


def text(cores: Iterable[int]) -> str:
    """As the kernel writes a list of cores: "0-3,8"."""
    ranges: list[list[int]] = []
    for cpu in sorted(cores):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def _is_gpu(folder: Path) -> bool:
    return _read(folder / "vendor") == _NVIDIA and _read(folder / "class").startswith(_DISPLAY)


def _numbers(ranges: str) -> set[int]:
    found: set[int] = set()
    for word in filter(None, ranges.split(",")):
        low, _, high = word.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
