"""What the script's processes use of the host, read from /proc: CPU time, resident memory; and the host's swap.

Source: proc(5), fields of /proc/<pid>/stat and /proc/meminfo.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
SYS = Path("/sys/devices/system/cpu")


def supported() -> bool:
    """Whether this system has a Linux /proc."""
    return (PROC / "self" / "stat").exists()


def descendants(root: int) -> set[int]:
    """Process ids of all live descendants of `root`, without `root` itself."""
    parents: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))):
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    frontier = [root]
    while frontier:
        for child in parents.get(frontier.pop(), []):
            if child not in found:
                found.add(child)
                frontier.append(child)
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of `pids` so far, user and system, with that of children they have waited for.

    A child that ends moves its time to its parent's account, so the sum over a tree does not fall when workers end.
    """
    ticks = sum(sum(map(int, fields[11:15])) for pid in pids if (fields := _stat(pid)))
    return ticks / os.sysconf("SC_CLK_TCK")


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident memory of `pids`; pages they share are counted once for each."""
    pages = 0
    for pid in pids:
        try:
            pages += int((PROC / str(pid) / "statm").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            continue  # ended meanwhile
    return pages * page_bytes()


def page_bytes() -> int:
    """The size of a page of memory."""
    return os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """The host's memory that can be had without swapping; 0 when it cannot be told."""
    try:
        for line in (PROC / "meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    return 0


def swap_frac() -> float | None:
    """Swap in use over the host's memory, or None when /proc/meminfo cannot be read."""
    sizes = {}
    try:
        for line in (PROC / "meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            sizes[name] = int(rest.split()[0])
        return (sizes["SwapTotal"] - sizes["SwapFree"]) / sizes["MemTotal"]
    except (OSError, KeyError, IndexError, ValueError, ZeroDivisionError):
        return None


def memory_bytes() -> int:
    """The host's memory; 0 when it cannot be told."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0


def cpu_count() -> int:
    """Cores this process may use: its affinity, cut by the control group's CPU quota. At least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):
        pass  # no control group v2 limit
    return max(1, cores)


def core_count() -> int:
    """Physical cores among those that `cpu_count` counts: two threads of one core share its arithmetic. At least 1."""
    try:
        cpus = os.sched_getaffinity(0)
    except AttributeError:
        return cpu_count()
    return max(1, min(len({siblings(cpu, SYS) for cpu in cpus}), cpu_count()))


def siblings(cpu: int, folder: Path) -> str:
    """The threads of this one's core, as the kernel lists them: the same for each of them. `folder`: /sys/devices/system/cpu."""
    try:
        return (folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip() or str(cpu)
    except OSError:
        return str(cpu)  # not told: a core of its own


def busy_seconds() -> float | None:
    """How long the cores that this process may use have worked so far, for whomever, seconds of one core.

    With what a hypervisor has given to others meanwhile. None where a quota allows fewer cores than there are to run on: then what
    others use is not taken from this process. Source: proc(5), /proc/stat.
    """
    try:
        cpus = os.sched_getaffinity(0)
        if cpu_count() < len(cpus):
            return None
        ticks = 0
        for line in (PROC / "stat").read_text().splitlines():
            name, _, rest = line.partition(" ")
            if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cpus:
                user, nice, system, _, _, irq, softirq, steal = map(int, rest.split()[:8])
                ticks += user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK") if ticks else None
    except (OSError, AttributeError, ValueError):
        return None


def cpu_name() -> str:
    """The processor's name as the kernel tells it; empty when it does not."""
    try:
        for line in (PROC / "cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat after the command's name, which may hold spaces; [] when the process is gone."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
